"""Git objects through libgit2: the only package that imports pygit2. Sync; runs in workers, never in the daemon.

Reads are verified: an object whose bytes do not match its id is a CorruptObjectError, not a wrong answer.
"""

from __future__ import annotations

from .commits import CommitInfo, commit_info, is_ancestor, resolve, write_squashed
from .conversion import Conversion, Conversions
from .repositories import Objects, open_objects
from .trees import TreeChange, TreeEntry, tree_changes, tree_entries

__all__ = [
    "CommitInfo",
    "Conversion",
    "Conversions",
    "Objects",
    "TreeChange",
    "TreeEntry",
    "commit_info",
    "is_ancestor",
    "open_objects",
    "resolve",
    "tree_changes",
    "tree_entries",
    "write_squashed",
]
