"""Patches into a checkout, and files of other commits into it.

What a patch makes of the named files is known before the first of them is written. A crash while
writing leaves files of the patch, which `diff` shows and `reset` removes. The checkout's index is
not touched: git sees by stat data which files are new. Sync; runs in workers.
"""

import stat
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import InvalidRequestError, PathNotFoundError, PathOutsideCheckoutError
from ...git.objects.repository import read_commit
from ...git.objects.text import find_conversion
from ...git.objects.trees import BaseTree, TreeEntry, walk
from ...git.patterns import Attributes
from ...host.files import full_disk_named, shown_path
from ...model import (
    NAME_LIMIT_BYTES,
    TREE_DEPTH_LIMIT,
    TREE_PATH_LIMIT_BYTES,
    ApplyStrategy,
    FoundStrategy,
)
from ..files.manifest import blob_id
from ..files.writer import TreeWriter
from .fit import DIRECTORY, UNTRACKED, BaseFiles, File
from .parse import EXECUTABLE, REGULAR, SUBMODULE, SYMLINK
from .strategies import apply_patch, must_fit
from .worktree import PatchJob, Worktree, open_worktree

_ATTRIBUTES = b".gitattributes"
_NOT_IN_A_TREE = (b"", b".", b"..", b".git")


def apply(
    job: PatchJob, patch: bytes | Path, reverse: bool, strategy: ApplyStrategy
) -> tuple[list[bytes], FoundStrategy]:
    """Apply a patch to the files as they are; the paths that it wrote or removed, and what fitted.

    Where it does not fit, nothing changes.
    """
    patch = patch.read_bytes() if isinstance(patch, Path) else patch
    with open_worktree(job) as worktree, full_disk_named("the files of the patch"):
        base = BaseFiles(worktree.objects, job.tree)
        done = apply_patch(
            CheckoutFiles(worktree),
            patch,
            scratch=job.scratch,
            reverse=reverse,
            strategy=strategy,
            base=base,
        )
        gone = [each.path for each in done.changes if each.mode is None]
        new = {each.path: each for each in done.changes if each.mode is not None}
        rules = {path: each.data for path, each in new.items() if _is_rules(path, each.mode)}
        files = ((path, File(each.mode or 0, each.data)) for path, each in new.items())
        _write(worktree, gone, files, rules)
        return [each.path for each in done.changes], done.strategy


def restore(job: PatchJob, commit: str, paths: list[bytes]) -> list[bytes]:
    """Write the files of `commit` at `paths`, files or directories, into the checkout.

    Answers the paths that were written.
    """
    wanted = [_checked(path) for path in paths]
    with open_worktree(job) as worktree, full_disk_named("the files of the commit"):
        objects = worktree.objects
        tree = BaseTree(objects, read_commit(objects, commit).tree)
        entries: dict[bytes, TreeEntry] = {}
        for path in wanted:
            found = tree.find(path) if path.count(b"/") < TREE_DEPTH_LIMIT else None
            if found is None:
                raise PathNotFoundError(
                    f"cannot restore {shown_path(path)}: commit {commit} does not have it",
                    hint="nothing was changed",
                )
            inside = walk(objects, found.oid, path + b"/") if found.is_tree else [found]
            entries |= {entry.path: entry for entry in inside if not entry.is_tree}
        must_fit(
            {
                path: File(at.mode, objects.read_blob(at.oid) if at.is_symlink else b"")
                for path, at in entries.items()
            },
            InvalidRequestError,
        )
        rules = {
            path: objects.read_blob(entry.oid)
            for path, entry in entries.items()
            if _is_rules(path, entry.mode)
        }
        files = (
            (path, File(at.mode, b"" if at.is_submodule else objects.read_blob(at.oid)))
            for path, at in entries.items()
        )
        _write(worktree, [], files, rules)
        return sorted(entries)


class CheckoutFiles:
    """The files of a checkout as what a patch is applied to; a `fit.Tree`.

    Nothing in a `.git` or in a submodule is looked at.
    """

    def __init__(self, worktree: Worktree) -> None:
        self._worktree = worktree
        self._known: dict[bytes, File | None] = {}

    def read(self, path: bytes) -> File | None:
        if path not in self._known:
            self._known[path] = self._look(path) if self._is_within(path) else None
        return self._known[path]

    def iter_below(self, path: bytes) -> Iterator[bytes]:
        with self._worktree.owner:
            for below, kind in self._worktree.reader.iter_below(path):
                if kind != stat.S_IFDIR:
                    yield below

    def _is_within(self, path: bytes) -> bool:
        parts = path.split(b"/")
        is_possible = (
            len(path) <= TREE_PATH_LIMIT_BYTES
            and len(parts) <= TREE_DEPTH_LIMIT
            and not any(len(at) > NAME_LIMIT_BYTES or at.lower() in _NOT_IN_A_TREE for at in parts)
        )
        above = (b"/".join(parts[:depth]) for depth in range(1, len(parts)))
        return is_possible and not any(self._is_submodule(at) for at in above)

    def _is_submodule(self, path: bytes) -> bool:
        entry = self._worktree.base.find(path)
        return entry is not None and entry.is_submodule

    def _look(self, path: bytes) -> File | None:
        worktree = self._worktree
        before = worktree.base.find(path)
        with worktree.owner:
            seen = worktree.reader.find_stat(path)
            if seen is None:
                return None
            if stat.S_ISDIR(seen.st_mode):
                if before and before.is_submodule:
                    return File(SUBMODULE, before.oid.encode())
                return File(DIRECTORY, b"")
            raw = worktree.look(path, stat.S_IFMT(seen.st_mode))
        if raw is None:
            return File(UNTRACKED, b"")
        if raw.conversion and before and stat.S_ISREG(before.mode):
            blob = worktree.objects.read_blob(before.oid)  # an unchanged file stays as it is
            if raw.conversion.smudge(blob, before.oid) == raw.data:
                return File(raw.mode, blob)
        return File(raw.mode, worktree.clean(path, raw, before))


def _write(
    worktree: Worktree,
    gone: Collection[bytes],
    new: Iterable[tuple[bytes, File]],
    rules: dict[bytes, bytes],
) -> None:
    """Remove what goes, then write what comes, as the owner and as its new files.

    Converted by the attributes of the tree as it will be; `rules` are the attribute files in `new`.
    """

    def attributes_in(directory: bytes) -> bytes | None:
        path = directory + b"/" + _ATTRIBUTES if directory else _ATTRIBUTES
        if path in rules or path in gone:
            return rules.get(path)
        return worktree.attributes_in(directory)

    attributes = Attributes(attributes_in)
    with TreeWriter(worktree.root, worktree.owner, mtime_ns=time.time_ns()) as writer:
        for path in gone:
            with _denial_of(path):
                writer.remove(path)
                writer.remove_empty_above(path)
        for path, (mode, data) in new:
            is_file = mode in (REGULAR, EXECUTABLE)
            if is_file and (conversion := find_conversion(attributes, path)):
                data = conversion.smudge(data, blob_id(data).hex())
            with _denial_of(path):
                writer.make_directories(path.rpartition(b"/")[0])
                if mode == SUBMODULE:
                    writer.make_directory(path)
                elif mode == SYMLINK:
                    writer.write_symlink(path, data)
                else:
                    writer.write_file(path, data, executable=mode == EXECUTABLE)


@contextmanager
def _denial_of(path: bytes) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise PermissionError(error.errno, error.strerror, path) from error


def _is_rules(path: bytes, mode: int | None) -> bool:
    is_named = path.rpartition(b"/")[2] == _ATTRIBUTES
    return is_named and mode is not None and stat.S_ISREG(mode)


def _checked(path: bytes) -> bytes:
    """A path of the tree; raises PathOutsideCheckoutError for any other."""
    trimmed = path.rstrip(b"/")
    if b"\0" in path or any(part.lower() in _NOT_IN_A_TREE for part in trimmed.split(b"/")):
        raise PathOutsideCheckoutError(
            f"cannot restore {shown_path(path)}: it is not a path in the checkout",
            hint="name paths from the top of the repository",
        )
    return trimmed
