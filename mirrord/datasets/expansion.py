"""How much a dataset file may unpack to. Kilobytes of gzip or Parquet can stand for gigabytes of rows.

A file of text as people write it shrinks to a tenth; one that would unpack to far more than that is refused when it
has come to the bound, whatever it says of itself.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import cast

from ..errors import InvalidDatasetError
from ..model import shown

FREE_BYTES = 256 * 1024**2
RATIO = 64
LIMIT_BYTES = 64 * 1024**3


class Expansion:
    """What was unpacked of one file, and the bound."""

    def __init__(self, path: Path, source: str) -> None:
        self._source = source
        self._size = os.stat(path).st_size
        self._left = min(FREE_BYTES + RATIO * self._size, LIMIT_BYTES)

    def take(self, count: int) -> None:
        """Count bytes; raises InvalidDatasetError."""
        self._left -= count
        if self._left < 0:
            raise InvalidDatasetError(
                f"cannot import dataset {shown(self._source)}: its {self._size} bytes unpack to more than"
                f" {min(FREE_BYTES + RATIO * self._size, LIMIT_BYTES) >> 20} MiB",
                hint="give the rows unpacked, or in several files",
            )


class Counted(io.RawIOBase):
    """An unpacking stream whose bytes are counted."""

    def __init__(self, raw: io.RawIOBase, expansion: Expansion) -> None:
        self._raw = raw
        self._expansion = expansion

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        count = cast("int", self._raw.readinto(buffer))  # type: ignore[arg-type]
        self._expansion.take(count)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()
