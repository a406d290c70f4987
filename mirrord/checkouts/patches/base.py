"""The tree of a base commit, and the paths of a checkout that differ from it."""

from collections.abc import Iterator
from typing import NamedTuple

from ...git.objects.repository import Objects
from ...git.objects.trees import BaseTree, TreeEntry
from ...model import TREE_DEPTH_LIMIT
from .fit import DIRECTORY, File
from .parse import SUBMODULE


class Change(NamedTuple):
    """A path that differs from the base tree, as git records it.

    `mode` is git's (0o100644, 0o100755, 0o120000, 0o160000), None where the path is removed; `data`
    is the blob (eol, ident and encoding undone), empty where removed or a submodule; `old` is the
    entry of the base tree, None where the path is new.
    """

    path: bytes
    mode: int | None
    data: bytes
    old: TreeEntry | None


class BaseFiles:
    """Reads one tree, to which a patch is applied without a checkout; a `fit.Tree`.

    Raises CorruptObjectError.
    """

    def __init__(self, objects: Objects, tree: str) -> None:
        self._objects = objects
        self._tree = BaseTree(objects, tree)
        self._known: dict[bytes, File | None] = {}

    def read(self, path: bytes) -> File | None:
        if path not in self._known:
            self._known[path] = self._look(path)
        return self._known[path]

    def _look(self, path: bytes) -> File | None:
        is_possible = path.count(b"/") < TREE_DEPTH_LIMIT
        entry = self._tree.find(path) if is_possible else None
        if entry is None:
            return None
        if entry.is_tree:
            return File(DIRECTORY, b"")
        if entry.is_submodule:
            return File(SUBMODULE, entry.oid.encode())
        return File(entry.mode, self._objects.read_blob(entry.oid))

    def iter_below(self, path: bytes) -> Iterator[bytes]:
        return (entry.path for entry in self._tree.iter_files(path))
