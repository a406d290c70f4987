"""The directories of a state directory and their modes. Makes them; never removes anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from stat import S_IMODE

from .errors import ResourceError


@dataclass(frozen=True, slots=True)
class Layout:
    """The directories of a state directory. Other users may pass `checkouts` alone."""

    root: Path

    @property
    def mirrors(self) -> Path:
        return self.root / "mirrors"

    @property
    def datasets(self) -> Path:
        return self.root / "datasets"

    @property
    def bundles(self) -> Path:
        return self.root / "bundles"

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
    def leases(self) -> Path:
        return self.root / "leases"

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
        private = self.mirrors, self.datasets, self.bundles, self.templates, self.leases
        for directory in (*private, self.quarantine, self.home):
            self._make(directory, 0o700)
        self._make(self.checkouts, 0o711)
        if not self.catalog.exists():
            self.catalog.touch(mode=0o600)  # SQLite gives its journals the mode of the database

    @staticmethod
    def _make(directory: Path, mode: int) -> None:
        try:
            directory.mkdir(mode=mode, parents=True, exist_ok=True)
            if S_IMODE(directory.stat().st_mode) != mode:
                directory.chmod(mode)
        except OSError as error:
            raise ResourceError(
                f"cannot use state directory {directory}: {error.strerror}",
                hint="give the daemon's user that directory, or choose another state_dir",
            ) from error
