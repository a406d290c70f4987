"""Acting as the owner of a tree: one thread takes that user's uid and gid and puts its capabilities down.

Owns the switch, its way back, and how a directory or file is opened for such a user. Linux keeps
credentials for each thread, so no other notices; `setgroups` is the raw call, because glibc's
changes all threads. What was opened before stays open: that is how a thread that acts as a client
reads something of the daemon's.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ResourceError
from .files import open_child, open_regular
from .processes import Capability, die_with_parent, dies_with_parent

_SYS_SETGROUPS = 116 if platform.machine() == "x86_64" else 159  # asm-generic/unistd.h
_CAPABILITY_VERSION = 0x20080522  # linux/capability.h
_NOBODY_KNOWN = 2**32 - 1  # (uid_t) -1 changes nothing, and so asks
_ACL = "system.posix_acl_access"
_READ, _READ_AND_ENTER = 0o4, 0o5

_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.setfsuid, _libc.setfsgid):
    _call.argtypes = [ctypes.c_uint]
    _call.restype = ctypes.c_uint


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Set(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


_Sets = _Set * 2
_THIS_THREAD = _Header(_CAPABILITY_VERSION, 0)


class ActingAs:
    """`with ActingAs(owner) as owner:` what this thread opens, makes and changes inside, it does as that user.

    `owner` is (uid, gid); None is the daemon itself, and changes nothing. May be entered again
    inside; `aside` is the way back for a while. `maker` is whose the files are that are made
    inside: the owner's, but for a daemon without CAP_SETUID and CAP_SETGID. That one keeps its
    capabilities and judges by mode what the owner may read. Belongs to one thread.
    """

    def __init__(self, owner: tuple[int, int] | None) -> None:
        me = (os.geteuid(), os.getegid())
        self.owner = owner or me
        self._mine = _capabilities()
        may_change = _has(self._mine, Capability.SETUID) and _has(self._mine, Capability.SETGID)
        self._changes = self.owner != me and may_change
        self._drops = owner is not None and (self._changes or owner == me)
        self.maker = self.owner if self._changes else me
        self._me, self._groups = me, os.getgroups() if self._changes else []
        self._parent = os.getppid() if self._changes and dies_with_parent() else None
        self._depth = 0

    def __enter__(self) -> ActingAs:
        if self._depth == 0:
            self._become_owner()
        self._depth += 1
        return self

    def __exit__(self, *failure: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._become_self()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Act as the daemon again, inside."""
        depth, self._depth = self._depth, 0
        if depth:
            self._become_self()
        try:
            yield
        finally:
            if depth:
                self._become_owner()
            self._depth = depth

    def open_directory(self, directory: int, name: bytes) -> int:
        """Open a directory in an open one; PermissionError where the owner may not look into it."""
        return self._admitted(open_child(directory, name), name, _READ_AND_ENTER)

    def open_regular(self, directory: int, name: bytes) -> int:
        """Open a regular file for reading; PermissionError where the owner may not."""
        return self._admitted(open_regular(directory, name), name, _READ)

    def _admitted(self, fd: int, name: bytes, bits: int) -> int:
        """The descriptor, where the kernel said that the owner may, or its mode says so."""
        if self.maker == self.owner or _may(os.fstat(fd), fd, self.owner, bits):
            return fd
        os.close(fd)
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)

    def _become_owner(self) -> None:
        try:
            if self._changes:
                _set_groups([self.owner[1]])
                _libc.setfsgid(self.owner[1])
                _libc.setfsuid(self.owner[0])
                if _fs_ids() != self.owner:
                    raise ResourceError(f"cannot act as uid {self.owner[0]}: the kernel refuses")
            if self._drops:
                _set_effective(self._mine, none=True)
            self._stay_tied()
        except BaseException:
            self._become_self()
            raise

    def _become_self(self) -> None:
        if self._drops:
            _set_effective(self._mine, none=False)
        if self._changes:
            _libc.setfsuid(self._me[0])
            _libc.setfsgid(self._me[1])
            _set_groups(self._groups)
            if _fs_ids() != self._me:
                raise ResourceError("cannot act as the daemon again: the kernel refuses")
            self._stay_tied()

    def _stay_tied(self) -> None:
        """A change of fsuid or fsgid takes away the signal that a worker gets when its parent dies."""
        if self._parent is not None:
            die_with_parent(self._parent)


def _may(found: os.stat_result, fd: int, owner: tuple[int, int], bits: int) -> bool:
    """Whether a mode gives a user all of `bits`; its own is its own, and the mask of an access list says too little."""
    if found.st_uid == owner[0]:
        return True
    if _ACL in os.listxattr(fd):
        return False
    return found.st_mode >> (3 if found.st_gid == owner[1] else 0) & bits == bits


def _capabilities() -> ctypes.Array[_Set]:
    sets = _Sets()
    _must(_libc.capget(ctypes.byref(_THIS_THREAD), sets))
    return sets


def _has(sets: ctypes.Array[_Set], capability: Capability) -> bool:
    return bool(sets[capability // 32].effective >> capability % 32 & 1)


def _set_effective(mine: ctypes.Array[_Set], *, none: bool) -> None:
    sets = _Sets(
        *(_Set(0 if none else one.effective, one.permitted, one.inheritable) for one in mine)
    )
    _must(_libc.capset(ctypes.byref(_THIS_THREAD), sets))


def _set_groups(groups: list[int]) -> None:
    _must(
        _libc.syscall(
            ctypes.c_long(_SYS_SETGROUPS), len(groups), (ctypes.c_uint32 * len(groups))(*groups)
        )
    )


def _fs_ids() -> tuple[int, int]:
    return int(_libc.setfsuid(_NOBODY_KNOWN)), int(_libc.setfsgid(_NOBODY_KNOWN))


def _must(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise ResourceError(
            f"cannot change what a thread acts as: {os.strerror(number)}", errno=number
        )
