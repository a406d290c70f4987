"""Acting as the owner of a tree: one thread takes that user's uid and gid, without capabilities.

Linux keeps credentials for each thread, so no other notices; `setgroups` is the raw call, because
glibc's changes all threads. What was opened before stays open: that is how a thread that acts as a
client reads a file of the daemon's.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import ResourceError
from .files import FOR_READING, open_child, open_regular, open_seen
from .processes import Capability, Owner, die_with_parent, dies_with_parent

_SYS_SETGROUPS = 116 if platform.machine() == "x86_64" else 159  # asm-generic/unistd.h
# linux/capability.h: version 3, this thread; for capabilities below 32, then for the others, those
# effective, permitted and inheritable
_CAP_HEADER = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0), 8)
_CAP_SETS = struct.Struct("=6I")

_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.setfsuid, _libc.setfsgid):
    _call.argtypes = [ctypes.c_uint]
    _call.restype = ctypes.c_uint


class ActingAs:
    """`with ActingAs(owner) as owner:` this thread opens, makes and changes files as that user.

    None is the daemon itself, and changes nothing. May be entered again inside; `aside` is the way
    back for a while. `maker` owns the files that are made inside: the owner, unless the daemon
    lacks CAP_SETUID and CAP_SETGID. Then it keeps its capabilities, and judges by mode what the
    owner may read. Belongs to one thread.
    """

    def __init__(self, owner: Owner | None) -> None:
        me = (os.geteuid(), os.getegid())
        self.owner = owner or me
        sets = ctypes.create_string_buffer(_CAP_SETS.size)
        _must(_libc.capget(_CAP_HEADER, sets))
        self._mine = _CAP_SETS.unpack(sets)
        self._none = 0, *self._mine[1:3], 0, *self._mine[4:]
        wanted = 1 << Capability.SETUID | 1 << Capability.SETGID
        may_change = self._mine[0] & wanted == wanted
        self._changes = self.owner != me and may_change
        self._drops = owner is not None and (self._changes or owner == me)
        self.maker = self.owner if self._changes else me
        self._me, self._groups = me, os.getgroups() if self._changes else []
        self._parent = os.getppid() if self._changes and dies_with_parent() else None
        self._depth = 0

    def __enter__(self) -> "ActingAs":
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
        """Open a directory in an open one; PermissionError where the owner may not read it."""
        return self._admitted(open_child(directory, name), name, 0o5)

    def open_regular(self, directory: int, name: bytes, *, keep_atime: bool = False) -> int:
        """Open a regular file for reading; PermissionError where the owner may not.

        `keep_atime` leaves no trace on a file that is the owner's.
        """
        if keep_atime:
            with suppress(PermissionError):  # not the owner's
                fd = open_regular(directory, name, FOR_READING | os.O_NOATIME)
                return self._admitted(fd, name, 0o4)
        return self.open_seen(directory, name)[0]

    def open_seen(self, directory: int, name: bytes) -> tuple[int, os.stat_result]:
        """As `open_regular`, with the file's stat."""
        fd, found = open_seen(directory, name, FOR_READING)
        return self._admitted(fd, name, 0o4), found

    def _admitted(self, fd: int, name: bytes, bits: int) -> int:
        """The descriptor, where the kernel said that the owner may, or else where its mode does."""
        if self.maker == self.owner:
            return fd
        found = os.fstat(fd)
        if found.st_uid == self.owner[0]:
            return fd
        # the mask of an access list, which a mode shows as its group's bits, says too little
        group = 3 if found.st_gid == self.owner[1] else 0
        has_list = "system.posix_acl_access" in os.listxattr(fd)
        if not has_list and found.st_mode >> group & bits == bits:
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
                _must(_libc.capset(_CAP_HEADER, _CAP_SETS.pack(*self._none)))
            if self._parent is not None:
                # a change of fsuid or fsgid takes away a worker's signal that its parent died
                die_with_parent(self._parent)
        except BaseException:
            self._become_self()
            raise

    def _become_self(self) -> None:
        if self._drops:
            _must(_libc.capset(_CAP_HEADER, _CAP_SETS.pack(*self._mine)))
        if self._changes:
            _libc.setfsuid(self._me[0])
            _libc.setfsgid(self._me[1])
            _set_groups(self._groups)
            if _fs_ids() != self._me:
                raise ResourceError("cannot act as the daemon again: the kernel refuses")
            if self._parent is not None:
                die_with_parent(self._parent)


def _set_groups(groups: list[int]) -> None:
    listed = (ctypes.c_uint32 * len(groups))(*groups)
    _must(_libc.syscall(ctypes.c_long(_SYS_SETGROUPS), len(groups), listed))


def _fs_ids() -> Owner:
    return int(_libc.setfsuid(-1)), int(_libc.setfsgid(-1))  # which change nothing, and so ask


def _must(result: int) -> None:
    if result != 0:
        reason = os.strerror(number := ctypes.get_errno())
        raise ResourceError(f"cannot change what a thread acts as: {reason}", errno=number)
