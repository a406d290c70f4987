"""What objects from outside may cost this machine: memory while git unpacks them, and the last of the disk.

A pack can say that it unpacks to a thousand times its size. git (2.39) bounds none of it on a fetch; so each git that takes
objects in may allocate so much and no more, big files are streamed and not held, and a transfer ends before the disk is full.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..errors import DiskFullError
from ..host.files import free_bytes
from ..protocol import Progress

STREAM_BIG_FILES = ("-c", "core.bigFileThreshold=64m", "-c", "pack.windowMemory=256m")
_RESERVE = 1024**3
_RESERVE_SHARE = 100


def reserve_bytes(path: Path) -> int:
    """What no transfer may use of the disk: a hundredth of it, a GiB at most. Checkouts and the catalog live there too."""
    disk = os.statvfs(path)
    return min(_RESERVE, disk.f_blocks * disk.f_frsize // _RESERVE_SHARE)


def within_disk(
    path: Path, sink: Callable[[Progress], None] | None, doing: str
) -> Callable[[Progress], None]:
    """A sink that passes progress on, and raises DiskFullError when a transfer into `path` comes to the reserve."""

    def watch(progress: Progress) -> None:
        if free_bytes(path) < reserve_bytes(path):
            raise DiskFullError(
                f"cannot {doing}: the disk is nearly full",
                hint="free space below the state directory; nothing was changed",
            )
        if sink is not None:
            sink(progress)

    return watch
