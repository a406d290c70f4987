"""A hostile client: exchanges two paths below the current directory, at random times, for as long as it is told.

Run by any Python as a script: `racer.py SECONDS ONE OTHER`.
"""

from __future__ import annotations

import ctypes
import random
import sys
import time

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def main(seconds: float, one: str, other: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        libc.renameat2(_AT_FDCWD, one.encode(), _AT_FDCWD, other.encode(), _RENAME_EXCHANGE)
        time.sleep(random.random() * 0.004)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3])
