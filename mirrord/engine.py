"""The composition root: builds every part of the daemon, in an order with reasons, and closes them in reverse.

Owns the settings in force and what is asked of the daemon as a whole: health, status, figures, reload. Knows no HTTP. Each part
is opened only when everything it may call is open; a failure on the way closes what was opened and is the caller's.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import structlog

from . import __version__, config, telemetry
from .config import Settings
from .errors import InvalidConfigError, ResourceError
from .git.command import Git
from .git.workers import Workers
from .host.peers import Access
from .jobs.events import Events
from .jobs.operations import Operations
from .model import utc_now
from .protocol import Health, ReloadAnswer

log = structlog.get_logger()

_LOW_DISK_BYTES = 512 * 1024**2
_LOW_INODES = 10_000


@dataclass(frozen=True, slots=True)
class Layout:
    """The directories of a state directory. Only `checkouts` may be entered by others: what they lease is below it."""

    root: Path

    @property
    def mirrors(self) -> Path:
        return self.root / "mirrors"

    @property
    def datasets(self) -> Path:
        return self.root / "datasets"

    @property
    def templates(self) -> Path:
        return self.root / "templates"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    @property
    def checkouts(self) -> Path:
        return self.root / "checkouts"

    @property
    def catalog(self) -> Path:
        return self.root / "catalog.sqlite3"

    @property
    def home(self) -> Path:
        return self.root / "home"

    def make_root(self) -> None:
        self._make(self.root, 0o711)

    def make(self) -> None:
        """Make what is missing, and put the modes right."""
        for private in (self.mirrors, self.datasets, self.templates, self.quarantine, self.home):
            self._make(private, 0o700)
        self._make(self.checkouts, 0o711)
        self.catalog.touch(mode=0o600)  # SQLite gives its journals the mode of the database

    @staticmethod
    def _make(directory: Path, mode: int) -> None:
        try:
            directory.mkdir(mode=mode, parents=True, exist_ok=True)
            directory.chmod(mode)
        except OSError as error:
            raise ResourceError(
                f"cannot use state directory {directory}: {error.strerror}",
                hint="give the daemon's user that directory, or choose another state_dir",
            ) from error


@dataclass(frozen=True, slots=True)
class HealthReport:
    """`body` is the JSON of the answer."""

    health: Health
    body: bytes
    is_degraded: bool


class Engine:
    """The parts of one daemon. What needs the disk or another process exists once `open` has ended."""

    def __init__(self, settings: Settings, *, config_path: Path | None = None) -> None:
        self._settings = settings
        self._config_path = config_path
        self._opened = asyncio.Event()
        self._closing = AsyncExitStack()
        self.started_at = utc_now()
        self.layout = Layout(settings.state_dir)
        self.access = Access(self.settings)
        self.events = Events()
        self.operations = Operations(self.events)

    def settings(self) -> Settings:
        """The settings in force now; parts keep this function, not its answer."""
        return self._settings

    async def open(self) -> None:
        self.git = Git(home=self.layout.home)
        self.workers = Workers()
        self._closing.push_async_callback(self.workers.close)
        self._opened.set()

    async def wait_until_open(self) -> None:
        if not self._opened.is_set():
            await self._opened.wait()

    async def close(self) -> None:
        await self._closing.aclose()

    # -- the whole ----------------------------------------------------------------------------------------------------

    def health(self) -> HealthReport:
        reasons = [] if self._opened.is_set() else ["the daemon is still opening its state directory"]
        reasons += self._disk_reasons()
        warnings = [f"warning: {text}" for text in self.access.warnings]
        health = Health(status="degraded" if reasons else "ok", reasons=reasons + warnings, version=__version__)
        return HealthReport(health, health.model_dump_json().encode(), bool(reasons))

    def _disk_reasons(self) -> list[str]:
        try:
            disk = os.statvfs(self.layout.root)
        except OSError as error:
            return [f"the state directory {self.layout.root} cannot be read: {error.strerror}"]
        reasons = []
        if disk.f_bavail * disk.f_frsize < _LOW_DISK_BYTES:
            reasons.append(f"the disk of {self.layout.root} is nearly full: {disk.f_bavail * disk.f_frsize >> 20} MiB are free")
        if disk.f_files and disk.f_favail < _LOW_INODES:
            reasons.append(f"the disk of {self.layout.root} is nearly out of inodes: {disk.f_favail} are free")
        return reasons

    async def reload(self) -> ReloadAnswer:
        """Read the configuration again and apply what is live. A bad file raises, and changes nothing."""
        try:
            new = await asyncio.to_thread(config.load, self._config_path)
        except InvalidConfigError as error:
            self.events.publish("config.refused", detail=error.message)
            raise
        applied, refused = config.compare(self._settings, new)
        self._settings = config.merge_live(self._settings, new)
        telemetry.configure(self._settings.log.level, self._settings.log.format)
        self.access.refresh()
        self.events.publish("config.reloaded", applied=applied, refused=refused)
        return ReloadAnswer(applied=applied, refused=refused)


@dataclass(frozen=True, slots=True)
class Figures:
    """What the metrics show of the engine at one moment."""

    started_at: datetime
    degraded: bool
    mirrors: int
    mirrors_failed: int
    mirror_bytes: int
    datasets: int
    unservable: int
    checkouts: int
    checkouts_max: int
    operations_running: int
    disk_free_bytes: int
    events: dict[str, int]
