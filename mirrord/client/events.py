"""Server-sent events, as far as the daemon writes them: bytes in, events out. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ..errors import NoDaemonError
from ..protocol import Event


class EventReader:
    """Feeds on pieces of a `text/event-stream`; comments, which are the server's heartbeat, fall through."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[Event]:
        """The events that `piece` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            if not line and self._data:
                data, self._data = b"\n".join(self._data), []
                yield _read(data)


def _read(data: bytes) -> Event:
    try:
        return Event.from_json(json.loads(data))
    except ValueError as error:
        raise NoDaemonError(
            "cannot read an event: not a message of mirrord",
            hint="use a client of the daemon's version",
            reason=str(error)[:500],
        ) from error
