"""New blobs and trees in an object directory of their own; the repository stays as it is."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pygit2
from pygit2.enums import ObjectType

from .trees import BaseTree

_Names = dict[bytes, tuple[int, str] | None]


class ScratchObjects:
    """An object directory that git can use as GIT_OBJECT_DIRECTORY."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._odb = pygit2.Odb(str(directory))

    def write_blob(self, data: bytes) -> str:
        return str(self._odb.write(ObjectType.BLOB, data))

    def write_tree(self, base: BaseTree, edits: Mapping[bytes, tuple[int, str] | None]) -> str:
        """The tree that `base` becomes with these modes and ids; None removes a path.

        Writes the directories of changed paths alone, the deepest first.
        """
        pending: defaultdict[bytes, _Names] = defaultdict(dict)
        for path, entry in edits.items():
            above, _, name = path.rpartition(b"/")
            pending[above][name] = entry
            while above:
                above = above.rpartition(b"/")[0]
                pending.setdefault(above, {})
        directories = sorted(pending, key=lambda each: each.count(b"/") + bool(each), reverse=True)
        for directory in directories:
            names: _Names = dict(base.names_in(directory))
            names |= pending[directory]
            left = {name: entry for name, entry in names.items() if entry}
            above, _, name = directory.rpartition(b"/")
            if left or not directory:
                written = str(self._odb.write(ObjectType.TREE, _tree_bytes(left)))
                if not directory:
                    return written
                pending[above][name] = 0o040000, written
            else:
                pending[above].setdefault(name, None)
        return base.oid


def _tree_bytes(names: Mapping[bytes, tuple[int, str]]) -> bytes:
    """A tree object; git sorts a directory as if its name had a slash behind it."""
    rows = []
    for name, (mode, oid) in names.items():
        row = b"%o %s\0%s" % (mode, name, bytes.fromhex(oid))
        rows.append((name + b"/" if mode == 0o040000 else name, row))
    return b"".join(row for _, row in sorted(rows))
