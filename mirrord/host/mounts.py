"""Mounts: the raw system calls, with types and our errors.

Owns how an overlay, an idmapped bind and an unmount are asked of the kernel, and what its refusals mean. Decides nothing about
what is mounted where. Mounts outlive the process that made them: nothing here is undone by a crash.

A path that is gone stays FileNotFoundError, so that the caller can make it anew; every other refusal is a ResourceError.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack

from ..errors import BackendUnavailableError, DiskFullError, MirrordError, ResourceError
from .files import opened
from .processes import Capability, has_capabilities

_MS_NOSUID, _MS_NODEV = 2, 4  # linux/mount.h
_MNT_DETACH = 2
_OPEN_TREE_CLONE = 1
_OPEN_TREE_CLOEXEC = os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_EMPTY_PATH = 0x4, 0x40
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV, _MOUNT_ATTR_IDMAP = 0x1, 0x2, 0x4, 0x100000
_AT_EMPTY_PATH = 0x1000
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_OPENAT2, _SYS_MOUNT_SETATTR = 428, 429, 437, 442  # the same on every architecture
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x2, 0x4, 0x8

_OPTIONS_MAX = 4095  # mount(2) takes one page
_SPECIAL = re.compile(r"[,:\\]")
_STACKED_MAX = 8

# redirect_dir: rename(2) of a directory below must not give EXDEV, which git mv does not survive. volatile: an unmount would else
# flush the whole file system. The rest would make files mean something only together with one mount.
_OVERLAY_OPTIONS = "redirect_dir=on,metacopy=off,index=off,xino=off,volatile"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.syscall.restype = ctypes.c_long


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def mount_overlay(target: str, lower: Sequence[str], upper: str, work: str) -> None:
    """Mount an overlay at `target`; `lower` is top first. `work` must never have been mounted before."""
    options = _overlay_options(lower, upper, work)
    if len(options) > _OPTIONS_MAX or _SPECIAL.search("".join((*lower, upper, work))):
        _mount_by_descriptors(target, lower, upper, work)
    else:
        _mount(target, options)


def umount(target: str) -> None:
    """Take away everything that is mounted at `target`, whoever is inside; fine where nothing is."""
    for _ in range(_STACKED_MAX):
        if _libc.umount2(os.fsencode(target), _MNT_DETACH) == 0:
            continue
        number = ctypes.get_errno()
        if number in (errno.EINVAL, errno.ENOENT):
            return
        raise _refused("unmount", target, number)
    raise ResourceError(f"cannot unmount {target}: {_STACKED_MAX} mounts went and there are more", hint="unmount it by hand")


def clone_idmapped(source: int, target: int, userns: int) -> None:
    """Bind the directory `source` to the directory `target`, read-only, with its owners seen through the user namespace `userns`.

    All three are descriptors. Needs Linux 5.12, and 5.19 for overlays on it.
    """
    how = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_EMPTY_PATH
    clone = _syscall("clone", "the templates", _SYS_OPEN_TREE, source, b"", how)
    flags = _MOUNT_ATTR_IDMAP | _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV
    attributes = _MountAttr(attr_set=flags, userns_fd=userns)
    with opened(clone):
        _syscall(
            "map owners of", "the templates", _SYS_MOUNT_SETATTR, clone, b"", _AT_EMPTY_PATH, ctypes.byref(attributes),
            ctypes.c_size_t(ctypes.sizeof(attributes)),
        )  # fmt: skip
        both_empty = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH
        _syscall("mount", "the idmapped templates", _SYS_MOVE_MOUNT, clone, b"", target, b"", both_empty)


def open_beneath(directory: int, path: str) -> int:
    """Open a directory (O_PATH) that lies below another, following no link on the way."""
    how = _OpenHow(
        flags=os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC,
        resolve=_RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS,
    )
    return _syscall(
        "open", path, _SYS_OPENAT2, directory, os.fsencode(path), ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how))
    )


def descriptor_path(fd: int) -> str:
    """A path that is the open file itself, whatever its name is by now."""
    return f"/proc/self/fd/{fd}"


def read_overlays() -> set[str]:
    """Where overlays are mounted now. Costs 10 ms with 3,000 of them: not for the hot path."""
    with open("/proc/self/mountinfo", "rb") as file:
        fields = [line.split(b" ") for line in file]
    return {_unescape(each[4]) for each in fields if each[each.index(b"-") + 1] == b"overlay"}


def is_private_namespace() -> bool:
    """Whether mounts made here are seen by nobody outside: this is not the mount namespace of pid 1.

    False where this process may not look at pid 1: then somebody made this whole world for it, clients included.
    """
    try:
        return os.stat("/proc/self/ns/mnt").st_ino != os.stat("/proc/1/ns/mnt").st_ino
    except (PermissionError, FileNotFoundError):
        return False


def may_mount() -> bool:
    """Whether this process has CAP_SYS_ADMIN."""
    return has_capabilities(Capability.SYS_ADMIN)


def _overlay_options(lower: Sequence[str], upper: str, work: str) -> bytes:
    return os.fsencode(f"lowerdir={':'.join(lower)},upperdir={upper},workdir={work},{_OVERLAY_OPTIONS}")


def _mount_by_descriptors(target: str, lower: Sequence[str], upper: str, work: str) -> None:
    """Name each directory by a descriptor: short, and free of the characters that options are split at."""
    with ExitStack() as stack:

        def brief(path: str) -> str:
            return descriptor_path(stack.enter_context(opened(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))))

        _mount(target, _overlay_options([brief(path) for path in lower], brief(upper), brief(work)))


def _mount(target: str, options: bytes) -> None:
    if _libc.mount(b"mirrord", os.fsencode(target), b"overlay", _MS_NOSUID | _MS_NODEV, options) != 0:
        raise _refused("mount an overlay at", target, ctypes.get_errno())


def _syscall(verb: str, noun: str, number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise _refused(verb, noun, ctypes.get_errno())
    return result


_HINTS = {
    errno.EPERM: "mounting needs CAP_SYS_ADMIN: run the daemon as root, or beside mirrord-mount.service",
    errno.EACCES: "mounting needs CAP_SYS_ADMIN: run the daemon as root, or beside mirrord-mount.service",
    errno.ENODEV: "load the overlay module with `modprobe overlay`",
    errno.ENOSYS: "this needs a newer kernel; the pool backend serves without it",
    errno.EOPNOTSUPP: "this file system lacks what is needed: put state_dir on ext4, xfs or btrfs",
    errno.EINVAL: "the kernel's log says why; the pool backend serves without mounts",
    errno.EREMOTE: "state_dir is on a file system that overlays cannot lie on: put it on ext4, xfs or btrfs",
}


def _refused(verb: str, noun: str, number: int) -> MirrordError | OSError:
    """What an errno of a mount call means."""
    message, reason = f"cannot {verb} {noun}", os.strerror(number)
    if number in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ESTALE):
        return FileNotFoundError(number, f"{message}: {reason}", noun)
    if number in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space, or raise fs.mount-max"  # the kernel says ENOSPC to one mount too many
        return DiskFullError(f"{message}: {reason}", hint=hint, errno=number)
    if number in _HINTS:
        return BackendUnavailableError(f"{message}: {reason}", hint=_HINTS[number], errno=number)
    return ResourceError(f"{message}: {reason}", hint="the kernel's log may say more", errno=number)


def _unescape(field: bytes) -> str:
    """A path as mountinfo writes it: space, tab, newline and backslash in octal."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), field))
