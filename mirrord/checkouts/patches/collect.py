"""What `git add --all` would record of a checkout, found by looking at the changed paths alone.

Only the tree's own `.gitignore` files, as they are now, decide what is ignored. A nested repository
gives its files, not its history. Bounded in files and bytes. Sync; runs in workers.
"""

import re
import stat
from collections.abc import Iterable

from ...errors import DiffTooLargeError
from ...git.objects.trees import TreeEntry
from ...git.patterns import Ignores
from ..files.manifest import blob_id
from .base import Change
from .worktree import (
    SMALLER_HINT,
    PatchJob,
    RawFile,
    Worktree,
    open_worktree,
    unrecordable,
)

FILES_LIMIT = 200_000
# is_ntfs_dotgit (path.c): git's index takes no such name, nor a link `.gitmodules`
_DOT_GIT = re.compile(rb"(?:^|/)(?:\.git|git~1)[ .]*(?:[\\:/]|\Z)", re.IGNORECASE)
_GIT_MODULES = re.compile(rb"(?:.*/)?\.gitmodules", re.IGNORECASE | re.DOTALL)


def collect_changes(job: PatchJob, changed: Iterable[bytes]) -> list[Change]:
    """The changes of a checkout, by path.

    `changed` has every path that may differ; a directory that the base commit does not have stands
    for all in it, and so does one of the base that is none any more.
    """
    with open_worktree(job) as worktree:
        return collect(worktree, changed)


def collect(worktree: Worktree, changed: Iterable[bytes]) -> list[Change]:
    """As `collect_changes`, in an open checkout."""
    base = {path: worktree.base.find(path) for path in changed}
    worktree.changed = base.keys()
    looking = _Looking(worktree)
    with worktree.owner:
        for path in sorted(base):
            looking.classify(path, base[path])
    changes = []
    for path in list(looking.found):
        raw, before = looking.found.pop(path)
        data = worktree.clean(path, raw, before) if raw.conversion else raw.data
        if before is None or before.mode != raw.mode or before.oid != blob_id(data).hex():
            changes.append(Change(path, raw.mode, data, before))
    for directory in looking.gone_directories:
        looking.gone |= {entry.path: entry for entry in worktree.base.iter_files(directory)}
    changes += [Change(path, None, b"", before) for path, before in looking.gone.items()]
    return sorted(changes, key=lambda change: change.path)


class _Looking:
    """What is at the changed paths: the files with what they were, and what is gone."""

    def __init__(self, worktree: Worktree) -> None:
        self.found: dict[bytes, tuple[RawFile, TreeEntry | None]] = {}
        self.gone: dict[bytes, TreeEntry] = {}
        self.gone_directories: list[bytes] = []
        self._worktree = worktree
        self._reader = worktree.reader
        self._ignores = Ignores(
            lambda above: worktree.read_rules(above + b"/.gitignore" if above else b".gitignore")
        )
        self._new = 0

    def classify(self, path: bytes, before: TreeEntry | None) -> None:
        try:
            seen = self._reader.find_stat(path)
        except PermissionError as error:
            self._refuse(path, error)
            return
        kind = stat.S_IFMT(seen.st_mode) if seen else 0
        is_directory = kind == stat.S_IFDIR
        if is_directory and before and (before.is_tree or before.is_submodule):
            return
        if before and before.is_tree:
            self.gone_directories.append(path)
            before = None
        if kind in (stat.S_IFREG, stat.S_IFLNK):
            if not before:
                if not self._is_out_of_bounds(path):
                    self._add(path, kind)
                return
            if raw := self._worktree.look(path, kind):
                self.found[path] = raw, before
                return
        if before:
            self.gone[path] = before
        if is_directory and not self._is_out_of_bounds(path):
            for below, there in self._reader.iter_below(path, self._refuse, self._enters):
                if there in (stat.S_IFREG, stat.S_IFLNK):
                    self._add(below, there)

    def _enters(self, directory: bytes) -> bool:
        """A nested `.git` is left out, and a directory that is ignored stays so with all in it."""
        return not _is_git(directory) and not self._ignores.match(directory, is_directory=True)

    def _add(self, path: bytes, kind: int) -> None:
        """Take a file or link that the base does not have, unless it is ignored."""
        if self._ignores.match(path):
            return
        is_modules = kind == stat.S_IFLNK and _GIT_MODULES.fullmatch(path)
        if is_modules or _DOT_GIT.search(path):
            if _is_git(path):
                return
            raise unrecordable(path, "git takes no such path")
        self._new += 1
        if self._new > FILES_LIMIT:
            raise DiffTooLargeError(
                f"cannot copy what changed in the checkout: more than {FILES_LIMIT} files are new",
                hint=SMALLER_HINT,
            )
        if raw := self._worktree.look(path, kind):
            self.found[path] = raw, None

    def _refuse(self, path: bytes, error: Exception) -> None:
        """Raise the error of what the owner may not look into, unless that is ignored."""
        try:
            is_ignored = self._is_out_of_bounds(path) or self._ignores.match(
                path, is_directory=True
            )
        except PermissionError:
            is_ignored = False
        if not is_ignored:
            raise error

    def _is_out_of_bounds(self, path: bytes) -> bool:
        """In some `.git`, or below a submodule of the base."""
        parts = path.split(b"/")
        if any(part.lower() == b".git" for part in parts):
            return True
        above = (b"/".join(parts[:depth]) for depth in range(1, len(parts)))
        entries = map(self._worktree.base.find, above)
        return any(entry.is_submodule for entry in entries if entry)


def _is_git(path: bytes) -> bool:
    return path[-4:].lower() == b".git" and path[-5:-4] in (b"", b"/")
