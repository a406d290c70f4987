"""Zstandard files: Python's own reader from 3.14 on, its backport before."""

import sys
from pathlib import Path
from typing import IO

if sys.version_info >= (3, 14):
    from compression.zstd import ZstdError, ZstdFile
else:
    from backports.zstd import ZstdError, ZstdFile

__all__ = ["ZSTD_MAGIC", "ZstdError", "open_zstd"]

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def open_zstd(file: Path | IO[bytes]) -> ZstdFile:
    """Open a file to read it decompressed. Reads raise ZstdError, and EOFError where it is cut."""
    return ZstdFile(file)
