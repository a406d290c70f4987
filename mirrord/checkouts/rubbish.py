"""Checkouts and parts of them that nobody needs any more, removed in the background.

Owns what that may cost the daemon. One to which nothing was written goes in a dozen system calls, on a few threads: a file
system that tells the disk of each freed block (ext4 with `discard`, without a journal) lets every `rmdir` wait for it. Whatever
else there is goes in batches to a worker: deleting trees on a thread would make every request wait for the interpreter. What is
not removed when the daemon ends, or is killed, has a name that says what it is, and is found again. What the disk does not let
go is tried again, with pauses that double.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import structlog

from ..errors import MirrordError, ResourceError
from ..git.turns import HOUSEKEEPING, Askers
from ..git.workers import Workers
from .worker_calls import discard_all

_THREADS = 8
_PAUSE_S = 0.05
_LONG_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 600.0
_BATCH = 64
_BACKLOG = 256
_TIMEOUT = timedelta(minutes=10)
_CLOSE_BOUND = timedelta(seconds=3)

log = structlog.get_logger()


class Rubbish:
    """Belongs to one event loop."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._threads = ThreadPoolExecutor(_THREADS, "rubbish")
        self._tasks: set[asyncio.Task[None]] = set()
        self._late: set[asyncio.Task[None]] = set()
        self._waiting: dict[Path, asyncio.Future[str | None]] = {}
        self._sweeper: asyncio.Task[None] | None = None

    def add(
        self,
        directory: Path,
        quickly: Callable[[Path], bool] | None = None,
        *,
        holding: int | None = None,
    ) -> None:
        """Remove a directory soon, unless `quickly`, in a thread, says that it did; one that is not there is fine.

        `holding` is a descriptor to close first, in a thread too.

        Whoever resets is answered first: until then not even a thread is woken, which would take its turn of the interpreter.
        What fails is tried again.
        """
        task = asyncio.get_running_loop().create_task(
            self._remove_soon(directory, quickly, holding)
        )
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    async def remove(self, directory: Path, quickly: Callable[[Path], bool]) -> None:
        """Remove a directory, whatever its modes and flags, unless `quickly`, in a thread, says that it did.

        Raises what that raised, and ResourceError where it cannot be done.
        """
        if await self._in_thread(quickly, directory):
            return
        if problem := await self._enqueue(directory):
            raise ResourceError(
                f"cannot remove {directory.name}: {problem}", hint="it is tried again"
            )

    async def keep_up(self) -> None:
        """Wait while there is too much of it."""
        while len(self._tasks) > _BACKLOG:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """Finish what can be finished soon."""
        running = [*self._tasks, *([self._sweeper] if self._sweeper else [])]
        if running:
            await asyncio.wait(running, timeout=_CLOSE_BOUND.total_seconds())
        running += self._late
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._threads.shutdown(wait=False)

    async def _remove_soon(
        self, directory: Path, quickly: Callable[[Path], bool] | None, holding: int | None
    ) -> None:
        await asyncio.sleep(_PAUSE_S)
        if holding is not None:
            await asyncio.get_running_loop().run_in_executor(self._threads, os.close, holding)
        pause_s = _LONG_PAUSE_S
        while not await self._is_removed(directory, quickly):
            self._step_aside()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _is_removed(self, directory: Path, quickly: Callable[[Path], bool] | None) -> bool:
        try:
            if quickly is not None and await self._in_thread(quickly, directory):
                return True
            return not await self._enqueue(directory)
        except (MirrordError, OSError) as error:
            log.warning("removal.failed", directory=str(directory), problem=str(error))
            return False

    def _step_aside(self) -> None:
        """What is stuck holds up nobody."""
        task = asyncio.current_task()
        if task in self._tasks:
            self._tasks.discard(task)
            self._late.add(task)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._late.discard(task)

    def _in_thread(self, work: Callable[[Path], bool], directory: Path) -> asyncio.Future[bool]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work, directory)

    def _enqueue(self, directory: Path) -> asyncio.Future[str | None]:
        loop = asyncio.get_running_loop()
        found = self._waiting.setdefault(directory, loop.create_future())
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = loop.create_task(self._sweep())
        return found

    async def _sweep(self) -> None:
        Askers(HOUSEKEEPING).bind()  # not for the user whose release came first
        while batch := list(self._waiting)[:_BATCH]:
            try:
                problems = await self._workers.call(discard_all, batch, timeout=_TIMEOUT)
            except MirrordError as error:
                problems = dict.fromkeys(batch, error.message)
            for directory in batch:
                problem = problems.get(directory)
                if problem:
                    log.warning("removal.failed", directory=str(directory), problem=problem)
                waiting = self._waiting.pop(directory)
                if not waiting.done():
                    waiting.set_result(problem)


def _remove_upper(upper: str) -> None:
    try:
        os.rmdir(upper)
    except FileNotFoundError:
        return
    except OSError:
        os.rmdir(f"{upper}/.git")
        os.rmdir(upper)


def remove_layer(layer: Path) -> bool:
    """Remove a layer of an overlay checkout; False where its owner wrote anything. `git status` alone makes `.git`."""
    kernels = (
        f"{layer}/work/work"  # what overlayfs leaves in a volatile work directory (Linux 6.18)
    )
    try:
        _remove_upper(f"{layer}/upper")
        with suppress(FileNotFoundError):
            os.unlink(f"{kernels}/incompat/volatile/dirty")
        volatile = f"{kernels}/incompat/volatile", f"{kernels}/incompat", kernels
        for directory in (*volatile, f"{layer}/work", layer):
            with suppress(FileNotFoundError):
                os.rmdir(directory)
    except OSError:
        return False
    return True


def remove_untouched(private: Path) -> bool:
    """Remove the private directory of an overlay checkout; False where its owner wrote anything."""
    if not remove_layer(private / "layer"):
        return False
    try:
        with suppress(FileNotFoundError):
            os.unlink(private / "lease.json")
        with suppress(FileNotFoundError):
            os.rmdir(private)
    except OSError:
        return False
    return True
