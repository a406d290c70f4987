"""What git writes to stderr while it runs: progress, HTTP traces and messages, told apart line by line.

Owns the reading only. Keeps the last messages within a bound; never keeps a trace, which may show what should not be shown.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

from ..protocol import Progress
from .errors import HttpAnswer

_PROGRESS = re.compile(
    r"(?:remote: )?([A-Z][A-Za-z -]+):\s+(?:\d+% \((\d+)/(\d+)\)|(\d+))(?:,.*)?\s*"
)
_TRACE = re.compile(r"\d\d:\d\d:\d\d\.\d+ \S+\.c:\d+\s+(.*)")
_HEADER = re.compile(r"<= Recv header:\s*(.*)")
_MAX_LINE = 4096
_MAX_LINES = 400


class StderrReader:
    """Feed it chunks; ask it for the messages at the end."""

    def __init__(self, progress: Callable[[Progress], None] | None = None) -> None:
        self._progress = progress
        self._tail = b""
        self._first: list[str] = []
        self._last: deque[str] = deque(maxlen=_MAX_LINES)
        self.http = HttpAnswer()

    def feed(self, chunk: bytes) -> None:
        *lines, tail = re.split(rb"[\r\n]", self._tail + chunk)
        self._tail = tail[-_MAX_LINE:]
        for line in lines:
            self._take(line)

    def text(self) -> str:
        """All messages that were kept: the first and the last ones."""
        if self._tail:
            self._take(self._tail)
            self._tail = b""
        return "\n".join([*self._first, *self._last])

    def _take(self, raw: bytes) -> None:
        line = raw[:_MAX_LINE].decode("utf-8", "replace").removesuffix("\x1b[K").rstrip()
        if not line:
            return
        if trace := _TRACE.fullmatch(line):
            self._take_trace(trace[1])
        elif found := _PROGRESS.fullmatch(line):
            self._tell(found)
        elif len(self._first) < _MAX_LINES:
            self._first.append(line)
        else:
            self._last.append(line)

    def _take_trace(self, text: str) -> None:
        header = _HEADER.match(text)
        if not header:
            return
        name, _, value = header[1].partition(":")
        if status := re.match(r"HTTP/\S+ (\d{3})", header[1]):
            self.http = HttpAnswer(int(status[1]))
        elif name.strip().lower() == "retry-after":
            self.http = self.http._replace(retry_after=value.strip())
        elif name.strip().lower() == "content-type":
            self.http = self.http._replace(content_type=value.strip().lower())

    def _tell(self, found: re.Match[str]) -> None:
        if self._progress is None:
            return
        title, done, total, count = found.groups()
        unit = title.split()[-1].lower()
        self._progress(
            Progress(
                done=int(done or count), total=int(total) if total else None, unit=unit, note=title
            )
        )
