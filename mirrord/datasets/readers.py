"""Dataset files as rows: JSON lines, a JSON document, Parquet; plain, gzip, Zstandard; by content.

Streams: holds one row, or one batch of Parquet. An unreadable row becomes a fault in its place and
reading continues; any other file raises InvalidDatasetError. Runs in a worker, and in the client of
a source of several files, which sends each row as a line that says where it is from (`row_line`).
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import date, time
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from ..errors import InvalidDatasetError
from ..model import shown

UNPACKED_FREE_BYTES = 256 * 1024**2
UNPACKED_RATIO = 64
"""Text as people write it shrinks to a tenth; more than this is a bomb."""
UNPACKED_LIMIT_BYTES = 64 * 1024**3

_HEAD_BYTES = 64 * 1024
_BUFFER_BYTES = 1024**2
_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_ROW_KEYS = {"instance_id", "repo", "base_commit"}
_ORIGIN, _FAULT = "mirrord:origin", "mirrord:fault"
_HINT = "give a file of JSON lines, a JSON array of rows, or Parquet"


class Origin(NamedTuple):
    """Where a row of a stream is from: a file or folder, and the line in it."""

    file: str
    line: int


class RawRow(NamedTuple):
    """One row of the file; `line` counts lines of JSON lines, rows of everything else, from 1."""

    line: int
    value: dict[str, Any] | None = None
    fault: str | None = None
    origin: Origin | None = None


def row_line(row: RawRow, file: str) -> bytes:
    """A row, or its fault, as one line of JSON that `iter_rows` reads back, with its origin."""
    origin = {_ORIGIN: row.origin or Origin(file, row.line)}
    value = {**(row.value or {}), **origin} if row.fault is None else {_FAULT: row.fault, **origin}
    return json.dumps(value, default=_plain).encode() + b"\n"


def _plain(value: object) -> str:
    """The text of what Parquet and Arrow have and JSON has not: bytes, dates, decimals."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return value.isoformat() if isinstance(value, date | time) else str(value)


def iter_rows(path: Path, source: str, columns: Collection[str] | None = None) -> Iterator[RawRow]:
    """All rows of a file that messages call `source`; of Parquet these columns, None being all."""
    size = os.stat(path)
    if not stat.S_ISREG(size.st_mode):
        raise _refused(source, "it is not a regular file")
    take = _unpacking(source, size.st_size)
    with path.open("rb") as file:
        head = file.read(8)
    if head.startswith(b"PAR1"):
        yield from _iter_parquet(path, source, take, columns)
        return
    line = 0
    raw = unpacked(path, head)
    with _Counted(raw, take) as counted, io.BufferedReader(counted, _HEAD_BYTES) as stream:
        try:
            for row in _iter_text(stream, source):
                line = row.line
                yield row
        except (EOFError, zlib.error, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk failed; damaged content has no errno
            yield RawRow(line + 1, fault=f"the compressed file is damaged from here on: {error}")


def unpacked(path: Path, head: bytes) -> Any:
    """A file that begins with `head`, opened to read its bytes as they were before compression."""
    if head.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(path)
    if head.startswith(b"\x28\xb5\x2f\xfd"):  # Python 3.11 does not read Zstandard
        return import_module("pyarrow").input_stream(str(path), compression="zstd")
    return io.FileIO(path)


def _unpacking(source: str, size: int) -> Callable[[int], None]:
    """A counter of unpacked bytes that raises InvalidDatasetError over the bound.

    Kilobytes of gzip or Parquet can stand for gigabytes of rows, whatever their headers say.
    """
    left = limit = min(UNPACKED_FREE_BYTES + UNPACKED_RATIO * size, UNPACKED_LIMIT_BYTES)

    def take(count: int) -> None:
        nonlocal left
        left -= count
        if left < 0:
            fact = f"its {size} bytes unpack to more than {limit >> 20} MiB"
            raise _refused(source, fact, "give the rows unpacked, or in several files")

    return take


class _Counted(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase, take: Callable[[int], None]) -> None:
        self._raw = raw
        self._take = take

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        count = cast("int", self._raw.readinto(buffer))  # type: ignore[arg-type]
        self._take(count)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def _refused(source: str, fact: str, hint: str = _HINT) -> InvalidDatasetError:
    return InvalidDatasetError(f"cannot import dataset {shown(source)}: {fact}", hint=hint)


# -- JSON -----------------------------------------------------------------------------------------


def _iter_text(stream: io.BufferedReader[Any], source: str) -> Iterator[RawRow]:
    head = stream.peek(_HEAD_BYTES)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _refused(source, "it is UTF-16", "write it as UTF-8")
    if head.startswith(_BOM):
        stream.read(len(_BOM))
        head = head.removeprefix(_BOM)
    if not head:
        raise _refused(source, "it is empty")
    start = head.lstrip(_SPACE)
    if start.startswith(b"PAR1"):
        hint = "decompress it; Parquet compresses by itself"
        raise _refused(source, "it is compressed Parquet", hint)
    if start.startswith(b"[") and not _is_array_line(start):
        yield from _iter_document(iter_elements(stream))
    elif start.startswith(b"{") and not _is_lines(start):
        match _first_member(start):
            case b"{":  # rows by instance id
                yield from _iter_document(iter_elements(stream))
            case b"[":  # an object with an array of rows
                elements = iter_elements(stream, depth=2)
                yield from _iter_document(element._replace(key=None) for element in elements)
            case _:
                yield from _iter_single(stream.read(ELEMENT_LIMIT_BYTES + 1), source)
    elif start.startswith((b"{", b"[")) or b"\n{" in start:
        yield from _iter_lines(stream)
    elif start:
        raise _refused(source, "it is neither JSON lines, nor JSON, nor Parquet")
    else:
        raise _refused(source, "it has no rows")


def _is_array_line(start: bytes) -> bool:
    """Whether the first `[` opens a bad first line of JSON lines, and not an array of rows."""
    first, _, rest = start.partition(b"\n")
    return rest.lstrip(_SPACE).startswith(b"{") and first.rstrip(_SPACE).endswith(b"]")


def _is_lines(start: bytes) -> bool:
    """Whether text that begins with `{` is one row a line, and not one document."""
    first, newline, rest = start.partition(b"\n")
    value = _decoded(first)[0]
    if value is not None:
        members = [v[0] if isinstance(v, list) and v else v for v in value.values()]
        has_rows = any(isinstance(m, dict) and _ROW_KEYS & m.keys() for m in members)
        return bool(rest.strip()) or bool(_ROW_KEYS & value.keys()) or not has_rows
    if not newline:  # a row longer than the head, or cut off: a document has brackets on own lines
        return _first_member(first) not in {b"{", b"["}
    return rest.lstrip(_SPACE).startswith(b"{")


def _first_member(text: bytes) -> bytes:
    """The byte that the value of an object's first member begins with."""
    return text.partition(b":")[2].lstrip(_SPACE)[:1]


def _iter_lines(stream: io.BufferedReader[Any]) -> Iterator[RawRow]:
    number = 0
    while line := stream.readline(ELEMENT_LIMIT_BYTES + 1):
        number += 1
        if len(line) > ELEMENT_LIMIT_BYTES:
            yield RawRow(number, fault=f"it is longer than {ELEMENT_LIMIT_BYTES >> 20} MiB")
            while (part := stream.readline(_HEAD_BYTES)) and not part.endswith(b"\n"):
                pass
        elif line.strip(_SPACE):
            value, fault = _decoded(line)
            if fault is not None and not line.endswith(b"\n"):
                fault = "the file ends in the middle of a row: it was cut off"
            yield _with_origin(RawRow(number, value, fault))


def _with_origin(row: RawRow) -> RawRow:
    """The row without what `row_line` added to it."""
    match row.value and row.value.pop(_ORIGIN, None):
        case [str(file), int(line)] if row.value is not None:
            fault = row.value.pop(_FAULT, None)
            row = row._replace(origin=Origin(file[:255], line))
            return row if fault is None else row._replace(value=None, fault=str(fault)[:1000])
    return row


def _iter_document(elements: Iterable[Element]) -> Iterator[RawRow]:
    for number, element in enumerate(elements, 1):
        if element.fault:
            yield RawRow(number, fault=element.fault)
            continue
        value, fault = _decoded(element.text)
        if value is not None and element.key is not None:
            try:
                identity = str(json.loads(element.key))
            except ValueError:
                identity = ""
            value.setdefault("instance_id", identity)
        yield RawRow(number, value, fault)


def _iter_single(text: bytes, source: str) -> Iterator[RawRow]:
    """The row that a document is, or the rows of the first array in it."""
    if len(text) > ELEMENT_LIMIT_BYTES:
        raise _refused(source, f"it is one JSON value of more than {ELEMENT_LIMIT_BYTES >> 20} MiB")
    value, fault = _decoded(text)
    arrays = [v for v in (value or {}).values() if isinstance(v, list)]
    rows = next((array for array in arrays if array and isinstance(array[0], dict)), None)
    if value is None or rows is None or "instance_id" in value:
        yield RawRow(1, value, fault)
        return
    for number, row in enumerate(rows, 1):
        is_row = isinstance(row, dict)
        yield RawRow(number, row if is_row else None, None if is_row else "it is not an object")


def _decoded(text: bytes) -> tuple[dict[str, Any] | None, str | None]:
    try:
        value = json.loads(text.decode())
    except UnicodeDecodeError as error:
        return None, f"it is not UTF-8: {error.reason} at byte {error.start}"
    except RecursionError:
        return None, "it is nested too deeply"
    except ValueError as error:
        return None, f"it is not JSON: {error}"
    return (value, None) if isinstance(value, dict) else (None, "it is not an object")


# -- Parquet --------------------------------------------------------------------------------------


def _iter_parquet(
    path: Path, source: str, take: Callable[[int], None], columns: Collection[str] | None
) -> Iterator[RawRow]:
    """Only `columns` have values; the others are None.

    Row by row, which costs 14 µs each: a dictionary of one value of 40 MiB can stand for any number
    of rows. Arrow's own dictionaries grow over a row group, and 50,000 rows of one took 15 s.
    """
    arrow = import_module("pyarrow")  # here: it alone is larger than the daemon
    parquet = import_module("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES)
    except (arrow.ArrowException, OSError) as error:
        fact = f"it is not a whole Parquet file: {_first_line(error)}"
        hint = "it was cut off or damaged on the way here; fetch it again"
        raise _refused(source, fact, hint) from error
    names = file.schema_arrow.names
    wanted = [name for name in names if columns is None or name in columns]
    unread, line = dict.fromkeys(names), 0
    try:
        for batch in file.iter_batches(batch_size=1, columns=wanted, use_threads=False):
            line += 1
            size = sum(map(_size_of, batch.columns))
            take(size)
            if size > ELEMENT_LIMIT_BYTES:
                yield RawRow(line, fault=f"it is longer than {ELEMENT_LIMIT_BYTES >> 20} MiB")
                continue
            try:
                row = unread | batch.to_pylist()[0]
            except UnicodeDecodeError as error:  # Arrow checks text when it becomes a str
                yield RawRow(line, fault=f"it is not UTF-8: {error.reason}")
            else:
                yield RawRow(line, row)
    except MemoryError:  # Arrow's is an ArrowException too
        raise
    except (arrow.ArrowException, OSError) as error:
        yield RawRow(line + 1, fault=f"the file is damaged from here on: {_first_line(error)}")


def _size_of(column: Any) -> int:
    """The bytes of a column, with those of a dictionary's values for each row that has them."""
    is_coded = hasattr(column, "dictionary_decode")
    return int((column.dictionary_decode() if is_coded else column).nbytes)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


# -- the elements of a JSON array, or the members of an object, one at a time ----------------------
#
# The document may be larger than memory. Where an element ends is found by strings and brackets
# alone, so a bad element does not spoil its neighbours. Works on bytes: in UTF-8 no other character
# contains the byte of a bracket or quote.

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
