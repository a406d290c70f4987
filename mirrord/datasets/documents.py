"""JSON documents larger than memory: the elements of an array, or the members of an object, one at a time.

Finds where an element ends by its strings and brackets alone, so that a bad element costs itself and not its neighbours. Never
holds more than one element. Works on bytes: in UTF-8 no other character contains the bytes of a bracket or a quote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

ELEMENT_LIMIT_BYTES = 256 * 1024**2
"""Longer than any row that is published (168 MB), and short enough to be held."""

DEPTH_LIMIT = 1000
"""Python reads no JSON that is nested deeper."""

_CHUNK_BYTES = 256 * 1024
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]', re.DOTALL)


class Source(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Element:
    """The bytes of one bracketed element, or in `fault` why there is none. `key` is what stands before it in an object."""

    text: bytes = b""
    key: bytes | None = None
    fault: str | None = None


class _Scanner:
    """Reads `source` from the start; elements are what opens at `depth`."""

    def __init__(self, source: Source, depth: int) -> None:
        self._source = source
        self._wanted = depth
        self._depth = 0
        self._buffer = b""
        self._at = 0  # where the next token is looked for
        self._start: int | None = None  # where the element that is open began
        self._after = 0  # where the last element, or the opening bracket, ended
        self._key: bytes | None = None
        self._in_array = False  # what the elements are in: there a string is a bad element, in an object it is a key
        self._ended = False
        self._is_given_up = False

    def elements(self) -> Iterator[Element]:
        while self._fill():
            yield from self._scan()
            if self._is_given_up:
                return
            if self._ended:
                yield from self._rest()
                return
            self._forget()
            if len(self._buffer) > ELEMENT_LIMIT_BYTES:
                yield Element(
                    fault=f"it is longer than {ELEMENT_LIMIT_BYTES >> 20} MiB; the file is read no further"
                )
                return
        where = (
            "in the middle of a row" if self._start is not None else "before its closing bracket"
        )
        yield Element(fault=f"the file ends {where}: it was cut off")

    def _fill(self) -> bool:
        """Read as much again as is held: a long element is then scanned twice at most, not once a chunk."""
        chunk = self._source.read(max(_CHUNK_BYTES, len(self._buffer)))
        self._buffer += chunk
        return bool(chunk)

    def _scan(self) -> Iterator[Element]:
        for token in _TOKEN.finditer(self._buffer, self._at):
            text = token.group()
            if text == b'"':  # a string whose end is not read yet
                self._at = token.start()
                return
            self._at = token.end()
            if text in b"{[":
                yield from self._open(token.start())
            elif text in b"}]":
                yield from self._close(token.end())
            elif self._depth == self._wanted and not self._in_array:
                self._key = text
            if self._ended:
                return
        self._at = len(self._buffer)

    def _open(self, start: int) -> Iterator[Element]:
        if self._depth == self._wanted:
            yield from self._stray(start)
            self._start = start
        self._depth += 1
        if self._depth > DEPTH_LIMIT:
            yield Element(fault="it is nested too deeply; the file is read no further")
            self._is_given_up = self._ended = True
        if self._depth == self._wanted:
            self._after, self._key = start + 1, None
            self._in_array = self._buffer[start : start + 1] == b"["

    def _close(self, end: int) -> Iterator[Element]:
        self._depth -= 1
        if self._depth == self._wanted and self._start is not None:
            yield Element(self._buffer[self._start : end], self._key)
            self._start, self._after, self._key = None, end, None
        elif self._depth < self._wanted:
            yield from self._stray(end - 1)
            self._ended = True

    def _stray(self, end: int) -> Iterator[Element]:
        """Strings, numbers and the like that stand where an element should: each is one of the document's rows."""
        if self._key is None:
            between = _TOKEN.sub(b"0", self._buffer[self._after : end])
            yield from (
                Element(fault="it is not an object") for part in between.split(b",") if part.strip()
            )

    def _rest(self) -> Iterator[Element]:
        if (
            self._wanted == 1
            and (self._buffer[self._at :] + self._source.read(_CHUNK_BYTES)).strip()
        ):
            yield Element(fault="the file goes on after its closing bracket; the rest is not read")

    def _forget(self) -> None:
        """Drop what was scanned, but for an element, a string or a gap that is still open."""
        keep = min(self._at, self._after if self._start is None else self._start)
        self._buffer = self._buffer[keep:]
        self._at -= keep
        self._after = max(0, self._after - keep)
        if self._start is not None:
            self._start -= keep


def iter_elements(source: Source, *, depth: int = 1) -> Iterator[Element]:
    """Elements of the array or object that the document is; with depth 2, of the first array in it."""
    return _Scanner(source, depth).elements()
