"""The gate of requests: who begins next, who waits, who is told to come again.

A turn of the event loop begins one request, that of the user served longest ago, so that nobody
waits behind the queue of another. A user with one request at a time begins at once. While there is
such a user, those with many at once get a part of the machine together, measured in seconds of the
loop and of workers: a queue alone is not enough, since the loop and the processors would be busy
whenever a single request arrives. Belongs to one event loop.
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
from typing import Any, TypeVar

from ..config import AccessSettings
from ..errors import OverloadedError, TooManyRequestsError

T = TypeVar("T")

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
    """Admits requests by user. `limits` are the settings in effect."""

    def __init__(
        self, limits: Callable[[], AccessSettings], clock: Callable[[], float] = time.monotonic
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
        """Wait until the user's request may begin."""
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
        """See at the next turn of the loop who may begin, unless that is planned."""
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
