"""Mounts: the system calls, with types and our errors.

An attached mount outlives the process that made it. A missing path is a FileNotFoundError, so that
the caller can make it again; every other failure is a ResourceError.
"""

import ctypes
import errno
import os
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import BackendUnavailableError, DiskFullError, MirrordError, ResourceError
from . import files
from .files import opened
from .processes import Capability, has_capabilities, in_user_namespace

# syncfs(2) answers EBADF for a descriptor of O_PATH
_READABLE = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# enough for all mount calls, and needs no right to read the directory
DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# what a client writes must not give rights on the host, by a set-id bit or a device
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

# decides which features of overlayfs are used: older kernels reject them late, with EINVAL
KERNEL = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])

# mounts of ours on top of each other at one place; more mean that something mounts in a loop
_STACKED_MAX = 8
_STRING_MAX = 255  # bytes in a value for fsconfig(2)

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
        # to a file opened now, an error that nobody has seen is still reported; then it counts as
        # seen
        with opened(os.open(descriptor_path(upper), _READABLE)) as fd:
            _libc.syncfs(fd)
        return _make_overlay(lower, upper, work)


def has_sync_error(overlay: Path) -> bool:
    """Return whether the disk below a volatile overlay failed a write since the overlay was made.

    Each fsync(2) in it fails from then on, whatever it is of (Linux 5.12). syncfs(2) reports that
    without flushing anything, in such an overlay; of a directory that is no mount it would.
    """
    with suppress(OSError), opened(os.open(overlay, _READABLE)) as fd:
        # directories of an overlay have a device number of its own
        if os.fstat(fd).st_dev != os.stat(overlay.parent).st_dev:
            return bool(_libc.syncfs(fd) != 0)
    return False


# redirect_dir: without it rename(2) of a lower directory is EXDEV, at which `git mv` fails.
# metacopy, index and xino would make files meaningful only together with this mount.
_OVERLAY_OPTIONS = {"redirect_dir": "on", "metacopy": "off", "index": "off", "xino": "off"}


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
        for layer in lower:
            _configure(context, _FSCONFIG_SET_STRING, "lowerdir+", descriptor_path(layer))
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
            # else chdir(2) would change the working directory of all threads
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
    # EBUSY is no fault: the next start finds it bound already
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
    # in use it would be EBUSY without MNT_DETACH; NOFOLLOW, because who can put a link in the place
    # of the target would choose what root unmounts
    if _libc.umount2(os.fsencode(target), _MNT_DETACH | _UMOUNT_NOFOLLOW) == 0:
        return True
    # umount(2): EINVAL where nothing is mounted, ENOENT where the directory is gone too
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
    # of fsopen(2): not compiled in, and no module is loaded
    errno.ENODEV: "load the overlay module with `modprobe overlay`",
    errno.ENOSYS: "upgrade the kernel, or use the pool backend",
    errno.EOPNOTSUPP: "this file system lacks a feature: put state_dir on ext4, xfs or btrfs",
    errno.EINVAL: "see the kernel's log, or use the pool backend",
    errno.EREMOTE: "overlays cannot be on this file system: put state_dir on ext4, xfs or btrfs",
}


def refused(verb: str, noun: str, number: int) -> MirrordError | OSError:
    """Return the error for an errno of a mount call."""
    fact = f"cannot {verb} {noun}: {os.strerror(number)}"
    # the path was moved, replaced or removed meanwhile; ESTALE: what a descriptor led to is gone
    if number in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ESTALE):
        return FileNotFoundError(number, fact, noun)
    if number in (errno.ENOSPC, errno.EDQUOT):
        # ENOSPC is also the kernel's answer above fs.mount-max
        return DiskFullError(fact, hint="free some space, or raise fs.mount-max", errno=number)
    if number in _HINTS:
        return BackendUnavailableError(fact, hint=_HINTS[number], errno=number)
    return ResourceError(fact, hint="see the kernel's log", errno=number)
