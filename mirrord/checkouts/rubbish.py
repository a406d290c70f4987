"""What checkouts were reset away from, removed in the background.

Owns how much of that runs at a time, and how long the backlog may get. Whatever is not removed when the daemon ends, or is
killed, has a name that says what it is, and is found again.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from ..errors import MirrordError
from .control import discard

_AT_A_TIME = 2
_BACKLOG = 64
_CLOSE_BOUND = timedelta(seconds=3)

log = structlog.get_logger()


class Rubbish:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(_AT_A_TIME)
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, directory: Path) -> None:
        """Remove a directory soon; one that is not there is fine."""
        task = asyncio.get_running_loop().create_task(self._remove(directory))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def keep_up(self) -> None:
        """Wait while there is too much of it."""
        while len(self._tasks) > _BACKLOG:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """Finish what can be finished soon."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=_CLOSE_BOUND.total_seconds())
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _remove(self, directory: Path) -> None:
        async with self._turns:
            try:
                await anyio.to_thread.run_sync(discard, directory)
            except (MirrordError, OSError) as error:
                log.warning("layer.stuck", directory=str(directory), error=str(error))
