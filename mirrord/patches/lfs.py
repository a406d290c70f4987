"""Patches that name objects of Git LFS by their pointers, as git makes them.

Where a checkout has the object in place of a pointer, git's filter still gives git the pointer, and
so do patches of `git diff` and of data sets. To such a patch the file is its pointer. No I/O.
"""

import hashlib
import re
from functools import cache

from ..git.lfs import POINTER_BYTES, Pointer, parse_pointer, pointer_bytes
from ..git.modes import EXECUTABLE, REGULAR
from ..host.files import shown_path
from .fit import File, Results, Tree

_OID = re.compile(rb"(?m)^[ +-]oid sha256:([0-9a-f]{64})\r?$")


def names_pointers(patch: bytes) -> bool:
    return _OID.search(patch) is not None


class PointedTree:
    """A tree in which the objects that a patch names stand as pointers."""

    def __init__(self, tree: Tree, patch: bytes) -> None:
        self._tree = tree
        self._oids = {oid.decode() for oid in _OID.findall(patch)}
        self.objects: dict[str, bytes] = {}
        self.iter_below = tree.iter_below
        self.read = cache(self._read)

    def _read(self, path: bytes) -> File | None:
        file = self._tree.read(path)
        if file is None or file.mode not in (REGULAR, EXECUTABLE):
            return file
        oid = hashlib.sha256(file.data).hexdigest()
        if oid not in self._oids:
            return file
        self.objects[oid] = file.data
        return File(file.mode, pointer_bytes(Pointer(oid, len(file.data))))


def with_objects(results: Results, trees: list[PointedTree], notes: list[str]) -> Results:
    """Return results with the objects that one of the trees has in place of their pointers; a note
    names each pointer that stays.
    """
    done = dict(results)
    for path, file in results.items():
        pointer = parse_pointer(file.data) if file and len(file.data) < POINTER_BYTES else None
        if file is None or pointer is None:
            continue
        befores = [tree.read(path) for tree in trees]  # which finds the objects, too
        data = next((it.objects[pointer.oid] for it in trees if pointer.oid in it.objects), None)
        if data is not None:
            done[path] = File(file.mode, data)
        elif file not in befores:
            notes.append(f"{shown_path(path)} is an LFS pointer, whose object the mirror lacks")
    return done
