"""Default places of configuration, state and socket, for the daemon and the client."""

import os
import tomllib
from pathlib import Path

from .errors import InvalidConfigError

_SYSTEM_SOCKET = Path("/run/mirrord/mirrord.sock")


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
    return path if path.exists() else None


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
