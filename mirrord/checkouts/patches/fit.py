"""Parsed patches onto the files of a tree: what each named path becomes, or why it cannot.

Follows check_patch of git 2.39 with `--cached`. Pure but for the tree that it reads.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from .names import NotPlainError
from .parse import REGULAR, SUBMODULE, SYMLINK, FilePatch, Hunk
from .splice import MisfitError

DIRECTORY, UNTRACKED = 0o040000, 0
# verify_path with core.protectNTFS, in a stricter form: such names are left to git
_ODD_NAME = re.compile(rb"|\.|\.\.|(?i:\.git(?![a-z0-9_-]).*|git~.*)", re.DOTALL)
_FORMAT = 0o170000


class File(NamedTuple):
    """A path as git records it; for a submodule `data` is its commit, in hexadecimal.

    A directory has DIRECTORY, a pipe or a device UNTRACKED, both without data.
    """

    mode: int
    data: bytes


class Tree(Protocol):
    """What a patch is applied to, in git's form: line ends, `$Id$` and encoding undone."""

    def read(self, path: bytes) -> File | None:
        """Whatever is at a path; None where nothing is, or below what is no directory."""
        ...

    def iter_below(self, path: bytes) -> Iterator[bytes]:
        """All paths below a directory that are no directories themselves."""
        ...


Results = dict[bytes, File | None]
Splice = Callable[[bytes, list[Hunk]], bytes]


def fit(
    tree: Tree,
    patches: list[FilePatch],
    *,
    reverse: bool,
    splice: Splice,
    rejects: bool = False,
) -> Results:
    """What each path that the patches name becomes; None for one that goes.

    Raises NotPlainError where only git can tell, MisfitError where a file does not fit: with
    `rejects` it is left out.
    """
    if reverse:
        patches = [patch.reversed() for patch in patches]
    results: Results = {}
    going = {patch.old for patch in patches if patch.new is None or patch.is_rename}
    names = [name for patch in patches for name in {patch.old, patch.new} - {None}]
    if any(patch.is_rename or patch.is_copy for patch in patches) and len(set(names)) < len(names):
        raise NotPlainError("a file moves, and is named again")
    for patch in patches:
        try:
            results |= _fit_one(tree, patch, results, going, reverse=reverse, splice=splice)
        except MisfitError:
            if not rejects:
                raise
    if any(results.get(above) for path, file in results.items() if file for above in _above(path)):
        raise NotPlainError("a file below another")
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
    """What one patch adds to the results of those before it; `going` are paths that later ones take
    away.
    """
    is_move = patch.is_rename or patch.is_copy
    if patch.old and patch.new and patch.old != patch.new and not is_move:
        raise NotPlainError("two names of one file")
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
    """The file that a patch changes, as earlier ones left it; None where it makes a new one."""
    if patch.old is None:
        return None
    if patch.old in results:
        if patch.is_rename or patch.is_copy:
            raise NotPlainError("a file moves that was changed before")
        found = results[patch.old]
        if found is None:
            raise MisfitError
    else:
        found = tree.read(patch.old)
    if found is None or found.mode in (DIRECTORY, UNTRACKED):
        if patch.is_new is None:
            patch.is_delete = False
            return None
        raise MisfitError
    if found.mode == SUBMODULE:
        raise NotPlainError("a submodule")
    return found


def _mode_of(patch: FilePatch, before: File | None, *, reverse: bool) -> int:
    """The mode that the patch gives its file."""
    if before is None:
        if reverse and patch.new_mode not in (0, REGULAR):
            raise NotPlainError("the mode of a removed file, taken back")
        return _canonical(patch.new_mode or REGULAR)
    if (patch.old_mode or before.mode) & _FORMAT != before.mode & _FORMAT:
        raise MisfitError
    if reverse and patch.new_mode and not patch.old_mode and patch.new_mode != before.mode:
        # git up to 2.43 takes the mode of an `index` line for the new one, later ones do not
        raise NotPlainError("the mode of an index line, taken back")
    mode = patch.new_mode or before.mode
    if mode & _FORMAT != before.mode & _FORMAT and not patch.is_delete:
        raise MisfitError
    return _canonical(mode)


def _canonical(mode: int) -> int:
    if mode & _FORMAT == SYMLINK:
        return SYMLINK
    return 0o100755 if mode & 0o100 else REGULAR


def _must_be_safe(path: bytes, mode: int) -> None:
    parts = path.split(b"/")
    if any(_ODD_NAME.fullmatch(part) for part in parts):
        raise NotPlainError("a path that git may refuse")
    if mode == SYMLINK and parts[-1].lower() == b".gitmodules":
        raise NotPlainError("a link for .gitmodules")


def _must_be_new(tree: Tree, path: bytes, results: Results, going: set[bytes | None]) -> None:
    if path in results:
        if results[path] is not None:
            raise NotPlainError("a file is made twice")
    elif path not in going and (found := tree.read(path)) and found.mode != DIRECTORY:
        raise MisfitError


def _must_have_directories(tree: Tree, path: bytes, results: Results) -> None:
    for above in _above(path):
        if above in results or ((found := tree.read(above)) and found.mode != DIRECTORY):
            raise NotPlainError("a file where a directory should be")


def find_obstacle(tree: Tree, results: Results) -> bytes | None:
    """What is in the way of a new file, though git with its index of few paths does not see it."""
    for path in (path for path, file in results.items() if file):
        found = tree.read(path)
        if found is None:
            for above in _above(path):
                at = tree.read(above)
                if at and at.mode != DIRECTORY and results.get(above, at) is not None:
                    return above
        elif found.mode == DIRECTORY:
            if any(results.get(below, found) is not None for below in tree.iter_below(path)):
                return path
        elif found.mode == UNTRACKED:
            return path
    return None


def _above(path: bytes) -> Iterator[bytes]:
    """The directories above a path, the nearest first."""
    while path := path.rpartition(b"/")[0]:
        yield path


class Patched:
    """A tree with results over it; a `Tree`."""

    def __init__(self, tree: Tree, results: Results) -> None:
        self._tree = tree
        self._results = results

    def read(self, path: bytes) -> File | None:
        return self._results[path] if path in self._results else self._tree.read(path)

    def iter_below(self, path: bytes) -> Iterator[bytes]:
        return (each for each in self._tree.iter_below(path) if each not in self._results)
