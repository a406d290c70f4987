"""Files through directory descriptors, for trees whose owner may be hostile and change them.

Names are looked up only in an open directory, without following a symbolic link, entering a mount
or leaving that directory. No device or pipe is ever opened. Names are bytes.
"""

import ctypes
import errno
import fcntl
import os
import stat
import struct
import sys
from contextlib import suppress
from functools import cache
from io import BufferedReader
from pathlib import Path

from .. import errors
from ..model import shown
from ..presence import is_file, is_symlink, walk
from ..quoting import decode_name, quote_name

# O_NOFOLLOW: who owns the directory above could put a link in its place
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe would wait for its writer; O_NOCTTY: a terminal could become ours
FOR_READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# O_EXCL neither follows a link nor opens what is there: a client may have made the name first
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# O_PATH needs no right to the file itself, and opens links, sockets and devices without effect
_PATH = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC

# the errno of `open_plain` for a pipe or a device
NOT_PLAIN = errno.EINVAL

# linux/fs.h, on machines of 64 bits
_FS_IOC_SETFLAGS = 0x40086602
_LOCKING_FLAGS = 0x10 | 0x20  # FS_IMMUTABLE_FL, FS_APPEND_FL
_FICLONE = 0x40049409  # linux/fs.h
_AT_FDCWD = -100  # linux/fcntl.h
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2  # linux/fs.h
_SYS_OPENAT2 = 437  # the same on every architecture
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 0x1, 0x2, 0x4, 0x8  # linux/openat2.h

_libc = ctypes.CDLL(None, use_errno=True)
_libc.renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p) * 2 + (ctypes.c_uint,)
_libc.syscall.restype = ctypes.c_long


class _OpenHow(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("flags", "mode", "resolve"))


_HOW_BYTES = ctypes.c_size_t(ctypes.sizeof(_OpenHow))


class opened:  # noqa: N801  (used as a function; a generator would cost 1 µs more each time)
    """Close `fd` at the end of the block."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *failure: object) -> None:
        os.close(self._fd)


def list_attributes(place: int | str, *, follow_symlinks: bool = True) -> list[str]:
    """Return the names of the extended attributes; none on a file system that has none."""
    try:
        return os.listxattr(place, follow_symlinks=follow_symlinks)
    except OSError as error:
        # NFS of version 3 and most of FUSE
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            return []
        raise


def open_directory(path: str | Path) -> int:
    """Open a directory by a trusted path. Its last component may not be a symbolic link."""
    return os.open(path, _DIRECTORY)


def open_beneath(
    directory: int, path: bytes, flags: int = _DIRECTORY, *, into_mounts: bool = False
) -> int:
    """Open a path below an open directory, by openat2(2) (Linux 5.6).

    A component that is a symbolic link is ELOOP; one that leads out of the directory, or that is a
    mount point (unless `into_mounts`), is EXDEV.
    """
    how = _how_to_open(flags, into_mounts)
    while True:
        fd = int(_libc.syscall(_SYS_OPENAT2, directory, path, how, _HOW_BYTES))
        if fd >= 0:
            return fd
        # EAGAIN: a concurrent rename or mount anywhere; the kernel cannot prove that `..` is safe
        if (number := ctypes.get_errno()) not in (errno.EINTR, errno.EAGAIN):
            raise OSError(number, os.strerror(number), path)


@cache
def _how_to_open(flags: int, into_mounts: bool) -> object:
    resolve = _BENEATH | _NO_SYMLINKS | _NO_MAGICLINKS | (0 if into_mounts else _NO_XDEV)
    return ctypes.byref(_OpenHow(flags | os.O_CLOEXEC, 0, resolve))


def open_plain(path: str | Path) -> BufferedReader:
    """Open a regular file, or what a symbolic link leads to, for reading; OSError for other kinds.

    A pipe or a terminal would make its reader wait for ever, and the thread could never end.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if stat.S_ISDIR(mode := os.fstat(fd).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(NOT_PLAIN, "not a regular file", str(path))
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_plain(path: str | Path) -> bytes:
    """Read a regular file, as `open_plain`."""
    with open_plain(path) as file:
        return file.read()


def open_child(directory: int, name: bytes) -> int:
    """Open the directory `name` in `directory`; ELOOP or ENOTDIR if it is anything else."""
    return open_own(directory, name, _DIRECTORY)


def open_top(root: Path) -> int:
    """Open the top of a pool tree; CheckoutBusyError where it is a mount point."""
    with opened(open_directory(root.parent)) as above:
        try:
            return open_child(above, os.fsencode(root.name))
        except OSError as error:
            # openat2(2) with RESOLVE_NO_XDEV enters no mount
            if error.errno == errno.EXDEV:
                raise mounted_on(os.fsencode(root)) from error
            raise


def open_regular(directory: int, name: bytes, flags: int = FOR_READING) -> int:
    """Open a regular file without waiting on a pipe; FileNotFoundError for other kinds."""
    fd = open_own(directory, name, flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "not a regular file", name)
    return fd


def open_unnoticed(directory: int, name: bytes) -> int:
    """Open a regular file for reading; its access time stays, if this user owns it."""
    try:
        return open_regular(directory, name, FOR_READING | os.O_NOATIME)
    except PermissionError:  # O_NOATIME is for the file's owner only
        return open_regular(directory, name)


def open_own(directory: int, name: bytes, flags: int) -> int:
    """Open `name` whatever its mode if this user owns it, else PermissionError.

    A directory gets mode u+rwx for good; the mode of a file is restored.
    """
    try:
        return open_beneath(directory, name, flags)
    except PermissionError:
        with opened(open_beneath(directory, name, _PATH)) as place:
            # fchmod(2) of an O_PATH descriptor is EBADF, and the name may be another file's by now
            mode, itself = os.fstat(place).st_mode, f"/proc/self/fd/{place}"
            if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                raise
            os.chmod(itself, stat.S_IMODE(mode) | (0o700 if stat.S_ISDIR(mode) else 0o400))
            try:
                # a name in /proc/self/fd is a link itself: with O_NOFOLLOW it is ELOOP
                return os.open(itself, flags & ~os.O_NOFOLLOW)
            finally:
                if stat.S_ISREG(mode):
                    os.chmod(itself, stat.S_IMODE(mode))


def find_stat(directory: int, name: bytes) -> os.stat_result | None:
    """Return lstat of a name, or None if it does not exist."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


# as os.fsencode, which makes four calls for each name of each directory that is read or removed
_AS_BYTES = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()


def names_in(directory: int) -> list[bytes]:
    return [name.encode(*_AS_BYTES) for name in os.listdir(directory)]


def entries_in(directory: int) -> list[tuple[bytes, int]]:
    """List names, each with its kind: S_IFREG, S_IFDIR, S_IFLNK, or 0 for any other.

    Kinds come with the names (d_type); few file systems need a stat for each.
    """
    with os.scandir(directory) as listed:
        return [(entry.name.encode(*_AS_BYTES), _kind_of(entry)) for entry in listed]


def _kind_of(entry: os.DirEntry[str]) -> int:
    if entry.is_file(follow_symlinks=False):
        return stat.S_IFREG
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR
    return stat.S_IFLNK if entry.is_symlink() else 0


def exchange(one: Path, other: Path) -> None:
    """Exchange two paths atomically. Mounts inside move along."""
    paths = _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other)
    if _libc.renameat2(*paths, _RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(one), None, str(other))


def rename_new(source: int, name: bytes, target: int, new_name: bytes) -> None:
    """Rename `name` of an open directory to `new_name` in another; FileExistsError if it exists."""
    if _libc.renameat2(source, name, target, new_name, _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name, None, new_name)


def grant_search(directory: str, uid: int) -> None:
    """Let one user enter, but not list, a directory of mode 0700: an ACL entry `user:UID:--x`.

    A later chmod would change the ACL's mask and lock that user out. Raises
    BackendUnavailableError on a file system without ACLs.
    """
    nobody = 0xFFFFFFFF
    # linux/posix_acl_xattr.h: version 2; the owner, this user, the owner's group, the mask, others
    entries = (1, 7, nobody), (2, 1, uid), (4, 0, nobody), (16, 1, nobody), (32, 0, nobody)
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(directory, "system.posix_acl_access", acl)
    except OSError as error:
        # a file system that has none, or is mounted with noacl
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        raise errors.BackendUnavailableError(
            f"cannot open {directory} to uid {uid}: its file system has no access control lists",
            hint="put state_dir on ext4, xfs or btrfs, mounted without noacl",
        ) from error


def set_link_owner(
    directory: int, name: bytes, owner: tuple[int, int], mtime_ns: int, *, maker: int
) -> os.stat_result:
    """Set owner and time of a symbolic link that `maker` (a uid) just made.

    The directory's owner may have replaced it, for example by a hard link to another user's file.
    So it is opened first, and anything else than a link of the maker's is left alone.
    """
    with opened(os.open(name, _PATH, dir_fd=directory)) as fd:
        st = os.fstat(fd)
        if not stat.S_ISLNK(st.st_mode) or st.st_uid != maker:
            fact = f"cannot make link {shown_path(name)}: another process replaced it"
            raise errors.CheckoutBusyError(fact, hint="stop the processes in the checkout")
        # leads to the symbolic link of this descriptor, and not on to that link's target
        itself = f"/proc/self/fd/{fd}"
        if owner != (st.st_uid, st.st_gid):
            os.chown(itself, *owner)
        os.utime(itself, ns=(mtime_ns, mtime_ns))
        return os.fstat(fd)


def make_whiteout(directory: int | None, name: bytes) -> None:
    """Hide a name of lower layers by a device 0/0, which any user may make since Linux 5.8."""
    os.mknod(name, stat.S_IFCHR | 0o000, os.makedev(0, 0), dir_fd=directory)


def mounted_on(
    path: bytes, kind: type[errors.CheckoutBusyError] = errors.CheckoutBusyError
) -> errors.CheckoutBusyError:
    """Return the error for a mount point, whose files belong to another file system."""
    return kind(
        f"cannot change {shown_path(path)}: a file system is mounted on it",
        hint="unmount it, then try again",
        path=quote_name(path),
    )


def unlock(directory: int, name: bytes) -> None:
    """Clear the flags and modes that prevent `name` from being removed or renamed."""
    # no name can be removed from an immutable or append-only directory either
    clear_flags(directory)
    st = find_stat(directory, name)
    if st is None or not (stat.S_ISREG(st.st_mode) or stat.S_ISDIR(st.st_mode)):
        return
    try:
        fd = open_own(directory, name, FOR_READING)
    except PermissionError:
        raise
    except OSError:
        return
    with opened(fd):
        clear_flags(fd)


def clear_flags(fd: int) -> None:
    """Clear the flags of an open file or directory, and make a directory of ours writable."""
    flags = read_flags(fd)
    if flags & _LOCKING_FLAGS:
        try:
            fcntl.ioctl(fd, _FS_IOC_SETFLAGS, struct.pack("L", flags & ~_LOCKING_FLAGS))
        except OSError as error:
            fact = f"cannot clear the immutable flag of a file: {error.strerror}"
            raise errors.ResourceError(fact, hint="the daemon needs CAP_LINUX_IMMUTABLE") from error
    st = os.fstat(fd)
    is_closed = stat.S_ISDIR(st.st_mode) and st.st_mode & 0o700 != 0o700
    if is_closed and st.st_uid == os.geteuid():
        os.fchmod(fd, stat.S_IMODE(st.st_mode) | 0o700)


_FS_IOC_GETFLAGS = 0x80086601  # linux/fs.h


def read_flags(fd: int) -> int:
    """Return the inode flags; 0 on a file system without them."""
    try:
        answer = fcntl.ioctl(fd, _FS_IOC_GETFLAGS, bytes(struct.calcsize("L")))
    except OSError as error:
        # which of them says "no flags here" differs between file systems, and between versions of
        # Linux
        if error.errno not in (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        return 0
    # ioctl_iflags(2): declared with a long, but the kernel reads and writes an int
    return int(struct.unpack("L", answer)[0]) & 0xFFFFFFFF


def is_locked(fd: int) -> bool:
    """Return whether the immutable or the append-only flag is set."""
    return bool(read_flags(fd) & _LOCKING_FLAGS)


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`. One write(2) may write less, and at most 2 GiB."""
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, memoryview(data)[written:])


# copy_file_range(2): EXDEV between file systems, EINVAL and EOPNOTSUPP from one that has it not,
# ENOSYS or EPERM where a container's seccomp profile has no such call
_NO_COPY = {errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM}


def copy_bytes(source: int, sink: int, size: int) -> None:
    """Copy the first `size` bytes of an open file into an empty one.

    By reflink, else by copy_file_range(2), else by read and write: which pairs of file systems
    support the first two differs between versions of Linux.
    """
    with suppress(OSError):
        fcntl.ioctl(sink, _FICLONE, source)
        # it may have grown meanwhile; else xfs would copy the last block, all of a small file
        if os.fstat(sink).st_size > size:
            os.ftruncate(sink, size)
        return
    offset = 0
    try:
        while offset < size and (copied := os.copy_file_range(source, sink, size - offset, offset)):
            offset += copied
    except OSError as error:
        if error.errno not in _NO_COPY:
            raise
    while offset < size and (data := os.pread(source, min(size - offset, 1 << 20), offset)):
        write_all(sink, data)
        offset += len(data)


def sync_directory(path: Path) -> None:
    """Flush the names in a directory, to survive a power failure."""
    with opened(open_directory(path)) as fd:
        os.fsync(fd)


def sync_file(path: Path) -> None:
    """Flush a file's content and its name, to survive a power failure."""
    # fsync(2) flushes what others wrote too, so reading is enough
    with opened(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as fd:
        os.fsync(fd)
    sync_directory(path.parent)


def sync_tree(path: Path) -> None:
    """Flush each file and directory of a small tree, to survive a power failure."""
    for directory, _, names in walk(path):
        for file in (os.path.join(directory, name) for name in names):
            if is_file(file) and not is_symlink(file):  # links are part of the directory
                with opened(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as fd:
                    os.fsync(fd)
        sync_directory(Path(directory))


def free_bytes(path: Path) -> int:
    """Return the free bytes below `path` for an unprivileged process."""
    # not f_bfree: ext4 keeps 5 % of its blocks for root alone
    st = os.statvfs(path)
    return st.f_bavail * st.f_frsize


_LEAST_BYTES = 64 * 1024  # what one lock file and one small object take


def has_room(path: Path) -> bool:
    """Return whether a small file could be written below `path`; True where that is unknown."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return True
    # f_files is 0 where inodes are not limited, as on btrfs
    return disk.f_bavail * disk.f_frsize >= _LEAST_BYTES and (disk.f_favail > 0 or not disk.f_files)


def shown_path(path: bytes) -> str:
    return shown(decode_name(path))
