"""Who is next: turns of scarce work, shared work, and the gate of requests.

A user holds a bounded number of turns; background work comes last. The user with the fewest is
next, then the one served longest ago. Work that several wait for counts for whichever of them is
next, so that nobody inherits the place of a user with a long queue.
"""

import asyncio
import itertools
import math
import time
import types
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Generator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

from ..errors import OverloadedError, TooManyRequestsError
from ..protocol import Progress, ProgressSink

if TYPE_CHECKING:  # workers load this module, and no pydantic
    from ..config import AccessSettings

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


# -- the gate of requests: who begins next, who waits, who is told to come again -----------------
#
# A turn of the event loop begins one request, that of the user served longest ago, so that nobody
# waits behind the queue of another. A user with one request at a time begins at once. While there
# is such a user, those with many at once get a part of the machine together, measured in seconds of
# the loop and of workers: a queue alone is not enough, since the loop and the processors would be
# busy whenever a single request arrives.

WORKING = 64
"""Requests of one user that are worked on at a time; the others wait."""
WAITING = 2048
"""Requests of all users that wait; an administrator's is always taken."""
CROWD_SHARE = 0.25
"""Seconds of the machine a second for those with many requests, while others have single ones."""
_SINGLE_S = 0.1  # so long around a single request its user is thought to have another
_DEBT_S = 0.25  # so much of what a crowd took at once is held against it
_USERS = 256


@dataclass(slots=True)
class _User:
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    working: int = 0
    served: int = 0
    tokens: float = 0.0
    filled_at: float = -math.inf

    @property
    def requests(self) -> int:
        return self.working + len(self.waiting)


class Gate:
    """Admits requests by user. `limits` are the settings in effect. Belongs to one event loop."""

    def __init__(
        self, limits: "Callable[[], AccessSettings]", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits, self._clock = limits, clock
        self._users: dict[int, _User] = {}
        self._single: dict[int, float] = {}  # when each user's last single request began
        self._served = 0
        self._debt_s, self._settled_at = 0.0, clock()
        self._turn: asyncio.Handle | None = None
        self._is_late = False  # the turn waits for the debt to shrink

    @property
    def waiting(self) -> int:
        return sum(len(each.waiting) for each in self._users.values())

    @property
    def working(self) -> int:
        return sum(each.working for each in self._users.values())

    def unanswered(self) -> dict[int, int]:
        """Requests at work or waiting, by user."""
        return {uid: each.requests for uid, each in self._users.items() if each.requests}

    @asynccontextmanager
    async def entered(self, uid: int, *, is_admin: bool) -> AsyncIterator[None]:
        """Wait for the user's turn, and count a request inside the block.

        Raises TooManyRequestsError at a limit of the user and OverloadedError where the queue is
        full, neither for an administrator.
        """
        if len(self._users) > _USERS:
            self._users = {uid: each for uid, each in self._users.items() if each.requests}
        user = self._users.setdefault(uid, _User())
        if not is_admin:
            self._must_be_within(uid, user)
        is_single = not user.requests
        await self._begun(uid, user)
        try:
            yield
        finally:
            user.working -= 1
            if is_single:
                self._single[uid] = self._clock()
            self._look()

    @types.coroutine
    def metered(self, uid: int, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Do the work, and charge the user with what it takes of the event loop."""
        step = partial(work.send, None)
        while True:
            began = time.perf_counter()
            try:
                awaited = step()
            except StopIteration as ended:
                result: T = ended.value
                return result
            finally:
                self.charge((uid,), time.perf_counter() - began)
            try:
                yield awaited
                step = partial(work.send, None)
            except BaseException as error:  # noqa: BLE001  a cancellation, which is the work's
                step = partial(work.throw, error)

    def charge(self, uids: Collection[int], seconds: float) -> None:
        """Count seconds of the loop or of a worker, by all who wait for what was done."""
        users = [self._users[uid] for uid in uids if uid in self._users]
        if users and all(user.requests > 1 for user in users):
            self._debt_s = min(self._debt() + seconds, _DEBT_S)

    # -- who may begin -----------------------------------------------------------------------------

    def _must_be_within(self, uid: int, user: _User) -> None:
        limits, now = self._limits(), self._clock()
        if user.requests >= limits.requests_per_user:
            fact = f"{user.requests} are unanswered"
            hint = "send fewer at a time, or raise access.requests_per_user"
            raise self._too_many("concurrency", uid, fact, hint, retry_after=1)
        if rate := limits.rate_per_user:
            filled = user.tokens + (now - user.filled_at) * rate
            user.tokens, user.filled_at = min(filled, rate), now
            if user.tokens < 1:
                fact = f"it sends more than {rate} a second"
                hint = "send them more slowly, or raise access.rate_per_user"
                missing_s = round((1 - user.tokens) / rate, 3)
                raise self._too_many("rate", uid, fact, hint, retry_after=missing_s or 0.001)
            user.tokens -= 1
        if self.waiting >= WAITING:
            raise OverloadedError(
                f"cannot take another request: {WAITING} wait already",
                hint="try again a little later",
                retry_after=1,
            )

    def _too_many(
        self, reason: str, uid: int, fact: str, hint: str, *, retry_after: float
    ) -> TooManyRequestsError:
        message = f"cannot take another request of uid {uid}: {fact}"
        return TooManyRequestsError(message, hint=hint, reason=reason, retry_after=retry_after)

    async def _begun(self, uid: int, user: _User) -> None:
        if not user.requests:
            self._single[uid] = self._clock()
        turn = asyncio.get_running_loop().create_future()
        user.waiting.append(turn)
        if self._turn is None or self._is_late:
            self._admit()  # it need not wait for a turn of the loop
        try:
            await turn
        except BaseException:
            if turn in user.waiting:
                user.waiting.remove(turn)
            elif not turn.cancelled():
                user.working -= 1
                self._look()
            raise

    def _look(self) -> None:
        if self._turn is None and self.waiting:
            self._turn = asyncio.get_running_loop().call_soon(self._admit)

    def _admit(self) -> None:
        """Begin one request, and look again at the next turn of the loop."""
        loop = asyncio.get_running_loop()
        if self._turn is not None:
            self._turn.cancel()
        self._turn, self._is_late = None, False
        ready = [each for each in self._users.values() if each.waiting and each.working < WORKING]
        free = [each for each in ready if not self._is_held_back(each)]
        if free:
            user = min(free, key=attrgetter("served"))
            self._served += 1
            user.served = self._served
            user.working += 1
            user.waiting.popleft().set_result(None)
            self._turn = loop.call_soon(self._admit)
        elif ready:
            self._is_late = True
            self._turn = loop.call_later(self._debt() / CROWD_SHARE, self._admit)

    def _is_held_back(self, user: _User) -> bool:
        """Whether it is a crowd that has to wait for the sake of those with single requests."""
        if user.requests == 1:
            return False
        recently = self._clock() - _SINGLE_S
        self._single = {uid: at for uid, at in self._single.items() if at > recently}
        if all(self._users.get(uid) is user for uid in self._single):
            self._debt_s = 0.0
        return self._debt() > 0

    def _debt(self) -> float:
        now = self._clock()
        self._debt_s = max(0.0, self._debt_s - (now - self._settled_at) * CROWD_SHARE)
        self._settled_at = now
        return self._debt_s
