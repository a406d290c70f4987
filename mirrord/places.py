"""Places: of configuration, state and socket by default, in the state directory, in a sandbox."""

import os
import tomllib
from contextlib import suppress
from pathlib import Path
from stat import S_IMODE

from .errors import InvalidConfigError, ResourceError, StateTooNewError
from .model import shown

_SYSTEM_SOCKET = Path("/run/mirrord/mirrord.sock")
DOCKER_SOCKET = Path("/run/docker/plugins/mirrord.sock")
"""Where docker looks for a driver of this name."""

# In a sandbox or container: where the scripts and images of SWE-bench have the same.
TESTBED = "/testbed"  # the tree
ENVIRONMENT = "/opt/miniconda3/envs/testbed"
ACTIVATE = "/opt/miniconda3/bin/activate"  # sourced by evaluation scripts
PROGRAMS = "/opt/mirrord/bin"
SANDBOX_HOME = "/home/testbed"

STATE_VERSION = 1
"""Of the files of a state directory: one more where an older mirrord would misread them. The
catalog has revisions of its own."""


def xdg_directory(name: str, otherwise: Path) -> Path:
    """A base directory of the XDG specification, which says to ignore a relative one."""
    given = Path(os.environ.get(name, ""))
    return given if given.is_absolute() else otherwise


def find_path() -> Path | None:
    """The default configuration file: MIRRORD_CONFIG, else the system's or user's, if it exists."""
    if named := os.environ.get("MIRRORD_CONFIG"):
        return Path(named)
    home = xdg_directory("XDG_CONFIG_HOME", Path.home() / ".config")
    path = Path("/etc/mirrord/config.toml") if os.geteuid() == 0 else home / "mirrord/config.toml"
    # the root of a user namespace may not look into root's directories
    return path if os.path.exists(path) else None


def default_state_dir() -> Path:
    """systemd's StateDirectory=, else root's /var/lib/mirrord, else below XDG_STATE_HOME."""
    if given := os.environ.get("STATE_DIRECTORY"):
        return Path(given.partition(":")[0])
    if os.geteuid() == 0:
        return Path("/var/lib/mirrord")
    return xdg_directory("XDG_STATE_HOME", Path.home() / ".local/state") / "mirrord"


def default_socket() -> Path:
    """Root's /run/mirrord/mirrord.sock, else below XDG_RUNTIME_DIR."""
    if os.geteuid() == 0:
        return _SYSTEM_SOCKET
    runtime = xdg_directory("XDG_RUNTIME_DIR", Path(f"/run/user/{os.geteuid()}"))
    return runtime / "mirrord/mirrord.sock"


def socket_path(named: Path | str | None, config_path: Path | str | None) -> Path:
    """The socket that a client means: the named one, else MIRRORD_SOCKET, else the configured one.

    Reads one key of the configuration; the daemon checks the rest. A user without a configuration
    and without a daemon of their own means the machine's daemon.
    """
    if named is not None:
        return Path(named).absolute()
    if config_path is None and (from_environment := os.environ.get("MIRRORD_SOCKET")):
        return Path(from_environment).absolute()
    path = Path(config_path) if config_path is not None else find_path()
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
    """The directories of a state directory, with their modes; never removes anything.

    Other users may pass `checkouts` alone.
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
        """Note the version in a new state directory. Raises StateTooNewError for a later one's."""
        written = self.version.read_text() if self.version.exists() else ""
        if not written:
            staged = self.version.with_suffix(".new")
            with suppress(OSError):  # a full or read-only disk serves what is there
                with staged.open("w") as file:
                    file.write(f"{STATE_VERSION}\n")
                    file.flush()
                    os.fsync(file.fileno())  # ext4 may keep a name whose bytes a power cut took
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
        """Make what is missing, and put the modes right."""
        for directory, mode in self.modes().items():
            self._make(directory, mode)
        if not self.catalog.exists():
            self.catalog.touch(mode=0o600)  # SQLite gives its journals the mode of the database

    def modes(self) -> dict[Path, int]:
        """Every directory with its mode."""
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
