"""Applies parsed patches to the files of a tree, in memory.

Follows check_patch of git 2.39 with `--cached`; `splicing.py` finds the hunks. Reads the tree and
nothing else.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple, Protocol

from ..git.modes import DIRECTORY, KIND, REGULAR, SUBMODULE, SYMLINK, file_mode
from ..git.objects.repository import Objects
from ..git.objects.trees import BaseTree, TreeEntry
from ..model import TREE_DEPTH_LIMIT
from ..trees.manifest import blob_id
from ..trees.reader import parents
from .parse import FilePatch, Hunk, NeedsGitError
from .splicing import MisfitError

UNTRACKED = 0


class File(NamedTuple):
    """A path as git records it; for a submodule `data` is its commit id in hex.

    `mode` is DIRECTORY for a directory, UNTRACKED for a pipe or a device, both without data.
    """

    mode: int
    data: bytes


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

    @property
    def oid(self) -> str:
        return blob_id(self.data).hex()


class Tree(Protocol):
    """The files that a patch is applied to, as git stores them: conversions are undone."""

    def read(self, path: bytes) -> File | None:
        """Return the file at a path; None where there is none, or a parent is not a directory."""
        ...

    def iter_below(self, path: bytes) -> Iterator[bytes]:
        """Yield all paths below a directory except directories."""
        ...


Results = dict[bytes, File | None]
Splice = Callable[[bytes, list[Hunk]], bytes]


def fit(
    tree: Tree, patches: list[FilePatch], *, reverse: bool, splice: Splice, rejects: bool = False
) -> Results:
    """Return the new file of each path that the patches name, None for a removed one.

    Raises NeedsGitError where only git can decide, MisfitError where a file does not fit; `rejects`
    skips that file.
    """
    if reverse:
        patches = [patch.reversed() for patch in patches]
    results: Results = {}
    going = {patch.old for patch in patches if patch.new is None or patch.is_rename}
    names = [name for patch in patches for name in {patch.old, patch.new} - {None}]
    if any(patch.is_rename or patch.is_copy for patch in patches) and len(set(names)) < len(names):
        raise NeedsGitError("a moved file is named again")
    for patch in patches:
        try:
            results |= _fit_one(tree, patch, results, going, reverse=reverse, splice=splice)
        except MisfitError:
            if not rejects:
                raise
    if any(results.get(above) for path, file in results.items() if file for above in parents(path)):
        raise NeedsGitError("a file below another")
    return results


def _fit_one(
    tree: Tree,
    patch: FilePatch,
    results: Results,
    going: set[bytes | None],
    *,
    reverse: bool,
    splice: Splice,
) -> Results:
    """Return what one patch adds to the `results` of those before it; `going` are all paths that
    some patch removes.
    """
    is_move = patch.is_rename or patch.is_copy
    if patch.old and patch.new and patch.old != patch.new and not is_move:
        raise NeedsGitError("two names of one file")
    before = _before(tree, patch, results)
    mode = _mode_of(patch, before, reverse=reverse)
    for name in {patch.old, patch.new} - {None}:
        _must_be_safe(name or b"", mode)
    if patch.new is not None and (before is None or is_move):
        _must_be_new(tree, patch.new, results, going)
    data = splice(before.data if before else b"", patch.hunks)
    if patch.is_delete and data:
        raise MisfitError
    added: Results = {}
    if patch.old is not None and (patch.new is None or patch.is_rename or patch.is_delete):
        added[patch.old] = None
    if patch.new is not None and not patch.is_delete:
        _must_have_directories(tree, patch.new, results)
        added[patch.new] = File(mode, data)
    return added


def _before(tree: Tree, patch: FilePatch, results: Results) -> File | None:
    """Return the file that a patch changes, after earlier patches; None where it is new."""
    if patch.old is None:
        return None
    if patch.old in results:
        if patch.is_rename or patch.is_copy:
            raise NeedsGitError("a moved file was changed before")
        entry = results[patch.old]
        if entry is None:
            raise MisfitError
    else:
        entry = tree.read(patch.old)
    if entry is None or entry.mode in (DIRECTORY, UNTRACKED):
        # a traditional patch of a file that is not there makes it (check_preimage)
        if patch.is_new is None:
            patch.is_delete = False
            return None
        raise MisfitError
    if entry.mode == SUBMODULE:
        raise NeedsGitError("a submodule")
    return entry


def _mode_of(patch: FilePatch, before: File | None, *, reverse: bool) -> int:
    if before is None:
        if reverse and patch.new_mode not in (0, REGULAR):
            raise NeedsGitError("the mode of a removed file, reversed")
        return _canonical(patch.new_mode or REGULAR)
    if (patch.old_mode or before.mode) & KIND != before.mode & KIND:
        raise MisfitError
    if reverse and patch.new_mode and not patch.old_mode and patch.new_mode != before.mode:
        # git up to 2.43 takes the mode of an `index` line for the new one, later ones do not
        raise NeedsGitError("the mode of an index line, reversed")
    mode = patch.new_mode or before.mode
    if mode & KIND != before.mode & KIND and not patch.is_delete:
        raise MisfitError
    return _canonical(mode)


def _canonical(mode: int) -> int:
    if mode & KIND == SYMLINK:
        return SYMLINK
    # as in git, the x bit of the owner decides
    return file_mode(mode)


# stricter than verify_path with core.protectNTFS: such names are left to git
_ODD_NAME = re.compile(rb"|\.|\.\.|(?i:\.git(?![a-z0-9_-]).*|git~.*)", re.DOTALL)


def _must_be_safe(path: bytes, mode: int) -> None:
    parts = path.split(b"/")
    if any(_ODD_NAME.fullmatch(part) for part in parts):
        raise NeedsGitError("a path that git may refuse")
    if mode == SYMLINK and parts[-1].lower() == b".gitmodules":
        raise NeedsGitError("a link for .gitmodules")


def _must_be_new(tree: Tree, path: bytes, results: Results, going: set[bytes | None]) -> None:
    if path in results:
        if results[path] is not None:
            raise NeedsGitError("a file is created twice")
    elif path not in going and (content := tree.read(path)) and content.mode != DIRECTORY:
        raise MisfitError


def _must_have_directories(tree: Tree, path: bytes, results: Results) -> None:
    for above in reversed(parents(path)):
        if above in results or ((content := tree.read(above)) and content.mode != DIRECTORY):
            raise NeedsGitError("a file where a directory should be")


def find_obstacle(tree: Tree, results: Results) -> bytes | None:
    """Return a path that blocks a new file and that git, whose index has few paths, cannot see."""
    for path in (path for path, file in results.items() if file):
        content = tree.read(path)
        if content is None:
            for above in reversed(parents(path)):
                parent = tree.read(above)
                is_tree = parent is None or parent.mode in (DIRECTORY, SUBMODULE)
                if not is_tree and results.get(above, parent) is not None:
                    return above
        elif content.mode == DIRECTORY:
            if any(results.get(below, content) is not None for below in tree.iter_below(path)):
                return path
        elif content.mode == UNTRACKED:
            return path
    return None


class Patched:
    """A tree after a patch, as a `Tree`."""

    def __init__(self, tree: Tree, results: Results) -> None:
        self._tree = tree
        self._results = results

    def read(self, path: bytes) -> File | None:
        return self._results[path] if path in self._results else self._tree.read(path)

    def iter_below(self, path: bytes) -> Iterator[bytes]:
        return (below for below in self._tree.iter_below(path) if below not in self._results)


class BaseFiles:
    """The files of one commit's tree, as a `Tree`. Raises CorruptObjectError."""

    def __init__(self, objects: Objects, tree: str) -> None:
        self._objects = objects
        self._tree = BaseTree(objects, tree)
        self.read = cache(self._read)

    def _read(self, path: bytes) -> File | None:
        entry = self._tree.find(path) if path.count(b"/") < TREE_DEPTH_LIMIT else None
        if entry is None:
            return None
        if entry.is_tree:
            return File(DIRECTORY, b"")
        if entry.is_submodule:
            return File(SUBMODULE, entry.oid.encode())
        return File(entry.mode, self._objects.read_blob(entry.oid))

    def iter_below(self, path: bytes) -> Iterator[bytes]:
        return (entry.path for entry in self._tree.iter_files(path))
