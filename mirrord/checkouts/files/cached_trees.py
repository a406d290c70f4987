"""The cached-tree extension of git's index: for each directory how many entries are below it, and its tree.

Owns its bytes, version 2 of the index: each directory before those in it, shorter names first. Pure.
"""

from __future__ import annotations

import re
import struct
from collections import Counter, defaultdict
from collections.abc import Mapping

from .records import DIRECTORY, Entry, Records

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
