"""Trees: what is in one, and what differs between two.

Trees are parsed from their raw bytes, because a mirrored repository may hold hostile ones: a name that would leave the tree, or
write into `.git`, is refused here, once, for everybody who materialises.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...errors import CommitUnservableError
from ...model import shown
from .repositories import Objects, open_objects

_TREE = 0o040000
_SUBMODULE = 0o160000
_SYMLINK = 0o120000
_TYPES = {0o100000, _TREE, _SUBMODULE, _SYMLINK}
_NAME_MAX = 255


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
    """One path that differs. `inherited`: a directory above it appeared or vanished whole, so that change covers this one."""

    path: bytes
    old: TreeEntry | None
    new: TreeEntry | None
    inherited: bool


def tree_entries(git_dir: Path, tree: str) -> list[TreeEntry]:
    """Every entry below `tree`, directories included, each directory before what is in it, in git's order."""
    with open_objects(git_dir) as objects:
        return list(walk(objects, tree))


def walk(objects: Objects, tree: str, above: bytes = b"") -> Iterator[TreeEntry]:
    for entry in read_entries(objects, tree, above):
        yield entry
        if entry.is_tree:
            yield from walk(objects, entry.oid, entry.path + b"/")


def tree_changes(git_dir: Path, old: str, new: str) -> list[TreeChange]:
    """What differs between two trees, directories included; a directory comes before what is in it."""
    with open_objects(git_dir) as objects:
        return list(changes(objects, old, new))


def changes(
    objects: Objects, old: str | None, new: str | None, above: bytes = b"", inherited: bool = False
) -> Iterator[TreeChange]:
    """The differences of two trees below `above`; None stands for no tree."""
    before = {entry.path: entry for entry in read_entries(objects, old, above)} if old else {}
    after = {entry.path: entry for entry in read_entries(objects, new, above)} if new else {}
    for path in sorted(before.keys() | after.keys()):
        a, b = before.get(path), after.get(path)
        if a == b:
            continue
        yield TreeChange(path, a, b, inherited)
        tree_a = a.oid if a and a.is_tree else None
        tree_b = b.oid if b and b.is_tree else None
        if tree_a or tree_b:
            whole = inherited or not (tree_a and tree_b)
            yield from changes(objects, tree_a, tree_b, path + b"/", whole)


def read_entries(objects: Objects, tree: str, above: bytes = b"") -> list[TreeEntry]:
    """The direct entries of one tree, `above` put before each name; raises CommitUnservableError for a hostile one."""
    data = objects.read_tree(tree)
    entries = []
    position, end = 0, len(data)
    try:
        while position < end:
            space = data.index(b" ", position)
            nul = data.index(b"\0", space)
            name = data[space + 1 : nul]
            mode = int(data[position:space], 8)
            _check(tree, mode, name)
            entries.append(TreeEntry(above + name, mode, data[nul + 1 : nul + 21].hex()))
            position = nul + 21
    except ValueError as error:
        raise _unservable(tree, "it is malformed") from error
    if len({entry.path for entry in entries}) != len(entries):
        raise _unservable(tree, "it names an entry twice")
    return entries


def _check(tree: str, mode: int, name: bytes) -> None:
    if mode & 0o170000 not in _TYPES or (mode & 0o170000 != 0o100000 and mode not in _TYPES):
        raise _unservable(tree, f"its entry {_shown(name)} has mode {mode:o}")
    if b"/" in name or name in (b"", b".", b"..") or len(name) > _NAME_MAX:
        raise _unservable(tree, f"its entry {_shown(name)} is no file name")
    if len(name) < 8 and name.lower() in (b".git", b"git~1"):  # git's verify_path refuses both, in any letter case
        raise _unservable(tree, f"its entry {_shown(name)} would be git's own directory")
    if mode == _SYMLINK and name.lower() == b".gitmodules":
        raise _unservable(tree, "its .gitmodules is a symbolic link")


def _shown(name: bytes) -> str:
    return shown(name.decode(errors="backslashreplace"))


def _unservable(tree: str, fact: str) -> CommitUnservableError:
    return CommitUnservableError(
        f"cannot use tree {tree}: {fact}", hint="no git checks out such a tree; leave the commit out", tree=tree
    )
