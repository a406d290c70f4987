"""Server-sent events, as far as the daemon writes them: lines in, events out. Pure."""

from __future__ import annotations

from pydantic import ValidationError

from ..errors import NoDaemonError
from ..protocol import Event


class EventReader:
    """Feeds on lines of a `text/event-stream`; comments, which are the server's heartbeat, fall through."""

    def __init__(self) -> None:
        self._data: list[str] = []

    def feed(self, line: str) -> Event | None:
        """The event that `line` completes, if it does."""
        if line.startswith("data:"):
            self._data.append(line[5:].removeprefix(" "))
        if line or not self._data:
            return None
        text, self._data = "\n".join(self._data), []
        try:
            return Event.model_validate_json(text)
        except ValidationError as error:
            raise NoDaemonError(
                "cannot read an event: not a message of mirrord",
                hint="use a client of the daemon's version",
                reason=str(error)[:500],
            ) from error
