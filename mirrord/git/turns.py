"""Work is shared: scarce turns among the users who wait for them, one run among all who ask.

A user holds a bounded number of turns; background work comes last. The user with the fewest is
next, then the one served longest ago. Work that several wait for counts for whichever of them is
next, so that nobody inherits the place of a user with a long queue.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio

from ..protocol import Progress, ProgressSink

HOUSEKEEPING = -1
"""The user that stands for work in everybody's interest, such as removing released checkouts."""

_askers: "ContextVar[Askers | None]" = ContextVar("git_askers", default=None)
_clock = itertools.count(1)


class Askers:
    """The uids that wait for one piece of work; none for background work."""

    def __init__(self, *uids: int) -> None:
        self.uids = list(uids)
        self.queues: list[Turns] = []

    @staticmethod
    def present() -> "Askers":
        return _askers.get() or Askers()

    def bind(self) -> None:
        """Make the present task, and the tasks that it starts from now on, work for these."""
        _askers.set(self)

    @contextmanager
    def joined(self, others: "Askers") -> Iterator[None]:
        """Work for those who wait for `others` too, inside the block."""
        uids = list(others.uids)
        self.uids += uids
        for queue in list(self.queues):
            queue.admit()
        try:
            yield
        finally:
            for uid in uids:
                self.uids.remove(uid)


@dataclass(eq=False, slots=True)
class _Turn:
    askers: Askers
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    uid: int | None = None
    """The user it counts for, once it has begun; None is background work."""


class Turns:
    """At most `most` turns at a time: `each` for one user, `background` for background work.

    A single turn is a lock: its holder works for the users who wait for it too, and passes through
    other queues as they would. Belongs to one event loop.
    """

    def __init__(self, most: int = 1, *, each: int = 1, background: int = 1) -> None:
        self._most, self._each, self._background = most, each, background
        self._waiting: list[_Turn] = []
        self._running: list[_Turn] = []
        self._served: dict[int | None, int] = {}

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[int | None]:
        """Wait for a turn, and hold it inside the block; answers the user it counts for."""
        turn = _Turn(Askers.present())
        self._waiting.append(turn)
        turn.askers.queues.append(self)
        try:
            self.admit()
            if not turn.begun.is_set():
                with ExitStack() as stack:
                    for holder in self._running if self._most == 1 else ():
                        stack.enter_context(holder.askers.joined(turn.askers))
                    await turn.begun.wait()
            yield turn.uid
        finally:
            turn.askers.queues.remove(self)
            (self._running if turn in self._running else self._waiting).remove(turn)
            self.admit()

    def waiting(self) -> Counter[int | None]:
        """How many turns are waited for, by the first user who asked."""
        return Counter(next(iter(turn.askers.uids), None) for turn in self._waiting)

    def admit(self) -> None:
        """Begin the turns that may begin."""
        while len(self._running) < self._most and (chosen := self._choose()):
            turn, uid = chosen
            turn.uid = uid
            self._served[turn.uid] = next(_clock)
            self._waiting.remove(turn)
            self._running.append(turn)
            turn.begun.set()
        if not self._waiting and not self._running:
            self._served.clear()

    def _choose(self) -> tuple[_Turn, int | None] | None:
        """The next turn and the user it counts for; None where nobody may begin."""
        running = [turn.uid for turn in self._running]
        best: tuple[tuple[bool, int, int], _Turn, int | None] | None = None
        for turn in self._waiting:
            for uid in turn.askers.uids or (None,):
                held = running.count(uid)
                rank = (uid is None, held, self._served.get(uid, 0))
                if held < (self._background if uid is None else self._each) and (
                    best is None or rank < best[0]
                ):
                    best = rank, turn, uid
        return best[1:] if best else None


# -- work that several callers ask for at the same time runs once ----------------------------------
#
# A caller joins work of the same key until the work looks at facts that may change
# (`SharedWork.close`); later callers share the next run, so no result is older than its question.
# The work is cancelled when its last caller was. It takes its turns for all callers.

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
        with anyio.CancelScope(shield=True), suppress(BaseException):
            await asyncio.wait([work.task])
            work.task.exception()
