"""User namespaces that only say which owner is seen as which, for idmapped mounts.

Owns the one way to get such a namespace: a child that enters it, waits, and is killed as soon as a descriptor holds it. A crash
takes the child along.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NoReturn, Self

from ..errors import BackendUnavailableError
from .files import opened
from .mounts import unescape
from .processes import Owner, die_with_parent, search_path

_CLONE_NEWUSER = 0x10000000
_libc = ctypes.CDLL(None, use_errno=True)


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


_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_SLAVE = (
    1,
    2,
    4,
    8,
    0x1000,
    0x4000,
    1 << 19,
)
_PR_SET_NO_NEW_PRIVS = 38
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
]


@dataclass(frozen=True, slots=True)
class Confinement:
    """`become` is the owner of the checkout where that is not the caller; `hidden` the socket, or
    None to leave it in reach."""

    parent_pid: int
    directory: Path
    become: Owner | None
    hidden: Path | None

    def enter(self) -> None:
        """Confine this process, and start it in `directory`. Raises OSError with the step that failed."""
        is_root = os.geteuid() == 0
        if self.become and not is_root:
            _enter_subordinate(self.become)
        elif self.hidden:
            _enter_own()
        if self.hidden:
            _hide(self.hidden)
            if is_root:
                with suppress(PermissionError):  # of a user namespace; root needs no group anyway
                    os.setgroups([])
        if self.become:
            os.setgroups([])
            os.setresgid(self.become[1], self.become[1], self.become[1])
            os.setresuid(self.become[0], self.become[0], self.become[0])
        if self.hidden and _libc.prctl(
            _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0
        ):  # sg(1) would give the group back
            raise _failed("give up new privileges")
        os.chdir(self.directory)  # last: its owner alone may enter
        die_with_parent(self.parent_pid)  # after the uid has changed, which would undo it


def find_obstacle() -> str | None:
    """Why a command could not be confined by this process; None where it could. Tried in a child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _enter_own()
            _mount(None, "/", None, _MS_REC | _MS_SLAVE)
            _mount("/dev/null", "/dev/null", None, _MS_BIND)
        except OSError as error:
            os.write(writing, str(error.strerror).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with opened(reading):
        obstacle = os.read(reading, 1000)
    os.waitpid(child, 0)
    return obstacle.decode() or None


def _enter_own() -> None:
    """Enter a mount namespace; who is not root, by way of a user namespace with itself alone in it."""
    own = os.getuid(), os.getgid()
    if os.geteuid() == 0:
        _unshare(_CLONE_NEWNS)
    else:
        _unshare(_CLONE_NEWNS | _CLONE_NEWUSER)
        _map_only(own)


def _enter_subordinate(owner: Owner) -> None:
    """Enter namespaces in which there is nobody but `owner`.

    newuidmap and newgidmap write the maps, from outside: a process inside may not ask them. They
    deny setgroups(2) unless the gid is a subordinate one too.
    """
    child = os.getpid()
    reading, writing = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(writing)
        os.read(reading, 1)
        os.environ["PATH"] = search_path()
        maps = (("newuidmap", owner[0]), ("newgidmap", owner[1]))
        done = [
            os.spawnlp(os.P_WAIT, name, name, f"{child}", f"{n}", f"{n}", "1")  # noqa: S606
            for name, n in maps
        ]
        os._exit(int(any(done)))
    try:
        _unshare(_CLONE_NEWNS | _CLONE_NEWUSER)
    finally:
        os.close(writing)
        _, status = os.waitpid(helper, 0)
    if status:
        raise PermissionError(
            1, f"cannot become uid {owner[0]} gid {owner[1]}: newuidmap or newgidmap failed"
        )


def _map_only(owner: Owner) -> None:
    uid, gid = owner
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="ascii")


def _hide(socket: Path) -> None:
    """Cover the socket, by its directory where only sockets are in it: a daemon that starts again
    renames a new socket over the old one, and a mount on a file goes with the file."""
    _mount(None, "/", None, _MS_REC | _MS_SLAVE)  # mounts of later resets arrive, ours do not leave
    directory = socket.parent
    if all(stat.S_ISSOCK(entry.lstat().st_mode) for entry in directory.iterdir()):
        _mount("none", str(directory), "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    else:
        _mount("/dev/null", str(socket), None, _MS_BIND)


def _unshare(flags: int) -> None:
    if _libc.unshare(flags):
        raise _failed("make a namespace")


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    arguments = (None if text is None else os.fsencode(text) for text in (source, target, kind))
    if _libc.mount(*arguments, flags, None):
        raise _failed(f"hide {target}")


def _failed(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"cannot {what}: {os.strerror(number)}")


class Visible(IntEnum):
    """Each includes those before it: nothing of the directory; plain files in it; what is mounted in it later."""

    NOTHING = 0
    FILES = 1
    MOUNTS = 2


@dataclass(frozen=True, slots=True)
class _Mount:
    """A line of mountinfo: `root` is the directory of the file system `device` that is seen at `at`."""

    device: bytes
    root: str
    at: str
    groups: frozenset[bytes]

    @classmethod
    def parse(cls, line: bytes) -> Self:
        fields = line.split()
        tags = fields[6 : fields.index(b"-", 6)]
        groups = frozenset(
            tag.partition(b":")[2] for tag in tags if tag.startswith((b"shared:", b"master:"))
        )
        return cls(fields[2], unescape(fields[3]), unescape(fields[4]), groups)


def shares_mounts(pid: int) -> bool:
    """Whether a process is in our mount namespace, or is not ours to look at, or has ended. Two system calls."""
    try:
        return os.stat(f"/proc/{pid}/ns/mnt").st_ino == os.stat("/proc/self/ns/mnt").st_ino
    except OSError:
        return True


def visible_to(pid: int, directory: Path) -> Visible:
    """What a process in another namespace sees of a directory. Reads two tables of mounts: 10 ms each with 3,000 of them."""
    try:
        theirs = list(_read_mounts(pid))
    except OSError:
        return Visible.MOUNTS
    holds = [each for each in _read_mounts("self") if _is_within(str(directory), each.at)]
    ours = max(
        reversed(holds), key=lambda each: len(each.at)
    )  # of several at one place the last is on top
    place = os.path.normpath(f"{ours.root}/{os.path.relpath(directory, ours.at)}")
    seen = [each for each in theirs if each.device == ours.device and _is_within(place, each.root)]
    if any(each.groups & ours.groups for each in seen):
        return Visible.MOUNTS
    return Visible.FILES if seen else Visible.NOTHING


def _read_mounts(pid: int | str) -> Iterator[_Mount]:
    with open(f"/proc/{pid}/mountinfo", "rb") as file:
        yield from map(_Mount.parse, file)


def _is_within(path: str, above: str) -> bool:
    return above == "/" or path == above or path.startswith(f"{above}/")
