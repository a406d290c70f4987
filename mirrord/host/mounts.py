"""Mounts: the system calls, with types and our errors; the tables of mounts.

An attached mount outlives the process that made it. A missing path is a FileNotFoundError, so that
the caller can make it again; every other failure is a ResourceError.
"""

import ctypes
import errno
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from ..errors import BackendUnavailableError, DiskFullError, MirrordError, ResourceError
from . import files
from .files import opened
from .processes import Capability, has_capabilities, in_user_namespace

_READABLE = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
HARMLESS = os.ST_NOSUID | os.ST_NODEV
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8  # linux/mount.h, linux/fs.h
# linux/mount.h, linux/sched.h and linux/fcntl.h; the calls came with Linux 5.2, with the same
# numbers on x86-64 and arm64
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_EMPTY_PATH, _MOVE_MOUNT_BENEATH = 0x4, 0x40, 0x200
_FSOPEN_CLOEXEC = _FSMOUNT_CLOEXEC = 1
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
_MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, _MOUNT_ATTR_NOEXEC = 1, 2, 4, 8
_MOUNT_ATTR_IDMAP = 0x100000
_MS_PRIVATE, MS_SLAVE, _MS_SHARED = 1 << 18, 1 << 19, 1 << 20
_CLONE_FS = 0x200
_AT_FDCWD, _AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 428, 429, 430, 431, 432
_SYS_MOUNT_SETATTR = 442  # the same on every architecture

KERNEL = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
"""Decides which features of overlayfs are used: older kernels reject them late, with EINVAL."""

# mounts of ours on top of each other at one place; more mean that something mounts in a loop
_STACKED_MAX = 8
_STRING_MAX = 255  # bytes in a value for fsconfig(2)
# redirect_dir: without it rename(2) of a lower directory is EXDEV, at which `git mv` fails.
# metacopy, index and xino would make files meaningful only together with this mount.
_OVERLAY_OPTIONS = {"redirect_dir": "on", "metacopy": "off", "index": "off", "xino": "off"}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.umount2.restype = ctypes.c_int
_libc.syscall.restype = ctypes.c_long


class MountAttributes(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")
    )


def make_overlay(lower: Sequence[int], upper: int, work: int) -> int:
    """Make an overlay of open directories, `lower` top first; return its root, for `attach`.

    After a failed write of its disk the kernel refuses a volatile overlay (EIO) until somebody has
    synced the file system and seen the error.
    """
    try:
        return _make_overlay(lower, upper, work)
    except ResourceError as error:
        if error.facts.get("errno") != errno.EIO:
            raise
        with opened(os.open(descriptor_path(upper), _READABLE)) as fd:
            _libc.syncfs(fd)
        return _make_overlay(lower, upper, work)


def has_sync_error(overlay: Path) -> bool:
    """Return whether the disk below a volatile overlay failed a write since the overlay was made.

    Each fsync(2) in it fails from then on, whatever it is of (Linux 5.12). syncfs(2) reports that
    without flushing anything, in such an overlay; of a directory that is no mount it would.
    """
    with suppress(OSError), opened(os.open(overlay, _READABLE)) as fd:
        if os.fstat(fd).st_dev != os.stat(overlay.parent).st_dev:
            return bool(_libc.syncfs(fd) != 0)
    return False


def _make_overlay(lower: Sequence[int], upper: int, work: int) -> int:
    """Make an overlay, once.

    `work` must never have been used before. The directories are given by the paths of descriptors,
    because every user sees these options in /proc/self/mountinfo.
    """
    with opened(_open_kind(b"overlay")) as context:
        _configure(context, _FSCONFIG_SET_STRING, "source", "mirrord")
        _configure(context, _FSCONFIG_SET_STRING, "upperdir", descriptor_path(upper))
        _configure(context, _FSCONFIG_SET_STRING, "workdir", descriptor_path(work))
        for key, value in _OVERLAY_OPTIONS.items():
            if key != "redirect_dir" or not in_user_namespace():
                _configure(context, _FSCONFIG_SET_STRING, key, value)
        if in_user_namespace():  # attributes in `user.` (Linux 5.11), which excludes redirect_dir
            _configure(context, _FSCONFIG_SET_FLAG, "userxattr")
        # without it, an unmount flushes the whole file system (Linux 5.10)
        _configure(context, _FSCONFIG_SET_FLAG, "volatile")
        _create_over(context, lower)
        flags = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
        return _syscall("mount", "an overlay", _SYS_FSMOUNT, context, _FSMOUNT_CLOEXEC, flags)


def _create_over(context: int, lower: Sequence[int]) -> None:
    """Add the lower directories, and create the file system.

    Linux 6.7 takes them one by one. Older kernels take one value of at most 255 bytes for all. The
    numbers of 64 descriptors fit, without a directory: so a thread of its own has /proc/self/fd as
    its working directory. Linux 6.5 and 6.6 resolve the names when they are set, older ones when
    the file system is created.
    """
    if KERNEL >= (6, 7):
        for each in lower:
            _configure(context, _FSCONFIG_SET_STRING, "lowerdir+", descriptor_path(each))
        _configure(context, _FSCONFIG_CMD_CREATE)
        return
    joined = ":".join(map(str, lower))
    if len(joined) > _STRING_MAX:
        raise BackendUnavailableError(
            f"cannot mount {len(lower)} layers: their names have more than the {_STRING_MAX} bytes"
            " that this kernel accepts",
            hint="upgrade to Linux 6.7, which takes them one by one, or use the pool backend",
        )
    failed: list[BaseException] = []

    def create() -> None:
        try:
            if _libc.unshare(_CLONE_FS):
                raise refused("leave", "the working directory", ctypes.get_errno())
            os.chdir("/proc/self/fd")
            _configure(context, _FSCONFIG_SET_STRING, "lowerdir", joined)
            _configure(context, _FSCONFIG_CMD_CREATE)
        except BaseException as error:  # noqa: BLE001  (the caller's thread raises it)
            failed.append(error)

    thread = threading.Thread(target=create)  # concurrent.futures would load logging
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def attach(mount: int, target: str, how: int = 0) -> None:
    """Make a detached mount visible at `target`."""
    how |= _MOVE_MOUNT_F_EMPTY_PATH
    _syscall("mount at", target, _SYS_MOVE_MOUNT, mount, b"", _AT_FDCWD, os.fsencode(target), how)


def attach_over(mount: int, covered: int) -> None:
    """Make a detached mount visible on the root of another one that is attached."""
    how = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH
    _syscall("mount on", "a mount", _SYS_MOVE_MOUNT, mount, b"", covered, b"", how)


def replace(mount: int, target: str) -> None:
    """Replace the mount at `target` by a detached one, here and wherever `target` propagates to.

    In one step: the new mount is attached beneath the old one, which is then unmounted. Before
    Linux 6.5, which has no MOVE_MOUNT_BENEATH, the bare directory is visible for a moment.
    """
    try:
        attach(mount, target, _MOVE_MOUNT_BENEATH)
    except BackendUnavailableError as error:  # EINVAL: an older kernel, or no mount at `target`
        if error.facts.get("errno") != errno.EINVAL:
            raise
        umount(target)
        attach(mount, target)
    else:
        _unmount(target)


def umount(target: str) -> None:
    """Unmount everything at `target`, even in use; fine if nothing is mounted."""
    for _ in range(_STACKED_MAX):
        if not _unmount(target):
            return
    raise ResourceError(
        f"cannot unmount {target}: still mounted after {_STACKED_MAX} unmounts",
        hint="unmount it by hand",
    )


def umount_unused(target: str) -> None:
    """Unmount `target` unless it is in use."""
    _libc.umount2(os.fsencode(target), _UMOUNT_NOFOLLOW)


def clone_idmapped(source: int, userns: int) -> int:
    """Make a read-only, detached clone of `source` with owners mapped by a user namespace.

    All three are descriptors; the clone ends with its last one. Needs Linux 5.12.
    """
    flags = _MOUNT_ATTR_IDMAP | _MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
    return clone_with(source, MountAttributes(attr_set=flags, userns_fd=userns))


def mount_private(target: str) -> int:
    """Mount a private tmpfs of mode 0700; return its root.

    Mounts in it are not visible in other namespaces, and end with it.
    """
    with opened(_open_kind(b"tmpfs")) as context:
        _configure(context, _FSCONFIG_SET_STRING, "source", "mirrord")
        _configure(context, _FSCONFIG_SET_STRING, "mode", "0700")
        _configure(context, _FSCONFIG_CMD_CREATE)
        flags = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | _MOUNT_ATTR_NOEXEC
        root = _syscall("mount", "a tmpfs", _SYS_FSMOUNT, context, _FSMOUNT_CLOEXEC, flags)
    try:
        attach(root, target)
        # attached in a shared mount, it became shared too
        set_attributes(root, MountAttributes(propagation=_MS_PRIVATE))
    except BaseException:
        os.close(root)
        raise
    return root


def bind_once(path: str) -> None:
    """Bind a directory over itself, `nosuid,nodev` and shared, unless an earlier process did.

    Without systemd `/` may be private, and containers could not follow mounts with `rslave`.
    """
    with (
        opened(os.open(os.path.dirname(path), DIRECTORY)) as above,
        opened(os.open(path, DIRECTORY)) as directory,
    ):
        is_mount = mount_id(above) != mount_id(directory)
        if is_mount and os.fstatvfs(directory).f_flag & HARMLESS == HARMLESS:
            return
        with opened(clone_mount(directory)) as clone:
            flags = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
            if in_user_namespace():  # leave the group of the outer mount: it shows nothing of ours
                set_attributes(clone, MountAttributes(propagation=_MS_PRIVATE))
            set_attributes(clone, MountAttributes(attr_set=flags, propagation=_MS_SHARED))
            attach(clone, path)


def mount_id(fd: int) -> int:
    """Return the id of the mount that a descriptor is in."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("mnt_id:"))


def open_beneath(directory: int, path: str) -> int:
    """Open a directory (O_PATH) below another, without following links."""
    try:
        flags = os.O_PATH | os.O_DIRECTORY
        return files.open_beneath(directory, os.fsencode(path), flags, into_mounts=True)
    except OSError as error:
        raise refused("open", path, error.errno or errno.EIO) from error


def descriptor_path(fd: int) -> str:
    """Return a path of an open file that does not depend on its name."""
    return f"/proc/self/fd/{fd}"


def read_overlays() -> set[str]:
    """Return the mount points of overlays. 10 ms with 3,000 mounts: not for the hot path."""
    return {mount.at for mount in read_mounts() if mount.kind == "overlay"}


def mounts_below(directory: str) -> list[str]:
    """Return the mount points at and below a directory, in this process's namespace."""
    top = os.path.realpath(directory)
    with open("/proc/self/mountinfo", "rb") as file:
        points = [_unescape(line.split(b" ", 5)[4]) for line in file]
    return [point for point in points if _is_within(point, top)]


def may_mount() -> bool:
    """Return whether this process has CAP_SYS_ADMIN."""
    return has_capabilities(Capability.SYS_ADMIN)


def _open_kind(kind: bytes) -> int:
    return _syscall("open", f"file system {kind.decode()}", _SYS_FSOPEN, kind, _FSOPEN_CLOEXEC)


def _configure(context: int, command: int, *key_and_value: str) -> None:
    key, value = (*map(str.encode, key_and_value), None, None)[:2]
    _syscall("mount", "an overlay", _SYS_FSCONFIG, context, command, key, value, 0)


def clone_mount(directory: int, how: int = 0) -> int:
    how |= _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_EMPTY_PATH
    return _syscall("clone", "a directory's mount", _SYS_OPEN_TREE, directory, b"", how)


def clone_with(directory: int, attributes: MountAttributes, how: int = 0) -> int:
    clone = clone_mount(directory, how)
    try:
        set_attributes(clone, attributes, how)
    except BaseException:
        os.close(clone)
        raise
    return clone


def set_attributes(mount: int, attributes: MountAttributes, how: int = 0) -> None:
    size, given = ctypes.c_size_t(ctypes.sizeof(attributes)), ctypes.byref(attributes)
    how |= _AT_EMPTY_PATH
    _syscall("set up", "a mount", _SYS_MOUNT_SETATTR, mount, b"", how, given, size)


def _unmount(target: str) -> bool:
    """Unmount the topmost mount; False if there is none."""
    if _libc.umount2(os.fsencode(target), _MNT_DETACH | _UMOUNT_NOFOLLOW) == 0:
        return True
    if (number := ctypes.get_errno()) in (errno.EINVAL, errno.ENOENT):
        return False
    raise refused("unmount", target, number)


def _syscall(verb: str, noun: str, number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise refused(verb, noun, ctypes.get_errno())
    return result


_NEEDS_ROOT = "mounting needs CAP_SYS_ADMIN: run the daemon as root, or with mirrord-mount.service"
_HINTS = {
    **dict.fromkeys((errno.EPERM, errno.EACCES), _NEEDS_ROOT),
    errno.ENODEV: "load the overlay module with `modprobe overlay`",
    errno.ENOSYS: "upgrade the kernel, or use the pool backend",
    errno.EOPNOTSUPP: "this file system lacks a feature: put state_dir on ext4, xfs or btrfs",
    errno.EINVAL: "see the kernel's log, or use the pool backend",
    errno.EREMOTE: "overlays cannot be on this file system: put state_dir on ext4, xfs or btrfs",
}


def refused(verb: str, noun: str, number: int) -> MirrordError | OSError:
    """Return the error for an errno of a mount call."""
    fact = f"cannot {verb} {noun}: {os.strerror(number)}"
    if number in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ESTALE):
        return FileNotFoundError(number, fact, noun)
    if number in (errno.ENOSPC, errno.EDQUOT):
        # ENOSPC is also the kernel's answer above fs.mount-max
        return DiskFullError(fact, hint="free some space, or raise fs.mount-max", errno=number)
    if number in _HINTS:
        return BackendUnavailableError(fact, hint=_HINTS[number], errno=number)
    return ResourceError(fact, hint="see the kernel's log", errno=number)


def _unescape(field: bytes) -> str:
    """Decode a path of mountinfo: space, tab, newline and backslash are octal."""
    if b"\\" in field:
        field = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), field)
    return os.fsdecode(field)


# -- tables of mounts, of this process and others --------------------------------------------------


class Visible(IntEnum):
    """What a process sees of a directory: its files; and also what is mounted below it later.

    UNKNOWN, where its table of mounts cannot be read, promises nothing.
    """

    NOTHING = 0
    UNKNOWN = 1
    FILES = 2
    MOUNTS = 3


class Mount(NamedTuple):
    """A line of mountinfo: `root`, a directory of the file system, is visible at `at`."""

    kind: str
    source: str
    device: str
    root: str
    at: str
    options: frozenset[str]  # of the mount and of its file system
    groups: frozenset[bytes]  # peer groups that it shares with, or is a slave of


def shares_mounts(pid: int) -> bool | None:
    """Return whether a process is in our mount namespace; None if it ended or is not readable."""
    try:
        return os.stat(f"/proc/{pid}/ns/mnt").st_ino == os.stat("/proc/self/ns/mnt").st_ino
    except OSError:
        return None


def visible_to(pid: int, directory: Path) -> Visible:
    """Return what a process sees of a directory in its mount namespace, at this moment.

    Reads two tables of mounts, as far as needed: a table of 3,000 takes 10 ms, but `checkouts` is
    mounted before the overlays in it. Everybody may read them, unless /proc is mounted with
    `hidepid` (ProtectProc=), or the process is in another pid namespace.
    """
    visible = Visible.NOTHING
    try:
        if (mount := _find_own_mount(directory)) is None:
            return Visible.UNKNOWN
        place = os.path.normpath(f"{mount.root}/{os.path.relpath(directory, mount.at)}")
        for each in _iter_mounts(pid):
            if each.device == mount.device and _is_within(place, each.root):
                if each.groups & mount.groups:
                    return Visible.MOUNTS
                visible = Visible.FILES
    except OSError:
        return Visible.UNKNOWN
    return visible


def _find_own_mount(directory: Path) -> Mount | None:
    with opened(os.open(directory, DIRECTORY)) as fd:
        wanted = b"%d" % mount_id(fd)
    return next((_mount_of(fields) for fields in _iter_fields("self") if fields[0] == wanted), None)


def find_left_behind(checkouts: Path) -> dict[int, str]:
    """Find mounted trees that no reset or release will unmount, one for each mount namespace.

    Returns mount points by a process of the namespace. Such a mount is private, or its master was
    unmounted without it, so it is in no peer group. Namespaces of unreadable processes are skipped.
    """
    mounts: dict[int, str] = {}
    visited: set[int] = set()
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with suppress(OSError):
            namespace = os.stat(f"/proc/{pid}/ns/mnt").st_ino
            if namespace in visited:
                continue
            visited.add(namespace)
            for mount in read_mounts(pid):
                is_ours = (mount.kind, mount.source) == ("overlay", "mirrord")
                if is_ours and not mount.groups and not _is_within(mount.at, str(checkouts)):
                    mounts[pid] = mount.at
    return mounts


def find_mount(path: Path) -> Mount:
    """Return the mount of a path, by name: on btrfs a file's device number is not its mount's."""
    place = str(path.resolve())
    above = [each for each in read_mounts() if _is_within(place, each.at)]
    return max(reversed(above), key=lambda each: len(each.at))  # the last of several at one place


def read_mounts(pid: int | str = "self") -> list[Mount]:
    return list(_iter_mounts(pid))


def _iter_mounts(pid: int | str) -> Iterator[Mount]:
    return map(_mount_of, _iter_fields(pid))


def _iter_fields(pid: int | str) -> Iterator[list[bytes]]:
    with open(f"/proc/{pid}/mountinfo", "rb") as file:
        yield from map(bytes.split, file)


def _mount_of(fields: list[bytes]) -> Mount:
    end = fields.index(b"-", 6)
    tags = [tag.partition(b":") for tag in fields[6:end]]
    groups = frozenset(group for kind, _, group in tags if kind in (b"shared", b"master"))
    root, at, source = map(_unescape, (fields[3], fields[4], fields[end + 2]))
    kind, device = fields[end + 1].decode(), fields[2].decode()
    options = frozenset(os.fsdecode(b",".join((fields[5], fields[end + 3]))).split(","))
    return Mount(kind, source, device, root, at, options, groups)


def _is_within(path: str, above: str) -> bool:
    return above == "/" or path == above or path.startswith(f"{above}/")
