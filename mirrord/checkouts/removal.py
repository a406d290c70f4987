"""Removing what released checkouts leave, in the background and within a bound.

Owns the tasks that delete; at most a few at a time, and whoever releases faster than that waits. A crash or a stop in between
leaves directories called `.gone-…`, which the next start removes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import anyio
import structlog

from ..errors import MirrordError
from .backend import CheckoutBackend
from .leases import Lease

_AT_A_TIME = 8
_BACKLOG = 64
_TRIES = 3
_PAUSE_S = 0.5

log = structlog.get_logger()


class Removal:
    """Deletes directories that nobody has a lease on. Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Semaphore(_AT_A_TIME)
        self._has_room = asyncio.Event()

    def start(self, directory: Path, lease: Lease | None, backends: Sequence[CheckoutBackend]) -> None:
        """Begin to remove `directory`, by each of the backends that could have made it."""
        task = asyncio.get_running_loop().create_task(self._remove(directory, lease, backends))
        self._tasks.add(task)
        task.add_done_callback(self._end)

    async def keep_up(self) -> None:
        """Wait while the backlog is long."""
        while len(self._tasks) > _BACKLOG:
            self._has_room.clear()
            await self._has_room.wait()

    async def close(self, bound: timedelta) -> None:
        """Finish what can be finished within `bound`; the rest is left for the next start."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=bound.total_seconds())
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._has_room.set()

    async def _remove(self, directory: Path, lease: Lease | None, backends: Sequence[CheckoutBackend]) -> None:
        async with self._turn:
            for backend in backends:
                await self._destroy(backend, directory, lease)

    async def _destroy(self, backend: CheckoutBackend, directory: Path, lease: Lease | None) -> None:
        """Try a few times: a process that still writes into the tree can make a directory come back while it is removed."""
        for attempt in range(1, _TRIES + 1):
            try:
                await backend.destroy(directory, lease)
            except (MirrordError, OSError) as error:
                log.warning("checkout.stuck", directory=directory.name, attempt=attempt, error=str(error))
                await anyio.sleep(_PAUSE_S)
            else:
                return
