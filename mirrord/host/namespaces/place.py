"""What this host allows, found by trying: sysctls, seccomp and AppArmor refuse differently."""

import ctypes
import os
import warnings
from functools import cache
from pathlib import Path

from ...model import Place
from ...presence import is_socket
from ..mounts import may_mount

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000  # linux/sched.h
_libc = ctypes.CDLL(None, use_errno=True)


@cache
def find_place(mount_service: Path) -> Place:
    """Return the place of this process; where the mount service answers, it is root's."""
    if is_socket(mount_service):
        return Place.ROOT
    if os.geteuid() == 0:
        return Place.ROOT if may_mount() else Place.CONTAINER
    # in namespaces of its own a daemon has the capability without being root
    return Place.NAMESPACE if may_mount() or _can_make_namespaces() else Place.USER


def _can_make_namespaces() -> bool:
    """Try, in a child: Ubuntu's AppArmor allows the user namespace, and refuses all in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child only calls
        child = os.fork()
    if child == 0:
        status = 1
        try:
            if _libc.unshare(_CLONE_NEWUSER) == 0 and _libc.unshare(_CLONE_NEWNS) == 0:
                status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0
