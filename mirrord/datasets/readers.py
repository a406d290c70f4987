"""Read rows of dataset files: JSON lines, a JSON document or Parquet; plain, gzip or Zstandard.

The content decides, not the name. Streams: holds one row. An unreadable row becomes a fault in its
place and is skipped; an unreadable file raises InvalidDatasetError. Runs in a worker, and in
clients that import several files: they send each row as a line with its origin (`row_line`).
"""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, cast

from ..host.zstd import ZSTD_MAGIC, ZstdError, open_zstd
from ..jsontext import loads
from .elements import ELEMENT_LIMIT_BYTES, Element, iter_elements
from .parquet import iter_parquet
from .rows import FAULT, ORIGIN, Origin, RawRow, refused

UNPACKED_FREE_BYTES = 256 * 1024**2
# datasets shrink to about a tenth; a file that shrinks more than this is a decompression bomb
UNPACKED_RATIO = 64
# whatever its ratio: a larger file is refused with 400 `invalid-dataset`
UNPACKED_LIMIT_BYTES = 64 * 1024**3

# tells the format, and the compression, without reading the file twice
_HEAD_BYTES = 64 * 1024
_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_ROW_KEYS = {"instance_id", "repo", "base_commit"}
# before the array of rows; SWE-Bench-CL has two
_FACTS_MAX = 20
_CELLS = "truncated_cells"


def iter_rows(path: Path, source: str, columns: Collection[str] | None = None) -> Iterator[RawRow]:
    """Read the rows of a file, named `source` in messages; of Parquet only `columns`, or all."""
    st = os.stat(path)
    if not stat.S_ISREG(st.st_mode):
        raise refused(source, "it is not a regular file")
    count = _unpacked_counter(source, st.st_size)
    with path.open("rb") as file:
        head = file.read(8)
    if head.startswith(b"PAR1"):
        yield from iter_parquet(path, source, count, columns)
        return
    line = further = 0
    raw = open_unpacked(path, head)
    with _Counted(raw, count) as counted, io.BufferedReader(counted, _HEAD_BYTES) as stream:
        try:
            for row in _iter_text(stream, source):
                line = row.line
                for number, inner in enumerate(_iter_inside(_without_viewer(row))):
                    further += number > 0
                    yield inner._replace(line=line + further)
        except (EOFError, ZstdError, zlib.error, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk failed; damaged content has no errno
            yield RawRow(line + 1, fault=f"the compressed file is damaged from here on: {error}")


def open_unpacked(path: Path, head: bytes) -> Any:
    """Open a file to read it decompressed. `head` are its first bytes."""
    if head.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(path)
    if head.startswith(ZSTD_MAGIC):
        return open_zstd(path)
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
            raise refused(source, fact, "unpack it, or split it into several files")

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


# the answer of the Hub's viewer: `features`, an array too, comes before `rows`
_VIEWER = re.compile(rb'\{\s*"features"')
# a document of columns begins with one of these, whose value is no text
_COLUMNS = re.compile(rb'\{\s*"(?:instance_id|repo|base_commit)"\s*:\s*[\[{]')


def _iter_text(stream: io.BufferedReader[Any], source: str) -> Iterator[RawRow]:
    head = stream.peek(_HEAD_BYTES)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise refused(source, "it is UTF-16", "write it as UTF-8")
    if head.startswith(_BOM):
        stream.read(len(_BOM))
        head = head.removeprefix(_BOM)
    if not head:
        raise refused(source, "it is empty")
    start = head.lstrip(_SPACE)
    if start.startswith(b"PAR1"):
        hint = "decompress it; Parquet compresses by itself"
        raise refused(source, "it is compressed Parquet", hint)
    if start.startswith(b"[") and not _is_array_line(start):
        yield from _iter_document(iter_elements(stream))
    elif _COLUMNS.match(start) and not _has_second_line(start):
        yield from _iter_columns(stream.read(ELEMENT_LIMIT_BYTES + 1), source)
    elif start.startswith(b"{") and not _is_lines(start):
        match _first_member(start):
            case b"{":
                yield from _iter_members(iter_elements(stream))
            case b"[" if not _VIEWER.match(start):  # an object with an array of rows
                elements = iter_elements(stream, depth=2)
                yield from _iter_document(element._replace(key=None) for element in elements)
            case _:
                yield from _iter_single(stream.read(ELEMENT_LIMIT_BYTES + 1), source)
    elif start.startswith((b"{", b"[")) or b"\n{" in start:
        yield from _iter_lines(stream)
    elif start:
        raise refused(source, "it is neither JSON lines, nor JSON, nor Parquet")
    else:
        raise refused(source, "it has no rows")


def _is_array_line(start: bytes) -> bool:
    """Return whether `[` begins an invalid first line of JSON lines, not an array of rows."""
    first, _, rest = start.partition(b"\n")
    return rest.lstrip(_SPACE).startswith(b"{") and first.rstrip(_SPACE).endswith(b"]")


def _is_lines(start: bytes) -> bool:
    """Return whether text that begins with `{` is JSON lines, not one document."""
    first, newline, rest = start.partition(b"\n")
    value = _decoded(first)[0]
    if value is not None:
        firsts = [v[0] for v in value.values() if isinstance(v, list) and v]
        has_rows = any(isinstance(first, dict) and _is_row(first) for first in firsts)
        # by id all members are rows; a row of a trainer has one beside other columns
        has_rows |= all(isinstance(v, dict) and _is_row(v) for v in value.values())
        return bool(rest.strip()) or bool(_ROW_KEYS & value.keys()) or not has_rows
    if not newline:  # a long or truncated row: documents have a line break after their bracket
        return _first_member(first) not in {b"{", b"["}
    return _has_second_line(start)


def _has_second_line(start: bytes) -> bool:
    return start.partition(b"\n")[2].lstrip(_SPACE).startswith(b"{")


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
            if fault is not None and not line.endswith((b"\n", b"}")):
                fault = "the file ends in the middle of a row: it is truncated"
            yield _with_origin(RawRow(number, value, fault))


def _with_origin(row: RawRow) -> RawRow:
    """Decode the members that `row_line` added."""
    match row.value and row.value.pop(ORIGIN, None):
        case [str(file), int(line)] if row.value is not None:
            fault = row.value.pop(FAULT, None)
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


def _iter_members(elements: Iterable[Element]) -> Iterator[RawRow]:
    """Read rows by instance id; or the rows in arrays that come after facts about the file."""
    elements, early = iter(elements), list[Element]()
    for element in elements:
        early.append(element)
        is_array = element.text.startswith(b"[")
        if is_array or len(early) == _FACTS_MAX or _is_row(_decoded(element.text)[0] or {}):
            break
    if not early or not early[-1].text.startswith(b"["):
        yield from _iter_document(chain(early, elements))
        return
    number = 0
    for element in chain(early[-1:], elements):
        if element.text.startswith(b"["):
            for inner in iter_elements(io.BytesIO(element.text)):
                number += 1
                yield from (row._replace(line=number) for row in _iter_document([inner]))
        elif element.fault:
            yield RawRow(number + 1, fault=element.fault)


def _iter_inside(row: RawRow) -> Iterator[RawRow]:
    """Take rows out of a list in an object that is none, such as the sequences of SWE-Bench-CL."""
    value = row.value or {}
    lists = () if "base_commit" in value else (v for v in value.values() if isinstance(v, list))
    inner = next((each for each in lists if each and _has_whole_row(each[0])), None)
    for member in inner or ():
        is_row = isinstance(member, dict)
        yield row._replace(
            value=member if is_row else None, fault=None if is_row else "it is not an object"
        )
    if inner is None:
        yield row


def _has_whole_row(value: Any) -> bool:
    members = [value, *value.values()] if isinstance(value, dict) else ()
    return any(isinstance(each, dict) and each.keys() >= _ROW_KEYS for each in members)


def _iter_columns(text: bytes, source: str) -> Iterator[RawRow]:
    """Read an object of columns: arrays, or objects by row, as pandas' `to_json` writes."""
    value, fault = _whole(text, source)
    columns = list((value or {}).values())
    keys = _row_keys(columns[0]) if columns else None
    if value is None or not keys or any(_row_keys(column) != keys for column in columns):
        yield RawRow(1, value, fault)
        return
    for number, key in enumerate(keys, 1):
        yield RawRow(number, {name: column[key] for name, column in value.items()})


def _row_keys(column: object) -> list[Any] | None:
    if isinstance(column, list):
        return list(range(len(column)))
    return list(column) if isinstance(column, dict) else None


def _whole(text: bytes, source: str) -> tuple[dict[str, Any] | None, str | None]:
    if len(text) > ELEMENT_LIMIT_BYTES:
        raise refused(source, f"it is one JSON value of more than {ELEMENT_LIMIT_BYTES >> 20} MiB")
    return _decoded(text)


def _iter_single(text: bytes, source: str) -> Iterator[RawRow]:
    """Read a document that is one row, or the first array of rows in it."""
    value, fault = _whole(text, source)
    arrays = [v for v in (value or {}).values() if isinstance(v, list)]
    arrays = [array for array in arrays if array and isinstance(array[0], dict)]
    rows = next((array for array in arrays if _is_row(array[0])), next(iter(arrays), None))
    if value is None or rows is None or _ROW_KEYS & value.keys():
        yield RawRow(1, value, fault)
        return
    for number, row in enumerate(rows, 1):
        is_row = isinstance(row, dict)
        yield RawRow(number, row if is_row else None, None if is_row else "it is not an object")


def _is_row(value: dict[str, Any]) -> bool:
    return bool(_ROW_KEYS & value.keys()) or isinstance(value.get("row"), dict)


def _without_viewer(row: RawRow) -> RawRow:
    """Take a row out of what the Hub's viewer wraps around it; what it truncated is a fault."""
    value = row.value or {}
    inner = value.get("row")
    if not isinstance(inner, dict) or not value.keys() <= {"row_idx", "row", _CELLS}:
        return row
    if cells := value.get(_CELLS):
        fault = f"the Hub's viewer truncated {', '.join(map(str, cells))[:200]}; fetch the file"
        return row._replace(value=None, fault=fault)
    return row._replace(value=inner)


def _decoded(text: bytes) -> tuple[dict[str, Any] | None, str | None]:
    try:
        value = loads(text.decode())
    except UnicodeDecodeError as error:
        return None, f"it is not UTF-8: {error.reason} at byte {error.start}"
    except ValueError as error:
        return None, f"it is not JSON: {error}"
    return (value, None) if isinstance(value, dict) else (None, "it is not an object")
