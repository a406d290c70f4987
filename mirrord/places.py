"""Where a daemon's configuration, state and socket are when nobody says otherwise. Shared by the daemon and the client."""

from __future__ import annotations

import os
from pathlib import Path


def xdg_directory(name: str, otherwise: Path) -> Path:
    """A base directory of the XDG specification, which says to ignore a relative one: it would be wherever we are started."""
    given = Path(os.environ.get(name, ""))
    return given if given.is_absolute() else otherwise


def find_path() -> Path | None:
    """The configuration file in use when nobody names one: MIRRORD_CONFIG, else the system's or the user's where it exists."""
    if named := os.environ.get("MIRRORD_CONFIG"):
        return Path(named)
    home = xdg_directory("XDG_CONFIG_HOME", Path.home() / ".config")
    path = Path("/etc/mirrord/config.toml") if os.geteuid() == 0 else home / "mirrord/config.toml"
    return path if path.exists() else None


def default_state_dir() -> Path:
    """Systemd's StateDirectory=, where it starts us; root's is /var/lib/mirrord; a user's is below XDG_STATE_HOME."""
    if given := os.environ.get("STATE_DIRECTORY"):
        return Path(given.partition(":")[0])
    if os.geteuid() == 0:
        return Path("/var/lib/mirrord")
    return xdg_directory("XDG_STATE_HOME", Path.home() / ".local/state") / "mirrord"


def default_socket() -> Path:
    """Root's is /run/mirrord/mirrord.sock; a user's is below XDG_RUNTIME_DIR."""
    if os.geteuid() == 0:
        return Path("/run/mirrord/mirrord.sock")
    return (
        xdg_directory("XDG_RUNTIME_DIR", Path(f"/run/user/{os.geteuid()}")) / "mirrord/mirrord.sock"
    )
