"""Patches that move a submodule to another commit, as changes of the files below it.

git records a submodule as a commit, so its patch is two lines, `Subproject commit ID`, and no file
changes by it. Here both commits are read, and what differs between them is what the patch does.
`diff --submodule=log` and `diff --submodule=diff` are read too. Runs in workers.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import CommitNotFoundError, CorruptObjectError, PatchConflictError
from ..git.lfs import POINTER_BYTES, parse_pointer
from ..git.modes import DIRECTORY, SUBMODULE
from ..git.objects.repository import Objects, read_commit
from ..git.objects.trees import TreeEntry, changes
from ..host.files import shown_path
from .fit import File, Results, Tree
from .parse import NeedsGitError, name_of, named_paths


class MovedSubmodule(NamedTuple):
    """A submodule's commit before and after, maybe abbreviated; None where it has none."""

    path: bytes
    old: str | None
    new: str | None
    is_dirty: bool = False


@dataclass(slots=True)
class Moved:
    """The files that pointers change, the `rest` of the patch, and what they do not change."""

    rest: bytes
    results: Results = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def move(tree: Tree, objects: Objects | None, patch: bytes, *, reverse: bool) -> Moved:
    """Take out of a patch what moves submodules, and return the files that differ by it.

    `objects` has the commits of submodules, None in a sealed checkout, which gets no file of
    another one. What is not had is left as it is, with a note. Raises PatchConflictError for a file
    that is not that of the old commit.
    """
    moved = Moved(patch)
    if b"\nrename from " in patch:
        _leave_renamed(tree, moved, reverse=reverse)
    if b"ubmodule " not in patch and b"Subproject commit " not in patch:
        return moved
    for pointer, text in _read(patch):
        path, old, new, _ = pointer
        file = tree.read(path)
        if file is None and b" 160000" not in text:  # text around the patch, or a new file
            continue
        if file is not None and file.mode not in (DIRECTORY, SUBMODULE):  # a file with such lines
            continue
        if reverse:
            pointer = MovedSubmodule(path, new, old, pointer.is_dirty)
        has_files = _has_files(tree, path) or (
            pointer.old is None and tree.read(path) is None and _has(objects, pointer.new)
        )
        if pointer.is_dirty:
            moved.notes.append(_said(path, "what was edited in it is not in the patch"))
        if has_files or text.startswith(b"Submodule ") or old == new:
            moved.rest = moved.rest.replace(text, b"", 1)
        if old == new:
            continue
        if not has_files:
            moved.notes.append(_said(path, "its files are not had, so none changes"))
        elif objects is None:
            fact = "its files stay: a checkout with the agent view has no other commit of it"
            moved.notes.append(_said(path, fact))
        else:
            _move(tree, objects, pointer, moved)
    return moved


# a submodule that only moves has no other lines; git never names a directory so
_RENAMED = re.compile(
    rb"(?m)^diff --git [^\n]*\nsimilarity index 100%\r?\n"
    rb"rename from ([^\n]*)\nrename to ([^\n]*)\n(?=diff |Submodule |-- \n|\n|\Z)"
)


def _leave_renamed(tree: Tree, moved: Moved, *, reverse: bool) -> None:
    """Take out of a patch what renames a submodule, with a note; its other parts are applied."""
    for match in _RENAMED.finditer(moved.rest):
        with suppress(NeedsGitError):
            old, new = (name_of(name, 0) for name in match.groups()[:: -1 if reverse else 1])
            file = tree.read(old) if old else None
            if old and new and file and file.mode in (DIRECTORY, SUBMODULE):
                moved.rest = moved.rest.replace(match[0], b"", 1)
                fact = f"its files stay: the patch renames it to {shown_path(new)}"
                moved.notes.append(_said(old, fact))


def _has_files(tree: Tree, path: bytes) -> bool:
    file = tree.read(path)
    return file is not None and file.mode == DIRECTORY


def _has(objects: Objects | None, commit: str | None) -> bool:
    with suppress(CommitNotFoundError, CorruptObjectError):
        return bool(objects and commit and read_commit(objects, commit))
    return False


# from git's shortest abbreviation by default to a whole id of SHA-256
_ID = rb"([0-9a-f]{7,64})(-dirty)?"
_EXTENDED = rb"(?:(?:index|(?:new file|deleted file|old|new) mode) [^\n]*\n)*"
_SECTION = re.compile(
    rb"(?m)^(?:diff --git [^\n]*\n" + _EXTENDED + rb")?--- ([^\n]*)\n\+\+\+ ([^\n]*)\n"
    rb"@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@[^\n]*\n"
    rb"(?:-Subproject commit " + _ID + rb"\r?(?:\n|\Z))?"
    rb"(?:\+Subproject commit " + _ID + rb"\r?(?:\n|\Z))?"
    # the next file, or `-- `, by which `git format-patch` ends
    rb"(?=diff |--- |Submodule |-- \n|\n|\Z)"
)
# `git diff --submodule=log` or `=diff`: abbreviated ids, three dots where history was rewritten
_LOG = re.compile(
    rb"(?m)^Submodule (.+) ([0-9a-f]{7,64})\.{2,3}([0-9a-f]{7,64})"
    rb"(?: \([a-z ]+\))?:?\r?\n(?:  [<>] [^\n]*\n)*"
)
# a line of the same formats for a work tree that was edited
_DIRTY = re.compile(rb"(?m)^Submodule (.+) contains (?:modified|untracked) content\r?\n")


def _read(patch: bytes) -> Iterator[tuple[MovedSubmodule, bytes]]:
    """Yield what moves a submodule, with the text that says so."""
    for match in _SECTION.finditer(patch):
        before, after, old, was_dirty, new, is_dirty = match.groups()
        if old is None and new is None:
            continue
        with suppress(NeedsGitError):
            path = name_of(after if new else before, 1)
            if path:
                yield _pointer(path, old, new, is_dirty=bool(was_dirty or is_dirty)), match[0]
    rest = _SECTION.sub(b"", patch)
    named = named_paths(rest)
    for match in _LOG.finditer(rest):
        path, old, new = match.groups()
        if path not in named:  # else `--submodule=diff`, and its files follow
            yield _pointer(path, old, new), match[0]
    for match in _DIRTY.finditer(rest):
        if match[1] not in named:
            yield MovedSubmodule(match[1], None, None, is_dirty=True), match[0]


# git has an id of zeros for the side that does not exist
_NULL_ID = re.compile(rb"0{7,64}")


def _pointer(
    path: bytes, old: bytes | None, new: bytes | None, *, is_dirty: bool = False
) -> MovedSubmodule:
    before, after = (
        None if oid is None or _NULL_ID.fullmatch(oid) else oid.decode() for oid in (old, new)
    )
    return MovedSubmodule(path, before, after, is_dirty)


def _move(tree: Tree, objects: Objects, pointer: MovedSubmodule, moved: Moved) -> None:
    path, old, new, _ = pointer
    for commit in (old, new):
        if commit and not _has(objects, commit):
            moved.notes.append(_said(path, f"its files stay: commit {commit} is not mirrored"))
            return
    trees = (read_commit(objects, commit).tree if commit else None for commit in (old, new))
    for change in changes(objects, next(trees), next(trees), path + b"/"):
        inner = MovedSubmodule(change.path, _commit_of(change.old), _commit_of(change.new))
        if (inner.old or inner.new) and _has_files(tree, change.path):
            _move(tree, objects, inner, moved)
        elif inner.new:
            moved.notes.append(_said(change.path, "its files are not had, so none changes"))
        before, after = _file_of(change.old), _file_of(change.new)
        if before and (before.mode, before.oid) != (after and (after.mode, after.oid)):
            _must_be(tree, objects, before)
        if before and not after:
            moved.results.setdefault(change.path, None)
        elif after:
            data = objects.read_blob(after.oid)
            moved.results[change.path] = File(after.mode, data)
            if len(data) < POINTER_BYTES and parse_pointer(data):
                fact = f"{shown_path(change.path)} is an LFS pointer, whose object the mirror lacks"
                moved.notes.append(_said(path, fact))


def _commit_of(entry: TreeEntry | None) -> str | None:
    return entry.oid if entry and entry.is_submodule else None


def _file_of(entry: TreeEntry | None) -> TreeEntry | None:
    return None if entry is None or entry.is_tree or entry.is_submodule else entry


def _must_be(tree: Tree, objects: Objects, entry: TreeEntry) -> None:
    file, data = tree.read(entry.path), objects.read_blob(entry.oid)
    if file == File(entry.mode, data):
        return
    pointer = parse_pointer(data) if len(data) < POINTER_BYTES else None
    # a checkout has the object of LFS where the commit has the pointer to it
    if file and pointer and hashlib.sha256(file.data).hexdigest() == pointer.oid:
        return
    raise PatchConflictError(
        f"cannot apply the patch: {shown_path(entry.path)} is not that of the commit from which the"
        " patch moves its submodule",
        hint="nothing was changed; `mirrord diff` shows what the checkout has",
    )


def _said(path: bytes, fact: str) -> str:
    return f"submodule {shown_path(path)}: {fact}"
