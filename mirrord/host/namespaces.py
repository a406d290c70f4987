"""User and mount namespaces: made for idmapped mounts and for `mirrord exec`, and seen in others.

`exec` runs in a child between fork and exec, and nothing of it outlives the command. Root takes a
mount namespace, hides the daemon's socket in it and becomes the owner. Another user takes a user
namespace with it, which needs no privilege. A group cannot be left there (setgroups(2) is denied
before an unprivileged gid_map is written), and SO_PEERGROUPS shows it to the daemon: so what counts
for the caller's own uid is that the socket is out of reach. The command has no capability in the
namespace, a namespace that it makes itself cannot take the cover off (the kernel locks mounts that
come from a more privileged one), and /proc/PID/root of processes outside needs a right that it
lacks. A subordinate uid (/etc/subuid) is entered by newuidmap(1); it has no groups at all.
"""

import ctypes
import errno
import os
import signal
import stat
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from ..errors import BackendUnavailableError
from .files import opened
from .mounts import unescape
from .processes import Owner, die_with_parent, search_path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000  # linux/sched.h
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8  # linux/mount.h
_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 1 << 19
_PR_SET_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [*[ctypes.c_char_p] * 3, ctypes.c_ulong, ctypes.c_char_p]


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


# -- for `mirrord exec` ---------------------------------------------------------------------------


class Confinement(NamedTuple):
    """What a command may reach, and as who.

    `become` is the owner of the checkout where that is not the caller; `hidden` the socket, or None
    to leave it in reach.
    """

    parent_pid: int
    directory: Path
    become: Owner | None
    hidden: Path | None

    def enter(self) -> None:
        """Confine this process, in `directory`. Raises OSError with the failed step."""
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
            uid, gid = self.become
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        # sg(1) would give the group back
        if self.hidden:
            _must(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "give up new privileges")
        os.chdir(self.directory)  # last: its owner alone may enter
        die_with_parent(self.parent_pid)  # after the uid has changed, which would undo it


def find_obstacle() -> str | None:
    """Why this process could not confine a command; None where it could. Tried in a child."""
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
    """Enter a mount namespace; without root, by way of a user namespace with this user alone."""
    uid, gid = os.getuid(), os.getgid()
    if os.geteuid() == 0:
        _must(_libc.unshare(_CLONE_NEWNS), "make a namespace")
        return
    _must(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER), "make a namespace")
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="ascii")


def _enter_subordinate(owner: Owner) -> None:
    """Enter namespaces that have `owner` alone.

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
        _must(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER), "make a namespace")
    finally:
        os.close(writing)
        _, status = os.waitpid(helper, 0)
    if status:
        fact = f"cannot become uid {owner[0]} gid {owner[1]}: newuidmap or newgidmap failed"
        raise PermissionError(errno.EPERM, fact)


def _hide(socket: Path) -> None:
    """Cover the socket, by its directory where only sockets are in it.

    A restarted daemon renames a new socket over the old one, and a mount on a file goes with it.
    """
    _mount(None, "/", None, _MS_REC | _MS_SLAVE)  # mounts of later resets arrive, ours do not leave
    directory = socket.parent
    if all(stat.S_ISSOCK(entry.lstat().st_mode) for entry in directory.iterdir()):
        _mount("none", str(directory), "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    else:
        _mount("/dev/null", str(socket), None, _MS_BIND)


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    arguments = (None if text is None else os.fsencode(text) for text in (source, target, kind))
    _must(_libc.mount(*arguments, flags, None), f"hide {target}")


def _must(result: int, step: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot {step}: {os.strerror(number)}")


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
