"""Writing into a tree that belongs to somebody else, and may change under our hands.

Owns every change of a tree on disk. All names are looked up through open directories that were opened without following links, a
file is always created anew (so no descriptor or hard link of its user's reaches it), and only what was just created here is
given away by chown. A crash leaves a tree that differs from its manifest, which a scan finds.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import CheckoutBusyError
from ..host.files import find_stat, is_locked, make_whiteout, opened, remove, set_owner, unlock, write_all
from .descent import Descent, busy, enter
from .graves import Graves

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_ONLY = 0o444
_CHUNK_BYTES = 1 << 20


class TreeWriter:
    """Writes below the directory `root`, a descriptor that stays the caller's.

    New files belong to `owner` (uid, gid; the daemon's own when None) and have `mtime_ns`. Paths are bytes without a leading
    slash; they must come from a checked tree. `touched` are the directories that were made, mended or written in. What is
    replaced or removed is deleted, or put into `graves`.
    """

    def __init__(self, root: int, *, owner: tuple[int, int] | None = None, mtime_ns: int, graves: Graves | None = None) -> None:
        self.touched: set[bytes] = set()
        self._root = root
        self._descent = Descent(root)
        self._mtime = (mtime_ns, mtime_ns)
        self._take_away = graves.bury if graves else remove
        self._owner = owner if owner != (os.geteuid(), os.getegid()) else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._descent.close()

    def write_file(self, path: bytes, data: bytes, *, executable: bool = False) -> os.stat_result:
        """Create or replace a regular file."""
        directory, name = self._enter(path)
        permissions = 0o755 if executable else 0o644
        fd = self._create(directory, name, permissions)
        try:
            if data:
                write_all(fd, data)
            return self._finish(fd, permissions)
        finally:
            os.close(fd)

    def write_symlink(self, path: bytes, target: bytes) -> os.stat_result:
        """Create or replace a symbolic link."""
        directory, name = self._enter(path)
        try:
            os.symlink(target, name, dir_fd=directory)
        except FileExistsError:
            self._clear(directory, path, name)
            os.symlink(target, name, dir_fd=directory)
        owner = self._owner or (os.geteuid(), os.getegid())
        return set_owner(directory, name, *owner, mtime_ns=self._mtime[0])

    def link_file(self, path: bytes, source: Path) -> os.stat_result:
        """Make or replace a hard link to a file of the daemon's; the stat of that file."""
        directory, name = self._enter(path)
        try:
            os.link(source, name, dst_dir_fd=directory, follow_symlinks=False)
        except FileExistsError:
            self._clear(directory, path, name)
            os.link(source, name, dst_dir_fd=directory, follow_symlinks=False)
        return os.stat(source, follow_symlinks=False)

    def copy_file(self, path: bytes, source: Path) -> tuple[os.stat_result, bytes]:
        """Copy a file of the daemon's as one that nobody writes; its stat, and the blob id of the bytes that were read."""
        directory, name = self._enter(path)
        with source.open("rb") as original, opened(self._create(directory, name, _READ_ONLY)) as fd:
            digest = hashlib.sha1(b"blob %d\0" % os.fstat(original.fileno()).st_size)
            while data := original.read(_CHUNK_BYTES):
                digest.update(data)
                write_all(fd, data)
            return self._finish(fd, _READ_ONLY), digest.digest()

    def share_file(self, path: bytes, target: Path) -> None:
        """Give a file that was just written one more name. For layers only."""
        directory, name = self.locate(path)
        os.link(name, target, src_dir_fd=directory, follow_symlinks=False)

    def write_whiteout(self, path: bytes) -> None:
        """Hide a name of the overlay layers below. For layers only."""
        make_whiteout(*self.locate(path))

    def make_directory(self, path: bytes) -> None:
        """Make a directory; one that is there and sound is kept with what is in it, anything else is replaced."""
        self.touched.add(path)
        if not path:
            self._mend(self._root)
            return
        directory, name = self._enter(path)
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
            directory, name = self._enter(path)
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
            raise busy(path)
        return found

    def _create(self, directory: int, name: bytes, permissions: int) -> int:
        try:
            return os.open(name, _CREATE, permissions, dir_fd=directory)
        except FileExistsError:
            self._take_away(directory, name)
        except PermissionError:
            unlock(directory, name)
            self._take_away(directory, name)
        return os.open(name, _CREATE, permissions, dir_fd=directory)

    def _finish(self, fd: int, permissions: int) -> os.stat_result:
        """Give a file that was just written its owner, time and mode."""
        if self._owner:
            os.fchown(fd, *self._owner)
        os.utime(fd, ns=self._mtime)
        found = os.fstat(fd)
        if stat.S_IMODE(found.st_mode) != permissions:
            os.fchmod(fd, permissions)
            found = os.fstat(fd)
        return found

    def _clear(self, directory: int, path: bytes, name: bytes) -> None:
        self._descent.leave(path)
        self._take_away(directory, name)

    def _adopt(self, directory: int, path: bytes, name: bytes) -> None:
        """Give a directory that we just made its mode and owner, unless somebody put another in its place."""
        fd = enter(directory, path, name)
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                raise busy(path)
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
        fd = enter(directory, path, name)
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
        return self._descent.locate(path)

    def _enter(self, path: bytes) -> tuple[int, bytes]:
        """The same, where something will be changed in that directory."""
        self.touched.add(path.rpartition(b"/")[0])
        return self._descent.locate(path)
