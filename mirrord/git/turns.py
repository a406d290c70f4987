"""Turns: scarce work is shared out among the users who wait for it, and background work comes last.

Owns who waits for the present task (`Askers`, a context variable that tasks inherit) and the queue for a resource (`Turns`). A
user holds only so many turns; of those who may begin, the user with the fewest goes first, then the one served longest ago. Work
that several wait for counts for whoever of them is next, so that nobody inherits the place of somebody with a long queue.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

HOUSEKEEPING = -1
"""The user that stands for what all wait for together, such as the removal of what was released."""

_askers: ContextVar[Askers | None] = ContextVar("git_askers", default=None)
_clock = itertools.count(1)


class Askers:
    """The uids that wait for one piece of work; none: it is background work."""

    def __init__(self, *uids: int) -> None:
        self.uids = list(uids)
        self.queues: list[Turns] = []

    @staticmethod
    def present() -> Askers:
        return _askers.get() or Askers()

    def bind(self) -> None:
        """Have the present task, and the tasks that it starts from now on, work for these."""
        _askers.set(self)

    @contextmanager
    def joined(self, others: Askers) -> Iterator[None]:
        """Work for those who wait for `others` too, for the time being."""
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
    """Whom it counts for, once it has begun; None is background work."""


class Turns:
    """At most `most` turns at a time, `each` of them for one user and `background` for background work. One event loop's.

    Where there is only one, it is a lock: who waits lends its users to whoever holds it, who gets through the queues that it
    stands in itself as they would.
    """

    def __init__(self, most: int = 1, *, each: int = 1, background: int = 1) -> None:
        self._most, self._each, self._background = most, each, background
        self._waiting: list[_Turn] = []
        self._running: list[_Turn] = []
        self._served: dict[int | None, int] = {}

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, and hold it inside."""
        turn = _Turn(Askers.present())
        self._waiting.append(turn)
        turn.askers.queues.append(self)
        try:
            self.admit()
            if not turn.begun.is_set():
                await self._wait(turn)
            yield
        finally:
            turn.askers.queues.remove(self)
            (self._running if turn in self._running else self._waiting).remove(turn)
            self.admit()

    def admit(self) -> None:
        """Begin what may begin."""
        while len(self._running) < self._most and (chosen := self._choose()):
            turn, turn.uid = chosen[0], chosen[1]
            self._served[turn.uid] = next(_clock)
            self._waiting.remove(turn)
            self._running.append(turn)
            turn.begun.set()
        if not self._waiting and not self._running:
            self._served.clear()

    async def _wait(self, turn: _Turn) -> None:
        with ExitStack() as stack:
            if self._most == 1:
                for holder in self._running:
                    stack.enter_context(holder.askers.joined(turn.askers))
            await turn.begun.wait()

    def _choose(self) -> tuple[_Turn, int | None] | None:
        """The next turn and whom it counts for; nothing where nobody may begin."""
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
