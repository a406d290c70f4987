"""What happened, as a numbered stream that many can follow at their own pace.

Owns one bounded ring of events; a follower is a position in it, so that a slow one costs no memory: when the ring has moved past
it, it gets one `events.dropped` in the place of what it missed, and goes on. Nothing is kept over a restart: the numbers start
again under another boot id.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

import structlog

from ..errors import LimitReachedError
from ..model import utc_now
from ..protocol import Event, to_bytes

log = structlog.get_logger()


FOLLOWERS_OF_USER = 16
FOLLOWERS = 256
_RESERVED = {"event", "level", "timestamp", "request_id"}  # what a line of the log says of itself


class Told(Event):
    """An event with what followers are sent of it, encoded once for all of them."""

    @cached_property
    def frame(self) -> bytes:
        """As server-sent events have it."""
        data = to_bytes(self)
        return b"id: %b:%d\nevent: %b\ndata: %b\n\n" % (
            self.boot.encode(),
            self.id,
            self.name.encode(),
            data,
        )


class Events:
    """The stream. `publish` belongs to the event loop's thread; it never waits."""

    def __init__(self, *, capacity: int = 4096, clock: Callable[[], datetime] = utc_now) -> None:
        self.boot = secrets.token_hex(4)
        self.counts: Counter[str] = Counter()
        self._ring: deque[Told] = deque(maxlen=capacity)
        self._clock = clock
        self._followers: Counter[int] = Counter()
        self._last = 0
        self._arrived = asyncio.Event()
        self._closed = False

    def publish(self, name: str, **fields: Any) -> None:
        """Tell all followers, and log it as `name` with its fields. Fields are JSON values; names are `noun.verb`, past tense.

        An event with `owner_uid` or `taken_by` is shown to that user too; every other only to administrators.
        """
        self._last += 1
        self.counts[name] += 1
        event = Told(id=self._last, boot=self.boot, at=self._clock(), name=name, fields=fields)
        self._ring.append(event)
        self._wake()
        log.log(
            _level(name),
            name,
            **{f"{key}_" if key in _RESERVED else key: value for key, value in fields.items()},
        )

    def position(self, last_event_id: str | None) -> int:
        """Where a follower stands who last saw `last_event_id` (`BOOT:ID`, or the id alone); None is the end.

        One from before a restart saw nothing of this boot: it stands at the beginning.
        """
        if not last_event_id:
            return self._last
        boot, colon, number = last_event_id.rpartition(":")
        if (colon and boot != self.boot) or not number.isascii() or not number.isdigit():
            return 0
        return min(int(number[:18]), self._last)

    async def subscribe(
        self, after: int | None = None, *, silence: timedelta | None = None
    ) -> AsyncIterator[list[Told]]:
        """Every event after number `after` (None: from now on), some at a time, until the stream is closed; none of them
        when nothing came for so long."""
        position = self._last if after is None else after
        while True:
            arrived = self._arrived
            if events := self._after(position):
                position = events[-1].id
                yield events
            elif self._closed:
                return
            else:
                try:
                    async with asyncio.timeout(silence.total_seconds() if silence else None):
                        await arrived.wait()
                except TimeoutError:
                    yield []

    def add_follower(self, user: int) -> None:
        """Count who is woken by each event from now on; raises LimitReachedError."""
        own, total = self._followers[user], self._followers.total()
        if own >= FOLLOWERS_OF_USER or total >= FOLLOWERS:
            raise LimitReachedError(
                f"cannot follow events: {own} follow for uid {user}, {total} in all",
                hint=f"one user may have {FOLLOWERS_OF_USER} followers, all {FOLLOWERS}; end some",
                retry_after=1,
            )
        self._followers[user] += 1

    def remove_follower(self, user: int) -> None:
        self._followers -= Counter([user])

    def remembered(self, after: int) -> list[Told]:
        """Every event after number `after` that is still in the ring."""
        found: list[Told] = []
        while events := self._after(after):
            found += events
            after = events[-1].id
        return found

    def close(self) -> None:
        """Let every follower come to an end."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._arrived.set()
        self._arrived = asyncio.Event()

    def _after(self, position: int) -> list[Told]:
        """At most a hundred events, so that a follower far behind does not hold the loop."""
        first = self._ring[0].id if self._ring else self._last + 1
        if position + 1 < first:
            return [self._gap(position, first)]
        start = position + 1 - first
        stop = min(start + 100, len(self._ring))
        return [self._ring[n] for n in range(start, stop)]

    def _gap(self, position: int, first: int) -> Told:
        fields = {"after": position, "count": first - position - 1}
        return Told(
            id=first - 1, boot=self.boot, at=self._clock(), name="events.dropped", fields=fields
        )


def _level(name: str) -> int:
    """How loud an event is in the log."""
    if name == "operation.progressed":
        return logging.DEBUG
    return logging.WARNING if name.endswith((".failed", ".refused")) else logging.INFO
