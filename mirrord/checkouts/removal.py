"""Removing what released checkouts leave, in the background and within a bound.

Owns the tasks that delete; at most a few at a time, and whoever releases faster than that waits. What cannot be deleted is tried
again, with pauses that double, and holds nobody up. A crash or a stop in between leaves directories called `.trash-…`, which the
next start removes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import anyio
import structlog

from ..errors import MirrordError
from .backend import CheckoutBackend
from .leases import Directories, Lease

_AT_A_TIME = 8
_BACKLOG = 64
_TRIES = 3
_PAUSE_S = 0.5
_LONG_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 600.0

log = structlog.get_logger()


class Removal:
    """Deletes directories that nobody has a lease on. Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._late: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Semaphore(_AT_A_TIME)
        self._has_room = asyncio.Event()

    def start(
        self, directories: Directories, lease: Lease | None, backends: Sequence[CheckoutBackend]
    ) -> None:
        """Begin to remove a checkout, by each of the backends that could have made it."""
        task = asyncio.get_running_loop().create_task(self._remove(directories, lease, backends))
        self._tasks.add(task)
        task.add_done_callback(self._end)

    async def keep_up(self) -> None:
        """Wait while the backlog is long."""
        while len(self._tasks) > _BACKLOG:
            self._has_room.clear()
            await self._has_room.wait()

    async def close(self, bound: timedelta) -> None:
        """Finish what can be finished within `bound`; the rest is left for the next start."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=bound.total_seconds())
        late = [*self._tasks, *self._late]
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._late.discard(task)
        self._tell_room()

    def _tell_room(self) -> None:
        """Not before there is some: under load, who waits for it was woken five times in vain for each time that it went on."""
        if len(self._tasks) <= _BACKLOG:
            self._has_room.set()

    async def _remove(
        self, directories: Directories, lease: Lease | None, backends: Sequence[CheckoutBackend]
    ) -> None:
        pause_s = _LONG_PAUSE_S
        while not await self._is_destroyed(directories, lease, backends):
            self._step_aside()
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _step_aside(self) -> None:
        """Whoever releases need not wait for what is stuck."""
        task = asyncio.current_task()
        if task in self._tasks:
            self._tasks.discard(task)
            self._late.add(task)
            self._tell_room()

    async def _is_destroyed(
        self, directories: Directories, lease: Lease | None, backends: Sequence[CheckoutBackend]
    ) -> bool:
        async with self._turn:
            return all([await self._destroy(backend, directories, lease) for backend in backends])

    async def _destroy(
        self, backend: CheckoutBackend, directories: Directories, lease: Lease | None
    ) -> bool:
        """Try a few times: a process that still writes into the tree can make a directory come back while it is removed.

        Answers whether it is gone.
        """
        for attempt in range(1, _TRIES + 1):
            try:
                await backend.destroy(directories, lease)
            except (MirrordError, OSError) as error:
                log.warning(
                    "removal.failed",
                    directory=directories.public.name,
                    attempt=attempt,
                    error=str(error),
                )
                await anyio.sleep(_PAUSE_S)
            else:
                return True
        return False
