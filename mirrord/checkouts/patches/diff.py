"""What changed in a checkout: found, printed as git prints it, or written as git's objects.

What libgit2 cannot print like git (`render.py` names the cases) one `git diff-tree` prints, between
the base tree and one that is written into a private object directory beside the mirror's. A long
answer goes to a file as it is made. Sync; runs in workers.
"""

import os
import re
import stat
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from ...errors import DiffTooLargeError
from ...git.command import run_git_sync
from ...git.objects.trees import ScratchObjects, TreeEntry, make_repository
from ...git.patterns import Ignores
from ...host.files import full_disk_named, write_all
from ...host.trash import remove_tree
from ...model import DiffFormat
from ..files.manifest import blob_id
from ..files.reader import parents
from .fit import Change
from .parse import NeedsGitError
from .render import Renderer, pair_up
from .worktree import SMALLER_HINT, PatchJob, RawFile, Worktree, open_worktree, unrecordable

PATCH_LIMIT_BYTES = 256 * 1024**2
SPOOLED_BYTES = 1024**2
_TIMEOUT = timedelta(minutes=4)
_OPTIONS = {
    DiffFormat.PATCH: ("-p", "--binary", "--full-index"),
    DiffFormat.STAT: ("--stat",),
    DiffFormat.NAME_STATUS: ("--name-status",),
}
_PRINTED_BY = {DiffFormat.PATCH: Renderer.patch, DiffFormat.NAME_STATUS: Renderer.name_status}


class Diff(NamedTuple):
    """`content` is None where it is in the spool; `reason` is why git made it, if it did."""

    content: bytes | None
    reason: str | None
    files: int


def diff(
    job: PatchJob, list_changed: Callable[[], list[bytes]], form: DiffFormat, spool: Path
) -> Diff:
    """What changed from the base commit to the checkout as `git add --all` would see it.

    A long answer is left in `spool`.
    """
    with open_worktree(job) as worktree:
        changes = collect(worktree, list_changed())
        reason = None
        try:
            if form is DiffFormat.STAT:
                raise NeedsGitError("stat")
            pairs = pair_up(worktree.objects, changes)
            renderer = Renderer(worktree.objects, worktree.attributes)
            content = _spooled(_PRINTED_BY[form](renderer, pairs), spool)
        except NeedsGitError as error:
            reason = error.reason
            with full_disk_named("a private copy of the changes"):
                content = _by_git(job, worktree, changes, form, spool)
        return Diff(content, reason, len(changes))


def _spooled(pieces: Iterable[bytes], spool: Path) -> bytes | None:
    """The pieces as one, or None where they are long and in the file."""
    held, size, fd = bytearray(), 0, -1
    try:
        for piece in pieces:
            size += len(piece)
            if size > PATCH_LIMIT_BYTES:
                raise _too_large()
            held += piece
            if len(held) > SPOOLED_BYTES:
                if fd < 0:
                    fd = os.open(spool, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                write_all(fd, bytes(held))
                held.clear()
        if fd < 0:
            return bytes(held)
        write_all(fd, bytes(held))
        return None
    finally:
        if fd >= 0:
            os.close(fd)


def _by_git(
    job: PatchJob, worktree: Worktree, changes: list[Change], form: DiffFormat, spool: Path
) -> bytes | None:
    remove_tree(job.scratch)
    try:
        rules = job.scratch / "rules"
        rules.mkdir(parents=True, mode=0o700)
        scratch = ScratchObjects(job.scratch / "objects")
        edits = _edits(scratch, changes)
        for directory, content in worktree.find_attribute_files(edits):
            above = rules / os.fsdecode(directory)
            above.mkdir(parents=True, exist_ok=True)
            (above / ".gitattributes").write_bytes(content)
        run_git_sync(
            "diff-tree", "-r", *_OPTIONS[form], "-M", "--no-ext-diff", "--no-textconv",
            "--src-prefix=a/", "--dst-prefix=b/",
            job.tree, scratch.write_tree(worktree.base, edits),
            git_dir=job.mirror, work_tree=rules, quarantine_objects=job.scratch / "objects",
            stdout_path=spool, timeout=_TIMEOUT,
        )  # fmt: skip
    finally:
        remove_tree(job.scratch)
    size = spool.stat().st_size
    if size > PATCH_LIMIT_BYTES:
        raise _too_large()
    if size > SPOOLED_BYTES:
        return None
    content = spool.read_bytes()
    spool.unlink()
    return content


def _too_large() -> DiffTooLargeError:
    return DiffTooLargeError(
        f"cannot give the diff: it is larger than {PATCH_LIMIT_BYTES >> 20} MiB",
        hint="remove large files, or let a .gitignore name them",
    )


def write_repository(
    job: PatchJob, list_changed: Callable[[], list[bytes]], plain: str, repository: Path
) -> str:
    """The tree that `git add --all` would record of a checkout, whose objects are in the new
    `repository`, or borrowed. Without changes of the tree `plain`, nothing is written.
    """
    with open_worktree(job) as worktree:
        changes = collect(worktree, list_changed())
        if not changes and job.tree == plain:
            return plain
        with full_disk_named("the changes of a layer"):
            objects = ScratchObjects(repository / "objects")
            make_repository(repository, borrows_from=job.mirror)
            return objects.write_tree(worktree.base, _edits(objects, changes))


def _edits(
    objects: ScratchObjects, changes: Iterable[Change]
) -> dict[bytes, tuple[int, str] | None]:
    return {
        path: None if mode is None else (mode, objects.write_blob(data))
        for path, mode, data, _ in changes
    }


# -- found, by looking at the changed paths alone --------------------------------------------------

FILES_LIMIT = 200_000
# is_ntfs_dotgit (path.c): git's index takes no such name, nor a link `.gitmodules`
_DOT_GIT = re.compile(rb"(?:^|/)(?:\.git|git~1)[ .]*(?:[\\:/]|\Z)", re.IGNORECASE)
_GIT_MODULES = re.compile(rb"(?:.*/)?\.gitmodules", re.IGNORECASE | re.DOTALL)


def collect(worktree: Worktree, changed: Iterable[bytes]) -> list[Change]:
    """The changes of an open checkout, by path: what `git add --all` would record.

    `changed` has every path that may differ; a directory that the base commit does not have stands
    for all in it, and so does one of the base that is none any more. Only the tree's own
    `.gitignore` files, as they are now, decide what is ignored. A nested repository gives its
    files, not its history.
    """
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
        if any(part.lower() == b".git" for part in path.split(b"/")):
            return True
        entries = map(self._worktree.base.find, parents(path))
        return any(entry.is_submodule for entry in entries if entry)


def _is_git(path: bytes) -> bool:
    return path[-4:].lower() == b".git" and path[-5:-4] in (b"", b"/")
