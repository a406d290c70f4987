"""Rows of CSV and Arrow files, one batch at a time; both are tables with one value a column."""

import csv
import io
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from ..datasets.json_stream import ELEMENT_LIMIT_BYTES
from ..datasets.readers import RawRow, unpacked
from ..errors import InvalidDatasetError
from ..model import shown

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_PACKED = {".gz", ".zst"}
_ARROW_FILE, _ARROW_STREAM = b"ARROW1", b"\xff\xff\xff\xff"  # feather v2 is an Arrow file


def find_reader(path: Path) -> Callable[[Path, str], Iterator[RawRow]] | None:
    """What reads this file: CSV by its name, Arrow by its first bytes; None for all others."""
    if _delimiter(path):
        return iter_csv
    with path.open("rb") as file:
        head = file.read(6)
    return iter_arrow if head.startswith((_ARROW_FILE, _ARROW_STREAM)) else None


def _delimiter(path: Path) -> str | None:
    stem = path.with_suffix("") if path.suffix.lower() in _PACKED else path
    return _DELIMITERS.get(stem.suffix.lower())


def iter_csv(path: Path, source: str) -> Iterator[RawRow]:
    """Rows by the names in the first line; each value is text."""
    with path.open("rb") as file:
        head = file.read(8)
    csv.field_size_limit(ELEMENT_LIMIT_BYTES)
    text = io.TextIOWrapper(
        io.BufferedReader(unpacked(path, head)), "utf-8-sig", "surrogateescape", newline=""
    )
    with text:
        reader = csv.reader(text, delimiter=_delimiter(path) or ",")
        columns = next(reader, None)
        if not columns:
            raise InvalidDatasetError(
                f"cannot import dataset {shown(source)}: it is empty", hint="nothing was changed"
            )
        rows = iter(reader)
        while True:
            line = reader.line_num + 1
            try:
                values = next(rows)
            except StopIteration:
                return
            except (csv.Error, zlib.error, EOFError, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                yield RawRow(line, fault=f"it is no CSV from here on: {error}")
                return
            if not values:
                continue
            if len(values) != len(columns):
                fault = f"it has {len(values)} values for {len(columns)} columns"
                yield RawRow(line, fault=fault)
                continue
            yield RawRow(line, dict(zip(columns, values, strict=True)))


def iter_arrow(path: Path, source: str) -> Iterator[RawRow]:
    """Rows of an Arrow file or stream; `datasets` caches its tables as streams."""
    arrow = import_module("pyarrow")
    line = 0
    try:
        with arrow.memory_map(str(path)) as file:
            for batch in _batches(arrow.ipc, file, path):
                for number in range(batch.num_rows):
                    line += 1
                    yield RawRow(line, batch.slice(number, 1).to_pylist()[0])
    except MemoryError:  # Arrow's is an ArrowException too
        raise
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        fact = str(error).partition("\n")[0][:200]
        yield RawRow(line + 1, fault=f"the file is damaged from here on: {fact}")


def _batches(ipc: Any, file: Any, path: Path) -> Iterator[Any]:
    with path.open("rb") as opened:
        is_file = opened.read(6) == _ARROW_FILE
    if not is_file:
        yield from ipc.open_stream(file)
        return
    reader = ipc.open_file(file)
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)
