"""Not being a burden on a host: so many at once, and waiting as long as it asks.

Owns one state for each host, in memory. A host that throttles is left alone until its Retry-After, or for a time that doubles
with each refusal and is spread by chance; meanwhile its mirrors get an error at once instead of a queue.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from ..errors import UpstreamThrottledError

_FIRST_S = 30.0
_LONGEST_S = 3600.0
_LONGEST_ASKED_S = 86400.0
_SPREAD = 0.2


@dataclass(slots=True)
class _Host:
    limiter: anyio.CapacityLimiter
    refusals: int = 0
    blocked_until: float = field(default=-math.inf)


class Hosts:
    """The upstream hosts. `concurrency` is read at each use, so that a reload applies."""

    def __init__(
        self,
        *,
        concurrency: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._concurrency = concurrency
        self._clock = clock
        self._chance = chance
        self._hosts: dict[str, _Host] = {}

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """One connection to a host. Raises UpstreamThrottledError while the host wants to be left alone."""
        host = self._host(name)
        async with host.limiter:
            self._refuse_while_blocked(name, host)
            try:
                yield
            except UpstreamThrottledError as error:
                self._block(host, error.facts.get("retry_after_s"))
                raise
            host.refusals = 0

    def _host(self, name: str) -> _Host:
        host = self._hosts.setdefault(name, _Host(anyio.CapacityLimiter(self._concurrency())))
        host.limiter.total_tokens = self._concurrency()
        return host

    def _refuse_while_blocked(self, name: str, host: _Host) -> None:
        left = host.blocked_until - self._clock()
        if left > 0:
            raise UpstreamThrottledError(
                f"cannot ask upstream host {name}: it wants no requests for another {left:.0f} s",
                hint="the next scheduled sync comes back to it",
                retry_after_s=round(left, 1),
                host=name,
            )

    def _block(self, host: _Host, asked_s: float | None) -> None:
        host.refusals += 1
        own = min(_FIRST_S * 2 ** (host.refusals - 1), _LONGEST_S) * (
            1 + _SPREAD * (2 * self._chance() - 1)
        )
        wait = (
            own
            if asked_s is None
            else min(float(asked_s), _LONGEST_ASKED_S) * (1 + _SPREAD * self._chance())
        )
        host.blocked_until = max(host.blocked_until, self._clock() + wait)
