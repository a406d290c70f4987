"""The directories of a state directory and their modes. Makes them; never removes anything."""

from pathlib import Path
from stat import S_IMODE

from .errors import ResourceError


class Layout:
    """The directories of a state directory. Other users may pass `checkouts` alone."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mirrors, self.quarantine = root / "mirrors", root / "quarantine"
        self.datasets, self.bundles = root / "datasets", root / "bundles"
        self.templates = root / "templates"
        self.checkouts, self.leases = root / "checkouts", root / "leases"
        self.catalog, self.home = root / "catalog.sqlite3", root / "home"

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
            hint = "give the daemon's user that directory, or choose another state_dir"
            fact = f"cannot use state directory {directory}: {error.strerror}"
            raise ResourceError(fact, hint=hint) from error
