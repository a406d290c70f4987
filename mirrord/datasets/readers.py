"""Dataset files as rows: JSON lines, a JSON document, Parquet; plain, gzip or Zstandard. By content, whatever the file is called.

Streams: holds one row, or one batch of Parquet. A row that cannot be read is answered as a fault in its place and the next one
is read; a file that is none of these raises InvalidDatasetError. Runs in a worker.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from ..errors import InvalidDatasetError
from ..model import shown
from .documents import ELEMENT_LIMIT_BYTES, Element, iter_elements
from .expansion import Counted, Expansion
from .formats import COLUMNS

_HEAD_BYTES = 64 * 1024
_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_ROW_KEYS = {"instance_id", "repo", "base_commit"}
_HINT = "give a file of JSON lines, a JSON array of rows, or Parquet"


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as it stands in the file; `line` counts lines of JSON lines and rows of everything else, from 1."""

    line: int
    value: dict[str, Any] | None = None
    fault: str | None = None


def iter_rows(path: Path, source: str) -> Iterator[RawRow]:
    """All rows of a file that messages call `source`."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise _refused(source, "it is not a regular file")
    with path.open("rb") as file:
        head = file.read(8)
    expansion = Expansion(path, source)
    if head.startswith(b"PAR1"):
        columnar = import_module(".columnar", __package__)
        rows = enumerate(columnar.iter_parquet(path, source, COLUMNS, expansion), 1)
        yield from (RawRow(line, value, fault) for line, (value, fault) in rows)
        return
    with _open(path, head, expansion) as stream:
        yield from _guarded(_iter_text(stream, source))


@contextmanager
def _open(path: Path, head: bytes, expansion: Expansion) -> Iterator[io.BufferedReader[Any]]:
    with Counted(_raw(path, head), expansion) as raw, io.BufferedReader(raw, _HEAD_BYTES) as stream:
        yield stream


def _raw(path: Path, head: bytes) -> io.RawIOBase:
    raw: Any
    if head.startswith(b"\x1f\x8b"):
        raw = gzip.GzipFile(path)
    elif head.startswith(b"\x28\xb5\x2f\xfd"):
        raw = import_module(".columnar", __package__).open_zstd(path)
    else:
        raw = io.FileIO(path)
    return cast("io.RawIOBase", raw)


def _guarded(rows: Iterator[RawRow]) -> Iterator[RawRow]:
    """Compressed bytes that are damaged end the file with a fault; a disk that fails is the caller's error."""
    line = 0
    try:
        for row in rows:
            line = row.line
            yield row
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        yield RawRow(line + 1, fault=f"the compressed file is damaged from here on: {error}")
    except OSError as error:
        if error.errno is not None:
            raise
        yield RawRow(line + 1, fault=f"the compressed file is damaged from here on: {error}")


def _iter_text(stream: io.BufferedReader[Any], source: str) -> Iterator[RawRow]:
    head = _head(stream)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _refused(source, "it is UTF-16", "write it as UTF-8")
    if head.startswith(_BOM):
        stream.read(len(_BOM))
    start = head.removeprefix(_BOM).lstrip(_SPACE)
    if not start and not head.removeprefix(_BOM):
        raise _refused(source, "it is empty")
    if start.startswith(b"PAR1"):
        raise _refused(
            source, "it is compressed Parquet", "decompress it; Parquet compresses by itself"
        )
    if start.startswith(b"[") and not _is_array_line(start):
        yield from _numbered(iter_elements(stream))
    elif start.startswith(b"{") and not _is_lines(start):
        yield from _iter_object(stream, start, source)
    elif start.startswith((b"{", b"[")) or b"\n{" in start:
        yield from _iter_lines(stream)
    elif start:
        raise _refused(source, "it is neither JSON lines, nor JSON, nor Parquet")
    else:
        raise _refused(source, "it has no rows")


def _head(stream: io.BufferedReader[Any]) -> bytes:
    """The first bytes, not consumed. A raw reader may give less than asked for at once."""
    return stream.peek(_HEAD_BYTES)


# -- JSON lines -------------------------------------------------------------------------------------------------------


def _is_lines(start: bytes) -> bool:
    """Whether text that begins with `{` is one row a line, and not one document."""
    first, newline, rest = start.partition(b"\n")
    value = _decoded(first)[0]
    if value is not None:
        return (
            bool(rest.strip())
            or _ROW_KEYS & value.keys() != set()
            or not _is_mapping_of_rows(value)
        )
    if not newline:  # a row longer than what was looked at, or one cut off: a document has its brackets on lines of their own
        return not _begins_nested(first)
    return rest.lstrip(_SPACE).startswith(b"{")


def _begins_nested(text: bytes) -> bool:
    """Whether the first member of an object is itself an object or an array."""
    _, colon, value = text.partition(b":")
    return bool(colon) and value.lstrip(_SPACE)[:1] in {b"{", b"["}


def _is_mapping_of_rows(value: dict[str, Any]) -> bool:
    firsts = [inner[0] if isinstance(inner, list) and inner else inner for inner in value.values()]
    return any(isinstance(first, dict) and _ROW_KEYS & first.keys() for first in firsts)


def _is_array_line(start: bytes) -> bool:
    """Whether what begins with `[` is a bad first line of JSON lines, and not an array of rows."""
    first, _, rest = start.partition(b"\n")
    return rest.lstrip(_SPACE).startswith(b"{") and first.rstrip(_SPACE).endswith(b"]")


def _iter_lines(stream: io.BufferedReader[Any]) -> Iterator[RawRow]:
    number = 0
    while line := stream.readline(ELEMENT_LIMIT_BYTES + 1):
        number += 1
        if len(line) > ELEMENT_LIMIT_BYTES:
            yield RawRow(number, fault=f"it is longer than {ELEMENT_LIMIT_BYTES >> 20} MiB")
            _skip_line(stream)
        elif line.strip(_SPACE):
            value, fault = _decoded(line)
            cut = fault is not None and not line.endswith(b"\n")
            yield RawRow(
                number,
                value,
                "the file ends in the middle of a row: it was cut off" if cut else fault,
            )


def _skip_line(stream: io.BufferedReader[Any]) -> None:
    while (part := stream.readline(_HEAD_BYTES)) and not part.endswith(b"\n"):
        pass


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


# -- a JSON document --------------------------------------------------------------------------------------------------


def _numbered(elements: Iterator[Element]) -> Iterator[RawRow]:
    for number, element in enumerate(elements, 1):
        if element.fault:
            yield RawRow(number, fault=element.fault)
            continue
        value, fault = _decoded(element.text)
        if value is not None and element.key is not None:
            value.setdefault("instance_id", _decoded_key(element.key))
        yield RawRow(number, value, fault)


def _decoded_key(key: bytes) -> str:
    try:
        return str(json.loads(key))
    except ValueError:
        return ""


def _iter_object(stream: io.BufferedReader[Any], start: bytes, source: str) -> Iterator[RawRow]:
    """An object of rows by instance id, an object with an array of rows, or a single row."""
    _, _, first = start.partition(b":")
    if first.lstrip(_SPACE).startswith(b"{"):
        yield from _numbered(iter_elements(stream))
    elif first.lstrip(_SPACE).startswith(b"["):
        elements = (Element(e.text, None, e.fault) for e in iter_elements(stream, depth=2))
        yield from _numbered(elements)
    else:
        yield from _single_row(stream.read(ELEMENT_LIMIT_BYTES + 1), source)


def _single_row(text: bytes, source: str) -> Iterator[RawRow]:
    if len(text) > ELEMENT_LIMIT_BYTES:
        raise _refused(source, f"it is one JSON value of more than {ELEMENT_LIMIT_BYTES >> 20} MiB")
    value, fault = _decoded(text)
    inner = next(
        (v for v in (value or {}).values() if isinstance(v, list) and v and isinstance(v[0], dict)),
        None,
    )
    if value is None:
        yield RawRow(1, fault=fault)
    elif inner is None or "instance_id" in value:
        yield RawRow(1, value)
    else:
        for number, row in enumerate(inner, 1):
            is_row = isinstance(row, dict)
            yield RawRow(number, row if is_row else None, None if is_row else "it is not an object")


def _refused(source: str, fact: str, hint: str = _HINT) -> InvalidDatasetError:
    return InvalidDatasetError(f"cannot import dataset {shown(source)}: {fact}", hint=hint)
