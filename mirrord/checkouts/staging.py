"""A private copy of what a checkout's user changed, for git to work on without ever seeing the checkout.

Owns a scratch repository whose objects are the mirror's, an index that starts at the base commit, and a work directory that
gets the changed files, copied through descriptors that follow no link. The user's `.git`, its configuration and excludes are
never read; what is ignored is decided by the tree's own `.gitignore` files. Bounded in files and bytes. Sync; runs in workers.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from ..errors import CheckoutBusyError, DiffTooLargeError, GitFailedError
from ..git.command import GitResult, run_git_sync
from ..host.files import full_disk_named, open_directory, open_regular, opened, shown_path
from .calls import Work
from .scan import iter_extra
from .writer import TreeWriter

FILES_LIMIT = 200_000
BYTES_LIMIT = 512 * 1024**2
_TIMEOUT = timedelta(minutes=4)
_SUBMODULE = "160000"
_CONFIG = "[core]\n\trepositoryformatversion = 0\n\tbare = false\n\tfilemode = true\n"


@dataclass
class Found:
    """What is at the changed paths: gone from a tracked path, tracked and still there, there and not tracked."""

    gone: list[bytes] = field(default_factory=list)
    tracked: list[bytes] = field(default_factory=list)
    untracked: list[bytes] = field(default_factory=list)
    links: dict[bytes, bytes] = field(default_factory=dict)


class Staging:
    """The scratch repository of one piece of work; made by `staged`."""

    def __init__(self, work: Work, root: int) -> None:
        self.work = work
        self.root = root
        self.git_dir = work.scratch / "git"
        self.files = work.scratch / "files"
        self._bytes_left = BYTES_LIMIT
        for directory in (self.git_dir / "objects/info", self.git_dir / "refs", self.files):
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
        """Run git on the scratch repository; `files` replaces the work directory, `into` takes what it prints."""
        return run_git_sync(
            *args,
            git_dir=self.git_dir,
            work_tree=files or self.files,
            stdin=stdin,
            stdout_path=into,
            ok=ok,
            timeout=_TIMEOUT,
        )

    def add_changes(self, changed: Iterable[bytes], keep_ignored: Callable[[bytes], bool]) -> None:
        """Bring the index to what `git add --all` would make of the checkout; ignored files only where `keep_ignored` says so."""
        found = self._look_at(changed)
        ignored = self._ignored(found)
        untracked = [path for path in found.untracked if path not in ignored or keep_ignored(path)]
        added = self._copy([*found.tracked, *untracked], found)
        gone = {*found.gone, *found.tracked} - set(added)
        self.run("update-index", "-z", "--force-remove", "--stdin", stdin=_joined(gone))
        self.run("update-index", "-z", "--add", "--replace", "--stdin", stdin=_joined(added))

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
        with TreeWriter(self.root, mtime_ns=0) as reader:
            for path in changed:
                self._classify(path, reader.find_stat(path), found)
        return found

    def _classify(self, path: bytes, seen: os.stat_result | None, found: Found) -> None:
        is_tracked = path in self.base
        if seen is None:
            if is_tracked:
                found.gone.append(path)
        elif stat.S_ISDIR(seen.st_mode):
            self._classify_directory(path, is_tracked, found)
        elif not (stat.S_ISREG(seen.st_mode) or stat.S_ISLNK(seen.st_mode)):
            if is_tracked:
                found.gone.append(path)  # git tracks no pipe, socket or device
        elif is_tracked:
            found.tracked.append(path)
        elif not self._is_out_of_bounds(path):
            self._add_untracked(path, found)

    def _classify_directory(self, path: bytes, is_tracked: bool, found: Found) -> None:
        if path in self._directories or self.base.get(path) == _SUBMODULE or self._is_out_of_bounds(path):
            return
        if is_tracked:
            found.gone.append(path)
        for below, seen in iter_extra(self.work.root, path):
            if (stat.S_ISREG(seen.st_mode) or stat.S_ISLNK(seen.st_mode)) and not self._is_out_of_bounds(below):
                self._add_untracked(below, found)

    def _add_untracked(self, path: bytes, found: Found) -> None:
        found.untracked.append(path)
        if len(found.untracked) > FILES_LIMIT:
            raise _too_large(f"more than {FILES_LIMIT} files are new")

    def _is_out_of_bounds(self, path: bytes) -> bool:
        """In some `.git`, or in a submodule: a nested repository gives its files, never its history."""
        parts = path.split(b"/")
        if any(part.lower() == b".git" for part in parts):
            return True
        return any(self.base.get(b"/".join(parts[:depth])) == _SUBMODULE for depth in range(1, len(parts)))

    def _ignored(self, found: Found) -> set[bytes]:
        """Which untracked paths the `.gitignore` files ignore. At this moment the work directory holds nothing else."""
        if not found.untracked:
            return set()
        rules = {path for path in (*self.base, *found.untracked) if path.rpartition(b"/")[2] == b".gitignore"}
        self._copy(sorted(rules - set(found.gone)), Found())
        named = _joined(b"./" + path for path in found.untracked)  # else `:(…)` is magic; GIT_LITERAL_PATHSPECS is refused here
        done = self.run("check-ignore", "-z", "--no-index", "--stdin", stdin=named, ok=(0, 1))
        return {path.removeprefix(b"./") for path in done.stdout.split(b"\0")[:-1]}

    # -- copying ------------------------------------------------------------------------------------------------------

    def _copy(self, paths: Iterable[bytes], found: Found) -> list[bytes]:
        """Copy files into the work directory; answers those that were there. Links come last: nothing is written through one."""
        with TreeWriter(self.root, mtime_ns=0) as reader:
            copied = [path for path in paths if self._copy_one(reader, path, found.links)]
        copied += [path for path, target in found.links.items() if self._link(path, target)]
        return copied

    def _copy_one(self, reader: TreeWriter, path: bytes, links: dict[bytes, bytes]) -> bool:
        """False for a link, which is only noted, and for what vanished meanwhile."""
        try:
            directory, name = reader.locate(path)
            seen = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISLNK(seen.st_mode):
                links[path] = os.fsencode(os.readlink(name, dir_fd=directory))
                return False
            with opened(open_regular(directory, name)) as source:
                self._write(self._target(path), source)
        except (FileNotFoundError, NotADirectoryError, FileExistsError, CheckoutBusyError):
            return False
        except OSError as error:
            if error.errno == errno.ELOOP:
                return False
            if error.errno not in (errno.EACCES, errno.EPERM):
                raise
            raise GitFailedError(f"cannot read {shown_path(path)}: {error.strerror}", hint="make the file readable") from error
        return True

    def _write(self, target: bytes, source: int) -> None:
        seen = os.fstat(source)
        if seen.st_size > self._bytes_left:
            raise _too_large(f"the changed files hold more than {BYTES_LIMIT >> 20} MiB")
        mode = 0o755 if seen.st_mode & 0o100 else 0o644
        with opened(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)) as sink:
            os.fchmod(sink, mode)
            left = seen.st_size
            while left and (data := os.read(source, min(left, 1 << 20))):
                os.write(sink, data)
                left -= len(data)
        self._bytes_left -= seen.st_size

    def _link(self, path: bytes, target: bytes) -> bool:
        try:
            os.symlink(target, self._target(path))
        except (FileExistsError, NotADirectoryError):
            return False
        return True

    def _target(self, path: bytes) -> bytes:
        target = os.path.join(os.fsencode(self.files), path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        return target


@contextmanager
def staged(work: Work) -> Iterator[Staging]:
    """Open a scratch repository for one piece of work, and remove it at the end."""
    shutil.rmtree(work.scratch, ignore_errors=True)
    with full_disk_named("a private copy of the checkout"), opened(_open_tree(work)) as root:
        work.scratch.mkdir(mode=0o700)
        try:
            yield Staging(work, root)
        except RecursionError as error:
            raise _too_large("its directories are nested too deep") from error
        finally:
            shutil.rmtree(work.scratch, ignore_errors=True)


def _open_tree(work: Work) -> int:
    try:
        return open_directory(work.root)
    except OSError as error:
        raise CheckoutBusyError(
            f"cannot open the checkout's directory: {error.strerror}", hint="it was replaced or removed; reset the checkout"
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
    return DiffTooLargeError(f"cannot copy what changed in the checkout: {fact}", hint="remove it, or let a .gitignore name it")
