"""Attach mounts, received as descriptors from the daemon, in a mount namespace.

In the namespace of another process the place is looked up as that process sees it, without
following symbolic links, by a child that enters the namespace (setns(2) needs a single-threaded
process). The child has a deadline, because a file system of the other process may hang.
"""

import ctypes
import errno
import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .. import errors
from ..model import Target

_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SYS_MOVE_MOUNT, _SYS_OPENAT2, _SYS_MOUNT_SETATTR = 429, 437, 442  # the same on every architecture
_F_EMPTY_PATH, _T_EMPTY_PATH, _MNT_DETACH, _UMOUNT_NOFOLLOW = 0x4, 0x40, 2, 8  # linux/mount.h
# linux/mount.h and linux/fcntl.h
_ATTR_RDONLY, _PRIVATE, _AT_EMPTY_PATH, _AT_RECURSIVE = 1, 1 << 18, 0x1000, 0x8000
_CLONE_NEWNS = 0x20000  # linux/sched.h
_NO_MAGICLINKS, _NO_SYMLINKS, _IN_ROOT = 0x2, 0x4, 0x10  # linux/openat2.h
# mounts of ours on top of each other at one place; more mean that something mounts in a loop
_STACKED_MAX = 8
# the root field of mountinfo, which follows renames: `.trash-` after a release; the kernel adds
# `//deleted` once the directory is removed, and the mount stays
_CHECKOUT_ROOT = re.compile(
    rb"/checkouts/((?:\.trash-)*[a-z2-7]{16})(?:/(tree|environment))?(?://deleted)?$"
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]


class _OpenHow(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("flags", "mode", "resolve"))


class _MountAttr(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns"))


class Attached(NamedTuple):
    """A checkout that is attached in this mount namespace; `.trash-…` after its release."""

    checkout: str
    target: Target
    read_only: bool


def attach(mount: int, path: Path, pid: int | None = None, *, read_only: bool = False) -> None:
    """Attach a mount to a directory, replacing a checkout that is attached there.

    With `pid`, `path` is in the mount namespace of that process. With `read_only` it does not
    follow resets, because what a reset mounts is writable. Raises AccessError, PathNotFoundError,
    NotFoundError, UsageError.
    """
    try:
        if read_only:
            frozen = ctypes.byref(_MountAttr(set=_ATTR_RDONLY, propagation=_PRIVATE))
            size, how = ctypes.c_size_t(ctypes.sizeof(_MountAttr)), _AT_EMPTY_PATH | _AT_RECURSIVE
            _must(_libc.syscall(_SYS_MOUNT_SETATTR, mount, b"", how, frozen, size))
        if pid is None:
            _replace(mount, lambda: os.open(path, _PLACE), "/proc/self")
        else:
            _replace_in(pid, mount, path)
    except OSError as error:
        raise _refused(path, pid, error.errno or errno.EIO) from error


def detach(path: Path) -> None:
    """Unmount all checkouts that are attached to a directory, even in use.

    Raises ConflictError if another mount is there.
    """
    for _ in range(_STACKED_MAX):
        try:
            place = os.open(path, _PLACE)
            try:
                if not _is_checkout(place, "/proc/self"):
                    break
            finally:
                os.close(place)
            _must(_libc.umount2(os.fsencode(path), _MNT_DETACH | _UMOUNT_NOFOLLOW))
        except FileNotFoundError:
            return
        except OSError as error:
            raise _refused(path, None, error.errno or errno.EIO, "detach") from error
    if os.path.ismount(path):
        fact = f"cannot detach a checkout at {path}: something else is mounted there"
        raise errors.ConflictError(fact, hint="unmount it by hand")


def find_attached() -> dict[Path, Attached]:
    """Return the checkouts that are attached in this mount namespace, by path."""
    attached = {}
    with open("/proc/self/mountinfo", "rb") as file:
        for fields in map(bytes.split, file):
            if match := _CHECKOUT_ROOT.search(_unescape(fields[3])):
                checkout, target = (os.fsdecode(group or b"directory") for group in match.groups())
                read_only = b"ro" in fields[5].split(b",")
                place = Path(os.fsdecode(_unescape(fields[4])))
                attached[place] = Attached(checkout, Target(target), read_only)
    return attached


def _replace(mount: int, open_place: Callable[[], int], proc: str) -> None:
    """Unmount checkouts from the directory and mount there; `proc` is a path of /proc/self."""
    for _ in range(_STACKED_MAX):
        place = open_place()
        try:
            # umount2 takes paths alone: through the descriptor it is the place that was looked up.
            # A mount that a more privileged namespace made is locked (EINVAL): then on top of it.
            if not _is_checkout(place, proc) or _libc.umount2(
                f"{proc}/fd/{place}".encode(), _MNT_DETACH
            ):
                how = _F_EMPTY_PATH | _T_EMPTY_PATH
                _must(_libc.syscall(_SYS_MOVE_MOUNT, mount, b"", place, b"", how))
                return
        finally:
            os.close(place)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


def _is_checkout(place: int, proc: str) -> bool:
    """True if the topmost mount on a directory is an attached checkout, or a released one."""
    mounted = _mount_id(place, proc)
    with suppress(PermissionError):  # the parent may be another user's
        above = os.open("..", _PLACE, dir_fd=place)
        try:
            if mounted == _mount_id(above, proc):
                return False
        finally:
            os.close(above)
    with open(f"{proc}/mountinfo", "rb") as file:
        for fields in map(bytes.split, file):
            if fields[0] == mounted:
                kind, source = fields[fields.index(b"-") + 1 :][:2]
                return (kind, source) == (b"overlay", b"mirrord") or bool(
                    _CHECKOUT_ROOT.search(fields[3])
                )
    return False


def _mount_id(fd: int, proc: str) -> bytes:
    with open(f"{proc}/fdinfo/{fd}", "rb") as file:
        return next(line.split()[1] for line in file if line.startswith(b"mnt_id:"))


def _replace_in(pid: int, mount: int, path: Path) -> None:
    """Attach in the namespace of another process, by a child whose exit status is the errno."""
    descriptors: list[int] = []
    try:
        descriptors.append(process := os.pidfd_open(pid))
        descriptors.append(root := os.open(f"/proc/{pid}/root", _PLACE & ~os.O_NOFOLLOW))
        descriptors.append(proc := os.open("/proc", _PLACE))
        signal.pidfd_send_signal(process, 0)  # still running, so the root is its
        if (child := os.fork()) == 0:
            _enter_and_replace(process, root, proc, mount, path)
        _, status = os.waitpid(child, 0)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    # killed by its alarm: a path on a dead network file system may never answer
    number = errno.ETIMEDOUT if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    if number:
        raise OSError(number, os.strerror(number))


# then SIGALRM ends the child: nothing in the other mount namespace holds the caller
_ENTERED_SECONDS = 10


def _enter_and_replace(process: int, root: int, proc: int, mount: int, path: Path) -> None:
    """Attach in the child; never returns."""
    number = errno.EIO
    try:
        # a handler of the caller's, in Python, would run only after the system call that hangs
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_ENTERED_SECONDS)
        _must(_libc.setns(process, _CLONE_NEWNS))
        os.fchdir(proc)  # our /proc: that of the namespace may be anything
        _replace(mount, lambda: _open_in(root, path), "self")
        number = 0
    except OSError as error:
        number = error.errno or number
    finally:
        os._exit(number)


def _open_in(root: int, path: Path) -> int:
    # IN_ROOT: `/` and `..` are those of the other process's root, never ours
    how = _OpenHow(_PLACE, 0, _IN_ROOT | _NO_SYMLINKS | _NO_MAGICLINKS)
    size = ctypes.c_size_t(ctypes.sizeof(how))
    return _must(_libc.syscall(_SYS_OPENAT2, root, os.fsencode(path), ctypes.byref(how), size))


def _must(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


def _unescape(field: bytes) -> bytes:
    """Unescape a path of mountinfo: space, tab, newline and backslash are octal."""
    return re.sub(rb"\\([0-7]{3})", lambda escape: bytes([int(escape[1], 8)]), field)


_NEEDS = {
    False: "attaching needs CAP_SYS_ADMIN in the user namespace of this mount namespace: be root,"
    " or enter new ones with `unshare --user --map-root-user --mount`",
    True: "only root may attach in the namespace of another process",
}


def _refused(path: Path, pid: int | None, number: int, verb: str = "attach") -> errors.MirrordError:
    where = f"{path}" if pid is None else f"{path} of process {pid}"
    fact = f"cannot {verb} a checkout at {where}: {os.strerror(number)}"
    match number:
        case errno.EPERM | errno.EACCES:
            return errors.AccessError(fact, hint=_NEEDS[pid is not None])
        case errno.ENOENT:
            return errors.PathNotFoundError(fact, hint="create the directory first")
        case errno.ENOTDIR | errno.ELOOP:
            return errors.UsageError(
                fact, hint="name a directory, without symbolic links on its path"
            )
        case errno.ESRCH:
            return errors.NotFoundError(fact, hint="give the pid of this pid namespace")
        case _:
            return errors.ResourceError(fact, hint="check dmesg", errno=number)
