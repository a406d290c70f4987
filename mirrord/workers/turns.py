"""Turns for scarce work, fair by user.

A user holds a bounded number of turns, and background work comes last. The user with the fewest
turns is next; among equals the one served longest ago. Work that several users wait for takes the
best place that any of them has, so no user waits in another's queue.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

# a pseudo-user for work in the interest of all, such as removing released checkouts
HOUSEKEEPING = -1

_askers: "ContextVar[Askers | None]" = ContextVar("git_askers", default=None)
# 0 is the rank of who was never served
_clock = itertools.count(1)


class Askers:
    """The uids that wait for a piece of work; empty for background work."""

    def __init__(self, *uids: int) -> None:
        self.uids = list(uids)
        self.queues: list[Turns] = []

    @staticmethod
    def present() -> "Askers":
        return _askers.get() or Askers()

    def bind(self) -> None:
        """Make this task, and the tasks it starts from now on, work for these users."""
        _askers.set(self)

    @contextmanager
    def joined(self, others: "Askers") -> Iterator[None]:
        """Count the users of `others` among these inside the block."""
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
    # once it has begun: the user it counts for; None is background work
    uid: int | None = None


class Turns:
    """Grants up to `most` turns at a time: `each` to one user, `background` to background work.

    A single turn is a lock with priority inheritance: its holder also takes the place of those who
    wait for it in other queues. Belongs to one event loop.
    """

    def __init__(self, most: int = 1, *, each: int = 1, background: int = 1) -> None:
        self._most, self._each, self._background = most, each, background
        self._waiting: list[_Turn] = []
        self._running: list[_Turn] = []
        self._served: dict[int | None, int] = {}

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[int | None]:
        """Wait for a turn, and hold it inside the block. Yields the user it counts for."""
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
        """Count the waiting turns, each by the first of its users."""
        return Counter(next(iter(turn.askers.uids), None) for turn in self._waiting)

    def admit(self) -> None:
        while len(self._running) < self._most and (chosen := self._choose()):
            turn, uid = chosen
            turn.uid = uid
            self._served[turn.uid] = next(_clock)
            self._waiting.remove(turn)
            self._running.append(turn)
            turn.begun.set()
        if not self._waiting and not self._running:
            # who waits for nothing has no place to keep, and the table would grow with every uid
            self._served.clear()

    def _choose(self) -> tuple[_Turn, int | None] | None:
        """Return the next turn and the user it counts for; None if none may begin."""
        running = [turn.uid for turn in self._running]
        best: tuple[tuple[bool, int, int], _Turn, int | None] | None = None
        seen: set[int | None] = set()
        for turn in self._waiting:
            for uid in turn.askers.uids or (None,):
                if uid in seen:  # of a user the first: the others have its rank
                    continue
                seen.add(uid)
                held = running.count(uid)
                rank = (uid is None, held, self._served.get(uid, 0))
                if held < (self._background if uid is None else self._each) and (
                    best is None or rank < best[0]
                ):
                    best = rank, turn, uid
        return best[1:] if best else None
