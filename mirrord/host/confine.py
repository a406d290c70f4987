"""What `mirrord exec` takes from its command: the daemon's socket, the groups, the uid.

Runs in the child, between fork and exec; nothing of it outlives the command. Root takes a mount
namespace, hides the socket in it and becomes the owner. Who is not root takes a user namespace with
it, which needs no privilege. A group cannot be left there (setgroups(2) is denied before an
unprivileged gid_map is written), and SO_PEERGROUPS shows it to the daemon: so what counts for the
caller's own uid is that the socket is out of reach. The command has no capability in the namespace,
a namespace that it makes itself cannot take the cover off (the kernel locks mounts that come from a
more privileged one), and /proc/PID/root of processes outside needs a right that it lacks. A
subordinate uid (/etc/subuid) is entered by newuidmap(1); it has no groups at all.
"""

from __future__ import annotations

import ctypes
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .files import opened
from .processes import die_with_parent, search_path
from .userns import Owner

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
