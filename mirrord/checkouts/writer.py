"""Writing into a tree that belongs to somebody else, and may change under our hands.

Owns every change of a tree on disk. All names are looked up through open directories that were opened without following links, a
file is always created anew (so no descriptor or hard link of its user's reaches it), and only what was just created here is
given away by chown. A crash leaves a tree that differs from its manifest, which a scan finds.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import CheckoutBusyError
from ..host.files import find_stat, is_locked, make_whiteout, open_child, remove, set_owner, shown_path, unlock, write_all

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_REPLACED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class TreeWriter:
    """Writes below the directory `root`, a descriptor that stays the caller's.

    New files belong to `owner` (uid, gid; the daemon's own when None) and have `mtime_ns`. Paths are bytes without a leading
    slash; they must come from a checked tree.
    """

    def __init__(self, root: int, *, owner: tuple[int, int] | None = None, mtime_ns: int) -> None:
        self._root = root
        self._stack: list[tuple[bytes, int]] = []
        self._here, self._here_fd = b"", root
        self._mtime = (mtime_ns, mtime_ns)
        self._owner = owner if owner != (os.geteuid(), os.getegid()) else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pop_to(0)

    def write_file(self, path: bytes, data: bytes, *, executable: bool = False) -> os.stat_result:
        """Create or replace a regular file."""
        directory, name = self.locate(path)
        permissions = 0o755 if executable else 0o644
        fd = self._create(directory, name, permissions)
        try:
            if data:
                write_all(fd, data)
            if self._owner:
                os.fchown(fd, *self._owner)
            os.utime(fd, ns=self._mtime)
            found = os.fstat(fd)
            if stat.S_IMODE(found.st_mode) != permissions:
                os.fchmod(fd, permissions)
                found = os.fstat(fd)
            return found
        finally:
            os.close(fd)

    def write_symlink(self, path: bytes, target: bytes) -> os.stat_result:
        """Create or replace a symbolic link."""
        directory, name = self.locate(path)
        try:
            os.symlink(target, name, dir_fd=directory)
        except FileExistsError:
            self._clear(directory, path, name)
            os.symlink(target, name, dir_fd=directory)
        owner = self._owner or (os.geteuid(), os.getegid())
        return set_owner(directory, name, *owner, mtime_ns=self._mtime[0])

    def link_file(self, path: bytes, source: Path) -> os.stat_result:
        """Create a file as one more link to `source`, on the same file system. For layers only."""
        directory, name = self.locate(path)
        os.link(source, name, dst_dir_fd=directory, follow_symlinks=False)
        return self.get_stat(path)

    def share_file(self, path: bytes, target: Path) -> None:
        """Give a file that was just written one more name. For layers only."""
        directory, name = self.locate(path)
        os.link(name, target, src_dir_fd=directory, follow_symlinks=False)

    def write_whiteout(self, path: bytes) -> None:
        """Hide a name of the overlay layers below; its directories are made. For layers only."""
        self.make_directories(path.rpartition(b"/")[0])
        make_whiteout(*self.locate(path))

    def make_directory(self, path: bytes) -> None:
        """Make a directory; one that is there and sound is kept with what is in it, anything else is replaced."""
        if not path:
            self._mend(self._root)
            return
        directory, name = self.locate(path)
        try:
            os.mkdir(name, 0o755, dir_fd=directory)
            self._adopt(directory, path, name)
        except FileExistsError:
            if not self._keep(directory, path, name):
                self._clear(directory, path, name)
                os.mkdir(name, 0o755, dir_fd=directory)
                self._adopt(directory, path, name)

    def make_directories(self, path: bytes) -> None:
        """Make a directory and those above it."""
        parts = path.split(b"/") if path else []
        for depth in range(1, len(parts) + 1):
            self.make_directory(b"/".join(parts[:depth]))

    def remove(self, path: bytes) -> None:
        """Remove whatever is at `path`; nothing there is fine, also where its directory is gone."""
        try:
            directory, name = self.locate(path)
        except CheckoutBusyError:
            return
        self._clear(directory, path, name)

    def find_stat(self, path: bytes) -> os.stat_result | None:
        """lstat of a path in the tree; None where there is nothing."""
        if not path:
            return os.fstat(self._root)
        try:
            directory, name = self.locate(path)
        except CheckoutBusyError:
            return None
        return find_stat(directory, name)

    def get_stat(self, path: bytes) -> os.stat_result:
        """lstat of a path that was just written."""
        found = self.find_stat(path)
        if found is None:
            raise _busy(path)
        return found

    def _create(self, directory: int, name: bytes, permissions: int) -> int:
        try:
            return os.open(name, _CREATE, permissions, dir_fd=directory)
        except FileExistsError:
            remove(directory, name)
        except PermissionError:
            unlock(directory, name)
            remove(directory, name)
        return os.open(name, _CREATE, permissions, dir_fd=directory)

    def _clear(self, directory: int, path: bytes, name: bytes) -> None:
        if self._here == path or self._here.startswith(path + b"/"):
            self._pop_to(path.count(b"/"))
        remove(directory, name)

    def _adopt(self, directory: int, path: bytes, name: bytes) -> None:
        """Give a directory that we just made its mode and owner, unless somebody put another in its place."""
        fd = self._open(directory, path, name)
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                raise _busy(path)
            if stat.S_IMODE(os.fstat(fd).st_mode) != 0o755:
                os.fchmod(fd, 0o755)
            if self._owner:
                os.fchown(fd, *self._owner)
        finally:
            os.close(fd)

    def _keep(self, directory: int, path: bytes, name: bytes) -> bool:
        """Mend a directory that is there; False where it is none, or somebody else's."""
        found = find_stat(directory, name)
        owner = self._owner or (os.geteuid(), os.getegid())
        if found is None or not stat.S_ISDIR(found.st_mode) or (found.st_uid, found.st_gid) != owner:
            return False
        fd = self._open(directory, path, name)
        try:
            self._mend(fd)
        finally:
            os.close(fd)
        return True

    def _mend(self, fd: int) -> None:
        """Undo what its user did to a directory itself: mode, flags, extended attributes."""
        if is_locked(fd):
            unlock(fd, b".")
        for attribute in os.listxattr(fd):
            os.removexattr(fd, attribute)
        if stat.S_IMODE(os.fstat(fd).st_mode) != 0o755:
            os.fchmod(fd, 0o755)

    def locate(self, path: bytes) -> tuple[int, bytes]:
        """The open directory of a path, and the name in it."""
        above, _, name = path.rpartition(b"/")
        if above != self._here:
            self._go(above)
        return self._here_fd, name

    def _go(self, above: bytes) -> None:
        """Make `above` the current directory, reusing what is open."""
        parts = above.split(b"/") if above else []
        shared = 0
        while shared < min(len(parts), len(self._stack)) and self._stack[shared][0] == parts[shared]:
            shared += 1
        self._pop_to(shared)
        for depth in range(shared, len(parts)):
            fd = self._open(self._here_fd, b"/".join(parts[: depth + 1]), parts[depth])
            self._stack.append((parts[depth], fd))
            self._here, self._here_fd = b"/".join(parts[: depth + 1]), fd

    def _pop_to(self, depth: int) -> None:
        while len(self._stack) > depth:
            os.close(self._stack.pop()[1])
        self._here = b"/".join(name for name, _ in self._stack)
        self._here_fd = self._stack[-1][1] if self._stack else self._root

    def _open(self, directory: int, path: bytes, name: bytes) -> int:
        try:
            return open_child(directory, name)
        except OSError as error:
            if error.errno in _REPLACED:
                raise _busy(path) from error
            raise


def _busy(path: bytes) -> CheckoutBusyError:
    return CheckoutBusyError(
        f"cannot write below {shown_path(path)}: it is not the directory it was",
        hint="stop what runs in the checkout, then reset it",
    )
