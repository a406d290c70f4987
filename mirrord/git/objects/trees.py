"""Trees: walking, comparing and measuring them.

Trees are parsed from their raw bytes, because a mirrored repository may have hostile ones. Names
that would leave the tree or write into `.git` are refused here, for every user of a tree.
"""

import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from cachetools import cachedmethod
from pygit2.enums import ObjectType

from ...errors import CommitUnservableError, TooLargeError
from ...model import NAME_LIMIT_BYTES, TREE_DEPTH_LIMIT, TREE_PATH_LIMIT_BYTES, shown
from ...quoting import decode_name
from ..modes import DIRECTORY, FILE, KIND, SUBMODULE, SYMLINK, file_mode
from .repository import Objects, tree_entries

# A larger tree is refused with 422 `tree-too-large`, before a byte of it is written.
ENTRIES_LIMIT = 1_000_000
FILE_LIMIT_BYTES = 1024**3
TREE_LIMIT_BYTES = 64 * 1024**3

_RawEntry = tuple[bytes, bytes, bytes]  # mode, name, id
# Linux's, with the final zero: a longer target of a link cannot be made
_PATH_MAX = 4096


class TreeEntry(NamedTuple):
    """`path` is relative to the root of the tree, `mode` as git stores it, `oid` hexadecimal."""

    path: bytes
    mode: int
    oid: str

    @property
    def is_tree(self) -> bool:
        return self.mode == DIRECTORY

    @property
    def is_submodule(self) -> bool:
        return self.mode == SUBMODULE

    @property
    def is_symlink(self) -> bool:
        return self.mode == SYMLINK

    @property
    def is_executable(self) -> bool:
        return self.mode & 0o170100 == 0o100100


class TreeChange(NamedTuple):
    """One path that differs. `inherited`: because a directory above was added or removed."""

    path: bytes
    old: TreeEntry | None
    new: TreeEntry | None
    inherited: bool

    @property
    def is_within(self) -> bool:
        """True for a directory of both trees with changes inside."""
        return bool(self.old and self.new and self.old.is_tree and self.new.is_tree)


def walk(objects: Objects, tree: str, above: bytes = b"") -> Iterator[TreeEntry]:
    """Iterate all entries of a tree, each directory before its content."""
    for entry in _entries(tree, _parse(objects, tree), above):
        yield entry
        if entry.is_tree:
            yield from walk(objects, entry.oid, entry.path + b"/")


def changes(
    objects: Objects, old: str | None, new: str | None, above: bytes = b"", inherited: bool = False
) -> Iterator[TreeChange]:
    """Iterate what differs between two trees, a directory before its content. None is no tree.

    Subtrees that both have are not read.
    """
    raw = _parse(objects, old), _parse(objects, new)
    same = {*raw[0]}.intersection(raw[1])
    before, after = (
        {
            entry.path: entry
            for entry in _entries(tree or "", [item for item in entries if item not in same], above)
        }
        for tree, entries in zip((old, new), raw, strict=True)
    )
    for path in sorted(before.keys() | after.keys()):
        a, b = before.get(path), after.get(path)
        yield TreeChange(path, a, b, inherited)
        tree_a = a.oid if a and a.is_tree else None
        tree_b = b.oid if b and b.is_tree else None
        if tree_a or tree_b:
            is_covered = inherited or not (tree_a and tree_b)
            yield from changes(objects, tree_a, tree_b, path + b"/", is_covered)


_Names = dict[bytes, tuple[int, str]]


class BaseTree:
    """Look-ups in one tree. Reads only the directories on the way to a path."""

    def __init__(self, objects: Objects, tree: str) -> None:
        self.oid = tree
        self._objects = objects
        self._directories = {b"": self._read(tree)}

    def find(self, path: bytes) -> TreeEntry | None:
        """Find the entry of a path, with the mode that git's index would have."""
        above, _, name = path.rpartition(b"/")
        if (pair := self.names_in(above).get(name)) is None:
            return None
        mode, oid = pair
        if mode & KIND == FILE:  # canon_mode: old commits have files with mode 100664
            mode = file_mode(mode)
        return TreeEntry(path, mode, oid)

    def submodule_above(self, path: bytes) -> bytes | None:
        """Return the submodule that a path is below."""
        slash = path.find(b"/")
        while slash >= 0:
            entry = self.find(path[:slash])
            if entry is None or not entry.is_tree:
                return path[:slash] if entry and entry.is_submodule else None
            slash = path.find(b"/", slash + 1)
        return None

    def iter_files(self, directory: bytes) -> Iterator[TreeEntry]:
        """Iterate every file, link and submodule below a directory."""
        for name in sorted(self.names_in(directory)):
            entry = self.find(directory + b"/" + name if directory else name)
            if entry and entry.is_tree:
                yield from self.iter_files(entry.path)
            elif entry:
                yield entry

    def names_in(self, directory: bytes) -> _Names:
        """Return the stored mode and id of each name; empty without such a directory."""
        if (names := self._directories.get(directory)) is None:
            entry = self.find(directory)
            names = self._read(entry.oid) if entry and entry.is_tree else {}
            self._directories[directory] = names
        return names

    @cachedmethod(attrgetter("_objects.trees"))
    def _read(self, tree: str) -> _Names:
        entries = _parse(self._objects, tree)
        return {name: (int(mode, 8), oid.hex()) for mode, name, oid in entries}


# of a tree that is near a checked one; with more, all of it is walked again
_FEW_CHANGES = 10_000


def must_fit(objects: Objects, tree: str, *, near: str | None = None) -> None:
    """Raise TooLargeError for a tree over a limit: entries, depth, path length, bytes.

    Raises CommitUnservableError for a symbolic link with an impossible target.

    Fifteen tiny objects can name 10^10 paths, so each distinct subtree is measured once, and file
    sizes are read from object headers. Of a tree that differs little from `near`, which is known to
    fit, only the changes are measured.
    """
    measured: dict[str, tuple[int, int, int]] = {}

    @cache
    def file_bytes(oid: str, is_symlink: bool) -> int:
        if (size := objects.blob_size(oid)) > FILE_LIMIT_BYTES:
            limit = f"the limit is {FILE_LIMIT_BYTES >> 20} MiB"
            raise _too_large(tree, f"a file has {size} bytes; {limit}")
        if is_symlink:
            must_be_target(oid, objects.read_blob(oid) if size < _PATH_MAX else b"")
        return size

    def check_totals(entries: int, size_bytes: int) -> None:
        if entries > ENTRIES_LIMIT:
            raise _too_large(tree, f"it has more than {ENTRIES_LIMIT} entries")
        if size_bytes > TREE_LIMIT_BYTES:
            raise _too_large(tree, f"its files have more than {TREE_LIMIT_BYTES >> 30} GiB")

    def measure(subtree: str, depth: int) -> tuple[int, int, int]:
        """Return entries, bytes and levels of a subtree. The depth limit bounds the recursion."""
        if depth > TREE_DEPTH_LIMIT:
            raise _too_deep(tree)
        if (total := measured.get(subtree)) is None:
            entries = size_bytes = below = 0
            for entry in _entries(subtree, _parse(objects, subtree), b""):
                entries += 1
                if entry.is_tree:
                    inner = measure(entry.oid, depth + 1)
                    entries, size_bytes = entries + inner[0], size_bytes + inner[1]
                    below = max(below, inner[2])
                elif not entry.is_submodule:
                    size_bytes += file_bytes(entry.oid, entry.is_symlink)
                check_totals(entries, size_bytes)
            total = measured[subtree] = entries, size_bytes, below + 1
        if depth + total[2] - 1 > TREE_DEPTH_LIMIT:
            raise _too_deep(tree)
        return total

    few = list(islice(changes(objects, near, tree), _FEW_CHANGES)) if near else []
    if near and len(few) < _FEW_CHANGES:
        new = (change.new for change in few)
        files = (entry for entry in new if entry and not entry.is_tree and not entry.is_submodule)
        check_totals(0, sum(file_bytes(entry.oid, entry.is_symlink) for entry in files))
    else:
        measure(tree, 1)


def must_be_target(oid: str, data: bytes) -> None:
    """Raise CommitUnservableError for a symbolic link's target that no file system accepts."""
    if not 0 < len(data) < _PATH_MAX or b"\0" in data:
        raise CommitUnservableError(
            f"cannot use blob {oid}: it cannot be the target of a symbolic link",
            hint="leave the commit out",
        )


# What git's fsck takes for `.git` on some file system: HFS+ ignores these code points, NTFS blanks
# and dots at the end, the name of a stream, and takes `\\` for a separator.
_HFS = rb"(?:\xe2\x80[\x8c-\x8f\xaa-\xae]|\xe2\x81[\xaa-\xaf]|\xef\xbb\xbf)*"
_NTFS_END = rb"[ .]*(?:[:\\].*)?"


def _variants(name: bytes, short: bytes) -> re.Pattern[bytes]:
    hfs = _HFS + _HFS.join(re.escape(name[index : index + 1]) for index in range(len(name))) + _HFS
    ntfs = rb"(?:.*\\)?(?:%s|%s)%s" % (re.escape(name), short, _NTFS_END)
    return re.compile(rb"%s|%s" % (hfs, ntfs), re.IGNORECASE | re.DOTALL)


_DOTGIT = _variants(b".git", rb"git~1")
# short names of NTFS: after four of `gitmod~N` it takes a hash of the name
_DOTGITMODULES = _variants(b".gitmodules", rb"(?:gitmod~[1-4]|gi7eba~[1-9])")


def _parse(objects: Objects, tree: str | None) -> list[_RawEntry]:
    if tree is None:
        return []
    entries = tree_entries(objects.read(tree, ObjectType.TREE))
    if entries is None:
        raise _unservable(tree, "it is malformed")
    if len({name for _, name, _ in entries}) != len(entries):
        raise _unservable(tree, "it has two entries of the same name")
    # git sorts a directory as if its name ended with a slash
    order = [name + b"/" if mode.lstrip(b"0") == b"40000" else name for mode, name, _ in entries]
    if order != sorted(order):
        raise _unservable(tree, "its entries are not sorted")
    return entries


def _entries(tree: str, raw: list[_RawEntry], above: bytes) -> list[TreeEntry]:
    """Check entries of a directory `above`. Raises CommitUnservableError, TooLargeError."""
    entries = []
    if raw and above.count(b"/") >= TREE_DEPTH_LIMIT:
        raise _too_deep(tree)
    for octal, name, oid in raw:
        mode = int(octal, 8)
        if mode not in (DIRECTORY, SUBMODULE, SYMLINK) and mode & KIND != FILE:
            raise _unservable(tree, f"its entry {_shown(name)} has mode {mode:o}")
        if b"/" in name or name in (b"", b".", b"..") or len(name) > NAME_LIMIT_BYTES:
            raise _unservable(tree, f"its entry {_shown(name)} is not a valid file name")
        if _DOTGIT.fullmatch(name):
            raise _unservable(tree, f"its entry {_shown(name)} means git's own directory")
        if mode == SYMLINK and _DOTGITMODULES.fullmatch(name):
            raise _unservable(tree, "its .gitmodules is a symbolic link")
        if octal[:1] == b"0" and len(octal) > 1:
            raise _unservable(tree, f"its entry {_shown(name)} has a zero before its mode")
        if not any(oid):
            raise _unservable(tree, f"its entry {_shown(name)} names no object")
        if len(above) + len(name) > TREE_PATH_LIMIT_BYTES:
            raise _too_large(tree, f"it has a path of more than {TREE_PATH_LIMIT_BYTES} bytes")
        entries.append(TreeEntry(above + name, mode, oid.hex()))
    return entries


def _too_deep(tree: str) -> TooLargeError:
    return _too_large(tree, f"it is more than {TREE_DEPTH_LIMIT} directories deep")


def _too_large(tree: str, fact: str) -> TooLargeError:
    return TooLargeError(
        f"cannot check out tree {tree}: {fact}",
        hint="leave the commit out; it is larger than mirrord checks out",
        tree=tree,
    )


def _shown(name: bytes) -> str:
    return shown(decode_name(name))


def _unservable(tree: str, fact: str) -> CommitUnservableError:
    return CommitUnservableError(
        f"cannot use tree {tree}: {fact}",
        hint="git does not check out such a tree either; leave the commit out",
        tree=tree,
    )
