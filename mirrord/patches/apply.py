"""Patches into a checkout, and files of other commits, all or nothing.

All new files are computed before the first is written (`change.py`). The checkout's index stays as
it is: git finds the new files by their stat data. Sync; runs in workers.
"""

import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from .. import errors
from ..errors import full_disk_named
from ..git.modes import DIRECTORY, EXECUTABLE, REGULAR, SUBMODULE
from ..git.objects.repository import read_commit
from ..git.objects.text import find_conversion
from ..git.objects.trees import BaseTree, TreeEntry, walk
from ..git.patterns import Attributes
from ..host.files import open_directory, opened, shown_path
from ..host.processes import ActingAs
from ..model import TREE_DEPTH_LIMIT, ApplyStrategy, FoundStrategy
from ..trees.manifest import blob_id
from ..trees.reader import TreeReader, parents
from .change import Expected, JournaledChange
from .fit import UNTRACKED, BaseFiles, File
from .strategies import apply_patch, is_within_limits, must_fit
from .worktree import ATTRIBUTES, PatchJob, Worktree, denials_named, open_worktree, within

_NOT_IN_A_TREE = (b"", b".", b"..", b".git")


def apply(
    job: PatchJob, patch: bytes | Path, reverse: bool, strategy: ApplyStrategy
) -> tuple[list[bytes], FoundStrategy, list[str]]:
    """Apply a patch to the current files, all or nothing.

    Returns the paths that it wrote or removed, the strategy that fitted, and notes on submodules.
    """
    patch = patch.read_bytes() if isinstance(patch, Path) else patch
    with open_worktree(job) as worktree, full_disk_named("the files of the patch"):
        tree = CheckoutFiles(worktree)
        done = apply_patch(
            tree,
            patch,
            scratch=job.scratch,
            reverse=reverse,
            strategy=strategy,
            base=BaseFiles(worktree.objects, job.tree),
            submodules=None if job.is_sealed else worktree.objects,
        )
        removed = [change.path for change in done.changes if change.mode is None]
        new = {
            change.path: File(change.mode, change.data)
            for change in done.changes
            if change.mode is not None
        }
        rules = {path: file.data for path, file in new.items() if _is_rules(path, file.mode)}
        modes = {path: file.mode for path, file in new.items()}
        _write(job, worktree, removed, modes, lambda path: new[path].data, rules, tree.stats)
        return [change.path for change in done.changes], done.strategy, done.notes


def restore(job: PatchJob, commit: str, paths: list[bytes]) -> list[bytes]:
    """Write the files of `commit` at `paths`, files or directories; returns the written paths."""
    wanted = [_validated(path) for path in paths]
    with open_worktree(job) as worktree, full_disk_named("the files of the commit"):
        objects = worktree.objects
        tree = BaseTree(objects, read_commit(objects, commit).tree)
        entries: dict[bytes, TreeEntry] = {}
        for path in wanted:
            named = tree.find(path) if path.count(b"/") < TREE_DEPTH_LIMIT else None
            if named is None:
                raise errors.PathNotFoundError(
                    f"cannot restore {shown_path(path)}: commit {commit} does not have it",
                    hint="nothing was changed",
                )
            inside = walk(objects, named.oid, path + b"/") if named.is_tree else [named]
            entries |= {entry.path: entry for entry in inside if not entry.is_tree}

        def read(entry: TreeEntry) -> File:
            return File(entry.mode, b"" if entry.is_submodule else objects.read_blob(entry.oid))

        # only targets of links are judged; files are read one at a time, when they are written
        links = {path: read(entry) for path, entry in entries.items() if entry.is_symlink}
        others = {path: File(entry.mode, b"") for path, entry in entries.items()}
        must_fit(others | links, errors.InvalidRequestError)
        rules = {
            path: read(entry).data for path, entry in entries.items() if _is_rules(path, entry.mode)
        }
        modes = {path: entry.mode for path, entry in entries.items()}
        _write(job, worktree, [], modes, lambda path: read(entries[path]).data, rules)
        return sorted(entries)


def recover(job: PatchJob) -> None:
    """Undo or finish an apply or a restore that was killed, or that failed half-way."""
    owner = ActingAs(job.owner)
    with (
        opened(open_directory(job.root)) as root,
        denials_named(job.owner),
        full_disk_named("the files that were there"),
        TreeReader(root, owner) as reader,
    ):
        JournaledChange(root, owner, reader, job.private).recover()


class CheckoutFiles:
    """The files of a checkout as a `Tree`, except those in a `.git`.

    `stats` has the lstat of each path that was read, None where there was nothing.
    """

    def __init__(self, worktree: Worktree) -> None:
        self._worktree = worktree
        self.stats: dict[bytes, os.stat_result | None] = {}
        self.read = cache(self._read)

    def iter_below(self, path: bytes) -> Iterator[bytes]:
        with self._worktree.owner:
            for below, kind in self._worktree.reader.iter_below(path):
                if kind != stat.S_IFDIR:
                    yield below

    def _iswithin(self, path: bytes) -> bool:
        if not is_within_limits(path):
            return False
        return not any(part.lower() in _NOT_IN_A_TREE for part in path.split(b"/"))

    def _read(self, path: bytes) -> File | None:
        if not self._iswithin(path):
            return None
        # a new directory is asked for once, not for each file in it
        if any(self.read(above) is None for above in parents(path)):
            self.stats[path] = None
            return None
        worktree = self._worktree
        before = worktree.base.find(path)
        with worktree.owner:
            seen = self.stats[path] = worktree.reader.find_stat(path)
            if seen is None:
                return None
            if stat.S_ISDIR(seen.st_mode):
                if before and before.is_submodule:
                    return File(SUBMODULE, before.oid.encode())
                return File(DIRECTORY, b"")
            raw = worktree.read(path, stat.S_IFMT(seen.st_mode))
        if raw is None:
            return File(UNTRACKED, b"")
        if raw.conversion and before and stat.S_ISREG(before.mode):
            blob = worktree.objects.read_blob(before.oid)  # an unchanged file keeps its blob
            if raw.conversion.smudge(blob, before.oid) == raw.data:
                return File(raw.mode, blob)
        return File(raw.mode, worktree.clean(path, raw, before))


def _write(
    job: PatchJob,
    worktree: Worktree,
    removed: Collection[bytes],
    written: Mapping[bytes, int],
    read: Callable[[bytes], bytes],
    rules: dict[bytes, bytes],
    expected: Expected = MappingProxyType({}),
) -> None:
    """Remove the `removed` paths and write the `written` ones, given with their modes.

    `read` returns the blob of one; it is converted by the attributes of the resulting tree, whose
    attribute files among the written ones are `rules`.
    """

    def attributes_in(directory: bytes) -> bytes | None:
        path = within(directory, ATTRIBUTES)
        if path in rules or path in removed:
            return rules.get(path)
        return worktree.attributes_in(directory)

    attributes = Attributes(attributes_in)

    def contents(path: bytes) -> bytes:
        data = read(path)
        if written[path] in (REGULAR, EXECUTABLE):
            conversion = find_conversion(attributes, path)
            return conversion.smudge(data, blob_id(data).hex()) if conversion else data
        return data

    change = JournaledChange(worktree.root, worktree.owner, worktree.reader, job.private)
    change.make(removed, written, contents, expected)


def _is_rules(path: bytes, mode: int) -> bool:
    return path.rpartition(b"/")[2] == ATTRIBUTES and stat.S_ISREG(mode)


def _validated(path: bytes) -> bytes:
    """Return a path without trailing slashes; InvalidRequestError where it is none."""
    trimmed = path.rstrip(b"/")
    if b"\0" in path or any(part.lower() in _NOT_IN_A_TREE for part in trimmed.split(b"/")):
        raise errors.InvalidRequestError(
            f"cannot restore {shown_path(path)}: it is not a path in the checkout",
            hint="name paths from the top of the repository",
        )
    return trimmed
