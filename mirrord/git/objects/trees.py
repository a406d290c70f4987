"""Trees: what is in one, what differs between two, and whether one is small enough to check out.

Trees are parsed from their raw bytes, because a mirrored repository may hold hostile ones. A name
that would leave the tree or write into `.git` is refused here, for all who materialise one. Also
new objects of our own: beside a repository, which stays as it is.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pygit2
from pygit2.enums import FileMode, ObjectType

from ...errors import CommitUnservableError, TreeTooLargeError
from ...model import NAME_LIMIT_BYTES, TREE_DEPTH_LIMIT, TREE_PATH_LIMIT_BYTES, shown
from .repository import Objects, tree_entries

ENTRIES_LIMIT = 1_000_000
FILE_LIMIT_BYTES = 1024**3
TREE_LIMIT_BYTES = 64 * 1024**3

_TREE, _SUBMODULE, _SYMLINK, _FILE = 0o040000, 0o160000, 0o120000, 0o100000
_Token = tuple[bytes, bytes, bytes]
_FEW_CHANGES = 10_000
_PATH_MAX = 4096


class TreeEntry(NamedTuple):
    """`path` from the root of the tree, `mode` as git stores it, `oid` in hexadecimal."""

    path: bytes
    mode: int
    oid: str

    @property
    def is_tree(self) -> bool:
        return self.mode == _TREE

    @property
    def is_submodule(self) -> bool:
        return self.mode == _SUBMODULE

    @property
    def is_symlink(self) -> bool:
        return self.mode == _SYMLINK

    @property
    def is_executable(self) -> bool:
        return self.mode & 0o170100 == 0o100100


class TreeChange(NamedTuple):
    """One path that differs. `inherited`: a change of a directory above covers this one."""

    path: bytes
    old: TreeEntry | None
    new: TreeEntry | None
    inherited: bool

    @property
    def is_within(self) -> bool:
        """A directory that both trees have, and in which something differs."""
        return bool(self.old and self.new and self.old.is_tree and self.new.is_tree)


def walk(objects: Objects, tree: str, above: bytes = b"") -> Iterator[TreeEntry]:
    for entry in _entries(tree, _parse(objects, tree), above):
        yield entry
        if entry.is_tree:
            yield from walk(objects, entry.oid, entry.path + b"/")


def changes(
    objects: Objects, old: str | None, new: str | None, above: bytes = b"", inherited: bool = False
) -> Iterator[TreeChange]:
    """What differs between two trees, a directory before its content. None stands for no tree.

    Subtrees that both have are not read.
    """
    tokens_a, tokens_b = _parse(objects, old), _parse(objects, new)
    both = set(tokens_a).intersection(tokens_b)
    before, after = (
        {
            entry.path: entry
            for entry in _entries(tree or "", [each for each in tokens if each not in both], above)
        }
        for tree, tokens in ((old, tokens_a), (new, tokens_b))
    )
    for path in sorted(before.keys() | after.keys()):
        a, b = before.get(path), after.get(path)
        yield TreeChange(path, a, b, inherited)
        tree_a = a.oid if a and a.is_tree else None
        tree_b = b.oid if b and b.is_tree else None
        if tree_a or tree_b:
            whole = inherited or not (tree_a and tree_b)
            yield from changes(objects, tree_a, tree_b, path + b"/", whole)


_Names = dict[bytes, tuple[int, str]]


class BaseTree:
    """Look-ups in one tree; reads only the directories on the way to a path."""

    def __init__(self, objects: Objects, tree: str) -> None:
        self.oid = tree
        self._objects = objects
        self._directories = {b"": self._read(tree)}

    def find(self, path: bytes) -> TreeEntry | None:
        """The entry of a path, with the mode that git's index would have."""
        above, _, name = path.rpartition(b"/")
        if (found := self.names_in(above).get(name)) is None:
            return None
        mode, oid = found
        if mode & 0o170000 == _FILE:  # canon_mode: old commits have files of mode 100664
            mode = 0o100755 if mode & 0o100 else 0o100644
        return TreeEntry(path, mode, oid)

    def iter_files(self, directory: bytes) -> Iterator[TreeEntry]:
        """Every file, link and submodule below a directory."""
        for name in sorted(self.names_in(directory)):
            entry = self.find(directory + b"/" + name if directory else name)
            if entry and entry.is_tree:
                yield from self.iter_files(entry.path)
            elif entry:
                yield entry

    def names_in(self, directory: bytes) -> _Names:
        """Mode, as it is stored, and id of each name; empty where there is no such directory."""
        if (found := self._directories.get(directory)) is None:
            entry = self.find(directory)
            found = self._read(entry.oid) if entry and entry.is_tree else {}
            self._directories[directory] = found
        return found

    def _read(self, tree: str) -> _Names:
        tokens = _parse(self._objects, tree)
        return {name: (int(mode, 8), oid.hex()) for mode, name, oid in tokens}


def must_fit(objects: Objects, tree: str, *, near: str | None = None) -> None:
    """Raise TreeTooLargeError for a tree over a bound: entries, depth, path length, bytes.

    Raises CommitUnservableError for a link that no file system holds.

    Fifteen tiny objects can name 10^10 paths, so each subtree is measured once, however often it is
    named, and by the sizes in its blobs' headers: nothing is inflated. Of a tree that differs
    little from `near`, which fits, only the changes are measured.
    """
    known: dict[str, tuple[int, int, int]] = {}

    @cache
    def file_bytes(oid: str, is_symlink: bool) -> int:
        if (size := objects.blob_size(oid)) > FILE_LIMIT_BYTES:
            limit = f"at most {FILE_LIMIT_BYTES >> 20} MiB are written"
            raise _too_large(tree, f"a file has {size} bytes; {limit}")
        if is_symlink:
            must_be_target(oid, objects.read_blob(oid) if size < _PATH_MAX else b"")
        return size

    def must_be_within(entries: int, size_bytes: int) -> None:
        if entries > ENTRIES_LIMIT:
            raise _too_large(tree, f"it has more than {ENTRIES_LIMIT} entries")
        if size_bytes > TREE_LIMIT_BYTES:
            raise _too_large(tree, f"its files have more than {TREE_LIMIT_BYTES >> 30} GiB")

    def measure(subtree: str, depth: int) -> tuple[int, int, int]:
        """Entries, bytes and levels of a subtree at `depth`. The bound keeps Python's stack."""
        if depth > TREE_DEPTH_LIMIT:
            raise _too_deep(tree)
        if (found := known.get(subtree)) is None:
            entries = size_bytes = below = 0
            for entry in _entries(subtree, _parse(objects, subtree), b""):
                entries += 1
                if entry.is_tree:
                    inner = measure(entry.oid, depth + 1)
                    entries, size_bytes = entries + inner[0], size_bytes + inner[1]
                    below = max(below, inner[2])
                elif not entry.is_submodule:
                    size_bytes += file_bytes(entry.oid, entry.is_symlink)
                must_be_within(entries, size_bytes)
            found = known[subtree] = entries, size_bytes, below + 1
        if depth + found[2] - 1 > TREE_DEPTH_LIMIT:
            raise _too_deep(tree)
        return found

    few = list(islice(changes(objects, near, tree), _FEW_CHANGES)) if near else []
    if near and len(few) < _FEW_CHANGES:
        new = (change.new for change in few)
        files = (entry for entry in new if entry and not entry.is_tree and not entry.is_submodule)
        must_be_within(0, sum(file_bytes(entry.oid, entry.is_symlink) for entry in files))
    else:
        measure(tree, 1)


def must_be_target(oid: str, data: bytes) -> None:
    """Raise CommitUnservableError for the blob of a symbolic link that no file system holds."""
    if not 0 < len(data) < _PATH_MAX or b"\0" in data:
        raise CommitUnservableError(
            f"cannot use blob {oid}: no symbolic link can have it as its target",
            hint="leave the commit out",
        )


def _parse(objects: Objects, tree: str | None) -> list[_Token]:
    if tree is None:
        return []
    tokens = tree_entries(objects.read(tree, ObjectType.TREE))
    if tokens is None:
        raise _unservable(tree, "it is malformed")
    if len({name for _, name, _ in tokens}) != len(tokens):
        raise _unservable(tree, "it names an entry twice")
    return tokens


def _entries(tree: str, tokens: list[_Token], above: bytes) -> list[TreeEntry]:
    """The entries of one tree, below `above`. Raises CommitUnservableError, TreeTooLargeError."""
    entries = []
    if tokens and above.count(b"/") >= TREE_DEPTH_LIMIT:
        raise _too_deep(tree)
    for octal, name, oid in tokens:
        mode = int(octal, 8)
        if mode not in (_TREE, _SUBMODULE, _SYMLINK) and mode & 0o170000 != _FILE:
            raise _unservable(tree, f"its entry {_shown(name)} has mode {mode:o}")
        if b"/" in name or name in (b"", b".", b"..") or len(name) > NAME_LIMIT_BYTES:
            raise _unservable(tree, f"its entry {_shown(name)} is no file name")
        # git's verify_path refuses both, in any letter case
        if len(name) < 8 and name.lower() in (b".git", b"git~1"):
            raise _unservable(tree, f"its entry {_shown(name)} would be git's own directory")
        if mode == _SYMLINK and name.lower() == b".gitmodules":
            raise _unservable(tree, "its .gitmodules is a symbolic link")
        if len(above) + len(name) > TREE_PATH_LIMIT_BYTES:
            raise _too_large(tree, f"it has a path of more than {TREE_PATH_LIMIT_BYTES} bytes")
        entries.append(TreeEntry(above + name, mode, oid.hex()))
    return entries


def _too_deep(tree: str) -> TreeTooLargeError:
    return _too_large(tree, f"it is more than {TREE_DEPTH_LIMIT} directories deep")


def _too_large(tree: str, fact: str) -> TreeTooLargeError:
    return TreeTooLargeError(
        f"cannot check out tree {tree}: {fact}",
        hint="leave the commit out; no clone of it would be of use",
        tree=tree,
    )


def _shown(name: bytes) -> str:
    return shown(name.decode(errors="backslashreplace"))


def _unservable(tree: str, fact: str) -> CommitUnservableError:
    return CommitUnservableError(
        f"cannot use tree {tree}: {fact}",
        hint="no git checks out such a tree; leave the commit out",
        tree=tree,
    )


# -- objects of our own: new blobs, trees, an index ------------------------------------------------

_CONFIG = "[core]\n\trepositoryformatversion = 0\n\tbare = false\n\tfilemode = true\n"


class ScratchRepository:
    """A private repository with blobs and an index of a few paths, for one git to work on.

    Made at `git_dir`, which must not exist; it has no object of any other repository.
    """

    def __init__(self, git_dir: Path) -> None:
        (git_dir / "objects/info").mkdir(parents=True)
        make_repository(git_dir)
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


def make_repository(git_dir: Path, *, borrows_from: Path | None = None) -> None:
    """Make a repository of the objects in `git_dir/objects`, and those that another one has."""
    (git_dir / "refs").mkdir()
    (git_dir / "objects/info").mkdir(exist_ok=True)
    if borrows_from is not None:
        lender = os.path.relpath(borrows_from / "objects", git_dir / "objects")
        (git_dir / "objects/info/alternates").write_bytes(os.fsencode(f"{lender}\n"))
    (git_dir / "config").write_text(_CONFIG)
    (git_dir / "HEAD").write_text("ref: refs/heads/none\n")


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
        pending: defaultdict[bytes, dict[bytes, tuple[int, str] | None]] = defaultdict(dict)
        for path, entry in edits.items():
            above, _, name = path.rpartition(b"/")
            pending[above][name] = entry
            while above:
                above = above.rpartition(b"/")[0]
                pending.setdefault(above, {})
        directories = sorted(pending, key=lambda each: each.count(b"/") + bool(each), reverse=True)
        for directory in directories:
            names = base.names_in(directory) | pending[directory]
            left = [(at[0], name, bytes.fromhex(at[1])) for name, at in names.items() if at]
            above, _, name = directory.rpartition(b"/")
            if left or not directory:
                written = str(self._odb.write(ObjectType.TREE, tree_bytes(left)))
                if not directory:
                    return written
                pending[above][name] = _TREE, written
            else:
                pending[above].setdefault(name, None)
        return base.oid


def tree_bytes(entries: Iterable[tuple[int, bytes, bytes]]) -> bytes:
    """A tree object of modes, names and raw ids, in any order.

    git sorts a directory as if its name had a slash behind it.
    """
    rows = [
        (name + b"/" if mode == _TREE else name, b"%o %s\0%s" % (mode, name, oid))
        for mode, name, oid in entries
    ]
    return b"".join(row for _, row in sorted(rows))
