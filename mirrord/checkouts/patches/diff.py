"""A private copy of what a checkout's user changed, for git to work on without ever seeing the checkout.

Owns a scratch repository whose objects are the mirror's, an index that starts at the base commit, and directories that get the
changed files, each opened as the checkout's owner, through directories that no link and no mount leads to. A link is only a blob
in the scratch repository, so nothing there is ever written through one. The user's `.git`, its configuration and excludes are
never read; what is ignored is decided by the tree's own `.gitignore` files. Bounded in files and bytes. Sync; runs in workers.
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
    OwnerDeniedError,
    TreeRefusedError,
)
from ...git.command import GitResult, run_git_sync
from ...host.credentials import ActingAs
from ...host.files import full_disk_named, mounted_on, open_directory, opened, shown_path
from ...host.trash import remove_tree
from ..files.manifest import blob_id
from ..files.reader import Descent
from ..files.writer import TreeWriter

PATCH_LIMIT_BYTES = 256 * 1024**2
SPOOLED_BYTES = 1024**2

FILES_LIMIT = 200_000
BYTES_LIMIT = 512 * 1024**2
_TIMEOUT = timedelta(minutes=4)
_SUBMODULE = "160000"
_CONFIG = "[core]\n\trepositoryformatversion = 0\n\tbare = false\n\tfilemode = true\n"
_REPLACED = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO)
_LOOKS = 3


@dataclass(frozen=True, slots=True)
class Work:
    """A checkout as patches see it: `root` is the tree, `scratch` a private directory of its own."""

    root: Path
    mirror: Path
    commit: str
    owner: tuple[int, int]
    scratch: Path


@dataclass
class Found:
    """What is at the changed paths: gone from a tracked path, tracked and still there, there and not tracked.

    `unread` is what the owner may not look at, or what is too deep, with the reason.
    """

    gone: list[bytes] = field(default_factory=list)
    tracked: list[bytes] = field(default_factory=list)
    untracked: dict[bytes, None] = field(default_factory=dict)
    unread: dict[bytes, Exception] = field(default_factory=dict)


class Staging:
    """The scratch repository of one piece of work; made by `staged`."""

    def __init__(self, work: Work, root: int) -> None:
        self.work = work
        self.root = root
        self.owner = ActingAs(work.owner)
        self.git_dir = work.scratch / "git"
        self._rules = work.scratch / "rules"
        self._files = work.scratch / "files"
        self._bytes_left = BYTES_LIMIT
        for directory in (
            self.git_dir / "objects/info",
            self.git_dir / "refs",
            self._rules,
            self._files,
        ):
            directory.mkdir(parents=True)
        (self.git_dir / "HEAD").write_text("ref: refs/heads/none\n")
        (self.git_dir / "config").write_text(_CONFIG)
        (self.git_dir / "objects/info/alternates").write_text(f"{work.mirror}/objects\n")
        self.run("read-tree", work.commit)
        self.base = self._read_index()
        self._directories = _directories_of(self.base)

    def run(
        self,
        *args: str,
        stdin: bytes | None = None,
        ok: tuple[int, ...] = (0,),
        into: Path | None = None,
        files: Path | None = None,
    ) -> GitResult:
        """Run git on the scratch repository; `files` is its work directory, `into` takes what it prints."""
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
        """Bring the index to what `git add --all` would make of the checkout; ignored files only where `keep_ignored` says so."""
        found = self._look_at(changed)
        ignored = self._ignored(found)
        for path, error in found.unread.items():
            if path not in ignored:
                raise error
        untracked = [path for path in found.untracked if path not in ignored or keep_ignored(path)]
        files, links = self._copy([*found.tracked, *untracked], self._files)
        gone = {*found.gone, *found.tracked} - {*files, *links}
        self._update_index("--force-remove", "--stdin", listing=_joined(gone))
        self._update_index("--add", "--replace", "--stdin", listing=_joined(files))
        lines = (b"120000 %s 0\t%s" % (self._store(target), path) for path, target in links.items())
        self._update_index("--replace", "--index-info", listing=_joined(lines))

    def _update_index(self, *how: str, listing: bytes) -> None:
        if not listing:
            return
        try:
            self.run("update-index", "-z", *how, stdin=listing)
        except GitFailedError as error:  # its encoding, say: our part of it is in order
            raise TreeRefusedError(
                f"cannot record what changed in the checkout: {error.message}",
                hint="mend or remove the file that it names, or its attributes",
            ) from error

    def write_tree(self) -> str:
        return self.run("write-tree").stdout.decode().strip()

    def check_out(self, paths: Collection[bytes]) -> Path:
        """Write files of the index into a private directory, converted as a checkout converts them."""
        out = self.work.scratch / "out"
        out.mkdir()
        self.run("checkout-index", "-f", "-z", "--stdin", stdin=_joined(paths), files=out)
        return out

    # -- looking ------------------------------------------------------------------------------------------------------

    def _read_index(self) -> dict[bytes, str]:
        """Mode by path."""
        lines = self.run("ls-files", "--stage", "-z").stdout.split(b"\0")[:-1]
        return {line.partition(b"\t")[2]: line[:6].decode() for line in lines}

    def _look_at(self, changed: Iterable[bytes]) -> Found:
        found = Found()
        with self.owner, Descent(self.root, self.owner) as reader:
            for path in changed:
                try:
                    self._classify(reader, path, found)
                except PermissionError as error:
                    found.unread[path] = error
        return found

    def _classify(self, reader: Descent, path: bytes, found: Found) -> None:
        is_tracked, seen = path in self.base, reader.find_stat(path)
        if seen is None:
            if is_tracked:
                found.gone.append(path)
        elif stat.S_ISDIR(seen.st_mode):
            self._classify_directory(reader, path, is_tracked, found)
        elif not (stat.S_ISREG(seen.st_mode) or stat.S_ISLNK(seen.st_mode)):
            if is_tracked:
                found.gone.append(path)  # git tracks no pipe, socket or device
        elif is_tracked:
            found.tracked.append(path)
        elif not self._is_out_of_bounds(path):
            self._add_untracked(path, found)

    def _classify_directory(
        self, reader: Descent, path: bytes, is_tracked: bool, found: Found
    ) -> None:
        if (
            path in self._directories
            or self.base.get(path) == _SUBMODULE
            or self._is_out_of_bounds(path)
        ):
            return
        if is_tracked:
            found.gone.append(path)

        def refused(below: bytes, error: Exception) -> None:
            if not self._is_out_of_bounds(below):
                found.unread[below] = error

        for below, seen in reader.iter_below(path, refused):
            if (
                stat.S_ISREG(seen.st_mode) or stat.S_ISLNK(seen.st_mode)
            ) and not self._is_out_of_bounds(below):
                self._add_untracked(below, found)

    def _add_untracked(self, path: bytes, found: Found) -> None:
        found.untracked[path] = None
        if len(found.untracked) > FILES_LIMIT:
            raise _too_large(f"more than {FILES_LIMIT} files are new")

    def _is_out_of_bounds(self, path: bytes) -> bool:
        """In some `.git`, or in a submodule: a nested repository gives its files, never its history."""
        parts = path.split(b"/")
        if any(part.lower() == b".git" for part in parts):
            return True
        return any(
            self.base.get(b"/".join(parts[:depth])) == _SUBMODULE for depth in range(1, len(parts))
        )

    def _ignored(self, found: Found) -> set[bytes]:
        """Which untracked paths the `.gitignore` files ignore. One that is a link says nothing, as in git (2.32)."""
        if not found.untracked and not found.unread:
            return set()
        rules = {
            path
            for path in (*self.base, *found.untracked)
            if path.rpartition(b"/")[2] == b".gitignore"
        }
        self._copy(sorted(rules - set(found.gone)), self._rules)
        named = [
            b"./" + path for path in found.untracked
        ]  # else `:(…)` is magic; GIT_LITERAL_PATHSPECS is refused here
        named += [b"./" + path + b"/" for path in found.unread]
        done = self.run(
            "check-ignore",
            "-z",
            "--no-index",
            "--stdin",
            stdin=_joined(named),
            ok=(0, 1),
            files=self._rules,
        )
        return {path.removeprefix(b"./").rstrip(b"/") for path in done.stdout.split(b"\0")[:-1]}

    # -- copying ------------------------------------------------------------------------------------------------------

    def _copy(self, paths: Iterable[bytes], into: Path) -> tuple[list[bytes], dict[bytes, bytes]]:
        """Copy files into an empty directory; answers those that were there, and the links with their targets."""
        files: list[bytes] = []
        links: dict[bytes, bytes] = {}
        with (
            opened(open_directory(into)) as sink,
            TreeWriter(sink, ActingAs(None), mtime_ns=0) as writer,
            Descent(self.root, self.owner) as reader,
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

    def _open(self, reader: Descent, path: bytes) -> int | bytes | None:
        """What is at a path now: an open file, the target of a link, or nothing that git tracks."""
        for _ in range(_LOOKS):
            try:
                with self.owner:
                    seen = reader.find_stat(path)
                    if seen is None or not (
                        stat.S_ISREG(seen.st_mode) or stat.S_ISLNK(seen.st_mode)
                    ):
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

    def _write(self, writer: TreeWriter, path: bytes, source: int) -> None:
        seen = os.fstat(source)
        if seen.st_size > self._bytes_left:
            raise _too_large(f"the changed files hold more than {BYTES_LIMIT >> 20} MiB")
        self._bytes_left -= seen.st_size
        writer.make_directories(path.rpartition(b"/")[0])
        writer.copy_file(path, source, permissions=0o755 if seen.st_mode & 0o100 else 0o644)

    def _store(self, data: bytes) -> bytes:
        """Write a blob into the scratch repository; its id."""
        oid = blob_id(data).hex()
        directory = self.git_dir / "objects" / oid[:2]
        directory.mkdir(exist_ok=True)
        (directory / oid[2:]).write_bytes(zlib.compress(b"blob %d\0" % len(data) + data))
        return oid.encode()


@contextmanager
def staged(work: Work) -> Iterator[Staging]:
    """Open a scratch repository for one piece of work, and remove it at the end."""
    remove_tree(work.scratch)
    with full_disk_named("a private copy of the checkout"), opened(_open_tree(work)) as root:
        work.scratch.mkdir(mode=0o700)
        try:
            with denials_named(work.owner):
                yield Staging(work, root)
        finally:
            remove_tree(work.scratch)


@contextmanager
def denials_named(owner: tuple[int, int]) -> Iterator[None]:
    """Turn the refusal of a path in a checkout, which is bytes, into an OwnerDeniedError."""
    try:
        yield
    except PermissionError as error:
        if not isinstance(error.filename, bytes):
            raise
        raise OwnerDeniedError(
            f"cannot use {shown_path(error.filename)} in the checkout: its owner, uid {owner[0]}, may not",
            hint="make it accessible to the checkout's owner, remove it, or let a .gitignore name it",
            path=error.filename.decode(errors="backslashreplace"),
        ) from error


def _open_tree(work: Work) -> int:
    try:
        return open_directory(work.root)
    except OSError as error:
        raise CheckoutBusyError(
            f"cannot open the checkout's directory: {error.strerror}",
            hint="it was replaced or removed; reset the checkout",
        ) from error


def _directories_of(paths: Iterable[bytes]) -> set[bytes]:
    directories: set[bytes] = set()
    for path in paths:
        above = path.rpartition(b"/")[0]
        while above and above not in directories:
            directories.add(above)
            above = above.rpartition(b"/")[0]
    return directories


def _joined(paths: Iterable[bytes]) -> bytes:
    return b"".join(path + b"\0" for path in paths)


def _too_large(fact: str) -> DiffTooLargeError:
    return DiffTooLargeError(
        f"cannot copy what changed in the checkout: {fact}",
        hint="remove it, or let a .gitignore name it",
    )


def diff(work: Work, changed: list[bytes], spool: Path) -> bytes | None:
    """The patch from the base commit to the checkout as `git add --all` would see it; a long one is left in `spool`."""
    with staged(work) as staging:
        staging.add_changes(changed, keep_ignored=lambda path: False)
        staging.run(
            "diff-index", "--cached", "--binary", "--full-index", "-M", "--no-ext-diff", "--no-textconv", "--src-prefix=a/",
            "--dst-prefix=b/", work.commit, into=spool,
        )  # fmt: skip
        size = spool.stat().st_size
        if size > PATCH_LIMIT_BYTES:
            raise DiffTooLargeError(
                f"cannot give the diff: it is larger than {PATCH_LIMIT_BYTES >> 20} MiB",
                hint="remove large files, or let a .gitignore name them",
            )
        if size > SPOOLED_BYTES:
            return None
        patch = spool.read_bytes()
        spool.unlink()
        return patch
