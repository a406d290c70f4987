"""Rows as a file has them, with the place of each."""

import json
from datetime import date, time
from typing import Any, NamedTuple

from ..errors import InvalidDatasetError
from ..model import shown

# members of a row that `mirrord` wrote itself (`row_line`)
ORIGIN, FAULT = "mirrord:origin", "mirrord:fault"
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
    origin = {ORIGIN: row.origin or Origin(file, row.line)}
    value = {**(row.value or {}), **origin} if row.fault is None else {FAULT: row.fault, **origin}
    return json.dumps(value, default=_plain).encode() + b"\n"


def _plain(value: object) -> Any:
    """Convert types of Parquet and Arrow that JSON lacks to text: bytes, dates, decimals."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        return value.tolist()
    return value.isoformat() if isinstance(value, date | time) else str(value)


def refused(source: str, fact: str, hint: str = _HINT) -> InvalidDatasetError:
    return InvalidDatasetError(f"cannot import dataset {shown(source)}: {fact}", hint=hint)
