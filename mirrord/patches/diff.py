"""What changed in a checkout: collected, printed, or written as git objects.

One `git diff-tree`, between the base tree and one written into a private object directory, prints
what `printing.py` leaves to it. A long answer goes to a file. Sync; runs in workers.
"""

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import TooLargeError, full_disk_named
from ..git.command import run_git_sync
from ..git.objects.scratch import ScratchObjects, make_repository
from ..git.objects.trees import BaseTree, TreeEntry
from ..git.patterns import Ignores
from ..host.files import shown_path, write_all
from ..host.trash import remove_tree
from ..model import DiffFormat
from ..trees.manifest import blob_id
from .fit import Change
from .parse import NeedsGitError
from .printing import Renderer, find_renames
from .worktree import SMALLER_HINT, PatchJob, RawFile, Worktree, open_worktree, unrecordable

PATCH_LIMIT_BYTES = 256 * 1024**2
# a longer diff goes through a file: one of 256 MiB was pickled by its worker, and held by the
# daemon
SPOOLED_BYTES = 1024**2
_OPTIONS = {
    # whole ids: `git apply --3way` looks the old blobs up by them
    DiffFormat.PATCH: ("-p", "--binary", "--full-index"),
    DiffFormat.STAT: ("--stat",),
    DiffFormat.NAME_STATUS: ("--name-status",),
}


class Diff(NamedTuple):
    """`content` is None where it is in the spool file; `reason` says why git made it, if it did.

    `notes` are sentences about what no patch records, and about paths below submodules.
    """

    content: bytes | None
    reason: str | None
    files: int
    notes: tuple[str, ...] = ()


def diff(
    job: PatchJob, list_changed: Callable[[], list[bytes]], form: DiffFormat, spool: Path
) -> Diff:
    """Return the changes from the base commit as `git add --all` would record them.

    A long diff is written to `spool`.
    """
    with open_worktree(job) as worktree:
        left_out: list[bytes] = []
        changes = collect(worktree, list_changed(), left_out)
        return print_diff(job, worktree, changes, left_out, form, spool)


def print_diff(
    job: PatchJob,
    worktree: Worktree,
    changes: list[Change],
    left_out: list[bytes],
    form: DiffFormat,
    spool: Path,
) -> Diff:
    """Print collected changes; `left_out` are the paths that no patch records."""
    notes = (*_special(left_out), *_below_submodules(worktree.base, changes))
    # 4.7 ms for 20 files; git, with an index of the base tree, took 14
    renderer = Renderer(worktree.objects, worktree.attributes)

    def print_some(some: list[Change]) -> bytes | None:
        part = spool.with_name(f"{spool.name}-part")
        try:
            return _by_git(job, worktree, some, form, part)
        finally:
            part.unlink(missing_ok=True)

    try:
        if form is DiffFormat.STAT:
            raise NeedsGitError("stat")
        entries = find_renames(worktree.objects, changes)
        is_patch = form is DiffFormat.PATCH
        with full_disk_named("a private copy of the changes"):
            printed = (
                renderer.patch(entries, print_some) if is_patch else renderer.name_status(entries)
            )
            content = _spooled(printed, spool)
    except NeedsGitError as error:
        renderer.reason = error.reason
        with full_disk_named("a private copy of the changes"):
            content = _by_git(job, worktree, changes, form, spool)
    return Diff(content, renderer.reason, len(changes), notes)


_NAMED = 10  # paths of a note


def _special(paths: list[bytes]) -> Iterator[str]:
    if paths:
        yield f"no patch records pipes, sockets and devices: {_names(paths)}"


def _below_submodules(base: BaseTree, changes: Iterable[Change]) -> Iterator[str]:
    """Say which changes are below a submodule, where `git apply` takes them but no `--index`."""
    below: dict[bytes, list[bytes]] = {}
    for change in changes:
        if submodule := base.submodule_above(change.path):
            below.setdefault(submodule, []).append(change.path)
    for submodule, paths in sorted(below.items()):
        name = shown_path(submodule)
        yield f"below submodule {name}, by their paths in this tree: {_names(paths)}"


def _names(paths: list[bytes]) -> str:
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return ", ".join(map(shown_path, paths[:_NAMED])) + more


def _spooled(pieces: Iterable[bytes], spool: Path) -> bytes | None:
    """Return the pieces joined, or None where they are long and written to the file."""
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
    # left by a call that was killed
    remove_tree(job.scratch)
    try:
        rules = job.scratch / "rules"
        rules.mkdir(parents=True, mode=0o700)
        scratch = ScratchObjects(job.scratch / "objects")
        edits = _edits(scratch.store_blob, changes)
        # A tree has no files below a submodule: neither side has one that got some.
        gone = filter(None, map(worktree.base.submodule_above, edits))
        before = scratch.write_tree(worktree.base, dict.fromkeys(gone))
        for directory, content in worktree.attribute_files(edits):
            above = rules / os.fsdecode(directory)
            above.mkdir(parents=True, exist_ok=True)
            (above / ".gitattributes").write_bytes(content)
        run_git_sync(
            "diff-tree", "-r", *_OPTIONS[form], "-M", "--no-ext-diff", "--no-textconv",
            "--src-prefix=a/", "--dst-prefix=b/",
            before, scratch.write_tree(worktree.base, edits),
            git_dir=job.mirror, work_tree=rules, quarantine_objects=job.scratch / "objects",
            stdout_path=spool,
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


def must_be_short(content: object) -> None:
    """Raise TooLargeError for a diff that is in a file, where the answer is JSON."""
    if not isinstance(content, bytes):
        raise TooLargeError(
            f"cannot answer with the diff: it is larger than {SPOOLED_BYTES >> 20} MiB",
            hint="ask for it by itself, then end the turn without it",
        )


def _too_large() -> TooLargeError:
    return TooLargeError(
        f"cannot print the diff: it is larger than {PATCH_LIMIT_BYTES >> 20} MiB",
        hint="remove large files, or add them to .gitignore",
    )


def write_repository(
    job: PatchJob, list_changed: Callable[[], list[bytes]], plain: str, repository: Path
) -> str:
    """Return the tree that `git add --all` would record, with objects in the new `repository`.

    The repository borrows from the mirror. It is not written where the tree is still `plain`.
    """
    with open_worktree(job) as worktree:
        changes = collect(worktree, list_changed())
        if not changes and job.tree == plain:
            return plain
        with full_disk_named("the changes of a layer"):
            objects = ScratchObjects(repository / "objects")
            make_repository(repository, borrows_from=[job.mirror])
            return objects.write_tree(worktree.base, _edits(objects.write_blob, changes))


def _edits(
    write: Callable[[bytes], str], changes: Iterable[Change]
) -> dict[bytes, tuple[int, str] | None]:
    return {path: None if mode is None else (mode, write(data)) for path, mode, data, _ in changes}


# -- collected from the changed paths alone --------------------------------------------------------

FILES_LIMIT = 200_000
# is_ntfs_dotgit (path.c): git's index refuses such names, and a link `.gitmodules`
_DOT_GIT = re.compile(rb"(?:^|/)(?:\.git|git~1)[ .]*(?:[\\:/]|\Z)", re.IGNORECASE)
_GIT_MODULES = re.compile(rb"(?:.*/)?\.gitmodules", re.IGNORECASE | re.DOTALL)


def collect(
    worktree: Worktree, changed: Iterable[bytes], left_out: list[bytes] | None = None
) -> list[Change]:
    """Return the changes of an open checkout, by path: what `git add --all` would record.

    `changed` has every path that may differ; a new directory stands for all in it, and so does a
    directory of the base commit that is gone. Only the tree's own `.gitignore` files, as they are
    now, are applied. The files of a nested repository and of a submodule count, its history does
    not. Pipes, sockets and devices are added to `left_out`.
    """
    base = {path: worktree.base.find(path) for path in changed}
    worktree.changed = base.keys()
    collector = _Collector(worktree)
    with worktree.owner:
        for path in sorted(base):
            collector.classify(path, base[path])
    if left_out is not None:
        left_out += collector.special
    changes = []
    for path in list(collector.found):
        # the content of an unchanged file is let go at once
        raw, before = collector.found.pop(path)
        data = worktree.clean(path, raw, before) if raw.conversion else raw.data
        if before is None or before.mode != raw.mode or before.oid != blob_id(data).hex():
            changes.append(Change(path, raw.mode, data, before))
    for directory in collector.removed_directories:
        collector.removed |= {entry.path: entry for entry in worktree.base.iter_files(directory)}
    changes += [Change(path, None, b"", before) for path, before in collector.removed.items()]
    return sorted(changes, key=lambda change: change.path)


class _Collector:
    """Collects the files at changed paths with their base entries, and the removed entries."""

    def __init__(self, worktree: Worktree) -> None:
        self.found: dict[bytes, tuple[RawFile, TreeEntry | None]] = {}
        self.removed: dict[bytes, TreeEntry] = {}
        self.removed_directories: list[bytes] = []
        self.special: list[bytes] = []
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
            self.removed_directories.append(path)
            before = None
        if kind in (stat.S_IFREG, stat.S_IFLNK):
            if not before:
                if not self._is_out_of_bounds(path):
                    self._add(path, kind)
                return
            if raw := self._worktree.read(path, kind):
                self.found[path] = raw, before
                return
        if before:
            self.removed[path] = before
        if kind and not is_directory and not self._is_out_of_bounds(path):
            self._note_special(path)
        if is_directory and not self._is_out_of_bounds(path):
            for below, kind in self._reader.iter_below(path, self._refuse, self._enters):
                if kind in (stat.S_IFREG, stat.S_IFLNK):
                    self._add(below, kind)
                elif kind != stat.S_IFDIR:
                    self._note_special(below)

    def _note_special(self, path: bytes) -> None:
        if not self._ignores.match(path):
            self.special.append(path)

    def _enters(self, directory: bytes) -> bool:
        """Skip a nested `.git`, and an ignored directory with all in it."""
        return not _is_git(directory) and not self._ignores.match(directory, is_directory=True)

    def _add(self, path: bytes, kind: int) -> None:
        """Add a new file or link, unless it is ignored."""
        if self._ignores.match(path):
            return
        is_modules = kind == stat.S_IFLNK and _GIT_MODULES.fullmatch(path)
        if is_modules or _DOT_GIT.search(path):
            if _is_git(path):
                return
            raise unrecordable(path, "git refuses this path")
        self._new += 1
        if self._new > FILES_LIMIT:
            raise TooLargeError(
                f"cannot copy what changed in the checkout: more than {FILES_LIMIT} files are new",
                hint=SMALLER_HINT,
            )
        if raw := self._worktree.read(path, kind):
            self.found[path] = raw, None

    def _refuse(self, path: bytes, error: Exception) -> None:
        """Raise the error of a path that the owner may not read, unless it is ignored."""
        try:
            is_ignored = self._is_out_of_bounds(path) or self._ignores.match(
                path, is_directory=True
            )
        except PermissionError:
            # the `.gitignore` above it cannot be read either
            is_ignored = False
        if not is_ignored:
            raise error

    def _is_out_of_bounds(self, path: bytes) -> bool:
        """Return whether a path is in a `.git`."""
        return any(part.lower() == b".git" for part in path.split(b"/"))


def _is_git(path: bytes) -> bool:
    return path[-4:].lower() == b".git" and path[-5:-4] in (b"", b"/")
