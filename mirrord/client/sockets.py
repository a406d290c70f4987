"""Which socket a client means."""

from __future__ import annotations

import os
from pathlib import Path

from .. import config

_SYSTEM_SOCKET = Path("/run/mirrord/mirrord.sock")


def socket_path(named: Path | str | None, config_path: Path | str | None) -> Path:
    """The socket named, else MIRRORD_SOCKET, else the one configured in the file named, in MIRRORD_CONFIG or in the usual place.

    A user without a configuration and without a daemon of their own means the machine's daemon.
    """
    if named is not None:
        return Path(named).absolute()
    if config_path is None and (from_environment := os.environ.get("MIRRORD_SOCKET")):
        return Path(from_environment).absolute()
    path = Path(config_path) if config_path is not None else config.find_path()
    socket = config.load(path).socket
    if path is None and not socket.exists() and _SYSTEM_SOCKET.exists():
        return _SYSTEM_SOCKET
    return socket
