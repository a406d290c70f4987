"""Writes into a tree of another user, who may change it at the same time.

Acts as the tree's owner, through directories opened without following a link or entering a mount.
Every file is a new one, so that no descriptor or hard link of the user refers to it. A crash leaves
a tree that differs from its manifest, which a scan finds.
"""

import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Self

from ..errors import CheckoutBusyError
from ..host import files
from ..host.processes import ActingAs
from ..host.trash import TrashDirectory, remove
from .reader import TreeReader, enter, parents


class TreeWriter:
    """Writes below `root`, a directory descriptor that the caller closes.

    New files belong to `owner` (`ActingAs(None)` is the daemon) and have `mtime_ns`. Paths are
    bytes without a leading slash, from a checked tree. `touched` are the directories that were
    made, restored or written in. Replaced and removed files go to `trash`, or are deleted with the
    owner's rights.
    """

    def __init__(
        self, root: int, owner: ActingAs, *, mtime_ns: int, trash: TrashDirectory | None = None
    ) -> None:
        self.touched: set[bytes] = set()
        self.owner = owner
        self._root = root
        self._reader = TreeReader(root, owner)
        self._mtime = (mtime_ns, mtime_ns)
        self._trash = trash
        self._made: set[bytes] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._reader.close()

    # -- files -------------------------------------------------------------------------------------

    def write_file(self, path: bytes, data: bytes, *, executable: bool = False) -> os.stat_result:
        permissions = 0o755 if executable else 0o644
        with self.owner, files.opened(self._create(path, permissions)) as fd:
            if data:
                files.write_all(fd, data)
            return self._finish(fd, permissions)

    def copy_file(
        self,
        path: bytes,
        source: int,
        *,
        permissions: int,
        mtime_ns: int | None = None,
        attributes: Mapping[str, bytes] = MappingProxyType({}),
    ) -> os.stat_result:
        """Create or replace a regular file with the current bytes of an open one."""
        with self.owner, files.opened(self._create(path, permissions)) as fd:
            files.copy_bytes(source, fd, os.fstat(source).st_size)
            for name, value in attributes.items():
                os.setxattr(fd, name, value)
            return self._finish(fd, permissions, mtime_ns)

    def write_symlink(
        self, path: bytes, target: bytes, *, mtime_ns: int | None = None
    ) -> os.stat_result:
        with self.owner:
            directory, name = self._enter(path)
            try:
                os.symlink(target, name, dir_fd=directory)
            except FileExistsError:
                self._clear(directory, path, name)
                os.symlink(target, name, dir_fd=directory)
            maker, _ = self.owner.maker
            when = self._mtime[0] if mtime_ns is None else mtime_ns
            return files.set_link_owner(directory, name, self.owner.owner, when, maker=maker)

    def link_file(self, path: bytes, source: Path) -> os.stat_result:
        """Make or replace a hard link to a daemon's file; returns its stat. For layers only."""
        directory, name = self._enter(path)
        try:
            os.link(source, name, dst_dir_fd=directory, follow_symlinks=False)
        except FileExistsError:
            self._clear(directory, path, name)
            os.link(source, name, dst_dir_fd=directory, follow_symlinks=False)
        return os.stat(source, follow_symlinks=False)

    def share_file(self, path: bytes, target: Path) -> None:
        """Make a hard link to a file that was just written. For layers only."""
        directory, name = self.locate(path)
        os.link(name, target, src_dir_fd=directory, follow_symlinks=False)

    def write_whiteout(self, path: bytes) -> None:
        """Hide a name of the layers below. For layers only."""
        files.make_whiteout(*self.locate(path))

    def _create(self, path: bytes, permissions: int) -> int:
        directory, name = self._enter(path)
        try:
            return os.open(name, files.CREATE, permissions, dir_fd=directory)
        except FileExistsError:
            self._clear(directory, path, name)
        except PermissionError:
            # the directory may be immutable, append-only or without its w bit
            if self._trash is None:
                raise
            with self.owner.aside():
                files.unlock(directory, name)
            self._clear(directory, path, name)
        return os.open(name, files.CREATE, permissions, dir_fd=directory)

    def _finish(self, fd: int, permissions: int, mtime_ns: int | None = None) -> os.stat_result:
        """Set owner, time and mode of a file that was just written."""
        os.utime(fd, ns=self._mtime if mtime_ns is None else (mtime_ns, mtime_ns))
        st = os.fstat(fd)
        # a set-gid directory may have set the group
        if (st.st_uid, st.st_gid) != self.owner.owner:
            os.fchown(fd, *self.owner.owner)
            st = os.fstat(fd)
        if stat.S_IMODE(st.st_mode) != permissions:
            os.fchmod(fd, permissions)
            st = os.fstat(fd)
        return st

    # -- directories -------------------------------------------------------------------------------

    def make_directory(self, path: bytes) -> None:
        """Make a directory; keeps a sound one with its content, replaces anything else."""
        self.touched.add(path)
        with self.owner:
            if not path:
                self._restore(self._root)
                return
            directory, name = self._enter(path)
            try:
                os.mkdir(name, 0o755, dir_fd=directory)
            except FileExistsError:
                st = files.find_stat(directory, name)
                if st and stat.S_ISDIR(st.st_mode) and (st.st_uid, st.st_gid) == self.owner.owner:
                    with files.opened(self._open(directory, path, name)) as fd:
                        self._restore(fd)
                    return
                self._clear(directory, path, name)
                os.mkdir(name, 0o755, dir_fd=directory)
            self._adopt(directory, path, name)

    def make_directories(self, path: bytes) -> None:
        """Make a directory and its parents; an existing one stays as it is."""
        with self.owner:
            for prefix in (*parents(path), path) if path else ():
                if prefix in self._made:
                    continue
                directory, name = self._enter(prefix)
                with suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=directory)
                    self._adopt(directory, prefix, name)
                self._made.add(prefix)

    def finish_directory(
        self, path: bytes, permissions: int, mtime_ns: int, attributes: Mapping[str, bytes]
    ) -> None:
        """Set attributes, mode and time of a directory, once its content is written."""
        with self.owner:
            directory, name = self._enter(path)
            self._reader.leave(path)
            with files.opened(self._open(directory, path, name)) as fd:
                # before the mode, which may take away the w bit that they need (xattr(7))
                for attribute, value in attributes.items():
                    os.setxattr(fd, attribute, value)
                os.fchmod(fd, permissions)
                os.utime(fd, ns=(mtime_ns, mtime_ns))

    def _adopt(self, directory: int, path: bytes, name: bytes) -> None:
        """Set mode and owner of a new directory; CheckoutBusyError if it was replaced since."""
        with files.opened(self._open(directory, path, name)) as fd:
            st = os.fstat(fd)
            if st.st_uid != self.owner.maker[0]:
                raise _busy(path)
            # mkdir(2) takes off the bits of the umask
            if stat.S_IMODE(st.st_mode) != 0o755:
                os.fchmod(fd, 0o755)
            if (st.st_uid, st.st_gid) != self.owner.owner:
                os.fchown(fd, *self.owner.owner)

    def _open(self, directory: int, path: bytes, name: bytes) -> int:
        try:
            return enter(self.owner, directory, path, name)
        except FileNotFoundError as error:
            raise _busy(path) from error

    def _restore(self, fd: int) -> None:
        """Undo a user's changes of a directory itself: mode, flags, extended attributes."""
        if files.is_locked(fd):
            with self.owner.aside():
                files.unlock(fd, b".")
        # ACLs are among them
        for attribute in files.list_attributes(fd):
            os.removexattr(fd, attribute)
        if stat.S_IMODE(os.fstat(fd).st_mode) != 0o755:
            os.fchmod(fd, 0o755)

    # -- removal -----------------------------------------------------------------------------------

    def remove(self, path: bytes) -> None:
        """Remove anything at `path`; does nothing where it or its parent is gone."""
        with self.owner:
            try:
                directory, name = self._reader.locate(path)
            except FileNotFoundError:
                return
            self.touched.add(path.rpartition(b"/")[0])
            self._clear(directory, path, name)

    def remove_empty_above(self, path: bytes) -> None:
        """Remove the directories above a removed file that are now empty, as git does."""
        self._made.clear()
        with self.owner:
            while path := path.rpartition(b"/")[0]:
                try:
                    directory, name = self._reader.locate(path)
                    self._reader.leave(path)
                    os.rmdir(name, dir_fd=directory)
                except OSError:
                    return

    def _clear(self, directory: int, path: bytes, name: bytes) -> None:
        self._reader.leave(path)
        self._made.clear()
        if self._trash is None:
            remove(directory, name)
        else:
            with self.owner.aside():  # it may belong to another user, or be locked
                self._trash.discard(directory, name)

    # -- stat --------------------------------------------------------------------------------------

    def find_stat(self, path: bytes) -> os.stat_result | None:
        """Return the lstat of a path; None where there is nothing."""
        with self.owner:
            return self._reader.find_stat(path)

    def get_stat(self, path: bytes) -> os.stat_result:
        return self.stats_of([path])[path]

    def stats_of(self, paths: Iterable[bytes]) -> dict[bytes, os.stat_result]:
        """Return the lstat of each path; CheckoutBusyError where one is gone."""
        stats = {}
        with self.owner:
            for path in paths:
                if (seen := self._reader.find_stat(path)) is None:
                    raise _busy(path)
                stats[path] = seen
        return stats

    def locate(self, path: bytes) -> tuple[int, bytes]:
        """Return the open parent of a path and the name in it; CheckoutBusyError if it is gone."""
        try:
            return self._reader.locate(path)
        except FileNotFoundError as error:
            raise _busy(path) from error

    def _enter(self, path: bytes) -> tuple[int, bytes]:
        """`locate` a path to change it."""
        self.touched.add(path.rpartition(b"/")[0])
        return self.locate(path)


def _busy(path: bytes) -> CheckoutBusyError:
    return CheckoutBusyError(
        f"cannot write below {files.shown_path(path)}: the directory was replaced",
        hint="stop the processes in the checkout, then reset it",
    )
