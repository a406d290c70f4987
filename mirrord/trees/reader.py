"""Reads a tree of another user, never following a link or entering a mount, with bounded walks.

Keeps the directories above the last path open, so that its neighbours need no second open; also
measures the disk space of trees. Changes nothing. The caller acts as the owner.
"""

import errno
import hashlib
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from ..errors import MirrordError, TooLargeError
from ..host import files
from ..host.processes import ActingAs
from ..model import TREE_DEPTH_LIMIT, TREE_PATH_LIMIT_BYTES
from .manifest import blob_id


def _refuse(_path: bytes, error: Exception) -> None:
    raise error


class Look(NamedTuple):
    """The names in a directory, and whether it has neither attributes nor a lock (chattr)."""

    names: set[bytes]
    is_plain: bool


class TreeReader:
    """Reads below `root`, a directory descriptor that the caller closes."""

    def __init__(self, root: int, owner: ActingAs) -> None:
        self._root = root
        self._owner = owner
        self._stack: list[tuple[bytes, int]] = []  # paths end with a slash
        self._current, self._current_fd = b"", root

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        while self._stack:
            self._pop()

    def locate(self, path: bytes) -> tuple[int, bytes]:
        """Return the open parent directory of a path, and the name in it.

        Raises FileNotFoundError where a parent is no directory any more, PermissionError where its
        owner may not enter one, CheckoutBusyError where one is a mount point.
        """
        above, _, name = path.rpartition(b"/")
        if above != self._current:
            self._go(above)
        return self._current_fd, name

    def find_stat(self, path: bytes) -> os.stat_result | None:
        """Return the lstat of a path; None where it or a parent is gone."""
        if not path:
            return os.fstat(self._root)
        try:
            directory, name = self.locate(path)
        except FileNotFoundError:
            return None
        try:
            return os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except PermissionError as error:
            with suppress(PermissionError):  # the owner can add the missing x bit
                os.fchmod(directory, stat.S_IMODE(os.fstat(directory).st_mode) | stat.S_IXUSR)
                return files.find_stat(directory, name)
            raise PermissionError(error.errno, error.strerror, path) from error

    def iter_below(
        self,
        path: bytes,
        refused: Callable[[bytes, Exception], None] = _refuse,
        enters: Callable[[bytes], bool] = lambda _path: True,
    ) -> Iterator[tuple[bytes, int]]:
        """Yield each path from `path` down with its kind (`entries_in`), parents first, by name.

        Calls `refused` for a directory that the owner may not read or that is too deep; by default
        that raises. Skips the content of directories for which `enters` is false.
        """
        st = self.find_stat(path)
        pending = [(path, stat.S_IFMT(st.st_mode))] if st else []
        while pending:
            current, kind = pending.pop()
            yield current, kind
            if kind == stat.S_IFDIR and enters(current):
                try:
                    inside = self.entries_in(current)
                except FileNotFoundError:
                    continue
                except (PermissionError, TooLargeError) as error:
                    refused(current, error)
                else:
                    prefix = current + b"/" if current else b""
                    pending += [(prefix + name, kind) for name, kind in reversed(inside)]

    def iter_stats_below(
        self, path: bytes, refused: Callable[[bytes, Exception], None] = _refuse
    ) -> Iterator[tuple[bytes, os.stat_result]]:
        """Like `iter_below`, with the lstat of each path."""
        for below, _ in self.iter_below(path, refused):
            if (st := self.find_stat(below)) is not None:
                yield below, st

    def names_in(self, path: bytes) -> list[bytes]:
        """Return the sorted names in a directory; TooLargeError for one that is too deep."""
        return sorted(files.names_in(self._open(path)))

    def entries_in(self, path: bytes) -> list[tuple[bytes, int]]:
        """Like `names_in`, with the kind of each name (`host.files.entries_in`)."""
        return sorted(files.entries_in(self._open(path)))

    def _open(self, path: bytes) -> int:
        """Return the directory at a path, open until the next call."""
        if path.count(b"/") >= TREE_DEPTH_LIMIT or len(path) >= TREE_PATH_LIMIT_BYTES:
            raise TooLargeError(
                f"cannot read {files.shown_path(path[-200:])}: it is more than"
                f" {TREE_DEPTH_LIMIT} directories deep, or its path has more than"
                f" {TREE_PATH_LIMIT_BYTES} bytes",
                hint="remove it, or add it to .gitignore",
            )
        try:
            self._go(path)
        except PermissionError:
            self.find_stat(path)  # adds the missing x bit of the parent
            self._go(path)
        return self._current_fd

    def stats_in(self, path: bytes) -> list[tuple[bytes, os.stat_result]]:
        """Return the names in a directory, in order, each with its lstat."""
        inside = path + b"/" if path else b""
        names = self.names_in(path)
        try:
            directory, _ = self.locate(inside)
            return [
                (name, os.stat(name, dir_fd=directory, follow_symlinks=False)) for name in names
            ]
        except (FileNotFoundError, PermissionError):
            # one by one: leaves out what was removed meanwhile, and adds a missing x bit
            st = ((name, self.find_stat(inside + name)) for name in names)
            return [(name, seen) for name, seen in st if seen is not None]

    def look_into(self, path: bytes) -> Look | None:
        """Return what is known only from within a directory; None where it cannot be entered."""
        try:
            directory, _ = self.locate(path + b"/" if path else b"")
        except OSError:
            return None
        is_plain = not files.list_attributes(directory) and not files.is_locked(directory)
        return Look(set(files.names_in(directory)), is_plain)

    def leave(self, path: bytes) -> None:
        """Close the directories at and below `path`, which is removed next."""
        while self._stack and self._stack[-1][0].startswith(path + b"/"):
            self._pop()

    def _go(self, above: bytes) -> None:
        """Make `above` the current directory; reuses open parents and children."""
        wanted = above + b"/" if above else b""
        while self._stack and not wanted.startswith(self._stack[-1][0]):
            if self._stack[-1][0].startswith(wanted):
                self._current = above
                self._current_fd = dict(self._stack).get(wanted, self._root)
                return
            self._pop()
        offset, fd = (
            (len(self._stack[-1][0]), self._stack[-1][1]) if self._stack else (0, self._root)
        )
        while offset < len(wanted):
            end = wanted.index(b"/", offset)
            fd = enter(self._owner, fd, wanted[:end], wanted[offset:end])
            offset = end + 1
            self._stack.append((wanted[:offset], fd))
        self._current, self._current_fd = above, fd

    def _pop(self) -> None:
        os.close(self._stack.pop()[1])
        above, self._current_fd = self._stack[-1] if self._stack else (b"", self._root)
        self._current = above[:-1]


def parents(path: bytes) -> list[bytes]:
    """Return the directories above a path, top first, without the root."""
    parts = path.split(b"/")[:-1]
    return [b"/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


# a directory that was removed, or replaced by a file or by a link, which is never followed
_REPLACED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def enter(owner: ActingAs, directory: int, path: bytes, name: bytes) -> int:
    """Open the directory `name`, at `path` in the tree; raises like `TreeReader.locate`."""
    try:
        return owner.open_directory(directory, name)
    except OSError as error:
        # openat2(2) with RESOLVE_NO_XDEV enters no mount
        if error.errno == errno.EXDEV:
            raise files.mounted_on(path) from error
        if error.errno in _REPLACED:
            raise FileNotFoundError(errno.ENOENT, "no longer a directory", path) from error
        raise type(error)(error.errno, error.strerror, path) from error


def content_id(directory: int, name: bytes, st: os.stat_result) -> bytes:
    """Return the blob id of a file's bytes or a link's target; OSError for other kinds."""
    if stat.S_ISLNK(st.st_mode):
        return blob_id(os.fsencode(os.readlink(name, dir_fd=directory)))
    return read_id(files.open_unnoticed(directory, name), st.st_size)


def file_id(fd: int) -> bytes:
    return read_id(os.dup(fd), os.fstat(fd).st_size)


# hashed at a time; most files need one read
_CHUNK_BYTES = 1 << 20


def read_id(fd: int, size: int) -> bytes:
    """Return the blob id of an open file that should have `size` bytes; closes it."""
    digest = hashlib.sha1(b"blob %d\0" % size)
    offset, left = 0, size + 1  # a read of one byte more finds the end of most files
    try:
        while left > 0 and (data := os.pread(fd, min(_CHUNK_BYTES, left), offset)):
            digest.update(data)
            offset, left = offset + len(data), left - len(data)
            if left == 1:  # a short read: the end of the file
                break
    finally:
        os.close(fd)
    return digest.digest()


# -- disk space of trees, and how much of it they share by hard links ------------------------------
#
# A client may change its tree meanwhile. Unreadable directories, and those not reached in time, are
# left out.

Inode = tuple[int, int]


class Weight(NamedTuple):
    """The disk space of a thing.

    `shared_bytes` are in files that another thing of the group has, too. `paths` counts files and
    directories. `is_whole` is false where a part was left out.
    """

    size_bytes: int
    shared_bytes: int
    is_whole: bool
    paths: int


class Weights(NamedTuple):
    """The weight of each thing of a group, in order; in the total a shared file counts once."""

    each: list[Weight]
    total_bytes: int


# Each is one or more files or trees. A missing one weighs nothing.
Things = Sequence[Sequence[Path]]


def weigh(groups: Mapping[str, Things], limit_s: float) -> dict[str, Weights]:
    """Return the disk space of groups of things, measured for at most `limit_s`."""
    deadline = time.monotonic() + limit_s
    return {name: _weigh_group(things, deadline) for name, things in groups.items()}


def _weigh_group(things: Things, deadline: float) -> Weights:
    linked = Counter[Inode]()  # how many things have a file with several links
    weights = [_weigh_one(paths, deadline) for paths in things]
    for _, links, _, _ in weights:
        linked.update(links.keys())
    weighed, once = [], dict[Inode, int]()
    for alone, links, is_whole, paths in weights:
        shared = sum(size for inode, size in links.items() if linked[inode] > 1)
        weighed.append(Weight(alone + sum(links.values()), shared, is_whole, paths))
        once |= links
    return Weights(weighed, sum(alone for alone, *_ in weights) + sum(once.values()))


def _weigh_one(paths: Sequence[Path], deadline: float) -> tuple[int, dict[Inode, int], bool, int]:
    """Return the bytes of files with one link, of each file with more, whether it is whole, and the
    number of paths.
    """
    alone, links, is_whole, count = 0, dict[Inode, int](), True, 0
    for path in paths:
        refused: list[bytes] = []
        try:
            for number, seen in enumerate(_iter_stats(path, refused)):
                if number % 256 == 0 and time.monotonic() > deadline:
                    return alone, links, False, count
                count += 1
                # st_blocks counts 512 bytes each, whatever the block size of the file system
                if seen.st_nlink > 1 and not stat.S_ISDIR(seen.st_mode):
                    links[seen.st_dev, seen.st_ino] = seen.st_blocks * 512
                else:
                    alone += seen.st_blocks * 512
        except FileNotFoundError:
            pass
        except (MirrordError, OSError):  # it contains a mount
            is_whole = False
        is_whole &= not refused
    return alone, links, is_whole, count


def _iter_stats(path: Path, refused: list[bytes]) -> Iterator[os.stat_result]:
    """Yield the stats of a file or tree; appends unreadable directories to `refused`."""
    with (
        files.opened(files.open_directory(path.parent)) as above,
        TreeReader(above, ActingAs(None)) as reader,
    ):
        name = os.fsencode(path.name)
        yield from (
            seen for _, seen in reader.iter_stats_below(name, lambda path, _: refused.append(path))
        )
