"""The elements of a JSON array, or the members of an object, one at a time.

The document may be larger than memory. Finds where an element ends by strings and brackets alone,
so a bad element does not spoil its neighbours. Works on bytes: in UTF-8 no other character contains
the byte of a bracket or quote.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple, Protocol

ELEMENT_LIMIT_BYTES = 256 * 1024**2
"""Longer than any published row (168 MB), and short enough for memory."""

DEPTH_LIMIT = 1000
"""Python reads no JSON that is nested deeper."""

_CHUNK_BYTES = 256 * 1024
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]', re.DOTALL)


class ByteSource(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Element(NamedTuple):
    """The bytes of one bracketed element, and its key in an object; or its fault."""

    text: bytes = b""
    key: bytes | None = None
    fault: str | None = None


def iter_elements(source: ByteSource, *, depth: int = 1) -> Iterator[Element]:
    """Elements of the document's array or object; with depth 2, of the first array in it."""
    buffer, at, level = b"", 0, 0  # `at`: where the next token begins
    start: int | None = None  # of the element that is open
    after = 0  # the end of the last element or of the opening bracket
    key: bytes | None = None
    in_array = False  # where a string is a bad element; in an object it is a key

    def strays(end: int) -> list[Element]:
        """Each string, number or the like in the place of an element is a bad row."""
        between = b"" if key is not None else _TOKEN.sub(b"0", buffer[after:end])
        return [
            Element(fault="it is not an object") for part in between.split(b",") if part.strip()
        ]

    # reading as much again as is held scans a long element twice at most, not once a chunk
    while chunk := source.read(max(_CHUNK_BYTES, len(buffer))):
        buffer += chunk
        for token in _TOKEN.finditer(buffer, at):
            text = token.group()
            if text == b'"':  # the string's end is not read yet
                at = token.start()
                break
            at = token.end()
            if text in b"{[":
                if level == depth:
                    yield from strays(token.start())
                    start = token.start()
                level += 1
                if level > DEPTH_LIMIT:
                    yield Element(fault="it is nested too deeply; the rest is not read")
                    return
                if level == depth:
                    after, key, in_array = at, None, text == b"["
            elif text in b"}]":
                level -= 1
                if level == depth and start is not None:
                    yield Element(buffer[start:at], key)
                    start, after, key = None, at, None
                elif level < depth:
                    yield from strays(token.start())
                    if depth == 1 and (buffer[at:] + source.read(_CHUNK_BYTES)).strip():
                        fault = "the file continues after its closing bracket; the rest is not read"
                        yield Element(fault=fault)
                    return
            elif level == depth and not in_array:
                key = text
        else:
            at = len(buffer)
        keep = min(at, after if start is None else start)
        buffer, at, after = buffer[keep:], at - keep, max(0, after - keep)
        if start is not None:
            start -= keep
        if len(buffer) > ELEMENT_LIMIT_BYTES:
            limit = f"{ELEMENT_LIMIT_BYTES >> 20} MiB"
            yield Element(fault=f"it is longer than {limit}; the rest is not read")
            return
    where = "before its closing bracket" if start is None else "in the middle of a row"
    yield Element(fault=f"the file ends {where}: it was cut off")
