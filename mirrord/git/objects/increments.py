"""What one commit adds to a closure that is packed already: found by walking it, and written as a pack of its own.

Owns the walk that a small closure pack is made by. It starts at the commit, so everything found is in its closure. It follows
all that a found object names, but what a pack below holds: these are closed, so nothing of the closure is left out. No cleverness
about what a neighbouring tree shares: that led in a circle once, where changes were reverted. Commits are read from their own
bytes: no commit-graph, bitmap, graft or replacement can change the walk. Every object was hashed when it was read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from pygit2.enums import ObjectType

from ...errors import CorruptObjectError
from ...model import CommitId
from ..pack_writer import Packed, PackObject, write_pack
from ..packs import PackIndex
from .repositories import Objects, open_objects

_OBJECTS_MAX = 2000
_BYTES_MAX = 16 * 1024**2
_ENTRY = re.compile(rb"([0-7]+) ([^\0]+)\0(.{20})", re.DOTALL)
_TREE, _SUBMODULE = b"40000", b"160000"

_Entry = tuple[bytes, bytes, bytes]


def pack_increment(git_dir: Path, tip: str, below: Sequence[Path], into: Path) -> Packed | None:
    """Pack what the closure of `tip` adds to the packs whose indexes are `below`; None where it is too much for this way.

    Raises CorruptObjectError when an object is missing or damaged.
    """
    with open_objects(git_dir) as objects:
        found = _Increment(objects, [_open_index(path) for path in below])
        return write_pack(found.objects, into) if found.walk(bytes.fromhex(tip)) else None


def first_parents(git_dir: Path, commit: str, limit: int) -> list[CommitId]:
    """A commit and its first parents, newest first, `limit` in all; raises CorruptObjectError where one cannot be read."""
    with open_objects(git_dir) as objects:
        return first_parents_in(objects, commit, limit)


def first_parents_in(objects: Objects, commit: str, limit: int) -> list[CommitId]:
    """The same of a repository that is open."""
    line = [bytes.fromhex(commit)]
    while len(line) < limit and (parents := _links(objects.read(line[-1], ObjectType.COMMIT))[1]):
        line.append(parents[0])
    return [CommitId(oid.hex()) for oid in line]


@lru_cache(maxsize=128)
def _open_index(path: Path) -> PackIndex:
    """Closure packs are never written again under a name: it is the checksum of their content."""
    return PackIndex(path, mapped=True)


class _Increment:
    """The objects found so far, each after what it may be a delta on."""

    def __init__(self, objects: Objects, below: Sequence[PackIndex]) -> None:
        self.objects: dict[bytes, PackObject] = {}
        self._source = objects
        self._below = below
        self._judged: set[bytes] = set()  # found, or known to be below
        self._entries: dict[bytes, list[_Entry]] = {}
        self._bytes = 0

    def walk(self, tip: bytes) -> bool:
        """Find everything, newest first; False when it is more than the bounds."""
        todo: list[tuple[bytes, bytes | None]] = [(tip, None)]
        while todo:
            commit, newer = todo.pop()
            if not self._is_new(commit):
                continue
            tree, parents = _links(self._add(commit, ObjectType.COMMIT))
            if not self._walk_tree(tree, newer):
                return False
            todo += [(parent, tree) for parent in reversed(parents)]
        return True

    def _walk_tree(self, top: bytes, newer: bytes | None) -> bool:
        """Find what is below a tree. The tree that came after it says no more than what may be a delta on what."""
        todo: list[tuple[bytes, bytes | None]] = [(top, newer)]
        while todo:
            tree, newer = todo.pop()
            if not self._is_new(tree):
                continue
            named = {name: oid for _, name, oid in self._entries.get(newer or b"", ())}
            for mode, name, oid in self._read_entries(tree, newer):
                kind = None if oid in self._judged else _kind(mode)
                if kind == ObjectType.TREE:
                    todo.append((oid, named.get(name)))
                elif kind == ObjectType.BLOB and self._is_new(oid):
                    self._add(oid, ObjectType.BLOB, named.get(name))
            if len(self.objects) > _OBJECTS_MAX or self._bytes > _BYTES_MAX:
                return False
        return True

    def _is_new(self, oid: bytes) -> bool:
        """Whether an object is neither found nor below; asked once of each."""
        if oid in self._judged:
            return False
        self._judged.add(oid)
        return not self._is_below(oid)

    def _is_below(self, oid: bytes) -> bool:
        return any(oid in index for index in self._below)

    def _read_entries(self, tree: bytes, newer: bytes | None) -> list[_Entry]:
        found = self._entries[tree] = _entries(tree, self._add(tree, ObjectType.TREE, newer))
        return found

    def _add(self, oid: bytes, kind: ObjectType, newer: bytes | None = None) -> bytes:
        data = self._source.read(oid, kind)
        self.objects[oid] = PackObject(oid, int(kind), data, newer)
        self._bytes += len(data)
        return data


def _links(commit: bytes) -> tuple[bytes, list[bytes]]:
    """The tree and the parents that a commit's first lines name."""
    tree, *rest = commit.split(b"\n")
    parents = []
    for line in rest:
        if not line.startswith(b"parent "):
            break
        parents.append(bytes.fromhex(line[7:].decode()))
    return bytes.fromhex(tree[5:].decode()), parents


def _entries(oid: bytes, data: bytes) -> list[_Entry]:
    found: list[_Entry] = _ENTRY.findall(data)
    if sum(len(mode) + len(name) + 22 for mode, name, _ in found) != len(data):
        raise CorruptObjectError(
            f"cannot read tree {oid.hex()}: it is malformed", objects=[oid.hex()]
        )
    return found


def _kind(mode: bytes) -> ObjectType | None:
    mode = mode.lstrip(b"0")
    return None if mode == _SUBMODULE else ObjectType.TREE if mode == _TREE else ObjectType.BLOB
