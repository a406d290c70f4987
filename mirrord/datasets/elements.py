"""The elements of a JSON array, or the members of an object, one at a time.

The document may be larger than memory. Only strings and brackets are recognised, so an invalid
element does not affect its neighbours. Works on bytes: in UTF-8 no other character contains the
byte of a bracket or quote.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from ..jsontext import DEPTH_MAX

# longer than any published row (168 MB)
ELEMENT_LIMIT_BYTES = 256 * 1024**2

# a row may be nested as deep as other JSON that mirrord reads
DEPTH_LIMIT = DEPTH_MAX

# doubled for a long element, so that its beginning is scanned twice at most
_CHUNK_BYTES = 256 * 1024

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]', re.DOTALL)


class ByteSource(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Element(NamedTuple):
    """The bytes of one element in brackets, with its key in an object; or its fault."""

    text: bytes = b""
    key: bytes | None = None
    fault: str | None = None


def iter_elements(source: ByteSource, *, depth: int = 1) -> Iterator[Element]:
    """Iterate over the document's array or object; with depth 2, over the first array in it."""
    buffer, offset, level = b"", 0, 0  # of the next token
    start: int | None = None  # offset of the open element
    after = 0  # end of the last element or of the opening bracket
    key: bytes | None = None
    in_array = False  # in an array a string is an invalid element, in an object it is a key

    def strays(end: int) -> list[Element]:
        """Return a fault for each scalar between two elements."""
        between = b"" if key is not None else _TOKEN.sub(b"0", buffer[after:end])
        return [
            Element(fault="it is not an object") for part in between.split(b",") if part.strip()
        ]

    # doubling the buffer scans a long element at most twice, not once per chunk
    while chunk := source.read(max(_CHUNK_BYTES, len(buffer))):
        buffer += chunk
        for token in _TOKEN.finditer(buffer, offset):
            text = token.group()
            if text == b'"':  # the end of the string is in the next chunk
                offset = token.start()
                break
            offset = token.end()
            if text in b"{[":
                if level == depth:
                    yield from strays(token.start())
                    start = token.start()
                level += 1
                if level > DEPTH_LIMIT:
                    yield Element(fault="it is nested too deeply; the rest is not read")
                    return
                if level == depth:
                    after, key, in_array = offset, None, text == b"["
            elif text in b"}]":
                level -= 1
                if level == depth and start is not None:
                    yield Element(buffer[start:offset], key)
                    start, after, key = None, offset, None
                elif level < depth:
                    yield from strays(token.start())
                    if depth == 1 and (buffer[offset:] + source.read(_CHUNK_BYTES)).strip():
                        fault = "the file continues after its closing bracket; the rest is not read"
                        yield Element(fault=fault)
                    return
            elif level == depth and not in_array:
                key = text
        else:
            offset = len(buffer)
        keep = min(offset, after if start is None else start)
        buffer, offset, after = buffer[keep:], offset - keep, max(0, after - keep)
        if start is not None:
            start -= keep
        if len(buffer) > ELEMENT_LIMIT_BYTES:
            limit = f"{ELEMENT_LIMIT_BYTES >> 20} MiB"
            yield Element(fault=f"it is longer than {limit}; the rest is not read")
            return
    where = "before its closing bracket" if start is None else "in the middle of a row"
    yield Element(fault=f"the file ends {where}: it is truncated")
