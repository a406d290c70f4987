"""Objects of our own beside a repository, which stays as it is: new blobs, trees, an index."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pygit2
from pygit2.enums import FileMode, ObjectType

from .trees import BaseTree, TreeEntry

_CONFIG = "[core]\n\trepositoryformatversion = 0\n\tbare = false\n\tfilemode = true\n"


class ScratchRepository:
    """A private repository with blobs and an index of a few paths, for one git to work on.

    Made at `git_dir`, which must not exist; it has no object of any other repository.
    """

    def __init__(self, git_dir: Path) -> None:
        for name in ("objects/info", "refs"):
            (git_dir / name).mkdir(parents=True)
        (git_dir / "HEAD").write_text("ref: refs/heads/none\n")
        (git_dir / "config").write_text(_CONFIG)
        self.git_dir = git_dir
        self._repository = pygit2.Repository(str(git_dir))

    def write_blob(self, data: bytes) -> str:
        return str(self._repository.create_blob(data))

    def read_blob(self, oid: str) -> bytes:
        return self._repository[oid].read_raw()

    def write_index(self, entries: Iterable[TreeEntry]) -> None:
        index = pygit2.Index(str(self.git_dir / "index"))
        for entry in entries:
            oid, mode = pygit2.Oid(hex=entry.oid), FileMode(entry.mode)
            # a name need not be UTF-8; pygit2 (1.21) takes bytes, though its types do not say so
            index.add(pygit2.IndexEntry(entry.path, oid, mode))  # type: ignore[arg-type]
        index.write()

    def read_index(self) -> list[TreeEntry]:
        index = pygit2.Index(str(self.git_dir / "index"))
        index.read(force=True)
        return [TreeEntry(os.fsencode(at.path), int(at.mode), str(at.id)) for at in index]


def make_repository(git_dir: Path, *, borrows_from: Path) -> None:
    """Make a repository of the objects in `git_dir/objects`, and those that another one has."""
    (git_dir / "refs").mkdir()
    (git_dir / "objects/info").mkdir(exist_ok=True)
    lender = os.path.relpath(borrows_from / "objects", git_dir / "objects")
    (git_dir / "objects/info/alternates").write_bytes(os.fsencode(f"{lender}\n"))
    (git_dir / "config").write_text(_CONFIG)
    (git_dir / "HEAD").write_text("ref: refs/heads/none\n")


_Names = dict[bytes, tuple[int, str] | None]


class ScratchObjects:
    """An object directory that git can use as GIT_OBJECT_DIRECTORY."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._odb = pygit2.Odb(str(directory))

    def write_blob(self, data: bytes) -> str:
        return str(self._odb.write(ObjectType.BLOB, data))

    def write_tree(self, base: BaseTree, edits: Mapping[bytes, tuple[int, str] | None]) -> str:
        """The tree that `base` becomes with these modes and ids; None removes a path.

        Writes the directories of changed paths alone, the deepest first.
        """
        pending: defaultdict[bytes, _Names] = defaultdict(dict)
        for path, entry in edits.items():
            above, _, name = path.rpartition(b"/")
            pending[above][name] = entry
            while above:
                above = above.rpartition(b"/")[0]
                pending.setdefault(above, {})
        directories = sorted(pending, key=lambda each: each.count(b"/") + bool(each), reverse=True)
        for directory in directories:
            names: _Names = dict(base.names_in(directory))
            names |= pending[directory]
            left = {name: entry for name, entry in names.items() if entry}
            above, _, name = directory.rpartition(b"/")
            if left or not directory:
                written = str(self._odb.write(ObjectType.TREE, _tree_bytes(left)))
                if not directory:
                    return written
                pending[above][name] = 0o040000, written
            else:
                pending[above].setdefault(name, None)
        return base.oid


def _tree_bytes(names: Mapping[bytes, tuple[int, str]]) -> bytes:
    """A tree object; git sorts a directory as if its name had a slash behind it."""
    rows = []
    for name, (mode, oid) in names.items():
        row = b"%o %s\0%s" % (mode, name, bytes.fromhex(oid))
        rows.append((name + b"/" if mode == 0o040000 else name, row))
    return b"".join(row for _, row in sorted(rows))
