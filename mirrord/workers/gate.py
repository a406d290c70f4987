"""The gate: which request begins next, which wait, which are refused.

Each iteration of the event loop begins one request, that of the user served longest ago, so no user
waits behind another's queue. A user with a single request begins at once. While there is such a
user, the crowd (users with several requests at once) shares a part of the machine.
"""

import asyncio
import math
import time
import types
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import OverloadedError, TooManyRequestsError

if TYPE_CHECKING:  # workers load this module, and no pydantic
    from ..config import AccessSettings

T = TypeVar("T")

# how many requests of one user run at a time; the others wait
WORKING = 64
# How many requests of all users may wait. An administrator's is always accepted.
WAITING = 2048
# Seconds of the machine per second for the crowd, while other users have single requests: a queue
# alone would leave loop and processors busy whenever one arrives. A warm checkout beside 200
# connections of another uid: 5.3 ms (p50), 139 without the gate, 2.5 alone (load 20 on two
# processors).
CROWD_SHARE = 0.25


@dataclass(slots=True)
class _User:
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    working: int = 0
    served: int = 0
    tokens: float = 0.0
    # so the bucket of a new user is full
    filled_at: float = -math.inf

    @property
    def requests(self) -> int:
        return self.working + len(self.waiting)


_SINGLE_S = 0.1  # how long after a single request its user is expected to send another
# what the crowd owes beyond it is forgotten: at CROWD_SHARE it is paid within a second
_DEBT_MAX_S = 0.25
# remembered; those without a request are forgotten first
_USERS = 256


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
        return sum(len(user.waiting) for user in self._users.values())

    @property
    def working(self) -> int:
        return sum(user.working for user in self._users.values())

    def unanswered(self) -> dict[int, int]:
        """Count running and waiting requests by user."""
        return {uid: user.requests for uid, user in self._users.items() if user.requests}

    @asynccontextmanager
    async def entered(self, uid: int, *, is_admin: bool) -> AsyncIterator[None]:
        """Wait for the user's turn, and count a request as running inside the block.

        Raises TooManyRequestsError at a limit of the user, OverloadedError if the queue is full;
        neither for an administrator.
        """
        if len(self._users) > _USERS:
            self._users = {uid: user for uid, user in self._users.items() if user.requests}
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
        # work that a single request waits for as well is not the crowd's
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
                # the missing time may round to 0, at which a client would come again at once
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
            # its turn came at the same moment as the cancellation: pass it on
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
        ready = [user for user in self._users.values() if user.waiting and user.working < WORKING]
        free = [user for user in ready if not self._is_held_back(user)]
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
        self._last_single = {
            uid: last for uid, last in self._last_single.items() if last > recently
        }
        # nobody else has single requests: a crowd alone has the whole machine
        if all(self._users.get(uid) is user for uid in self._last_single):
            self._debt_s = 0.0
        return self._debt() > 0

    def _debt(self) -> float:
        now = self._clock()
        self._debt_s = max(0.0, self._debt_s - (now - self._settled_at) * CROWD_SHARE)
        self._settled_at = now
        return self._debt_s
