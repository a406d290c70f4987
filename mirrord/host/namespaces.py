"""User and mount namespaces: made for idmapped mounts, and seen in others."""

import ctypes
import errno
import os
import signal
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from ..errors import BackendUnavailableError
from .files import opened
from .mounts import unescape
from .processes import Owner, die_with_parent

_CLONE_NEWUSER = 0x10000000  # linux/sched.h

_libc = ctypes.CDLL(None, use_errno=True)


# -- for idmapped mounts --------------------------------------------------------------------------


def make_userns(stored: Owner, seen: Owner) -> int:
    """A descriptor of a user namespace in which files of `stored` are seen as those of `seen`.

    A child enters it, because only a process of one thread may, and is killed as soon as the
    descriptor holds the namespace.
    """
    parent = os.getpid()
    reader, writer = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:  # never returns into its parent's code
        try:
            die_with_parent(parent)
            failed = _libc.unshare(_CLONE_NEWUSER)
            os.write(writer, bytes([ctypes.get_errno() if failed else 0]))
            if not failed:
                signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        with opened(reader):
            answer = os.read(reader, 1)
        if answer != b"\0":
            number = answer[0] if answer else errno.EIO
            raise OSError(number, os.strerror(number))
        for kind, inside, outside in (("uid", stored[0], seen[0]), ("gid", stored[1], seen[1])):
            Path(f"/proc/{child}/{kind}_map").write_text(f"{inside} {outside} 1\n", "ascii")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise BackendUnavailableError(
            f"cannot make a user namespace: {error.strerror}",
            hint="see user.max_user_namespaces; without one, only the daemon's own user gets"
            " overlay checkouts",
            errno=error.errno or errno.EIO,
        ) from error
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# -- of other processes ---------------------------------------------------------------------------


class Visible(IntEnum):
    """What a process sees of a directory, each with those before it: MOUNTS are later ones too."""

    NOTHING = 0
    FILES = 1
    MOUNTS = 2


class _Mount(NamedTuple):
    kind: list[bytes]  # of its file system, and its source
    device: bytes
    root: str  # the directory of that file system which is seen at `at`
    at: str
    groups: frozenset[bytes]


def shares_mounts(pid: int) -> bool:
    """Whether a process is in our mount namespace, or has ended, or may not be asked about."""
    try:
        return os.stat(f"/proc/{pid}/ns/mnt").st_ino == os.stat("/proc/self/ns/mnt").st_ino
    except OSError:
        return True


def visible_to(pid: int, directory: Path) -> Visible:
    """What a process sees of a directory from its own mount namespace, at this moment.

    Reads two tables of mounts: 10 ms each with 3,000 of them. Everything, where the daemon may not
    ask about other users' processes.
    """
    try:
        theirs = _read_mounts(pid)
    except OSError:
        return Visible.MOUNTS
    holds = [each for each in _read_mounts("self") if _is_within(str(directory), each.at)]
    ours = max(reversed(holds), key=lambda each: len(each.at))  # of several at one place the last
    place = os.path.normpath(f"{ours.root}/{os.path.relpath(directory, ours.at)}")
    seen = [each for each in theirs if each.device == ours.device and _is_within(place, each.root)]
    if any(each.groups & ours.groups for each in seen):
        return Visible.MOUNTS
    return Visible.FILES if seen else Visible.NOTHING


def find_left_behind(checkouts: Path) -> dict[int, str]:
    """Where a tree is mounted that its checkout has no more, or that no reset would take away.

    By process, one for each mount namespace that this one may look at. Such a mount is the slave of
    none: it was made private, or its master was unmounted without it.
    """
    found: dict[int, str] = {}
    looked_at: set[int] = set()
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with suppress(OSError):
            namespace = os.stat(f"/proc/{pid}/ns/mnt").st_ino
            if namespace in looked_at:
                continue
            looked_at.add(namespace)
            for each in _read_mounts(pid):
                is_ours = each.kind == [b"overlay", b"mirrord"]
                if is_ours and not each.groups and not _is_within(each.at, str(checkouts)):
                    found[pid] = each.at
    return found


def _read_mounts(pid: int | str) -> list[_Mount]:
    found = []
    with open(f"/proc/{pid}/mountinfo", "rb") as file:
        for fields in map(bytes.split, file):
            end = fields.index(b"-", 6)
            tags = [tag.partition(b":") for tag in fields[6:end]]
            groups = frozenset(group for kind, _, group in tags if kind in (b"shared", b"master"))
            root, at = unescape(fields[3]), unescape(fields[4])
            kind = fields[end + 1 : end + 3]
            found.append(_Mount(kind, fields[2], root, at, groups))
    return found


def _is_within(path: str, above: str) -> bool:
    return above == "/" or path == above or path.startswith(f"{above}/")
