"""A process's own attributes: capabilities, limits, and acting with another user's rights."""

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from functools import cache
from pathlib import Path

from ..errors import ResourceError
from .files import list_attributes, open_child, open_regular, open_unnoticed

_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2  # linux/prctl.h

Owner = tuple[int, int]  # a uid with its gid

_libc = ctypes.CDLL(None, use_errno=True)


class Capability(IntEnum):
    """linux/capability.h"""

    CHOWN = 0
    DAC_OVERRIDE = 1
    FOWNER = 3
    SETGID = 6
    SETUID = 7
    SYS_MODULE = 16
    SYS_RAWIO = 17
    SYS_ADMIN = 21
    SYS_TIME = 25
    MKNOD = 27


def has_capabilities(*wanted: Capability) -> bool:
    """Return whether this process, root or not, has all of them effective."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    effective = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    return all(effective >> capability & 1 for capability in wanted)


def may_give_files_away() -> bool:
    """Return whether this process can make files for other users, and remove any of them.

    In a user namespace only for those of `is_mapped`.
    """
    return has_capabilities(Capability.CHOWN, Capability.DAC_OVERRIDE, Capability.FOWNER)


def is_mapped(owner: Owner) -> bool:
    """Return whether the user namespace of this process has a uid and a gid."""
    return all(
        any(first <= number < first + count for first, _, count in _read_map(kind))
        for kind, number in zip(("uid", "gid"), owner, strict=True)
    )


def in_user_namespace() -> bool:
    """Return whether this process is in a user namespace other than the first one."""
    return _read_map("uid") != [(0, 0, 2**32 - 1)]


@cache
def _read_map(kind: str) -> list[tuple[int, ...]]:
    lines = Path(f"/proc/self/{kind}_map").read_text(encoding="ascii").splitlines()
    return [tuple(map(int, line.split())) for line in lines]


def die_with_parent(parent_pid: int) -> None:
    """Request SIGKILL for when the thread of `parent_pid` that started this process ends."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise ResourceError(f"cannot tie a worker to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # it ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def dies_with_parent() -> bool:
    """Return whether `die_with_parent` is in effect: a change of credentials clears it."""
    number = ctypes.c_int()
    _libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0)
    return number.value == signal.SIGKILL


def lower_priority() -> None:
    """Give this thread, and the processes it starts, low CPU and disk priority.

    Linux keeps a nice value for each thread. Schedulers of disks derive the priority from it: 15 is
    the lowest of the best-effort class (ionice(1)). Only root can undo it: call it in a thread that
    ends. A thread that has a lower one, as under `nice`, keeps it: raising it is denied to users.
    """
    os.setpriority(os.PRIO_PROCESS, 0, max(15, os.getpriority(os.PRIO_PROCESS, 0)))


def search_path() -> str:
    """Return PATH without the working directory, which `.` and an empty entry mean."""
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(filter(os.path.isabs, entries)) or os.defpath


def memory_limit_bytes() -> int:
    """Return how much a process may allocate for untrusted data: half of RAM, 1 to 4 GiB."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1024**3, min(machine // 2, 4 * 1024**3))


def limit_memory() -> None:
    """Limit this process, and each that it starts, to `memory_limit_bytes`; then MemoryError.

    RLIMIT_DATA counts private writable mappings since Linux 4.7, not the packs that libgit2 and git
    map.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = memory_limit_bytes()
    limit = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def hide_argument(text: str) -> None:
    """Overwrite a text in this process's arguments, which every user can read in /proc."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[45:47])  # arg_start and arg_end (Linux 3.5)
    with suppress(OSError), open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        arguments = memory.read(end - start)
        memory.seek(start)
        memory.write(arguments.replace(os.fsencode(text), b"*" * len(os.fsencode(text))))


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def trim_memory() -> None:
    """Return freed memory to the kernel: glibc keeps it after libgit2 has walked large trees."""
    if trim := getattr(_libc, "malloc_trim", None):
        trim(0)


# mallopt(3), malloc.h of glibc
_M_ARENA_MAX = -8


def share_arenas() -> None:
    """Have all threads of this process allocate from two arenas, where glibc is its malloc.

    By default each thread gets one of its own, up to eight for each processor. What they freed is
    kept in pieces, of which `malloc_trim` returns little: of a daemon at rest after 1,200 turns
    19 MiB were such pieces, with two arenas 4 MiB.
    """
    if limit := getattr(_libc, "mallopt", None):
        limit(_M_ARENA_MAX, 2)


@cache
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


# -- acting as the owner of a tree -----------------------------------------------------------------
#
# One thread takes on that user's fsuid, fsgid and group and drops its capabilities. Linux keeps
# credentials for each thread. glibc's setgroups(3) would change them in all, hence the raw system
# call. Open descriptors keep working, so a thread that acts as a client can read a file that the
# daemon opened.

_SYS_SETGROUPS = 116 if platform.machine() == "x86_64" else 159  # asm-generic/unistd.h
# linux/capability.h: version 3, this thread; effective, permitted and inheritable for capabilities
# below 32, then for those above
_CAP_HEADER = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0), 8)
_CAP_SETS = struct.Struct("=6I")
for _call in (_libc.setfsuid, _libc.setfsgid):
    _call.argtypes = [ctypes.c_uint]
    _call.restype = ctypes.c_uint


_GIVING = (
    Capability.CHOWN,
    Capability.DAC_OVERRIDE,
    Capability.FOWNER,
    Capability.SETGID,
    Capability.SETUID,
)
_PR_CAP_AMBIENT, _AMBIENT_RAISE, _AMBIENT_CLEAR_ALL = 47, 2, 4  # linux/prctl.h


@contextmanager
def passing_capabilities() -> Iterator[None]:
    """Give a program that is started inside the capabilities to act as other users.

    execve(2) takes them from all but root, unless they are ambient. Only a user namespace with
    other ids has them.
    """
    if os.geteuid() == 0 or not has_capabilities(*_GIVING):
        yield
        return
    sets = ctypes.create_string_buffer(_CAP_SETS.size)
    _must(_libc.capget(_CAP_HEADER, sets))
    mine = _CAP_SETS.unpack(sets)
    # only what is permitted and inheritable can be ambient (capabilities(7))
    inherited = *mine[:2], sum(1 << capability for capability in _GIVING), *mine[3:]
    _must(_libc.capset(_CAP_HEADER, _CAP_SETS.pack(*inherited)))
    try:
        for capability in _GIVING:
            _must(_libc.prctl(_PR_CAP_AMBIENT, _AMBIENT_RAISE, int(capability), 0, 0))
        yield
    finally:
        drop_passed_capabilities()
        _must(_libc.capset(_CAP_HEADER, _CAP_SETS.pack(*mine)))


def drop_passed_capabilities() -> None:
    """Have programs that this process starts get no capabilities; it keeps its own."""
    _libc.prctl(_PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL, 0, 0, 0)  # EINVAL before Linux 4.3


class ActingAs:
    """`with ActingAs(owner) as owner:` makes this thread open, make and change files as that user.

    None is the daemon itself, and changes nothing. The block may be entered again inside; `aside`
    suspends it. `maker` owns files made inside: the owner, unless the daemon lacks CAP_SETUID and
    CAP_SETGID. Then the daemon keeps its capabilities, and checks modes for what the owner may
    read. Belongs to one thread.
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
        self._checks = self.maker != self.owner
        self.open_directory: Callable[[int, bytes], int] = (
            self._open_allowed if self._checks else open_child
        )
        """Open a directory in an open one. PermissionError if the owner may not read it."""
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
        """Act as the daemon inside the block."""
        depth, self._depth = self._depth, 0
        if depth:
            self._become_self()
        try:
            yield
        finally:
            if depth:
                self._become_owner()
            self._depth = depth

    def _open_allowed(self, directory: int, name: bytes) -> int:
        return self._check_access(open_child(directory, name), name, 0o5)

    def open_regular(self, directory: int, name: bytes, *, keep_atime: bool = False) -> int:
        """Open a regular file for reading. PermissionError if the owner may not read it.

        `keep_atime` leaves the access time of a file that the owner owns.
        """
        fd = (open_unnoticed if keep_atime else open_regular)(directory, name)
        return self._check_access(fd, name, 0o4) if self._checks else fd

    def _check_access(self, fd: int, name: bytes, bits: int) -> int:
        """Return `fd` if the file's mode allows the owner what the kernel did not check."""
        st = os.fstat(fd)
        if st.st_uid == self.owner[0]:
            return fd
        # with an ACL, the group bits of a mode are its mask and not the group's rights
        group = 3 if st.st_gid == self.owner[1] else 0
        has_list = "system.posix_acl_access" in list_attributes(fd)
        if not has_list and st.st_mode >> group & bits == bits:
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
                # a change of fsuid or fsgid clears PR_SET_PDEATHSIG
                die_with_parent(self._parent)
        except BaseException:
            self._become_self()
            raise

    def _become_self(self) -> None:
        # first, because setfsuid(2) and setgroups(2) need capabilities that were dropped
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
    # -1 is invalid: both return the present id and change nothing
    return int(_libc.setfsuid(-1)), int(_libc.setfsgid(-1))


def _must(result: int) -> None:
    if result != 0:
        reason = os.strerror(number := ctypes.get_errno())
        raise ResourceError(f"cannot change a thread's credentials: {reason}", errno=number)
