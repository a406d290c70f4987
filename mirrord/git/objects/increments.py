"""What one commit adds to a closure that is packed already: found by walking it, and written as a pack of its own.

Owns the walk that a small closure pack is made by. It starts at the commit, so everything found is in its closure; it stops only
at what is found already, at what a pack below holds, and at entries that the first parent has under the same name, and follows
all else; so with the packs below, which are closed, nothing of the closure is left out. Commits are read from their own bytes:
no commit-graph, bitmap, graft or replacement can change the walk. Every object was hashed when it was read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from pygit2.enums import ObjectType

from ...errors import CorruptObjectError
from ..packs import PackIndex
from ..packwriter import Packed, PackObject, write_pack
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


def first_parents(git_dir: Path, commit: str, limit: int) -> list[str]:
    """A commit and its first parents, newest first, `limit` in all; raises CorruptObjectError where one cannot be read."""
    line = [bytes.fromhex(commit)]
    with open_objects(git_dir) as objects:
        while len(line) < limit and (parents := _links(objects.read(line[-1], ObjectType.COMMIT))[1]):
            line.append(parents[0])
    return [oid.hex() for oid in line]


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
        self._newer: dict[bytes, bytes] = {}
        self._trees: dict[bytes, bytes] = {}
        self._walked: set[tuple[bytes, bytes | None]] = set()
        self._bytes = 0

    def walk(self, tip: bytes) -> bool:
        """Find everything; False when it is more than the bounds."""
        todo = [tip]
        while todo:
            commit = todo.pop()
            if self._has(commit):
                continue
            tree, parents = _links(self._add(commit, ObjectType.COMMIT))
            above = _links(self._source.read(parents[0], ObjectType.COMMIT))[0] if parents else None
            if not self._walk_tree(tree, above):
                return False
            todo += parents
        return True

    def _walk_tree(self, top: bytes, above: bytes | None) -> bool:
        """Find what is below a tree, in the light of the tree in its place before.

        A tree that was found in the light of another one has only what it lacks: where a change was reverted, that one may count
        on this one in turn. So only the same pair is not walked again.
        """
        todo: list[tuple[bytes, bytes | None]] = [(top, above)]
        while todo:
            tree, before = todo.pop()
            if (tree, before) in self._walked or self._is_below(tree):
                continue
            self._walked.add((tree, before))
            for kind, oid, older in self._differing(tree, before):
                if older is not None:
                    self._newer.setdefault(older, oid)
                if kind == ObjectType.TREE:
                    todo.append((oid, older))
                elif not self._has(oid):
                    self._add(oid, ObjectType.BLOB)
            if before is not None:
                self._newer.setdefault(before, tree)
            if len(self.objects) > _OBJECTS_MAX or self._bytes > _BYTES_MAX:
                return False
        return True

    def _differing(self, tree: bytes, before: bytes | None) -> Iterator[tuple[ObjectType, bytes, bytes | None]]:
        """Entries that `before` has not: kind, object, and the object of that kind which `before` has under the name."""
        old = _entries(before, self._read_tree(before)) if before else []
        named = {name: (_kind(mode), oid) for mode, name, oid in old}
        for mode, name, oid in sorted(set(_entries(tree, self._add(tree, ObjectType.TREE))).difference(old)):
            kind = _kind(mode)
            if kind is not None:
                older_kind, older = named.get(name, (None, None))
                yield kind, oid, older if older_kind == kind else None

    def _has(self, oid: bytes) -> bool:
        return oid in self.objects or self._is_below(oid)

    def _is_below(self, oid: bytes) -> bool:
        return any(oid in index for index in self._below)

    def _add(self, oid: bytes, kind: ObjectType) -> bytes:
        if oid in self.objects:
            return self.objects[oid].data
        data = self._read_tree(oid) if kind == ObjectType.TREE else self._source.read(oid, kind)
        self.objects[oid] = PackObject(oid, int(kind), data, self._newer.get(oid))
        self._bytes += len(data)
        return data

    def _read_tree(self, oid: bytes) -> bytes:
        """Each tree is wanted twice: as what is new, and as what was there before."""
        if oid not in self._trees:
            self._trees[oid] = self._source.read_tree(oid)
        return self._trees[oid]


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
        raise CorruptObjectError(f"cannot read tree {oid.hex()}: it is malformed", objects=[oid.hex()])
    return found


def _kind(mode: bytes) -> ObjectType | None:
    mode = mode.lstrip(b"0")
    return None if mode == _SUBMODULE else ObjectType.TREE if mode == _TREE else ObjectType.BLOB
