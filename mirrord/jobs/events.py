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
from datetime import datetime
from typing import Any, NamedTuple

import structlog

from ..model import utc_now
from ..protocol import Event

log = structlog.get_logger()


_RESERVED = {"event", "level", "timestamp", "request_id"}  # what a line of the log says of itself


class _Entry(NamedTuple):
    id: int
    at: datetime
    name: str
    fields: dict[str, Any]


class Events:
    """The stream. `publish` belongs to the event loop's thread; it never waits."""

    def __init__(self, *, capacity: int = 4096, clock: Callable[[], datetime] = utc_now) -> None:
        self.boot = secrets.token_hex(4)
        self.counts: Counter[str] = Counter()
        self._ring: deque[_Entry] = deque(maxlen=capacity)
        self._clock = clock
        self._last = 0
        self._arrived = asyncio.Event()
        self._closed = False

    def publish(self, name: str, **fields: Any) -> None:
        """Tell all followers, and log it as `name` with its fields. Fields are JSON values; names are `noun.verb`, past tense.

        An event with `owner_uid` or `taken_by` is shown to that user too; every other only to administrators.
        """
        self._last += 1
        self.counts[name] += 1
        self._ring.append(_Entry(self._last, self._clock(), name, fields))
        self._wake()
        log.log(_level(name), name, **{f"{key}_" if key in _RESERVED else key: value for key, value in fields.items()})

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

    async def subscribe(self, after: int | None = None) -> AsyncIterator[Event]:
        """Every event after number `after` (None: from now on), until the stream is closed."""
        position = self._last if after is None else after
        while True:
            arrived = self._arrived
            for event in self._after(position):
                position = event.id
                yield event
            if position < self._last:
                continue
            if self._closed:
                return
            await arrived.wait()

    def remembered(self, after: int) -> list[Event]:
        """Every event after number `after` that is still in the ring."""
        found: list[Event] = []
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

    def _after(self, position: int) -> list[Event]:
        """At most a hundred events, so that a follower far behind does not hold the loop."""
        first = self._ring[0].id if self._ring else self._last + 1
        if position + 1 < first:
            return [self._gap(position, first)]
        start = position + 1 - first
        stop = min(start + 100, len(self._ring))
        return [self._event(self._ring[n]) for n in range(start, stop)]

    def _event(self, entry: _Entry) -> Event:
        return Event(id=entry.id, boot=self.boot, at=entry.at, name=entry.name, fields=entry.fields)

    def _gap(self, position: int, first: int) -> Event:
        fields = {"after": position, "count": first - position - 1}
        return Event(id=first - 1, boot=self.boot, at=self._clock(), name="events.dropped", fields=fields)


def _level(name: str) -> int:
    """How loud an event is in the log."""
    if name == "operation.progressed":
        return logging.DEBUG
    return logging.WARNING if name.endswith((".failed", ".refused")) else logging.INFO
