"""User namespaces that only say which owner is seen as which, for idmapped mounts.

Owns the one way to get such a namespace: a child that enters it, waits, and is killed as soon as a descriptor holds it. A crash
takes the child along.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from pathlib import Path
from typing import NoReturn

from ..errors import BackendUnavailableError
from .files import opened
from .processes import die_with_parent

_CLONE_NEWUSER = 0x10000000
_libc = ctypes.CDLL(None, use_errno=True)

Owner = tuple[int, int]


def make_userns(stored: Owner, seen: Owner) -> int:
    """A descriptor of a namespace in which files of `stored` (uid, gid) are seen as those of `seen`."""
    child = _start()
    try:
        for kind, inside, outside in (("uid", stored[0], seen[0]), ("gid", stored[1], seen[1])):
            Path(f"/proc/{child}/{kind}_map").write_text(
                f"{inside} {outside} 1\n", encoding="ascii"
            )
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _unavailable(error.errno or errno.EIO) from error
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _start() -> int:
    """Start the child; it is in its namespace when this returns. Only a process of one thread may enter one, so it is forked."""
    parent = os.getpid()
    reader, writer = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        _wait_in_namespace(writer, parent)
    os.close(writer)
    with opened(reader):
        answer = os.read(reader, 1)
    if answer != b"\0":
        os.waitpid(child, 0)
        raise _unavailable(answer[0] if answer else errno.EIO)
    return child


def _wait_in_namespace(writer: int, parent: int) -> NoReturn:
    """The child's whole life; it never returns into its parent's code."""
    try:
        die_with_parent(parent)
        failed = _libc.unshare(_CLONE_NEWUSER)
        os.write(writer, bytes([ctypes.get_errno() if failed else 0]))
        if not failed:
            signal.pause()
    finally:
        os._exit(1)


def _unavailable(number: int) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"cannot make a user namespace: {os.strerror(number)}",
        hint="see user.max_user_namespaces; without one, only the daemon's own user gets overlay checkouts",
        errno=number,
    )
