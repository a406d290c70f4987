"""What a commit may cost whoever checks it out: entries, depth, path length and bytes of its tree.

Fifteen tiny objects can name 10^10 paths. So a tree is measured before anything is made of it: each subtree
once, however often it is named, which answers such a commit in milliseconds. Sizes are what the headers of the
objects state; nothing is inflated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from ...model import TREE_DEPTH_LIMIT
from .repositories import Objects
from .trees import TreeChange, TreeEntry, changes, read_entries, too_large

ENTRIES_LIMIT = 1_000_000
FILE_LIMIT_BYTES = 1024**3
TREE_LIMIT_BYTES = 64 * 1024**3
_FEW = 10_000  # changes, which are looked at one by one


class _Size(NamedTuple):
    entries: int
    size_bytes: int
    depth: int


def must_fit(objects: Objects, tree: str, *, near: str | None = None) -> None:
    """Raise TreeTooLargeError for a tree that is over a bound. One that differs little from the tree `near`, which
    fits, is not looked at as a whole."""
    measure = _Measure(objects, tree)
    few = list(islice(changes(objects, near, tree), _FEW)) if near else []
    if near and len(few) < _FEW:
        measure.must_be_within(0, sum(map(measure.file_bytes, _iter_files(few))))
    else:
        measure.of(tree, 1)


class _Measure:
    """The sizes of the subtrees of one tree."""

    def __init__(self, objects: Objects, tree: str) -> None:
        self._objects = objects
        self._tree = tree
        self._known: dict[str, _Size] = {}
        self._file_size = lru_cache(maxsize=None)(objects.blob_size)

    def of(self, tree: str, depth: int) -> _Size:
        """Of a subtree that stands `depth` levels deep. No deeper than the bound, so that Python's stack holds it."""
        found = self._known.get(tree) or self._known.setdefault(tree, self._add_up(tree, depth))
        if depth + found.depth - 1 > TREE_DEPTH_LIMIT:
            raise too_large(self._tree, f"it is more than {TREE_DEPTH_LIMIT} directories deep")
        return found

    def file_bytes(self, entry: TreeEntry) -> int:
        size = self._file_size(entry.oid)
        if size > FILE_LIMIT_BYTES:
            raise too_large(
                self._tree,
                f"a file has {size} bytes; at most {FILE_LIMIT_BYTES >> 20} MiB are written",
            )
        return size

    def must_be_within(self, entries: int, size_bytes: int) -> None:
        if entries > ENTRIES_LIMIT:
            raise too_large(self._tree, f"it has more than {ENTRIES_LIMIT} entries")
        if size_bytes > TREE_LIMIT_BYTES:
            raise too_large(self._tree, f"its files have more than {TREE_LIMIT_BYTES >> 30} GiB")

    def _add_up(self, tree: str, depth: int) -> _Size:
        if depth > TREE_DEPTH_LIMIT:
            raise too_large(self._tree, f"it is more than {TREE_DEPTH_LIMIT} directories deep")
        entries = size_bytes = below = 0
        for entry in read_entries(self._objects, tree):
            inner = _Size(0, 0, 0)
            if entry.is_tree:
                inner = self.of(entry.oid, depth + 1)
            elif not entry.is_submodule:
                size_bytes += self.file_bytes(entry)
            entries += 1 + inner.entries
            size_bytes += inner.size_bytes
            below = max(below, inner.depth)
            self.must_be_within(entries, size_bytes)
        return _Size(entries, size_bytes, below + 1)


def _iter_files(steps: Iterable[TreeChange]) -> Iterator[TreeEntry]:
    return (
        step.new
        for step in steps
        if step.new and not step.new.is_tree and not step.new.is_submodule
    )
