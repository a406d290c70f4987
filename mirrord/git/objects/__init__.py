"""Git objects through libgit2: the only package that imports pygit2. Sync; runs in workers, never in the daemon.

Reads are verified: an object whose bytes do not match its id is a CorruptObjectError, not a wrong answer.
"""

from __future__ import annotations

from .bounds import must_fit
from .commits import CommitInfo, is_ancestor, read_commit, resolve
from .conversion import Conversion, Conversions
from .increments import first_parents, pack_increment
from .repositories import Objects, open_objects
from .trees import TreeChange, TreeEntry, changes, tree_changes, tree_entries, walk

__all__ = [
    "CommitInfo",
    "Conversion",
    "Conversions",
    "Objects",
    "TreeChange",
    "TreeEntry",
    "changes",
    "first_parents",
    "is_ancestor",
    "must_fit",
    "open_objects",
    "pack_increment",
    "read_commit",
    "resolve",
    "tree_changes",
    "tree_entries",
    "walk",
]
