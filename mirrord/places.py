"""Paths: defaults of configuration, state and socket; the state directory; inside a sandbox."""

import os
import tomllib
from contextlib import suppress
from pathlib import Path
from stat import S_IMODE

from .errors import InvalidConfigError, ResourceError, StateTooNewError
from .model import shown

_SYSTEM_SOCKET = Path("/run/mirrord/mirrord.sock")
DOCKER_SOCKET = Path("/run/docker/plugins/mirrord.sock")
"""Where docker looks for the volume driver `mirrord`."""

# In a sandbox or container, as in the images of SWE-bench.
TESTBED = "/testbed"  # the tree
ENVIRONMENT = "/opt/miniconda3/envs/testbed"
ACTIVATE = "/opt/miniconda3/bin/activate"  # sourced by evaluation scripts
PROGRAMS = "/opt/mirrord/bin"
SANDBOX_HOME = "/home/testbed"

STATE_VERSION = 1
"""The format of a state directory: incremented when an older mirrord would misread it. The catalog
has its own revisions."""


def xdg_directory(name: str, otherwise: Path) -> Path:
    """Return an XDG base directory; the specification says to ignore a relative path."""
    given = Path(os.environ.get(name, ""))
    return given if given.is_absolute() else otherwise


def find_config_path() -> Path | None:
    """Find the default configuration: MIRRORD_CONFIG, else the system's or the user's file."""
    if named := os.environ.get("MIRRORD_CONFIG"):
        return Path(named)
    home = xdg_directory("XDG_CONFIG_HOME", Path.home() / ".config")
    path = Path("/etc/mirrord/config.toml") if os.geteuid() == 0 else home / "mirrord/config.toml"
    # os.path.exists: the root of a user namespace may not enter root's directories
    return path if os.path.exists(path) else None


def default_state_dir() -> Path:
    """Return systemd's StateDirectory=, for root /var/lib/mirrord, else below XDG_STATE_HOME."""
    if given := os.environ.get("STATE_DIRECTORY"):
        return Path(given.partition(":")[0])
    if os.geteuid() == 0:
        return Path("/var/lib/mirrord")
    return xdg_directory("XDG_STATE_HOME", Path.home() / ".local/state") / "mirrord"


def default_socket() -> Path:
    """Return /run/mirrord/mirrord.sock for root, else below XDG_RUNTIME_DIR."""
    if os.geteuid() == 0:
        return _SYSTEM_SOCKET
    runtime = xdg_directory("XDG_RUNTIME_DIR", Path(f"/run/user/{os.geteuid()}"))
    return runtime / "mirrord/mirrord.sock"


def socket_path(named: Path | str | None, config_path: Path | str | None) -> Path:
    """Choose a client's socket: the named one, MIRRORD_SOCKET, or the configured one.

    Reads one key of the configuration; the daemon validates the others. For a user without a
    configuration and without a daemon, it is the system's daemon.
    """
    if named is not None:
        return Path(named).absolute()
    if config_path is None and (from_environment := os.environ.get("MIRRORD_SOCKET")):
        return Path(from_environment).absolute()
    path = Path(config_path) if config_path is not None else find_config_path()
    default = default_socket()
    if path is None:
        is_system = not default.exists() and _SYSTEM_SOCKET.exists()
        return _SYSTEM_SOCKET if is_system else default
    try:
        socket = tomllib.loads(path.read_text(encoding="utf-8")).get("socket")
    except (OSError, ValueError) as error:
        fact = error.strerror if isinstance(error, OSError) else error
        hint = "`mirrord config check` reports all faults of a file"
        raise InvalidConfigError(f"cannot use configuration {path}: {fact}", hint=hint) from error
    if socket is None:
        return default
    if not isinstance(socket, str) or not socket.startswith("/"):
        fact = f"cannot use configuration {path}: socket: must be an absolute path"
        raise InvalidConfigError(fact, hint='for example "/run/mirrord/mirrord.sock"')
    return Path(socket)


class Layout:
    """The directories of a state directory, with their modes. Removes nothing.

    Other users may enter only `checkouts` and `environments`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mirrors, self.quarantine = root / "mirrors", root / "quarantine"
        self.datasets, self.bundles = root / "datasets", root / "bundles"
        self.templates, self.environments = root / "templates", root / "environments"
        self.checkouts, self.leases = root / "checkouts", root / "leases"
        self.catalog, self.home = root / "catalog.sqlite3", root / "home"
        self.version = root / "state_version"

    def make_root(self) -> None:
        self._make(self.root, 0o711)

    def check_version(self) -> None:
        """Write the version into a new state directory. Raises StateTooNewError for a newer one."""
        written = self.version.read_text() if self.version.exists() else ""
        if not written:
            staged = self.version.with_suffix(".new")
            with suppress(OSError):  # a full or read-only disk can still be served from
                with staged.open("w") as file:
                    file.write(f"{STATE_VERSION}\n")
                    file.flush()
                    os.fsync(file.fileno())  # else a power cut may leave an empty file
                staged.rename(self.version)
            return
        if written.strip() not in {str(number) for number in range(1, STATE_VERSION + 1)}:
            raise StateTooNewError(
                f"cannot use state directory {self.root}: its version is {shown(written.strip())},"
                f" and this mirrord knows {STATE_VERSION} and older",
                hint="a newer mirrord wrote it: install that one, or restore a backup from before"
                " the upgrade into another directory",
            )

    def make(self) -> None:
        """Make missing directories, and correct modes."""
        for directory, mode in self.modes().items():
            self._make(directory, mode)
        if not self.catalog.exists():
            self.catalog.touch(mode=0o600)  # SQLite creates its journals with the database's mode

    def modes(self) -> dict[Path, int]:
        """Return every directory with its mode."""
        private = self.mirrors, self.datasets, self.bundles, self.templates, self.leases
        return {
            **dict.fromkeys((self.root, self.checkouts, self.environments), 0o711),
            **dict.fromkeys((*private, self.quarantine, self.home), 0o700),
        }

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
