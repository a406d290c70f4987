"""Which socket a client means. Reads one key of the configuration; whether the rest is right is the daemon's to say."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from ..errors import InvalidConfigError
from ..places import default_socket, find_path

_SYSTEM_SOCKET = Path("/run/mirrord/mirrord.sock")


def socket_path(named: Path | str | None, config_path: Path | str | None) -> Path:
    """The socket named, else MIRRORD_SOCKET, else the one configured in the file named, in MIRRORD_CONFIG or in the usual place.

    A user without a configuration and without a daemon of their own means the machine's daemon.
    """
    if named is not None:
        return Path(named).absolute()
    if config_path is None and (from_environment := os.environ.get("MIRRORD_SOCKET")):
        return Path(from_environment).absolute()
    path = Path(config_path) if config_path is not None else find_path()
    socket = default_socket() if path is None else _configured(path)
    if path is None and not socket.exists() and _SYSTEM_SOCKET.exists():
        return _SYSTEM_SOCKET
    return socket


def _configured(path: Path) -> Path:
    try:
        socket = tomllib.loads(path.read_text(encoding="utf-8")).get("socket")
    except (OSError, ValueError) as error:
        fact = error.strerror if isinstance(error, OSError) else error
        raise InvalidConfigError(
            f"cannot use configuration {path}: {fact}",
            hint="`mirrord config check` tells all faults of a file",
        ) from error
    if socket is None:
        return default_socket()
    if not isinstance(socket, str) or not socket.startswith("/"):
        raise InvalidConfigError(
            f"cannot use configuration {path}: socket: must be an absolute path",
            hint='for example "/run/mirrord/mirrord.sock"',
        )
    return Path(socket)
