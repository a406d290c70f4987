"""Whether the daemon can serve: what `health` answers. Looks at the disk and at what was noticed; repairs nothing.

Degraded is what an operator must act on. A warning (a group that does not exist) is said, but degrades nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import __version__
from .host.peers import Access
from .protocol import Health, to_bytes

LOW_DISK_BYTES = 512 * 1024**2
LOW_INODES = 10_000
_REMEMBERED_S = 1.0


@dataclass(frozen=True, slots=True)
class HealthReport:
    """`body` is the JSON of the answer, made once for all who ask within a second."""

    health: Health
    body: bytes
    is_degraded: bool


class HealthMonitor:
    """Collects reasons. `notes` are the parts' own: a key for each, so that a part can take its reason back."""

    def __init__(self, state_dir: Path, access: Access, *, is_open: Callable[[], bool]) -> None:
        self._state_dir = state_dir
        self._is_open = is_open
        self._notes: dict[str, str] = {}
        self._warn: list[Callable[[], Sequence[str]]] = [lambda: access.warnings]
        self._degrade: list[Callable[[], Sequence[str]]] = []
        self._report: HealthReport | None = None
        self._reported_at = 0.0

    def note(self, key: str, reason: str) -> None:
        """Degrade the daemon until `clear(key)`."""
        self._notes[key] = reason
        self._report = None

    def warn_by(self, source: Callable[[], Sequence[str]]) -> None:
        """Have warnings told as they are when somebody asks."""
        self._warn.append(source)

    def degrade_by(self, source: Callable[[], Sequence[str]]) -> None:
        """Be degraded for the reasons that `source` has when somebody asks."""
        self._degrade.append(source)

    def clear(self, key: str) -> None:
        if self._notes.pop(key, None):
            self._report = None

    def report(self) -> HealthReport:
        now = time.monotonic()
        is_fresh = now - self._reported_at < _REMEMBERED_S
        if self._report is None or not is_fresh or self._report.is_degraded:
            self._report, self._reported_at = self._look(), now
        return self._report

    @property
    def disk_free_bytes(self) -> int:
        disk = os.statvfs(self._state_dir)
        return disk.f_bavail * disk.f_frsize

    def _look(self) -> HealthReport:
        reasons = [] if self._is_open() else ["the daemon is still opening its state directory"]
        reasons += [*self._disk_reasons(), *self._notes.values()]
        reasons += [text for source in self._degrade for text in source()]
        warnings = [f"warning: {text}" for source in self._warn for text in source()]
        health = Health(
            status="degraded" if reasons else "ok", reasons=reasons + warnings, version=__version__
        )
        return HealthReport(health, to_bytes(health), bool(reasons))

    def _disk_reasons(self) -> list[str]:
        try:
            disk = os.statvfs(self._state_dir)
        except OSError as error:
            return [f"the state directory {self._state_dir} cannot be read: {error.strerror}"]
        reasons = []
        if disk.f_flag & os.ST_RDONLY:
            reasons.append(f"the file system of {self._state_dir} is read-only")
        if disk.f_bavail * disk.f_frsize < LOW_DISK_BYTES:
            reasons.append(
                f"the disk of {self._state_dir} is nearly full: {disk.f_bavail * disk.f_frsize >> 20} MiB are free"
            )
        if disk.f_files and disk.f_favail < LOW_INODES:  # file systems without a limit say 0
            reasons.append(
                f"the disk of {self._state_dir} is nearly out of inodes: {disk.f_favail} are free"
            )
        return reasons
