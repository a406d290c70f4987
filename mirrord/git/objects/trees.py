"""Trees: what is in one, and what differs between two.

Trees are parsed from their raw bytes, because a mirrored repository may hold hostile ones: a name that would leave the tree, or
write into `.git`, is refused here, once, for everybody who materialises.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...errors import CommitUnservableError, TreeTooLargeError
from ...model import NAME_LIMIT_BYTES, TREE_DEPTH_LIMIT, TREE_PATH_LIMIT_BYTES, shown
from .repositories import Objects, open_objects

_TREE = 0o040000
_SUBMODULE = 0o160000
_SYMLINK = 0o120000
_TYPES = {0o100000, _TREE, _SUBMODULE, _SYMLINK}
_Token = tuple[bytes, bytes, bytes]
_TOKEN = re.compile(rb"([0-7]+) ([^\0]*)\0(.{20})", re.DOTALL)
_FIXED_BYTES = 22  # the space, the NUL and the id


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

    @property
    def is_within(self) -> bool:
        """A directory that both trees have, and in which something differs."""
        return (
            self.old is not None and self.new is not None and self.old.is_tree and self.new.is_tree
        )


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
    """The differences of two trees below `above`; None stands for no tree. What both have is not looked at again."""
    tokens_a, tokens_b = _parse(objects, old), _parse(objects, new)
    both = set(tokens_a).intersection(tokens_b)
    before = {
        entry.path: entry
        for entry in _entries(old or "", [token for token in tokens_a if token not in both], above)
    }
    after = {
        entry.path: entry
        for entry in _entries(new or "", [token for token in tokens_b if token not in both], above)
    }
    for path in sorted(before.keys() | after.keys()):
        a, b = before.get(path), after.get(path)
        yield TreeChange(path, a, b, inherited)
        tree_a = a.oid if a and a.is_tree else None
        tree_b = b.oid if b and b.is_tree else None
        if tree_a or tree_b:
            whole = inherited or not (tree_a and tree_b)
            yield from changes(objects, tree_a, tree_b, path + b"/", whole)


def read_entries(objects: Objects, tree: str, above: bytes = b"") -> list[TreeEntry]:
    """The direct entries of one tree, `above` put before each name; raises CommitUnservableError for a hostile one."""
    return _entries(tree, _parse(objects, tree), above)


def _parse(objects: Objects, tree: str | None) -> list[_Token]:
    """Mode, name and id of each entry, as they are stored; none of None."""
    if tree is None:
        return []
    data = objects.read_tree(tree)
    tokens: list[_Token] = _TOKEN.findall(data)
    if sum(len(mode) + len(name) for mode, name, _ in tokens) + _FIXED_BYTES * len(tokens) != len(
        data
    ):
        raise _unservable(tree, "it is malformed")
    if len({name for _, name, _ in tokens}) != len(tokens):
        raise _unservable(tree, "it names an entry twice")
    return tokens


def _entries(tree: str, tokens: list[_Token], above: bytes) -> list[TreeEntry]:
    entries = []
    if above.count(b"/") >= TREE_DEPTH_LIMIT:
        raise too_large(tree, f"it is more than {TREE_DEPTH_LIMIT} directories deep")
    for octal, name, oid in tokens:
        mode = int(octal, 8)
        _check(tree, mode, name)
        if len(above) + len(name) > TREE_PATH_LIMIT_BYTES:
            raise too_large(tree, f"it has a path of more than {TREE_PATH_LIMIT_BYTES} bytes")
        entries.append(TreeEntry(above + name, mode, oid.hex()))
    return entries


def _check(tree: str, mode: int, name: bytes) -> None:
    if mode & 0o170000 not in _TYPES or (mode & 0o170000 != 0o100000 and mode not in _TYPES):
        raise _unservable(tree, f"its entry {_shown(name)} has mode {mode:o}")
    if b"/" in name or name in (b"", b".", b"..") or len(name) > NAME_LIMIT_BYTES:
        raise _unservable(tree, f"its entry {_shown(name)} is no file name")
    if len(name) < 8 and name.lower() in (
        b".git",
        b"git~1",
    ):  # git's verify_path refuses both, in any letter case
        raise _unservable(tree, f"its entry {_shown(name)} would be git's own directory")
    if mode == _SYMLINK and name.lower() == b".gitmodules":
        raise _unservable(tree, "its .gitmodules is a symbolic link")


def too_large(tree: str, fact: str) -> TreeTooLargeError:
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
