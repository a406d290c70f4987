"""Whether the daemon can serve: what `health` answers. Repairs nothing.

Degraded is what an operator must act on; a warning, such as a missing group, degrades nothing.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from . import __version__
from .host.peers import Access
from .host.room import Room
from .protocol import Health, to_bytes


class HealthReport(NamedTuple):
    """`body` is the JSON of the answer, made once for all who ask within a second."""

    health: Health
    body: bytes
    is_degraded: bool


class HealthMonitor:
    """Collects reasons; a part notes its own under a key."""

    def __init__(
        self, state_dir: Path, access: Access, room: Room, *, is_open: Callable[[], bool]
    ) -> None:
        self._state_dir = state_dir
        self._room = room
        self._is_open = is_open
        self._notes: dict[str, str] = {}
        self._warn: list[Callable[[], Sequence[str]]] = [lambda: access.warnings]
        self._degrade: list[Callable[[], Sequence[str]]] = []
        self._report: HealthReport | None = None
        self._reported_at = 0.0

    def note(self, key: str, reason: str) -> None:
        """Degrade the daemon until its next start."""
        self._notes[key] = reason
        self._report = None

    def warn_by(self, source: Callable[[], Sequence[str]]) -> None:
        """Add the warnings that `source` has at each report."""
        self._warn.append(source)

    def degrade_by(self, source: Callable[[], Sequence[str]]) -> None:
        """Add the reasons to be degraded that `source` has at each report."""
        self._degrade.append(source)

    def report(self) -> HealthReport:
        now = time.monotonic()
        is_fresh = now - self._reported_at < 1
        if self._report is None or not is_fresh or self._report.is_degraded:
            self._report, self._reported_at = self._look(), now
        return self._report

    def _look(self) -> HealthReport:
        reasons = [] if self._is_open() else ["the daemon is still opening its state directory"]
        reasons += [*self._disk_reasons(), *self._notes.values()]
        reasons += [text for source in self._degrade for text in source()]
        warnings = [f"warning: {text}" for source in self._warn for text in source()]
        status: Literal["ok", "degraded"] = "degraded" if reasons else "ok"
        health = Health(status=status, reasons=reasons + warnings, version=__version__)
        return HealthReport(health, to_bytes(health), bool(reasons))

    def _disk_reasons(self) -> list[str]:
        place = self._state_dir
        try:
            disk = os.statvfs(place)
        except OSError as error:
            return [f"cannot read the state directory {place}: {error.strerror}"]
        reasons = []
        if disk.f_flag & os.ST_RDONLY:
            reasons.append(f"the file system of {place} is read-only")
        if shortage := self._room.measure().shortage:
            reasons.append(f"the disk of {place} is nearly full, new work is refused: {shortage}")
        return reasons
