"""The event stream: numbered events that many followers read at their own pace.

Events are in one bounded ring. A follower is a position in it, so a slow one costs no memory; if it
falls out of the ring, it gets one `events.dropped` for the missed events. Nothing survives a
restart: numbers start again under another boot id.
"""

import asyncio
import logging
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator
from datetime import timedelta
from functools import cached_property
from typing import Any

from ..errors import LimitReachedError
from ..model import utc_now
from ..protocol import Event, to_bytes
from ..telemetry import log

# a follower is a connection and a queue for good; more are refused with 503 `limit-reached`
FOLLOWERS_OF_USER = 16
FOLLOWERS = 256
_BATCH = 100  # bounds how long a follower that is far behind keeps the loop busy
_RESERVED = {"event", "level", "timestamp", "request_id"}  # members of every log line


class FramedEvent(Event):
    """An event with its encoding, made once for all followers."""

    @cached_property
    def frame(self) -> bytes:
        """The bytes of the server-sent event."""
        head = f"id: {self.boot}:{self.id}\nevent: {self.name}\ndata: "
        return head.encode() + to_bytes(self) + b"\n\n"


class Events:
    """The stream. Belongs to the event loop's thread."""

    def __init__(self, *, capacity: int = 4096) -> None:
        self.boot = secrets.token_hex(4)
        self.counts: Counter[str] = Counter()
        self._ring: deque[FramedEvent] = deque(maxlen=capacity)
        self._followers: Counter[int] = Counter()
        self._last = 0
        self._arrived = asyncio.Event()
        self._closed = False

    def publish(self, name: str, **fields: Any) -> None:
        """Send an event to all followers and log it, without waiting. Fields are JSON values.

        Names are `noun.verb` in the past tense. Users see events with their uid in `owner_uid` or
        `taken_by`, administrators see all.
        """
        self._last += 1
        self.counts[name] += 1
        self._ring.append(self._event(self._last, name, fields))
        self._wake()
        is_warning = name.endswith((".failed", ".refused", ".ran_low", ".exceeded"))
        level = logging.WARNING if is_warning else logging.INFO
        level = logging.DEBUG if name == "operation.progressed" else level
        logged = {f"{key}_" if key in _RESERVED else key: value for key, value in fields.items()}
        log.log(level, name, **logged)

    def position(self, last_event_id: str | None) -> int:
        """Return the number of `last_event_id` (`BOOT:ID` or ID); without one, of the last event.

        An id of another boot is 0, the beginning of this one.
        """
        if not last_event_id:
            return self._last
        boot, colon, number = last_event_id.rpartition(":")
        # a client's text: isdigit() takes ², which int() refuses, as it does more than 4,300 digits
        if (colon and boot != self.boot) or not number.isascii() or not number.isdigit():
            return 0
        return min(int(number[:18]), self._last)

    async def subscribe(
        self, after: int | None = None, *, silence: timedelta | None = None
    ) -> AsyncIterator[list[FramedEvent]]:
        """Iterate over batches of events after number `after` (default: new ones) until `close`.

        Yields an empty batch after each `silence` without events.
        """
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
        """Count a follower of this user. Raises LimitReachedError."""
        own, total = self._followers[user], self._followers.total()
        if own >= FOLLOWERS_OF_USER or total >= FOLLOWERS:
            raise LimitReachedError(
                f"cannot follow events: uid {user} has {own} followers, all users have {total}",
                hint=f"at most {FOLLOWERS_OF_USER} per user and {FOLLOWERS} in all; end some",
                retry_after=1,
            )
        self._followers[user] += 1

    def remove_follower(self, user: int) -> None:
        # `-=` of a Counter drops who has none left
        self._followers -= Counter([user])

    def remembered(self, after: int) -> list[FramedEvent]:
        """Return all events after number `after` that are still in the ring."""
        framed: list[FramedEvent] = []
        while events := self._after(after):
            framed += events
            after = events[-1].id
        return framed

    def close(self) -> None:
        """End all subscriptions after the last event."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        # not cleared but replaced: a follower that has not run yet must still see it
        self._arrived.set()
        self._arrived = asyncio.Event()

    def _after(self, position: int) -> list[FramedEvent]:
        first = self._ring[0].id if self._ring else self._last + 1
        if position + 1 < first:
            fields = {"after": position, "count": first - position - 1}
            return [self._event(first - 1, "events.dropped", fields)]
        start = position + 1 - first
        stop = min(start + _BATCH, len(self._ring))
        return [self._ring[n] for n in range(start, stop)]  # islice would walk from the left

    def _event(self, number: int, name: str, fields: dict[str, Any]) -> FramedEvent:
        return FramedEvent(id=number, boot=self.boot, at=utc_now(), name=name, fields=fields)
