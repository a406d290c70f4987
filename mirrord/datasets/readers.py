"""Read rows of dataset files: JSON lines, a JSON document or Parquet; plain, gzip or Zstandard.

The content decides, not the name. Streams: holds one row. An unreadable row becomes a fault in its
place and is skipped; an unreadable file raises InvalidDatasetError. Runs in a worker, and in
clients that import several files: they send each row as a line with its origin (`row_line`).
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
from ..jsontext import DEPTH_MAX, loads
from ..model import shown

UNPACKED_FREE_BYTES = 256 * 1024**2
UNPACKED_RATIO = 64
"""Datasets shrink to about a tenth; a file that shrinks more than this is a decompression bomb."""
UNPACKED_LIMIT_BYTES = 64 * 1024**3

_HEAD_BYTES = 64 * 1024
_BUFFER_BYTES = 1024**2
_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_ROW_KEYS = {"instance_id", "repo", "base_commit"}
_ORIGIN, _FAULT = "mirrord:origin", "mirrord:fault"
_HINT = "give a file of JSON lines, a JSON array of rows, or Parquet"


class Origin(NamedTuple):
    """The file or folder of a row, and the line in it."""

    file: str
    line: int


class RawRow(NamedTuple):
    """One row of a file. `line` counts lines of JSON lines, else rows, from 1."""

    line: int
    value: dict[str, Any] | None = None
    fault: str | None = None
    origin: Origin | None = None


def row_line(row: RawRow, file: str) -> bytes:
    """Encode a row or its fault, with its origin, as a line of JSON for `iter_rows`."""
    origin = {_ORIGIN: row.origin or Origin(file, row.line)}
    value = {**(row.value or {}), **origin} if row.fault is None else {_FAULT: row.fault, **origin}
    return json.dumps(value, default=_plain).encode() + b"\n"


def _plain(value: object) -> str:
    """Convert types of Parquet and Arrow that JSON lacks to text: bytes, dates, decimals."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return value.isoformat() if isinstance(value, date | time) else str(value)


def iter_rows(path: Path, source: str, columns: Collection[str] | None = None) -> Iterator[RawRow]:
    """Read the rows of a file, named `source` in messages; of Parquet only `columns`, or all."""
    facts = os.stat(path)
    if not stat.S_ISREG(facts.st_mode):
        raise _refused(source, "it is not a regular file")
    count = _unpacked_counter(source, facts.st_size)
    with path.open("rb") as file:
        head = file.read(8)
    if head.startswith(b"PAR1"):
        yield from _iter_parquet(path, source, count, columns)
        return
    line = 0
    raw = open_unpacked(path, head)
    with _Counted(raw, count) as counted, io.BufferedReader(counted, _HEAD_BYTES) as stream:
        try:
            for row in _iter_text(stream, source):
                line = row.line
                yield row
        except (EOFError, zlib.error, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk failed; damaged content has no errno
            yield RawRow(line + 1, fault=f"the compressed file is damaged from here on: {error}")


def open_unpacked(path: Path, head: bytes) -> Any:
    """Open a file to read it decompressed. `head` are its first bytes."""
    if head.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(path)
    if head.startswith(b"\x28\xb5\x2f\xfd"):  # Python 3.11 does not read Zstandard
        return import_module("pyarrow").input_stream(str(path), compression="zstd")
    return io.FileIO(path)


def _unpacked_counter(source: str, size: int) -> Callable[[int], None]:
    """Make a counter of unpacked bytes that raises InvalidDatasetError over the bound.

    Kilobytes of gzip or Parquet can unpack to gigabytes, and their headers may lie about it.
    """
    left = limit = min(UNPACKED_FREE_BYTES + UNPACKED_RATIO * size, UNPACKED_LIMIT_BYTES)

    def count(unpacked_bytes: int) -> None:
        nonlocal left
        left -= unpacked_bytes
        if left < 0:
            fact = f"its {size} bytes unpack to more than {limit >> 20} MiB"
            raise _refused(source, fact, "unpack it, or split it into several files")

    return count


class _Counted(io.RawIOBase):
    """A raw stream that reports the bytes read from it."""

    def __init__(self, raw: io.RawIOBase, count: Callable[[int], None]) -> None:
        self._raw = raw
        self._count = count

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        size = cast("int", self._raw.readinto(buffer))  # type: ignore[arg-type]
        self._count(size)
        return size

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
    """Return whether `[` begins an invalid first line of JSON lines, not an array of rows."""
    first, _, rest = start.partition(b"\n")
    return rest.lstrip(_SPACE).startswith(b"{") and first.rstrip(_SPACE).endswith(b"]")


def _is_lines(start: bytes) -> bool:
    """Return whether text that begins with `{` is JSON lines, not one document."""
    first, newline, rest = start.partition(b"\n")
    value = _decoded(first)[0]
    if value is not None:
        members = [v[0] if isinstance(v, list) and v else v for v in value.values()]
        has_rows = any(isinstance(m, dict) and _ROW_KEYS & m.keys() for m in members)
        return bool(rest.strip()) or bool(_ROW_KEYS & value.keys()) or not has_rows
    if not newline:  # a long or truncated row: documents have a line break after their bracket
        return _first_member(first) not in {b"{", b"["}
    return rest.lstrip(_SPACE).startswith(b"{")


def _first_member(text: bytes) -> bytes:
    """Return the first byte of the value of an object's first member."""
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
                fault = "the file ends in the middle of a row: it is truncated"
            yield _with_origin(RawRow(number, value, fault))


def _with_origin(row: RawRow) -> RawRow:
    """Decode the members that `row_line` added."""
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
                identity = str(loads(element.key))
            except ValueError:
                identity = ""
            value.setdefault("instance_id", identity)
        yield RawRow(number, value, fault)


def _iter_single(text: bytes, source: str) -> Iterator[RawRow]:
    """Read a document that is one row, or the first array of rows in it."""
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
        value = loads(text.decode())
    except UnicodeDecodeError as error:
        return None, f"it is not UTF-8: {error.reason} at byte {error.start}"
    except ValueError as error:
        return None, f"it is not JSON: {error}"
    return (value, None) if isinstance(value, dict) else (None, "it is not an object")


# -- Parquet --------------------------------------------------------------------------------------


def _iter_parquet(
    path: Path, source: str, count: Callable[[int], None], columns: Collection[str] | None
) -> Iterator[RawRow]:
    """Read rows in which all but `columns` are None.

    Batches of one row, 14 µs each: with dictionary encoding any number of rows can share a value of
    40 MiB. Arrow's dictionary batches grow over a row group: 50,000 rows of one took 15 s.
    """
    arrow = import_module("pyarrow")  # imported late: it needs more memory than the whole daemon
    parquet = import_module("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES)
    except (arrow.ArrowException, OSError) as error:
        fact = f"it is not a whole Parquet file: {_first_line(error)}"
        hint = "it was truncated or damaged on the way here; fetch it again"
        raise _refused(source, fact, hint) from error
    names = file.schema_arrow.names
    wanted = [name for name in names if columns is None or name in columns]
    unread, line = dict.fromkeys(names), 0
    try:
        for batch in file.iter_batches(batch_size=1, columns=wanted, use_threads=False):
            line += 1
            size = sum(map(_size_of, batch.columns))
            count(size)
            if size > ELEMENT_LIMIT_BYTES:
                yield RawRow(line, fault=f"it is longer than {ELEMENT_LIMIT_BYTES >> 20} MiB")
                continue
            try:
                row = unread | batch.to_pylist()[0]
            except UnicodeDecodeError as error:  # Arrow validates text only when converting to str
                yield RawRow(line, fault=f"it is not UTF-8: {error.reason}")
            else:
                yield RawRow(line, row)
    except MemoryError:  # pyarrow's is an ArrowException too
        raise
    except (arrow.ArrowException, OSError) as error:
        yield RawRow(line + 1, fault=f"the file is damaged from here on: {_first_line(error)}")


def _size_of(column: Any) -> int:
    """Return the bytes of a column, dictionary-encoded values counted in full."""
    is_coded = hasattr(column, "dictionary_decode")
    return int((column.dictionary_decode() if is_coded else column).nbytes)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


# -- the elements of a JSON array, or the members of an object, one at a time ----------------------
#
# The document may be larger than memory. Only strings and brackets are recognised, so an invalid
# element does not affect its neighbours. Works on bytes: in UTF-8 no other character contains the
# byte of a bracket or quote.

ELEMENT_LIMIT_BYTES = 256 * 1024**2
"""Longer than any published row (168 MB)."""
DEPTH_LIMIT = DEPTH_MAX
"""A row may be nested as deep as other JSON that mirrord reads."""
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
    buffer, at, level = b"", 0, 0  # `at`: offset of the next token
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
        for token in _TOKEN.finditer(buffer, at):
            text = token.group()
            if text == b'"':  # the end of the string is in the next chunk
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
    yield Element(fault=f"the file ends {where}: it is truncated")
