"""Rows of a Parquet file. pyarrow is an extra: 170 MB, where all the rest has 100."""

from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import ResourceError
from ..model import shown
from ..places import how_to_get
from .elements import ELEMENT_LIMIT_BYTES
from .rows import RawRow, refused

# of column chunks, which pyarrow otherwise reads whole
_BUFFER_BYTES = 1024**2


def iter_parquet(
    path: Path, source: str, count: Callable[[int], None], columns: Collection[str] | None
) -> Iterator[RawRow]:
    """Read rows in which all but `columns` are None.

    Batches of one row, 14 µs each: with dictionary encoding any number of rows can share a value of
    40 MiB. Arrow's dictionary batches grow over a row group: 50,000 rows of one took 15 s.
    """
    arrow = import_pyarrow(source)
    parquet = import_module("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES)
    except (arrow.ArrowException, OSError) as error:
        fact = f"it is not a whole Parquet file: {_first_line(error)}"
        hint = "it was truncated or damaged on the way here; fetch it again"
        raise refused(source, fact, hint) from error
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


def import_pyarrow(source: str) -> Any:
    """Import pyarrow, late: it needs more memory than the whole daemon. Raises ResourceError."""
    try:
        return import_module("pyarrow")
    except ImportError as error:
        raise ResourceError(
            f"cannot read dataset {shown(source)}: Parquet and Arrow files need pyarrow",
            hint=f"{how_to_get('parquet')}, or convert the file to JSON Lines",
        ) from error


def _size_of(column: Any) -> int:
    """Return the bytes of a column, dictionary-encoded values counted in full."""
    is_coded = hasattr(column, "dictionary_decode")
    return int((column.dictionary_decode() if is_coded else column).nbytes)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
