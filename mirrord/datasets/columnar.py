"""Parquet files, a few rows at a time. Loaded in workers only: pyarrow alone is larger than the daemon."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow
from pyarrow import parquet

from ..errors import InvalidDatasetError
from ..model import shown

_ROWS = 64
_BUFFER_BYTES = 1024**2


def iter_parquet(path: Path, source: str, columns: Collection[str]) -> Iterator[tuple[dict[str, Any] | None, str | None]]:
    """Each row, or what is wrong with it. Only `columns` have values; the others are there and None.

    Raises InvalidDatasetError for a file that is no Parquet.
    """
    try:
        file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES)
        there: list[str] = file.schema_arrow.names
    except (pyarrow.ArrowException, OSError) as error:
        raise InvalidDatasetError(
            f"cannot import dataset {shown(source)}: it is not a whole Parquet file: {_first_line(error)}",
            hint="it was cut off or damaged on the way here; fetch it again",
        ) from error
    unread: dict[str, Any] = dict.fromkeys(there)
    wanted = [name for name in there if name in columns]
    try:
        for batch in file.iter_batches(batch_size=_ROWS, columns=wanted, use_threads=False):
            yield from _rows(batch, unread)
    except (pyarrow.ArrowException, OSError) as error:
        yield None, f"the file is damaged from here on: {_first_line(error)}"


def _rows(batch: Any, unread: dict[str, Any]) -> Iterator[tuple[dict[str, Any] | None, str | None]]:
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:  # Arrow checks text only when it becomes a str
        for number in range(batch.num_rows):
            yield _single(batch.slice(number, 1), unread)
        return
    for row in rows:
        yield unread | row, None


def _single(row: Any, unread: dict[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    try:
        return unread | row.to_pylist()[0], None
    except UnicodeDecodeError as error:
        return None, f"it is not UTF-8: {error.reason}"


def open_zstd(path: Path) -> BinaryIO:
    """A Zstandard-compressed file as its content; Python 3.11 has no reader of its own."""
    return cast("BinaryIO", pyarrow.input_stream(str(path), compression="zstd"))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
