"""What changed in a checkout: collected, printed as git prints it, or written as git objects.

Headers, added and deleted binary files and exact renames are printed here; libgit2 makes the hunks.
The rest raises NeedsGitError: a modified binary file (git's delta), a deletion and an addition that
may be a rename with changes, a diff driver such as `diff=rust` whose rules choose the text after
`@@`, and files over LARGE_BYTES. Then one `git diff-tree` prints all, between the base tree and one
written into a private object directory. A long answer goes to a file. Sync; runs in workers.
"""

import base64
import os
import re
import stat
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from ..errors import DiffTooLargeError, full_disk_named
from ..git.command import run_git_sync
from ..git.objects.repository import Objects
from ..git.objects.text import DRIVERS, hunks
from ..git.objects.trees import ScratchObjects, TreeEntry, make_repository
from ..git.patterns import Attributes, Ignores, State
from ..host.files import write_all
from ..host.trash import remove_tree
from ..model import DiffFormat
from ..trees.manifest import blob_id
from ..trees.reader import parents
from .fit import Change
from .parse import NeedsGitError
from .worktree import SMALLER_HINT, PatchJob, RawFile, Worktree, open_worktree, unrecordable

PATCH_LIMIT_BYTES = 256 * 1024**2
SPOOLED_BYTES = 1024**2
_TIMEOUT = timedelta(minutes=4)
_OPTIONS = {
    DiffFormat.PATCH: ("-p", "--binary", "--full-index"),
    DiffFormat.STAT: ("--stat",),
    DiffFormat.NAME_STATUS: ("--name-status",),
}
LARGE_BYTES = 64 * 1024**2
_NO_ID = b"0" * 40
_NO_FILE = b"/dev/null"
_BINARY_LOOK_BYTES = 8000  # buffer_is_binary
_CANDIDATES = 100  # of one blob, that find_identical_files looks at
_LINE_BYTES = 52


class Diff(NamedTuple):
    """`content` is None where it is in the spool file; `reason` says why git made it, if it did."""

    content: bytes | None
    reason: str | None
    files: int


def diff(
    job: PatchJob, list_changed: Callable[[], list[bytes]], form: DiffFormat, spool: Path
) -> Diff:
    """Return the changes from the base commit as `git add --all` would record them.

    A long diff is written to `spool`.
    """
    with open_worktree(job) as worktree:
        changes = collect(worktree, list_changed())
        reason = None
        try:
            if form is DiffFormat.STAT:
                raise NeedsGitError("stat")
            entries = find_renames(worktree.objects, changes)
            renderer = Renderer(worktree.objects, worktree.attributes)
            is_patch = form is DiffFormat.PATCH
            printed = renderer.patch(entries) if is_patch else renderer.name_status(entries)
            content = _spooled(printed, spool)
        except NeedsGitError as error:
            reason = error.reason
            with full_disk_named("a private copy of the changes"):
                content = _by_git(job, worktree, changes, form, spool)
        return Diff(content, reason, len(changes))


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
    remove_tree(job.scratch)
    try:
        rules = job.scratch / "rules"
        rules.mkdir(parents=True, mode=0o700)
        scratch = ScratchObjects(job.scratch / "objects")
        edits = _edits(scratch, changes)
        for directory, content in worktree.attribute_files(edits):
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
        f"cannot print the diff: it is larger than {PATCH_LIMIT_BYTES >> 20} MiB",
        hint="remove large files, or let a .gitignore name them",
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
            make_repository(repository, borrows_from=job.mirror)
            return objects.write_tree(worktree.base, _edits(objects, changes))


def _edits(
    objects: ScratchObjects, changes: Iterable[Change]
) -> dict[bytes, tuple[int, str] | None]:
    return {
        path: None if mode is None else (mode, objects.write_blob(data))
        for path, mode, data, _ in changes
    }


# -- collected from the changed paths alone --------------------------------------------------------

FILES_LIMIT = 200_000
# is_ntfs_dotgit (path.c): git's index refuses such names, and a link `.gitmodules`
_DOT_GIT = re.compile(rb"(?:^|/)(?:\.git|git~1)[ .]*(?:[\\:/]|\Z)", re.IGNORECASE)
_GIT_MODULES = re.compile(rb"(?:.*/)?\.gitmodules", re.IGNORECASE | re.DOTALL)


def collect(worktree: Worktree, changed: Iterable[bytes]) -> list[Change]:
    """Return the changes of an open checkout, by path: what `git add --all` would record.

    `changed` has every path that may differ; a new directory stands for all in it, and so does a
    directory of the base commit that is gone. Only the tree's own `.gitignore` files, as they are
    now, are applied. The files of a nested repository count, its history does not.
    """
    base = {path: worktree.base.find(path) for path in changed}
    worktree.changed = base.keys()
    collector = _Collector(worktree)
    with worktree.owner:
        for path in sorted(base):
            collector.classify(path, base[path])
    changes = []
    for path in list(collector.found):
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
        if is_directory and not self._is_out_of_bounds(path):
            for below, kind in self._reader.iter_below(path, self._refuse, self._enters):
                if kind in (stat.S_IFREG, stat.S_IFLNK):
                    self._add(below, kind)

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
            raise DiffTooLargeError(
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
            is_ignored = False
        if not is_ignored:
            raise error

    def _is_out_of_bounds(self, path: bytes) -> bool:
        """Return whether a path is in a `.git`, or below a submodule of the base."""
        if any(part.lower() == b".git" for part in path.split(b"/")):
            return True
        entries = map(self._worktree.base.find, parents(path))
        return any(entry.is_submodule for entry in entries if entry)


def _is_git(path: bytes) -> bool:
    return path[-4:].lower() == b".git" and path[-5:-4] in (b"", b"/")


# -- printed as git prints it: `git diff --cached --binary --full-index -M` after `git add --all` --


def find_renames(objects: Objects, changes: Sequence[Change]) -> list[Change]:
    """Return the entries of the diff: an exact rename is a change whose `old` has another path.

    Raises NeedsGitError where a rename may have to be found by content.
    """
    removed = [change.old for change in changes if change.old and change.mode is None]
    added = [change for change in changes if not change.old]
    if not removed or not added:
        return list(changes)
    sources = _exact_renames(removed, added)
    used = {source.path for source in sources.values()}
    sizes = sorted(
        len(new.data) for new in added if stat.S_ISREG(new.mode or 0) and new.path not in sources
    )
    for old in removed:
        is_candidate = stat.S_ISREG(old.mode) and old.path not in used
        if is_candidate and _may_match(objects.blob_size(old.oid), sizes):
            raise NeedsGitError("renames")
    return [
        change._replace(old=sources.get(change.path, change.old))
        for change in changes
        if change.mode is not None or change.path not in used
    ]


def _exact_renames(removed: Sequence[TreeEntry], added: Sequence[Change]) -> dict[bytes, TreeEntry]:
    """Return the source of each new path: of the removed files with its blob the first of the same
    name, else the first (find_identical_files).
    """
    by_blob: defaultdict[tuple[str, int], list[TreeEntry]] = defaultdict(list)
    for old in removed:
        by_blob[old.oid, stat.S_IFMT(old.mode)].append(old)
    found = {}
    for new in added:
        if same := by_blob.get((new.oid, stat.S_IFMT(new.mode or 0))):
            name = new.path.rpartition(b"/")[2]
            named = (old for old in same[:_CANDIDATES] if old.path.rpartition(b"/")[2] == name)
            found[new.path] = chosen = next(named, same[0])
            same.remove(chosen)
    return found


def _may_match(size: int, sizes: list[int]) -> bool:
    """Return whether one of the sorted sizes is near enough for similarity 50 %
    (estimate_similarity).
    """
    at = bisect_left(sizes, max(1, (size + 1) // 2))
    return size > 0 and at < len(sizes) and sizes[at] <= 2 * size


@dataclass(eq=False, repr=False)
class Renderer:
    """Prints changes; reads the old blobs one at a time."""

    objects: Objects
    attributes: Attributes

    def patch(self, changes: Sequence[Change]) -> Iterator[bytes]:
        """Yield the patch entry by entry; git splits one that changes its kind."""
        for change in changes:
            old, new = change.old, None if change.mode is None else change
            if old and new and _changes_kind(change):
                yield self._entry(change.path, old, None)
                yield self._entry(change.path, None, new)
            else:
                yield self._entry(change.path, old, new)

    def name_status(self, changes: Sequence[Change]) -> Iterator[bytes]:
        for change in changes:
            paths = dict.fromkeys([change.old.path if change.old else change.path, change.path])
            if change.old is None:
                status = b"A"
            elif change.mode is None:
                status = b"D"
            elif change.old.path != change.path:
                status = b"R100"
            else:
                status = b"T" if _changes_kind(change) else b"M"
            yield b"\t".join([status, *map(quoted, paths)]) + b"\n"

    def _entry(self, path: bytes, old: TreeEntry | None, new: Change | None) -> bytes:
        """Return one entry from `diff --git` on (builtin_diff)."""
        a_name, b_name = quoted(old.path if old else path, b"a/"), quoted(path, b"b/")
        old_mode, new_mode = old.mode if old else 0, (new.mode or 0) if new else 0
        old_id, new_id = old.oid.encode() if old else _NO_ID, new.oid.encode() if new else _NO_ID
        lines = [b"diff --git %s %s" % (a_name, b_name)]
        same_mode = b""
        if not old_mode:
            lines.append(b"new file mode %06o" % new_mode)
        elif not new_mode:
            lines.append(b"deleted file mode %06o" % old_mode)
        else:
            if old_mode == new_mode:
                same_mode = b" %06o" % old_mode
            else:
                lines += [b"old mode %06o" % old_mode, b"new mode %06o" % new_mode]
            if old and old.path != path:
                lines.append(b"similarity index 100%")
                lines += [b"rename from " + quoted(old.path), b"rename to " + quoted(path)]
            if old_id == new_id:
                return b"\n".join([*lines, b""])
        lines.append(b"index %s..%s%s\n" % (old_id, new_id, same_mode))
        before, after = self._read(old), new.data if new else b""
        if before == after:  # an empty file
            return b"\n".join(lines)
        is_regular = stat.S_ISREG(new_mode or old_mode)  # links and submodules have no attributes
        state = self.attributes.find(path).get("diff") if is_regular else None
        if _is_binary(state, before) or _is_binary(state, after):
            return b"\n".join(lines) + _binary(before, after)
        driver = state if isinstance(state, str) else None
        if driver not in DRIVERS and before and after:
            raise NeedsGitError("driver")
        a_label, b_label = _label(a_name) if old else _NO_FILE, _label(b_name) if new else _NO_FILE
        head = b"%s--- %s\n+++ %s\n" % (b"\n".join(lines), a_label, b_label)
        return head + hunks(before, after, driver)

    def _read(self, old: TreeEntry | None) -> bytes:
        if old is None:
            return b""
        if old.is_submodule:
            return f"Subproject commit {old.oid}\n".encode()
        if self.objects.blob_size(old.oid) > LARGE_BYTES:
            raise NeedsGitError("size")
        return self.objects.read_blob(old.oid)


def _changes_kind(change: Change) -> bool:
    return change.old is not None and stat.S_IFMT(change.old.mode) != stat.S_IFMT(change.mode or 0)


def _is_binary(state: State, data: bytes) -> bool:
    if isinstance(state, bool):
        return not state
    return data.find(b"\0", 0, _BINARY_LOOK_BYTES) >= 0


def _label(name: bytes) -> bytes:
    return name + b"\t" if b" " in name else name


def _binary(before: bytes, after: bytes) -> bytes:
    """Return a binary patch; git tries a delta unless one side is empty."""
    if before and after:
        raise NeedsGitError("binary")
    return b"GIT binary patch\n" + _literal(after) + _literal(before)


def _literal(data: bytes) -> bytes:
    """Return data deflated at git's level 1 in base 85; the letter of a line gives its length."""
    deflated = zlib.compress(data, 1)
    lines = [b"literal %d\n" % len(data)]
    for at in range(0, len(deflated), _LINE_BYTES):
        piece = deflated[at : at + _LINE_BYTES]
        letter = len(piece) + (ord("A") - 1 if len(piece) <= 26 else ord("a") - 27)
        lines.append(b"%c%s\n" % (letter, base64.b85encode(piece, pad=True)))
    return b"".join([*lines, b"\n"])


_QUOTED = re.compile(rb'[\x00-\x1f"\\\x7f-\xff]')
_ESCAPES = dict(zip(b'\a\b\t\n\v\f\r"\\', b'abtnvfr"\\', strict=True))


def quoted(path: bytes, prefix: bytes = b"") -> bytes:
    """Return a name as `core.quotePath` prints it: in quotes if a byte is special or not ASCII."""

    def escaped(found: re.Match[bytes]) -> bytes:
        byte = found[0][0]
        return b"\\%c" % _ESCAPES[byte] if byte in _ESCAPES else b"\\%03o" % byte

    if not _QUOTED.search(path):
        return prefix + path
    return b'"%s%s"' % (prefix, _QUOTED.sub(escaped, path))
