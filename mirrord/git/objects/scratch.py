"""New blobs and trees, and repositories of a few of them, outside of any mirror."""

import errno
import hashlib
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pygit2
from pygit2.enums import FileMode, ObjectType

from ...host.files import free_bytes
from ...presence import exists
from ..modes import DIRECTORY
from .repository import lenders_of
from .trees import BaseTree, TreeEntry

_CONFIG = "[core]\n\trepositoryformatversion = 0\n\tbare = false\n\tfilemode = true\n"


class ScratchRepository:
    """A private repository for one git: an index of a few paths, and their blobs.

    Made at `git_dir`, which must not exist.
    """

    def __init__(self, git_dir: Path) -> None:
        (git_dir / "objects/info").mkdir(parents=True)
        make_repository(git_dir)
        self.git_dir = git_dir
        self._repository = pygit2.Repository(str(git_dir))
        self._objects = ScratchObjects(git_dir / "objects")

    def write_blob(self, data: bytes) -> str:
        with _write_errors(self.git_dir):
            return self._objects.store_blob(data)

    def read_blob(self, oid: str) -> bytes:
        return self._repository[oid].read_raw()

    def write_index(self, entries: Iterable[TreeEntry]) -> None:
        index = pygit2.Index(str(self.git_dir / "index"))
        for entry in entries:
            oid, mode = pygit2.Oid(hex=entry.oid), FileMode(entry.mode)
            # a name need not be UTF-8; pygit2 (1.21) accepts bytes, against its own types
            index.add(pygit2.IndexEntry(entry.path, oid, mode))  # type: ignore[arg-type]
        with _write_errors(self.git_dir):
            index.write()

    def read_index(self) -> list[TreeEntry]:
        index = pygit2.Index(str(self.git_dir / "index"))
        index.read(force=True)
        return [TreeEntry(os.fsencode(item.path), int(item.mode), str(item.id)) for item in index]


# pygit2's errors have no errno: a failed write on a disk with less was for want of room
_NEARLY_FULL_BYTES = 1024**2


@contextmanager
def _write_errors(directory: Path) -> Iterator[None]:
    """Turn an error of libgit2 into an OSError: it says "no error" of a full disk (1.9.7)."""
    try:
        yield
    except pygit2.GitError as error:
        number = errno.EIO if free_bytes(directory) > _NEARLY_FULL_BYTES else errno.ENOSPC
        raise OSError(number, os.strerror(number), str(directory)) from error


def make_repository(git_dir: Path, *, borrows_from: Sequence[Path] = ()) -> None:
    """Make a repository around `git_dir/objects`; `borrows_from` become its alternates, with
    those from which they borrow themselves, and those that it had.
    """
    (git_dir / "refs").mkdir(exist_ok=True)
    (git_dir / "objects/info").mkdir(exist_ok=True)
    lenders = [lender / "objects" for lender in borrows_from]
    lenders += (Path(os.path.normpath(far)) for near in lenders for far in lenders_of(near))
    if lenders:
        file = git_dir / "objects/info/alternates"
        before = os.fsdecode(file.read_bytes()).splitlines() if exists(file) else ()
        paths = (os.path.relpath(lender, git_dir / "objects") for lender in lenders)
        lines = "".join(f"{path}\n" for path in dict.fromkeys((*before, *paths)))
        file.with_name("alternates.new").write_bytes(os.fsencode(lines))
        file.with_name("alternates.new").rename(file)
    (git_dir / "config").write_text(_CONFIG)
    (git_dir / "HEAD").write_text("ref: refs/heads/none\n")


_COPIED_BYTES = 16 * 1024**2  # libgit2 writes a larger one without a second copy in memory


class ScratchObjects:
    """An object directory, as for GIT_OBJECT_DIRECTORY."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._odb = pygit2.Odb(str(directory))

    def write_blob(self, data: bytes) -> str:
        return str(self._odb.write(ObjectType.BLOB, data))

    def store_blob(self, data: bytes) -> str:
        """Write a blob for a moment, without compression; libgit2 takes 20 ms for 300 kB."""
        if len(data) > _COPIED_BYTES:
            return self.write_blob(data)
        content = b"blob %d\0" % len(data) + data
        oid = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        file = self._directory / oid[:2] / oid[2:]
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(zlib.compress(content, 0))
        return oid

    def write_tree(self, base: BaseTree, edits: Mapping[bytes, tuple[int, str] | None]) -> str:
        """Write `base` with paths changed to a mode and id, or removed (None); return its id.

        Only the directories of changed paths are written, the deepest first.
        """
        pending: defaultdict[bytes, dict[bytes, tuple[int, str] | None]] = defaultdict(dict)
        for path, entry in edits.items():
            above, _, name = path.rpartition(b"/")
            pending[above][name] = entry
            while above:
                above = above.rpartition(b"/")[0]
                pending.setdefault(above, {})
        directories = sorted(pending, key=lambda path: path.count(b"/") + bool(path), reverse=True)
        for directory in directories:
            names = base.names_in(directory) | pending[directory]
            kept = [(pair[0], name, bytes.fromhex(pair[1])) for name, pair in names.items() if pair]
            above, _, name = directory.rpartition(b"/")
            if kept or not directory:
                written = str(self._odb.write(ObjectType.TREE, tree_bytes(kept)))
                if not directory:
                    return written
                pending[above][name] = DIRECTORY, written
            else:
                pending[above].setdefault(name, None)
        return base.oid


def tree_bytes(entries: Iterable[tuple[int, bytes, bytes]]) -> bytes:
    """Encode a tree object from modes, names and raw ids in any order.

    git sorts a directory as if its name ended with a slash.
    """
    rows = [
        (name + b"/" if mode == DIRECTORY else name, b"%o %s\0%s" % (mode, name, oid))
        for mode, name, oid in entries
    ]
    return b"".join(row for _, row in sorted(rows))
