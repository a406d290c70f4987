"""Checks of the way to the daemon: its socket, whoever runs already, the group that may use it."""

from __future__ import annotations

import fcntl
import grp
import os
import shutil
import socket
from pathlib import Path

from ..config import Settings
from ..host.namespaces import find_obstacle
from ..host.processes import search_path
from .asking import Result, existing, judge

_SOCKET_PATH_BYTES = 107  # sockaddr_un, less its final zero


def socket_path(settings: Settings) -> Result:
    path = settings.socket
    if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
        return (
            "fail",
            f"{path} is longer than {_SOCKET_PATH_BYTES} bytes",
            "choose a shorter `socket`",
        )
    parent = existing(path.parent)
    uid = _daemons_uid(settings.state_dir)
    well = (
        os.access(parent, os.W_OK)
        if uid == os.geteuid()
        else parent.stat().st_uid == uid or uid == 0
    )
    return judge(
        well, f"{path}", f"{parent} is not writable for uid {uid}: choose another `socket`"
    )


def _daemons_uid(state_dir: Path) -> int:
    """Whose daemon it is: somebody else's where the state directory is."""
    return state_dir.stat().st_uid if state_dir.exists() else os.geteuid()


def daemon(settings: Settings) -> Result:
    """Two questions: who listens, and who holds the state directory's lock."""
    listens = _listens(settings.socket)
    holder = _lock_holder(settings.state_dir / "daemon.lock")
    if holder is None:
        return judge(
            not listens,
            "none runs",
            f"another daemon listens at {settings.socket}: choose another `socket`",
        )
    return "ok", f"one runs: {holder}", ""


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _lock_holder(lock: Path) -> str | None:
    """What the daemon wrote into its lock, if one holds it."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 400, 0).decode(errors="replace").strip() or "just starting"
    finally:
        os.close(descriptor)
    return None


def confinement(settings: Settings) -> Result:
    """What `mirrord exec` needs to keep the daemon out of its command's reach."""
    if obstacle := find_obstacle():
        return (
            "warn",
            obstacle,
            "`mirrord exec` refuses to run; --keep-access runs without confinement",
        )
    if shutil.which("newuidmap", path=search_path()) is None:
        return "ok", "for your own uid and for root; newuidmap is not installed", ""
    return "ok", "for your own uid, for subordinate uids and for root", ""


def group(settings: Settings) -> Result:
    name = settings.access.group
    try:
        found = grp.getgrnam(name)
    except KeyError:
        return (
            "warn",
            f"there is no group {name}: only root and the daemon's user may use it",
            f"make it with `groupadd --system {name}`",
        )
    return "ok", f"{name}, gid {found.gr_gid}", ""
