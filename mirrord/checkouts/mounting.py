"""Who mounts for the overlay backend: the daemon itself where it may, else the mounter service. One contract for both."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ..host import mounts


class Mounter(Protocol):
    """Every call is done, or raises BackendUnavailableError, DiskFullError or ResourceError and has changed nothing.

    Calls take tens to hundreds of microseconds and are made on the event loop's thread.
    """

    def mount_overlay(self, target: Path, lower: Sequence[Path], upper: Path, work: Path) -> None: ...

    def unmount(self, target: Path) -> bool: ...

    def bind_idmapped(self, source: Path, target: Path, owner: tuple[int, int]) -> None: ...


class OwnMounter:
    """Mounts by this process, which has CAP_SYS_ADMIN."""

    def mount_overlay(self, target: Path, lower: Sequence[Path], upper: Path, work: Path) -> None:
        mounts.mount_overlay(target, lower, upper, work)

    def unmount(self, target: Path) -> bool:
        return mounts.unmount(target)

    def bind_idmapped(self, source: Path, target: Path, owner: tuple[int, int]) -> None:
        """Layers are the daemon's own; shown as `owner`'s."""
        mounts.bind_idmapped(source, target, uid=(os.geteuid(), owner[0]), gid=(os.getegid(), owner[1]))
