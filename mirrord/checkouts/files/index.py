"""The index of a checkout, written from its manifest, so that git need not look at any file.

Owns the bytes of git's index format, version 2, with the cached-tree extension: `git status` compares stat data and hashes
nothing, `git write-tree` and `git commit` find the trees of what did not change. Pure: the caller writes the bytes.
"""

from __future__ import annotations

import hashlib
import re
import struct
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Self

from .manifest import DIRECTORY, SUBMODULE, Entry, Manifest, Records

_HEADER = struct.Struct(">4sI")
_NODE = re.compile(rb"(([^\0]*)\0(\d+) (\d+)\n.{20})", re.DOTALL)


def cached_trees(files: Mapping[bytes, Entry], paths: list[bytes]) -> bytes:
    """The extension for all `files`; `paths` are those that the index lists."""
    counts = Counter([path.rpartition(b"/")[0] for path in paths])
    below: dict[bytes, list[bytes]] = {
        path: [] for path, entry in files.items() if entry.mode == DIRECTORY
    }
    for path in sorted(below, reverse=True):  # what is in a directory comes before it
        if path:
            above = path.rpartition(b"/")[0]
            counts[above] += counts[path]
            below[above].append(path)
    parts: list[bytes] = []
    pending = [b""]
    while pending:
        path = pending.pop()
        subtrees = below[path]
        parts.append(_node(path, counts[path], len(subtrees), files[path]))
        subtrees.sort(reverse=True)
        subtrees.sort(key=len, reverse=True)  # the last of the pending is next
        pending += subtrees
    return _extension(b"".join(parts))


def spliced_trees(old: bytes, before: Records, files: Records) -> bytes:
    """The same, made of the extension `old` for `before`: directories in which nothing changed are copied."""
    return _extension(_Splice(old, before, files).render(b"", 0))


class _Splice:
    """Nodes are named by their place in the old extension; None is a directory that it has not."""

    def __init__(self, old: bytes, before: Records, files: Records) -> None:
        self._files = files
        self._nodes: list[tuple[bytes, bytes, bytes, bytes]] = _NODE.findall(old, _HEADER.size)
        self._ends = _ends([int(node[3]) for node in self._nodes])
        self._growth: Counter[bytes] = Counter()
        self._changed = {b""}
        self._gone: defaultdict[bytes, set[bytes]] = defaultdict(set)
        self._new: defaultdict[bytes, set[bytes]] = defaultdict(set)
        for path in files.changed_since(before):
            self._note(path, before.get(path), files.get(path))

    def _note(self, path: bytes, old: Entry | None, new: Entry | None) -> None:
        was_tree, is_tree = (entry is not None and entry.mode == DIRECTORY for entry in (old, new))
        growth = (new is not None and not is_tree) - (old is not None and not was_tree)
        above, _, name = path.rpartition(b"/")
        if was_tree != is_tree:
            (self._new if is_tree else self._gone)[above].add(name)
        if is_tree:
            self._changed.add(path)
        while path:
            path = path.rpartition(b"/")[0]
            self._changed.add(path)
            self._growth[path] += growth

    def render(self, path: bytes, place: int | None) -> bytes:
        """A directory in which something changed, with all below it."""
        old = self._subtrees(place)
        names = sorted(
            (old.keys() - self._gone[path]) | self._new[path], key=lambda name: (len(name), name)
        )
        count = self._growth[path] + (0 if place is None else int(self._nodes[place][2]))
        parts = [_node(path, count, len(names), self._files[path])]
        for name in names:
            child = path + b"/" + name if path else name
            parts.append(
                self.render(child, old.get(name))
                if child in self._changed
                else self._copied(old[name])
            )
        return b"".join(parts)

    def _subtrees(self, place: int | None) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        if place is not None:
            at = place + 1
            for _ in range(int(self._nodes[place][3])):
                found[self._nodes[at][1]] = at
                at = self._ends[at]
        return found

    def _copied(self, place: int) -> bytes:
        return b"".join([node[0] for node in self._nodes[place : self._ends[place]]])


def _ends(subtrees: list[int]) -> list[int]:
    """For each node the place after it and all below it; `subtrees` says how many are directly below."""
    ends = [0] * len(subtrees)
    for place in reversed(range(len(subtrees))):
        end = place + 1
        for _ in range(subtrees[place]):
            end = ends[end]
        ends[place] = end
    return ends


def _node(path: bytes, count: int, subtrees: int, entry: Entry) -> bytes:
    return b"%s\0%d %d\n%s" % (path.rpartition(b"/")[2], count, subtrees, entry.oid)


def _extension(nodes: bytes) -> bytes:
    return _HEADER.pack(b"TREE", len(nodes)) + nodes


_ENTRY = struct.Struct(">10I20sH")
_HEADER_BYTES = 12
_CHECKSUM_BYTES = 20
_LOW = 0xFFFFFFFF
_LONGEST_NAME = 0xFFF
_EXECUTABLE = 0o100
_SECOND_NS = 10**9
_PADDING = [bytes(8 - (_ENTRY.size + length) % 8) for length in range(8)]


def index_bytes(manifest: Manifest) -> bytes:
    """The index of the tree that a manifest is of."""
    files = manifest.files.decoded()
    paths = sorted(path for path, entry in files.items() if entry.mode != DIRECTORY)
    parts = [b"DIRC", struct.pack(">II", 2, len(paths))]
    parts += _packed_entries(files, paths)
    parts.append(cached_trees(files, paths))
    body = b"".join(parts)
    return body + hashlib.sha1(body).digest()


@dataclass(frozen=True, slots=True)
class Former:
    """An index that was written from `manifest`, as it is on disk."""

    manifest: Manifest
    index: bytes

    @classmethod
    def proven(cls, manifest: Manifest, index: bytes) -> Self | None:
        """None where the bytes are not those that were written."""
        return (
            cls(manifest, index)
            if hashlib.sha1(index[:-_CHECKSUM_BYTES]).hexdigest() == manifest.index
            else None
        )


def spliced_index(former: Former, manifest: Manifest) -> bytes:
    """What `index_bytes` gives, for a manifest that goes back to the former's: what both have is copied."""
    old, files = former.index, manifest.files
    names, offsets = _located(old)
    pieces, done, count = [], 0, len(names)
    for path in sorted(files.changed_since(former.manifest.files)):
        place = bisect_left(names, path)
        was_there = names[place : place + 1] == [path]
        is_there = path in files and files[path].mode != DIRECTORY
        if was_there or is_there:
            pieces.append(old[offsets[done] : offsets[place]])
            pieces += _packed_entries(files, [path]) if is_there else []
            done = place + was_there
            count += is_there - was_there
    pieces.append(old[offsets[done] : offsets[-1]])
    trees = old[offsets[-1] : -_CHECKSUM_BYTES]
    if manifest.tree != former.manifest.tree:
        trees = spliced_trees(trees, former.manifest.files, files)
    body = b"".join([b"DIRC", struct.pack(">II", 2, count), *pieces, trees])
    return body + hashlib.sha1(body).digest()


def _located(index: bytes) -> tuple[list[bytes], list[int]]:
    """The paths in an index that we wrote, and where each entry begins; last where the entries end."""
    names, offsets, at = [], [], _HEADER_BYTES
    for _ in range(int.from_bytes(index[8:_HEADER_BYTES], "big")):
        begin = at + _ENTRY.size
        length = int.from_bytes(index[begin - 2 : begin], "big")
        if length == _LONGEST_NAME:
            length = index.index(b"\0", begin) - begin
        names.append(index[begin : begin + length])
        offsets.append(at)
        at = begin + length + 8 - (_ENTRY.size + length) % 8
    return names, [*offsets, at]


def _packed_entries(files: Mapping[bytes, Entry], paths: list[bytes]) -> list[bytes]:
    """The entries, each padded with NULs to a multiple of eight; st_dev is left 0, git ignores it (USE_STDEV is off)."""
    parts: list[bytes] = []
    pack = _ENTRY.pack
    for path in paths:
        mode, oid, _, _, size, ino, mtime_ns, ctime_ns, uid, gid = files[path]
        length = min(len(path), _LONGEST_NAME)
        if mode == SUBMODULE:
            fixed = pack(0, 0, 0, 0, 0, 0, SUBMODULE, 0, 0, 0, oid, length)
        else:
            ctime, mtime = ctime_ns // _SECOND_NS & _LOW, mtime_ns // _SECOND_NS & _LOW
            times = ctime, ctime_ns % _SECOND_NS, mtime, mtime_ns % _SECOND_NS
            fixed = pack(
                *times, 0, ino & _LOW, _canonical(mode), uid, gid, size & _LOW, oid, length
            )
        parts += (fixed, path, _PADDING[len(path) & 7])
    return parts


@cache
def _canonical(mode: int) -> int:
    """Old trees hold modes like 100664; an index knows two kinds of file."""
    if mode & 0o170000 != 0o100000:
        return mode
    return 0o100755 if mode & _EXECUTABLE else 0o100644
