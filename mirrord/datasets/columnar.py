"""Parquet files, a few rows at a time. Loaded in workers only: pyarrow alone is larger than the daemon."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow
from pyarrow import compute, parquet, types

from ..errors import InvalidDatasetError
from ..model import shown
from .documents import ELEMENT_LIMIT_BYTES
from .expansion import Expansion

_ROWS = 64
_BUFFER_BYTES = 1024**2


def iter_parquet(
    path: Path, source: str, columns: Collection[str], expansion: Expansion
) -> Iterator[tuple[dict[str, Any] | None, str | None]]:
    """Each row, or what is wrong with it. Only `columns` have values; the others are there and None.

    Raises InvalidDatasetError for a file that is no Parquet, or unpacks to too much.
    """
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
        there: list[str] = schema.names
        wanted = [name for name in there if name in columns]
        # text stays encoded until its row is asked for: a dictionary of one value of 40 MiB can stand for any number of rows
        texts = [name for name in wanted if _is_text(schema.field(name).type)]
        file = parquet.ParquetFile(
            path, pre_buffer=False, buffer_size=_BUFFER_BYTES, read_dictionary=texts
        )
    except (pyarrow.ArrowException, OSError) as error:
        raise InvalidDatasetError(
            f"cannot import dataset {shown(source)}: it is not a whole Parquet file: {_first_line(error)}",
            hint="it was cut off or damaged on the way here; fetch it again",
        ) from error
    unread: dict[str, Any] = dict.fromkeys(there)
    try:
        for batch in file.iter_batches(batch_size=_ROWS, columns=wanted, use_threads=False):
            yield from _rows(batch, unread, expansion)
    except MemoryError:
        raise
    except (pyarrow.ArrowException, OSError) as error:
        yield None, f"the file is damaged from here on: {_first_line(error)}"


def _rows(
    batch: Any, unread: dict[str, Any], expansion: Expansion
) -> Iterator[tuple[dict[str, Any] | None, str | None]]:
    for row, size in zip(_iter_single(batch), _row_bytes(batch), strict=True):
        expansion.take(size)
        if size > ELEMENT_LIMIT_BYTES:
            yield None, f"it is longer than {ELEMENT_LIMIT_BYTES >> 20} MiB"
            continue
        try:
            yield unread | row.to_pylist()[0], None
        except UnicodeDecodeError as error:  # Arrow checks text only when it becomes a str
            yield None, f"it is not UTF-8: {error.reason}"


def _iter_single(batch: Any) -> Iterator[Any]:
    return (batch.slice(number, 1) for number in range(batch.num_rows))


def _row_bytes(batch: Any) -> list[int]:
    """What each row takes unpacked, before it is: the lengths of its texts, and its share of what is no text."""
    sizes = [0] * batch.num_rows
    for column in batch.columns:
        if isinstance(column, pyarrow.DictionaryArray):
            texts: Any = column.dictionary
            lengths = compute.binary_length(texts).take(column.indices).to_pylist()
        else:
            lengths = [column.nbytes // max(1, batch.num_rows)] * batch.num_rows
        sizes = [size + (length or 0) for size, length in zip(sizes, lengths, strict=True)]
    return sizes


def _is_text(kind: Any) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (
            types.is_string,
            types.is_large_string,
            types.is_binary,
            types.is_large_binary,
        )
    )


def open_zstd(path: Path) -> BinaryIO:
    """A Zstandard-compressed file as its content; Python 3.11 has no reader of its own."""
    return cast("BinaryIO", pyarrow.input_stream(str(path), compression="zstd"))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
