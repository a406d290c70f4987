"""Fair scheduling by user: turns for scarce work, shared work, and the gate for requests.

A user holds a bounded number of turns, and background work comes last. The user with the fewest
turns is next; among equals the one served longest ago. Work that several users wait for takes the
best place that any of them has, so no user waits in another's queue.
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
"""A pseudo-user for work in the interest of all, such as removing released checkouts."""

_askers: "ContextVar[Askers | None]" = ContextVar("git_askers", default=None)
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
    uid: int | None = None
    """Once it has begun: the user it counts for; None is background work."""


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
            self._served.clear()

    def _choose(self) -> tuple[_Turn, int | None] | None:
        """Return the next turn and the user it counts for; None if none may begin."""
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


# -- shared work: callers that ask for the same thing at the same time -----------------------------
#
# Callers join work of the same key until it reads facts that may change (`SharedWork.close`). Later
# callers share the next run, so no result is older than the call. The work takes turns for all its
# callers, and is cancelled with the last of them.

T = TypeVar("T")
Run = Callable[["SharedWork[T]"], Coroutine[None, None, T]]


@dataclass(slots=True, eq=False)
class SharedWork(Generic[T]):
    """One run of the work, as passed to it. After `close` no caller joins it."""

    close: Callable[[], None]
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

    async def join(self, key: str, run: Run[T], progress: ProgressSink | None = None) -> T:
        """Wait for the open work of a key, or begin it with `run`."""
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
        """Cancel all work and wait for its end."""
        for work in list(self._running):
            await self._cancel(work)

    async def _cancel(self, work: SharedWork[T]) -> None:
        work.close()
        work.task.cancel()
        with anyio.CancelScope(shield=True), suppress(BaseException):
            await asyncio.wait([work.task])
            work.task.exception()


# -- the gate: which request begins next, which wait, which are refused ----------------------------
#
# Each iteration of the event loop begins one request, that of the user served longest ago, so no
# user waits behind another's queue. A user with a single request begins at once. While there is
# such a user, the crowd (users with several requests at once) shares a part of the machine,
# measured in seconds of the loop and of workers. A queue alone would not do: the loop and the
# processors would be busy whenever a single request arrives.

WORKING = 64
"""How many requests of one user run at a time; the others wait."""
WAITING = 2048
"""How many requests of all users may wait. An administrator's is always accepted."""
CROWD_SHARE = 0.25
"""Seconds of the machine per second for the crowd, while other users have single requests."""
_SINGLE_S = 0.1  # how long after a single request its user is expected to send another
_DEBT_MAX_S = 0.25
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
        self._last_single: dict[int, float] = {}  # when each user last had a single request
        self._served = 0
        self._debt_s, self._settled_at = 0.0, clock()
        self._next: asyncio.Handle | None = None
        self._is_delayed = False  # `_next` waits until the crowd's debt is paid

    @property
    def waiting(self) -> int:
        return sum(len(each.waiting) for each in self._users.values())

    @property
    def working(self) -> int:
        return sum(each.working for each in self._users.values())

    def unanswered(self) -> dict[int, int]:
        """Count running and waiting requests by user."""
        return {uid: each.requests for uid, each in self._users.items() if each.requests}

    @asynccontextmanager
    async def entered(self, uid: int, *, is_admin: bool) -> AsyncIterator[None]:
        """Wait for the user's turn, and count a request as running inside the block.

        Raises TooManyRequestsError at a limit of the user, OverloadedError if the queue is full;
        neither for an administrator.
        """
        if len(self._users) > _USERS:
            self._users = {uid: each for uid, each in self._users.items() if each.requests}
        user = self._users.setdefault(uid, _User())
        if not is_admin:
            self._check_limits(uid, user)
        is_single = not user.requests
        await self._wait_for_turn(uid, user)
        try:
            yield
        finally:
            user.working -= 1
            if is_single:
                self._last_single[uid] = self._clock()
            self._schedule()

    @types.coroutine
    def metered(self, uid: int, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Run a coroutine, and charge the user for its time on the event loop."""
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
            except BaseException as error:  # noqa: BLE001  (a cancellation, for the coroutine)
                step = partial(work.throw, error)

    def charge(self, uids: Collection[int], seconds: float) -> None:
        """Charge seconds of the loop or of a worker to the users who wait for the work."""
        users = [self._users[uid] for uid in uids if uid in self._users]
        if users and all(user.requests > 1 for user in users):
            self._debt_s = min(self._debt() + seconds, _DEBT_MAX_S)

    def _check_limits(self, uid: int, user: _User) -> None:
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
                f"cannot accept another request: {WAITING} are waiting",
                hint="try again a little later",
                retry_after=1,
            )

    def _too_many(
        self, reason: str, uid: int, fact: str, hint: str, *, retry_after: float
    ) -> TooManyRequestsError:
        message = f"cannot accept another request of uid {uid}: {fact}"
        return TooManyRequestsError(message, hint=hint, reason=reason, retry_after=retry_after)

    async def _wait_for_turn(self, uid: int, user: _User) -> None:
        if not user.requests:
            self._last_single[uid] = self._clock()
        turn = asyncio.get_running_loop().create_future()
        user.waiting.append(turn)
        if self._next is None or self._is_delayed:
            self._admit()  # now rather than in the next iteration of the loop
        try:
            await turn
        except BaseException:
            if turn in user.waiting:
                user.waiting.remove(turn)
            elif not turn.cancelled():
                user.working -= 1
                self._schedule()
            raise

    def _schedule(self) -> None:
        if self._next is None and self.waiting:
            self._next = asyncio.get_running_loop().call_soon(self._admit)

    def _admit(self) -> None:
        """Begin one request, and schedule the next."""
        loop = asyncio.get_running_loop()
        if self._next is not None:
            self._next.cancel()
        self._next, self._is_delayed = None, False
        ready = [each for each in self._users.values() if each.waiting and each.working < WORKING]
        free = [each for each in ready if not self._is_held_back(each)]
        if free:
            user = min(free, key=attrgetter("served"))
            self._served += 1
            user.served = self._served
            user.working += 1
            user.waiting.popleft().set_result(None)
            self._next = loop.call_soon(self._admit)
        elif ready:
            self._is_delayed = True
            self._next = loop.call_later(self._debt() / CROWD_SHARE, self._admit)

    def _is_held_back(self, user: _User) -> bool:
        """Return whether a user of the crowd has to wait for the sake of single requests."""
        if user.requests == 1:
            return False
        recently = self._clock() - _SINGLE_S
        self._last_single = {uid: at for uid, at in self._last_single.items() if at > recently}
        if all(self._users.get(uid) is user for uid in self._last_single):
            self._debt_s = 0.0
        return self._debt() > 0

    def _debt(self) -> float:
        now = self._clock()
        self._debt_s = max(0.0, self._debt_s - (now - self._settled_at) * CROWD_SHARE)
        self._settled_at = now
        return self._debt_s
