"""Layers and checkouts that nobody needs any more, removed in the background.

Owns what that may cost the daemon. A layer to which nothing was written goes at once, in a dozen system calls; whatever else
there is goes in batches to a worker: deleting trees on a thread would make every request wait for the interpreter. What is not
removed when the daemon ends, or is killed, has a name that says what it is, and is found again.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import structlog

from ..errors import MirrordError, ResourceError
from ..git.workers import Workers
from .calls import discard_all

_BATCH = 64
_BACKLOG = 256
_TIMEOUT = timedelta(minutes=10)
_CLOSE_BOUND = timedelta(seconds=3)

log = structlog.get_logger()


class Rubbish:
    """Belongs to one event loop."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._waiting: dict[Path, asyncio.Future[str | None]] = {}
        self._sweeper: asyncio.Task[None] | None = None

    def add(self, layer: Path) -> None:
        """Remove a layer soon; one that is not there is fine. Whoever resets is answered first: it may take as long."""
        asyncio.get_running_loop().call_soon(self._remove_layer, layer)

    async def remove(self, directory: Path) -> None:
        """Remove a directory, whatever its modes and flags. Raises ResourceError where that cannot be done."""
        if problem := await self._enqueue(directory):
            raise ResourceError(f"cannot remove {directory.name}: {problem}", hint="it is tried again when the daemon starts")

    async def keep_up(self) -> None:
        """Wait while there is too much of it."""
        while len(self._waiting) > _BACKLOG:
            await asyncio.wait(self._waiting.values(), return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """Finish what can be finished soon."""
        if self._sweeper is None:
            return
        await asyncio.wait((self._sweeper,), timeout=_CLOSE_BOUND.total_seconds())
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, return_exceptions=True)

    def _remove_layer(self, layer: Path) -> None:
        if not remove_unwritten(str(layer)):
            self._enqueue(layer)

    def _enqueue(self, directory: Path) -> asyncio.Future[str | None]:
        loop = asyncio.get_running_loop()
        found = self._waiting.setdefault(directory, loop.create_future())
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = loop.create_task(self._sweep())
        return found

    async def _sweep(self) -> None:
        while batch := list(self._waiting)[:_BATCH]:
            try:
                problems = await self._workers.call(discard_all, batch, timeout=_TIMEOUT)
            except MirrordError as error:
                problems = dict.fromkeys(batch, error.message)
            for directory in batch:
                problem = problems.get(directory)
                if problem:
                    log.warning("directory.stuck", directory=str(directory), problem=problem)
                waiting = self._waiting.pop(directory)
                if not waiting.done():
                    waiting.set_result(problem)


def remove_unwritten(layer: str) -> bool:
    """Remove an overlay's layer; False where something was written to it, or it is none. `git status` alone makes `.git`."""
    kernels = os.path.join(layer, "work", "work")  # what overlayfs leaves in a volatile work directory (Linux 6.18)
    try:
        with suppress(FileNotFoundError):
            os.rmdir(f"{layer}/upper/.git")
        with suppress(FileNotFoundError):
            os.rmdir(f"{layer}/upper")
            with suppress(FileNotFoundError):
                os.unlink(f"{kernels}/incompat/volatile/dirty")
            for directory in (f"{kernels}/incompat/volatile", f"{kernels}/incompat", kernels, f"{layer}/work"):
                os.rmdir(directory)
        with suppress(FileNotFoundError):
            os.rmdir(layer)
    except OSError:
        return False
    return True


def remove_untouched(checkout: str) -> bool:
    """Remove the directory of a checkout whose layer nothing was written to; False where there is more in it."""
    if not remove_unwritten(f"{checkout}/layer"):
        return False
    try:
        with suppress(FileNotFoundError):
            os.unlink(f"{checkout}/lease.json")
        with suppress(FileNotFoundError):
            os.rmdir(f"{checkout}/tree")
        os.rmdir(checkout)
    except OSError:
        return False
    return True
