"""Paths: defaults of configuration, state and socket; the state directory; inside a sandbox."""

import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from stat import S_IMODE

from .errors import ConflictError, InvalidConfigError, ResourceError
from .model import shown
from .presence import exists, is_dir
from .quoting import decode_name

_SYSTEM_SOCKET = Path("/run/mirrord/mirrord.sock")
_DEBIAN = "/usr/lib/mirrord"  # as packaging/deb.py has it
# where docker looks for the volume driver `mirrord`
DOCKER_SOCKET = Path("/run/docker/plugins/mirrord.sock")

# In a sandbox or container, as in the images of SWE-bench.
TESTBED = "/testbed"  # the tree
ENVIRONMENT = "/opt/miniconda3/envs/testbed"
ACTIVATE = "/opt/miniconda3/bin/activate"  # sourced by evaluation scripts
PROGRAMS = "/opt/mirrord/bin"
SANDBOX_HOME = "/home/testbed"
_SYSTEM = re.compile(r"/(?:bin|boot|dev|etc|lib[0-9a-z]*|proc|sbin|sys|usr)(?:/|$)")
# as sandboxes have them
_TMP = ("/tmp", "/var/tmp")  # noqa: S108
# `x` is any name: /run and /tmp would hide what is in them, a directory below them hides nothing
_OWN = (ENVIRONMENT, PROGRAMS, SANDBOX_HOME, TESTBED, "/run/x", *(f"{tmp}/x" for tmp in _TMP))


def read_workdir(text: str) -> str:
    """Return the path at which a sandbox shows the tree, normalised; ValueError says why not.

    A path in the tree, such as /testbed/docs, is a directory to work in.
    """
    # normpath keeps two slashes at the beginning, whose meaning POSIX leaves open
    path = os.path.normpath(text).replace("//", "/")
    if not text.startswith("/") or not text.isprintable() or len(text) > 200:
        raise ValueError("is not an absolute path of at most 200 printable characters")
    above = next((own for own in _OWN if f"{own}/".startswith(f"{path}/") and own != path), None)
    inside = next((own for own in _OWN[:3] if f"{path}/".startswith(f"{own}/")), None)
    is_temporary = path.startswith(f"{_TMP[1]}/")
    if path == "/" or _SYSTEM.match(path) or above or inside or is_temporary:
        raise ValueError("would hide what a sandbox needs")
    return path


# The format of a state directory: incremented when an older mirrord would misread it. The catalog
# has its own revisions.
STATE_VERSION = 1


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
    # the root of a user namespace may not enter root's directories
    return path if _is_reachable(path) else None


def default_state_dir() -> Path:
    """Return systemd's StateDirectory=, for root /var/lib/mirrord, else below XDG_STATE_HOME."""
    if given := os.environ.get("STATE_DIRECTORY"):
        # several directories are separated by colons (systemd.exec(5))
        return Path(given.partition(":")[0])
    if os.geteuid() == 0:
        return Path("/var/lib/mirrord")
    return xdg_directory("XDG_STATE_HOME", Path.home() / ".local/state") / "mirrord"


def default_socket(state_dir: Path) -> Path:
    """Return where a daemon listens unless it is told: for root /run/mirrord/mirrord.sock."""
    return _default_sockets(state_dir)[0]


def _default_sockets(state_dir: Path) -> list[Path]:
    """Return the sockets that a user's daemon may have, the one of a new daemon first.

    The runtime directory exists while the user has a login session. `su -`, cron, Slurm and
    `docker exec -u` make none, and `su` leaves that of another user in the environment.
    """
    uid = os.geteuid()
    if uid == 0:
        return [_SYSTEM_SOCKET]
    sockets = [Layout(state_dir).run / "mirrord.sock"]
    runtime = xdg_directory("XDG_RUNTIME_DIR", Path(f"/run/user/{uid}"))
    with suppress(OSError):
        if runtime.stat().st_uid == uid:
            sockets.insert(0, runtime / "mirrord/mirrord.sock")
    return sockets


def how_to_get(extra: str) -> str:
    """Say how to install the packages of an extra. The Debian package has no pip inside."""
    if sys.prefix == _DEBIAN:
        return "install the Debian package mirrord-full"
    return f"install it beside mirrord: pip install 'mirrord[{extra}]'"


def named_socket(named: Path | str | None, config_path: Path | str | None) -> Path | None:
    """Return the socket that is named on the command line, or by MIRRORD_SOCKET where no
    configuration is.
    """
    if named is None and config_path is None:
        named = os.environ.get("MIRRORD_SOCKET") or None
    return Path(named).absolute() if named is not None else None


def socket_path(named: Path | str | None, config_path: Path | str | None) -> Path:
    """Choose a client's socket: the named one, MIRRORD_SOCKET, the configured one, or the user's.

    Reads two keys of the configuration; the daemon validates the others. For a user without a
    configuration and without a daemon, it is the system's daemon.
    """
    if chosen := named_socket(named, config_path):
        return chosen
    path = Path(config_path) if config_path is not None else find_config_path()
    settings = _read_paths(path) if path else {}
    if "socket" in settings:
        return settings["socket"]
    defaults = _default_sockets(settings.get("state_dir") or default_state_dir())
    candidates = defaults if path else [*defaults, _SYSTEM_SOCKET]
    return next(filter(_is_reachable, candidates), defaults[0])


def _is_reachable(path: Path) -> bool:
    """Return whether a path exists; what another user's directory hides counts as absent."""
    try:
        return exists(path)
    except PermissionError:
        return False


def _read_paths(config: Path) -> dict[str, Path]:
    """Return `socket` and `state_dir` of a configuration, those that it sets."""
    import tomllib  # noqa: PLC0415  (4 ms, and most clients have no configuration)

    try:
        values = tomllib.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fact = error.strerror if isinstance(error, OSError) else error
        hint = "`mirrord config check` reports all faults of a file"
        raise InvalidConfigError(f"cannot use configuration {config}: {fact}", hint=hint) from error
    given = {name: values[name] for name in ("socket", "state_dir") if name in values}
    for name, path in given.items():
        if not isinstance(path, str) or not path.startswith("/"):
            fact = f"cannot use configuration {config}: {name}: must be an absolute path"
            raise InvalidConfigError(fact, hint='for example "/run/mirrord/mirrord.sock"')
    return {name: Path(path) for name, path in given.items()}


class Layout:
    """The directories of a state directory, with their modes. Removes nothing.

    Other users may enter only `checkouts` and `environments`. A link to a directory is followed:
    mounts are made and found by real paths.
    """

    def __init__(self, root: Path) -> None:
        # not one to nothing, which may be a disk that is not mounted yet
        self.root = root = root.resolve() if is_dir(root) else root
        self.mirrors, self.quarantine = root / "mirrors", root / "quarantine"
        self.datasets, self.bundles = root / "datasets", root / "bundles"
        self.templates, self.environments = root / "templates", root / "environments"
        self.checkouts, self.leases = root / "checkouts", root / "leases"
        self.catalog, self.home = root / "catalog.sqlite3", root / "home"
        self.detached_log = root / "daemon.log"  # of `mirrord serve --detach`
        self.version, self.run = root / "state_version", root / "run"

    def make_root(self) -> None:
        self._make(self.root, 0o711)

    def make_run(self) -> None:
        """Make the directory of an ordinary user's socket, closed as that of a session is."""
        self._make(self.run, 0o700)

    def check_version(self) -> None:
        """Write the version into a new state directory. Raises ConflictError for a newer one."""
        written = decode_name(self.version.read_bytes()) if exists(self.version) else ""
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
            raise ConflictError(
                f"cannot use state directory {self.root}: its version is {shown(written.strip())},"
                f" and this mirrord knows {STATE_VERSION} and older",
                hint="a newer mirrord wrote it: install that one, or restore a backup from before"
                " the upgrade into another directory",
            )

    def make(self) -> None:
        """Make missing directories, and correct modes."""
        for directory, mode in self.modes().items():
            self._make(directory, mode)
        if not exists(self.catalog):
            self.catalog.touch(mode=0o600)  # SQLite creates its journals with the database's mode

    def modes(self) -> dict[Path, int]:
        """Return every directory with its mode."""
        private = self.mirrors, self.datasets, self.bundles, self.templates, self.leases
        return {
            **dict.fromkeys((self.root, self.checkouts, self.environments), 0o711),
            **dict.fromkeys((*private, self.quarantine, self.home), 0o700),
        }

    def has_leases(self) -> bool:
        """Return whether checkouts outlive the daemon."""
        return any(not path.name.startswith(".") for path in self.leases.iterdir())

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


def whole_path(templates: Path, mirror: str) -> Path:
    """Return the repository with the composed trees of a mirror's commits."""
    return templates / mirror / "whole.git"
