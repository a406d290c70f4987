"""Work that several callers ask for at the same time runs once.

A caller joins work of the same key until the work looks at facts that may change
(`SharedWork.close`); later callers share the next run, so no result is older than its question. The
work is cancelled when its last caller was. It takes its turns (`git/turns.py`) for all callers.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio

from ..git.turns import Askers
from ..protocol import Progress, ProgressSink

T = TypeVar("T")
Run = Callable[["SharedWork[T]"], Coroutine[None, None, T]]


@dataclass(slots=True, eq=False)
class SharedWork(Generic[T]):
    """One run of the work, as the work itself sees it. After `close` nobody joins it."""

    close: Callable[[], None]
    askers: Askers = field(default_factory=Askers)
    sinks: list[ProgressSink] = field(default_factory=list)
    callers: int = 0
    task: asyncio.Task[T] = field(init=False)

    def report(self, progress: Progress) -> None:
        for sink in self.sinks:
            sink(progress)


class Coalescer(Generic[T]):
    """Shared work by key."""

    def __init__(self) -> None:
        self._open: dict[str, SharedWork[T]] = {}
        self._running: set[SharedWork[T]] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._open

    async def join(self, key: str, run: Run[T], progress: ProgressSink | None = None) -> T:
        """Wait for the open work of that key, or begin it with `run`."""
        work = self._open.get(key) or self._begin(key, run)
        sinks = [progress] if progress else []
        work.callers += 1
        work.sinks += sinks
        try:
            with work.askers.joined(Askers.present()):
                return await asyncio.shield(work.task)
        finally:
            work.callers -= 1
            for sink in sinks:
                work.sinks.remove(sink)
            if not work.callers and not work.task.done():
                await self._cancel(work)

    def _begin(self, key: str, run: Run[T]) -> SharedWork[T]:
        def close() -> None:
            if self._open.get(key) is work:
                del self._open[key]

        async def bound() -> T:
            work.askers.bind()
            return await run(work)

        def end(_: object) -> None:
            close()
            self._running.discard(work)

        work: SharedWork[T] = SharedWork(close)
        work.task = asyncio.get_running_loop().create_task(bound())
        work.task.add_done_callback(end)
        self._open[key] = work
        self._running.add(work)
        return work

    async def close(self) -> None:
        """Cancel everything and wait for its end."""
        for work in list(self._running):
            await self._cancel(work)

    async def _cancel(self, work: SharedWork[T]) -> None:
        work.close()
        work.task.cancel()
        with anyio.CancelScope(shield=True), contextlib.suppress(BaseException):
            await asyncio.wait([work.task])
            work.task.exception()
