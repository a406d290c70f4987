"""Shared work: callers that ask for the same thing at the same time.

Callers join work of the same key until it reads facts that may change (`SharedWork.close`). Later
callers share the next run, so no result is older than the call. The work takes turns for all its
callers, and is cancelled with the last of them.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio

from ..protocol import Progress, ProgressSink
from .turns import Askers

T = TypeVar("T")
Run = Callable[["SharedWork[T]"], Coroutine[None, None, T]]


@dataclass(slots=True, eq=False)
class SharedWork(Generic[T]):
    """One run of the work, as passed to it. After `close` no caller joins it.

    `error` is why it was ended, for its callers.
    """

    key: str
    close: Callable[[], None]
    error: Exception | None = None
    askers: Askers = field(default_factory=Askers)
    sinks: list[ProgressSink] = field(default_factory=list)
    callers: int = 0
    task: asyncio.Task[T] = field(init=False)

    def report(self, progress: Progress) -> None:
        for sink in self.sinks:
            sink(progress)


class Coalescer(Generic[T]):
    """Runs shared work, by key."""

    def __init__(self) -> None:
        self._open: dict[str, SharedWork[T]] = {}
        self._running: set[SharedWork[T]] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._open

    def runs(self, prefix: str) -> bool:
        """True if work whose key begins so has not ended."""
        return any(work.key.startswith(prefix) for work in self._running)

    async def join(self, key: str, run: Run[T], progress: ProgressSink | None = None) -> T:
        """Wait for the open work of a key, or begin it with `run`."""
        work = self._open.get(key) or self._begin(key, run)
        sinks = [progress] if progress else []
        work.callers += 1
        work.sinks += sinks
        try:
            with work.askers.joined(Askers.present()):
                # the cancellation of one caller leaves the work to the others
                return await asyncio.shield(work.task)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if work.error is None or (task and task.cancelling()):
                raise
            raise work.error from None
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
            # the task has a copy of the first caller's context; later callers must count as well
            work.askers.bind()
            return await run(work)

        def end(_: object) -> None:
            close()
            self._running.discard(work)

        work: SharedWork[T] = SharedWork(key, close)
        work.task = asyncio.get_running_loop().create_task(bound())
        work.task.add_done_callback(end)
        self._open[key] = work
        self._running.add(work)
        return work

    async def end(self, prefix: str, error: Exception) -> None:
        """Cancel all work whose key begins so, and wait for its end; its callers get the error."""
        for work in [work for work in self._running if work.key.startswith(prefix)]:
            work.error = error
            await self._cancel(work)

    async def close(self) -> None:
        """Cancel all work and wait for its end."""
        for work in list(self._running):
            await self._cancel(work)

    async def _cancel(self, work: SharedWork[T]) -> None:
        work.close()
        work.task.cancel()
        with anyio.CancelScope(shield=True), suppress(BaseException):
            await asyncio.wait([work.task])
            # else asyncio logs that nobody asked for it; raises CancelledError itself
            work.task.exception()
