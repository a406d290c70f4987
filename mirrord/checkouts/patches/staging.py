"""A private copy of a checkout's changes for git, which never sees the checkout itself.

Owns a scratch repository whose objects are the mirror's, an index that starts at the base commit,
and directories that get the changed files, each opened as the checkout's owner through directories
that no link and no mount leads to. A link becomes a blob only, so nothing is written through one.
The user's `.git`, its configuration and excludes are never read; the tree's own `.gitignore` files
decide what is ignored. Bounded in files and bytes. Sync; runs in workers.
"""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from ...errors import (
    CheckoutBusyError,
    DiffTooLargeError,
    GitFailedError,
    TreeRefusedError,
)
from ...git.command import GitResult, run_git_sync
from ...host.credentials import ActingAs
from ...host.files import full_disk_named, mounted_on, open_directory, opened, shown_path
from ...host.trash import remove_tree
from ..files.manifest import SUBMODULE, blob_id
from ..files.reader import TreeReader
from ..files.writer import TreeWriter
from .worktree import PatchJob, denials_named

FILES_LIMIT = 200_000
BYTES_LIMIT = 512 * 1024**2
_TIMEOUT = timedelta(minutes=4)
_CONFIG = "[core]\n\trepositoryformatversion = 0\n\tbare = false\n\tfilemode = true\n"
_REPLACED = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO)
_LOOKS = 3
_HINT = "remove it, or let a .gitignore name it"


@contextmanager
def staged(job: PatchJob) -> Iterator[Staging]:
    """Open a scratch repository, and remove it at the end."""
    remove_tree(job.scratch)
    try:
        tree = open_directory(job.root)
    except OSError as error:
        raise CheckoutBusyError(
            f"cannot open the checkout's directory: {error.strerror}",
            hint="it was replaced or removed; reset the checkout",
        ) from error
    with opened(tree) as root, full_disk_named("a private copy of the checkout"):
        job.scratch.mkdir(mode=0o700)
        try:
            with denials_named(job.owner):
                yield Staging(job, root)
        finally:
            remove_tree(job.scratch)


@dataclass
class _Found:
    """What is at the changed paths: gone from a tracked path, tracked and there, not tracked.

    `unread` is what the owner may not look at, or what is too deep, with the reason.
    """

    gone: list[bytes] = field(default_factory=list)
    tracked: list[bytes] = field(default_factory=list)
    untracked: dict[bytes, None] = field(default_factory=dict)
    unread: dict[bytes, Exception] = field(default_factory=dict)


class Staging:
    """A scratch repository; `root` is the open tree of the checkout."""

    def __init__(self, job: PatchJob, root: int) -> None:
        self.job = job
        self.root = root
        self.owner = ActingAs(job.owner)
        self.git_dir = job.scratch / "git"
        self._rules = job.scratch / "rules"
        self._files = job.scratch / "files"
        self._bytes_left = BYTES_LIMIT
        objects = self.git_dir / "objects/info"
        for directory in (objects, self.git_dir / "refs", self._rules, self._files):
            directory.mkdir(parents=True)
        (self.git_dir / "HEAD").write_text("ref: refs/heads/none\n")
        (self.git_dir / "config").write_text(_CONFIG)
        (objects / "alternates").write_text(f"{job.mirror}/objects\n")
        self.run("read-tree", job.commit)
        listed = self.run("ls-files", "--stage", "-z").stdout.split(b"\0")[:-1]
        self._base = {line.partition(b"\t")[2]: int(line[:6], 8) for line in listed}
        self._directories: set[bytes] = set()
        for path in self._base:
            while (path := path.rpartition(b"/")[0]) and path not in self._directories:
                self._directories.add(path)

    def run(
        self,
        *args: str,
        stdin: bytes | None = None,
        ok: tuple[int, ...] = (0,),
        into: Path | None = None,
        files: Path | None = None,
    ) -> GitResult:
        """Run git on the scratch repository; `files` is its work tree, `into` takes its output."""
        return run_git_sync(
            *args,
            git_dir=self.git_dir,
            work_tree=files or self._files,
            stdin=stdin,
            stdout_path=into,
            ok=ok,
            timeout=_TIMEOUT,
        )

    def add_changes(self, changed: Iterable[bytes], keep_ignored: Callable[[bytes], bool]) -> None:
        """Bring the index to what `git add --all` would make of the checkout.

        Ignored files are added where `keep_ignored` says so.
        """
        found = _Found()
        with self.owner, TreeReader(self.root, self.owner) as reader:
            for path in changed:
                try:
                    self._classify(reader, path, found)
                except PermissionError as error:
                    found.unread[path] = error
        ignored = self._ignored(found)
        for path, reason in found.unread.items():
            if path not in ignored:
                raise reason
        untracked = [path for path in found.untracked if path not in ignored or keep_ignored(path)]
        files, links = self._copy([*found.tracked, *untracked], self._files)
        self._update_index(
            "--force-remove", "--stdin", rows={*found.gone, *found.tracked} - {*files, *links}
        )
        self._update_index("--add", "--replace", "--stdin", rows=files)
        rows = [b"120000 %s 0\t%s" % (self._store(to), path) for path, to in links.items()]
        self._update_index("--replace", "--index-info", rows=rows)

    def write_tree(self) -> str:
        return self.run("write-tree").stdout.decode().strip()

    def check_out(self, paths: Collection[bytes]) -> Path:
        """Write files of the index into a private directory, converted as a checkout does it."""
        out = self.job.scratch / "out"
        out.mkdir()
        self.run("checkout-index", "-f", "-z", "--stdin", stdin=_joined(paths), files=out)
        return out

    def _update_index(self, *how: str, rows: Collection[bytes]) -> None:
        try:
            if rows:
                self.run("update-index", "-z", *how, stdin=_joined(rows))
        except GitFailedError as error:  # of its encoding, say: our part of it is in order
            raise TreeRefusedError(
                f"cannot record what changed in the checkout: {error.message}",
                hint="mend or remove the file that it names, or its attributes",
            ) from error

    def _store(self, data: bytes) -> bytes:
        """Write a blob into the scratch repository; its id."""
        oid = blob_id(data).hex()
        directory = self.git_dir / "objects" / oid[:2]
        directory.mkdir(exist_ok=True)
        (directory / oid[2:]).write_bytes(zlib.compress(b"blob %d\0" % len(data) + data))
        return oid.encode()

    # -- looking -----------------------------------------------------------------------------------

    def _classify(self, reader: TreeReader, path: bytes, found: _Found) -> None:
        is_tracked, seen = path in self._base, reader.find_stat(path)
        if seen and stat.S_ISDIR(seen.st_mode):
            is_known = path in self._directories or self._base.get(path) == SUBMODULE
            if is_known or self._is_out_of_bounds(path):
                return
            if is_tracked:
                found.gone.append(path)

            def refused(below: bytes, error: Exception) -> None:
                if not self._is_out_of_bounds(below):
                    found.unread[below] = error

            for below, there in reader.iter_below(path, refused):
                if _has_content(there) and not self._is_out_of_bounds(below):
                    self._add_untracked(below, found)
        elif seen is None or not _has_content(seen):  # git tracks no pipe, socket or device
            if is_tracked:
                found.gone.append(path)
        elif is_tracked:
            found.tracked.append(path)
        elif not self._is_out_of_bounds(path):
            self._add_untracked(path, found)

    def _add_untracked(self, path: bytes, found: _Found) -> None:
        found.untracked[path] = None
        if len(found.untracked) > FILES_LIMIT:
            raise DiffTooLargeError(
                f"cannot copy what changed in the checkout: more than {FILES_LIMIT} files are new",
                hint=_HINT,
            )

    def _is_out_of_bounds(self, path: bytes) -> bool:
        """In some `.git`, or a submodule: a nested repository gives its files, not its history."""
        parts = path.split(b"/")
        if any(part.lower() == b".git" for part in parts):
            return True
        above = (b"/".join(parts[:depth]) for depth in range(1, len(parts)))
        return any(self._base.get(path) == SUBMODULE for path in above)

    def _ignored(self, found: _Found) -> set[bytes]:
        """The untracked paths that `.gitignore` files ignore; a link is none, as in git (2.32)."""
        if not found.untracked and not found.unread:
            return set()
        known = (*self._base, *found.untracked)
        rules = {path for path in known if path.rpartition(b"/")[2] == b".gitignore"}
        self._copy(sorted(rules - set(found.gone)), self._rules)
        # `./`, else `:(…)` is magic; GIT_LITERAL_PATHSPECS is refused here
        named = [b"./" + path for path in found.untracked]
        named += [b"./" + path + b"/" for path in found.unread]
        done = self.run(
            "check-ignore", "-z", "--no-index", "--stdin",
            stdin=_joined(named), ok=(0, 1), files=self._rules,
        )  # fmt: skip
        return {path.removeprefix(b"./").rstrip(b"/") for path in done.stdout.split(b"\0")[:-1]}

    # -- copying -----------------------------------------------------------------------------------

    def _copy(self, paths: Iterable[bytes], into: Path) -> tuple[list[bytes], dict[bytes, bytes]]:
        """Copy files into an empty directory; answers those that exist, and links with targets.

        Through descriptors, though the directory is private: a path in it may have been a link.
        """
        files: list[bytes] = []
        links: dict[bytes, bytes] = {}
        with (
            opened(open_directory(into)) as sink,
            TreeWriter(sink, ActingAs(None), mtime_ns=0) as writer,
            TreeReader(self.root, self.owner) as reader,
        ):
            for path in paths:
                there = self._open(reader, path)
                if isinstance(there, bytes):
                    links[path] = there
                elif there is not None:
                    with opened(there):
                        self._write(writer, path, there)
                    files.append(path)
        return files, links

    def _write(self, writer: TreeWriter, path: bytes, source: int) -> None:
        seen = os.fstat(source)
        self._bytes_left -= seen.st_size
        if self._bytes_left < 0:
            raise DiffTooLargeError(
                "cannot copy what changed in the checkout:"
                f" the changed files hold more than {BYTES_LIMIT >> 20} MiB",
                hint=_HINT,
            )
        writer.make_directories(path.rpartition(b"/")[0])
        writer.copy_file(path, source, permissions=0o755 if seen.st_mode & 0o100 else 0o644)

    def _open(self, reader: TreeReader, path: bytes) -> int | bytes | None:
        """An open file, the target of a link, or None where git tracks nothing."""
        for _ in range(_LOOKS):
            try:
                with self.owner:
                    seen = reader.find_stat(path)
                    if seen is None or not _has_content(seen):
                        return None
                    directory, name = reader.locate(path)
                    if stat.S_ISLNK(seen.st_mode):
                        return os.readlink(name, dir_fd=directory)
                    return self.owner.open_regular(directory, name)
            except PermissionError as error:
                raise PermissionError(error.errno, error.strerror, path) from error
            except OSError as error:
                if error.errno == errno.EXDEV:
                    raise mounted_on(path) from error
                if error.errno not in _REPLACED:  # by something else, since it was looked at
                    raise
        raise CheckoutBusyError(
            f"cannot read {shown_path(path)}: it changes while it is read",
            hint="stop what runs in the checkout",
        )


def _has_content(seen: os.stat_result) -> bool:
    return stat.S_ISREG(seen.st_mode) or stat.S_ISLNK(seen.st_mode)


def _joined(rows: Iterable[bytes]) -> bytes:
    return b"".join(row + b"\0" for row in rows)
