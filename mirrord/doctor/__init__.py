"""What this host can and cannot do for a daemon with these settings, and what to change.

Changes nothing and needs no daemon. A check that fails itself is an answer too.
"""

from collections.abc import Callable
from typing import NamedTuple

from ..config import Settings
from ..errors import MirrordError
from . import host, state
from .host import Result, Verdict


class Check(NamedTuple):
    """One question, its verdict, the fact behind it, and a remedy unless it is ok."""

    name: str
    verdict: Verdict
    fact: str
    remedy: str = ""


def examine(settings: Settings) -> list[Check]:
    """Run every check."""
    checks = []
    for name, check in _CHECKS.items():
        try:
            checks.append(Check(name, *check(settings)))
        except (OSError, MirrordError, ValueError) as error:
            remedy = "check it by hand, or run the doctor as root"
            checks.append(Check(name, "warn", f"cannot check: {error}", remedy))
    return checks


_CHECKS: dict[str, Callable[[Settings], Result]] = {
    "git": host.git,
    "setpriv": host.setpriv,
    "python packages": host.packages,
    "certificates": host.certificates,
    "libgit2": host.libgit2,
    "kernel": host.kernel,
    "overlay": host.overlay,
    "privileges": host.privileges,
    "mount namespace": host.mount_namespace,
    "mount limit": host.mount_limit,
    "inotify": host.inotify,
    "open files": host.open_files,
    "clock": host.clock,
    "state directory": state.state_dir,
    "its parents": state.parents,
    "its file system": state.file_system,
    "its parts": state.one_file_system,
    "access control lists": state.access_lists,
    "set-id bits": state.set_id_bits,
    "space": state.space,
    "inodes": state.inodes,
    "catalog": state.catalog,
    "leftovers": state.leftovers,
    "socket": state.socket_path,
    "daemon": state.daemon,
    "group": state.group,
    "binds of trees": state.binds,
    "volumes": state.volumes,
    "exec": state.confinement,
    "builds": host.builds,
}
