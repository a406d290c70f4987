"""Layers of what an image has in its repository's directory besides the commit. In workers.

Installed packages, compiled and generated files and a recipe's edits of tracked files become a
layer over the base commit, as links to the files of the image. Nothing of a `.git` is in it, and no
file whose content the mirror has outside of the base commit's past.
"""

import errno
import filecmp
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ...errors import MirrordError, full_disk_named
from ...git.command import run_git_sync
from ...git.objects.scratch import make_repository
from ...host.files import make_whiteout, read_plain
from ...host.trash import remove_tree
from ...model import CommitId
from ...presence import exists, is_symlink
from ...protocol import RootLeak
from ...quoting import encode_name
from ...seal.scan import scan_root

_GIT = ".git"
# kinds of findings in files that no layer has
TAKEN_OUT = ("future-file", "object", "pack", "repository")


class TreeOrder(NamedTuple):
    """A layer to write at the new path `layer`: what the directory `tree` of an image, whose
    `stack` of layers begins with the top, has over `commit`, which is checked out at `checkout`.
    """

    stack: tuple[Path, ...]
    tree: str
    checkout: Path
    mirror: Path
    commit: CommitId
    layer: Path

    @property
    def scratch(self) -> Path:
        """A private directory beside the layer; a start removes what is left of it."""
        return self.layer.with_name(f".scratch-{self.layer.name}")


class Written(NamedTuple):
    """What was written: `changed` paths, none for no layer. `head` is the image's, if it could be
    read; `kept_back` paths are as the base commit has them because another commit differs there.
    """

    changed: int
    head: str | None
    kept_back: int
    findings: list[RootLeak]


def write_tree_layer(order: TreeOrder) -> Written:
    """Write the layer of an image's tree; there is none if it has nothing besides the commit.

    Raises DiskFullError, and what the scan of `verify-seal --root` raises.
    """
    stack = [directory for layer in order.stack if (directory := directory_in(layer, order.tree))]
    try:
        with full_disk_named("a layer of an image's tree"):
            base = _list_tree(order.mirror, order.commit)
            head, other = _read_head(order, stack, base)
            writer = _Writer(order, base, other)
            if stack:
                writer.compare("", stack)
            findings = writer.take_out_leaks() if writer.changed else []
    except BaseException:
        remove_tree(order.layer)
        raise
    finally:
        remove_tree(order.scratch)
    if not writer.changed:
        remove_tree(order.layer)
    return Written(writer.changed, head, writer.kept_back, findings)


def directory_in(layer: Path, path: str) -> Path | None:
    """Return a directory of a layer; None if a link or nothing is there."""
    directory = layer
    for name in filter(None, path.split("/")):
        directory = directory / name
        if not _is_directory(directory):
            return None
    return directory


def _is_directory(path: Path) -> bool:
    with suppress(OSError):
        return stat.S_ISDIR(path.lstat().st_mode)
    return False


def merged(stack: Sequence[Path]) -> dict[str, list[Path]]:
    """Return what overlayfs shows of a directory in layers, the top first: the paths of each name,
    more than one for a directory that several layers have.
    """
    names: dict[str, list[Path]] = {}
    closed = set[str]()
    for layer in stack:
        with os.scandir(layer) as entries:
            for entry in entries:
                if entry.name in closed:
                    continue
                is_directory = entry.is_dir(follow_symlinks=False)
                is_other = entry.is_file(follow_symlinks=False) or entry.is_symlink()
                if is_directory or (is_other and entry.name not in names):
                    names.setdefault(entry.name, []).append(Path(entry.path))
                if not is_directory:  # a file, or a whiteout
                    closed.add(entry.name)
    return names


# -- the commits -----------------------------------------------------------------------------------


def _read_head(
    order: TreeOrder, stack: Sequence[Path], base: dict[str, str]
) -> tuple[str | None, dict[str, str] | None]:
    """Return the image's HEAD and the files of its commit; None for what cannot be read."""
    with suppress(OSError, ValueError, MirrordError):
        repository = take_repository(stack, order.scratch)
        words = ("rev-parse", "--verify", "HEAD^{commit}")
        listed = run_git_sync(*words, git_dir=repository, doing="read an image's HEAD")
        head = listed.stdout.decode().strip()
        if head == order.commit:
            return head, base
        for git_dir in (order.mirror, repository):
            with suppress(MirrordError):
                other = _list_tree(git_dir, CommitId(head))
                # a commit of a shallow repository has another id in the mirror, and equal files
                return (order.commit if other == base else head), other
        return head, None
    return None, None


_HEAD_BYTES = 200


_STORED = ("HEAD", "packed-refs", "refs", "objects", "shallow")  # and nothing that configures git


def take_repository(stack: Sequence[Path], scratch: Path) -> Path:
    """Link the objects and refs of a tree's `.git` into a new repository, without configuration.

    Raises FileNotFoundError if it has none.
    """
    inside = merged(stack).get(_GIT, [])
    if not inside or not _is_directory(inside[0]):
        raise FileNotFoundError(_GIT)
    repository = scratch / "repository"
    repository.mkdir(parents=True, mode=0o700)
    (repository / "objects").mkdir()
    make_repository(repository)
    head = b""
    for path, source in _iter_files("", inside):
        if path == "HEAD":
            head = read_plain(source)[:_HEAD_BYTES]
        # objects/info/alternates could lead out of the image
        elif path.split("/")[0] in _STORED and not path.startswith("objects/info/"):
            to = repository / path
            to.parent.mkdir(parents=True, exist_ok=True)
            _link(source, to)
    (repository / "HEAD").write_bytes(head)
    return repository


def _iter_files(above: str, stack: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    for name, paths in merged(stack).items():
        path = f"{above}{name}"
        if _is_directory(paths[0]):
            yield from _iter_files(f"{path}/", paths)
        elif not is_symlink(paths[0]):
            yield path, paths[0]


def _list_tree(git_dir: Path, commit: CommitId) -> dict[str, str]:
    """Return the files of a commit: mode and object by path."""
    words = ("ls-tree", "-r", "-z", "--full-tree", commit)
    listed = run_git_sync(*words, git_dir=git_dir, doing="list the files of a commit").stdout
    entries = (line.partition("\t") for line in os.fsdecode(listed).split("\0") if line)
    return {path: fact for fact, _, path in entries}


# -- the layer -------------------------------------------------------------------------------------


class _Writer:
    """Compares an image's tree with a clean checkout, and writes the difference as a layer.

    `base` and `other` are the files of the base commit and of the image's HEAD. Paths in which they
    differ stay as they are; where `other` is unknown, all paths of the base commit do.
    """

    def __init__(
        self, order: TreeOrder, base: dict[str, str], other: dict[str, str] | None
    ) -> None:
        self._checkout, self._layer, self._order = order.checkout, order.layer, order
        kept = set(base) if other is None else {path for path, _ in base.items() ^ other.items()}
        self._kept = kept
        self._above_kept = {path[:end] for path in kept for end in _slashes(path)}
        self.changed = self.kept_back = 0

    def compare(self, above: str, stack: Sequence[Path]) -> None:
        """Compare a directory that both have; `above` is empty, or ends with a slash."""
        names = merged(stack)
        for name, paths in sorted(names.items()):
            path = f"{above}{name}"
            if name.lower() == _GIT:
                continue
            if path in self._kept:
                self.kept_back += 1
            elif not _is_directory(paths[0]):
                self._compare_file(path, paths[0])
            elif _is_directory(self._checkout / path):
                self.compare(f"{path}/", paths)
            else:
                self._add_directory(path, paths)
        if names.keys() - {_GIT}:  # else a submodule whose files the image does not have
            for name in set(os.listdir(self._checkout / above)) - names.keys() - {_GIT}:
                self._hide(f"{above}{name}")

    def _compare_file(self, path: str, source: Path) -> None:
        if path in self._above_kept:
            self.kept_back += 1
        elif not _is_same(source, self._checkout / path):
            _link(source, self._target(path))
            self.changed += 1

    def _add_directory(self, path: str, stack: Sequence[Path]) -> None:
        target = self._target(path)
        target.mkdir()
        self.changed += 1
        for name, paths in sorted(merged(stack).items()):
            below = f"{path}/{name}"
            if name.lower() == _GIT:
                continue
            if below in self._kept:
                self.kept_back += 1
            elif _is_directory(paths[0]):
                self._add_directory(below, paths)
            else:
                _link(paths[0], target / name)
                self.changed += 1
        # last, because each file that is made in it changes its mtime
        shutil.copystat(stack[0], target)

    def _hide(self, path: str) -> None:
        if path in self._kept or path in self._above_kept:
            self.kept_back += 1
        else:
            make_whiteout(None, os.fsencode(self._target(path)))
            self.changed += 1

    def _target(self, path: str) -> Path:
        """Return a path of the layer, after making the directories above it."""
        target = self._layer
        for name in ("", *path.split("/")[:-1]):
            target = target / name
            if not exists(target):
                target.mkdir()
                # mkdir obeys the umask
                target.chmod(0o755)
        return self._layer / path

    def take_out_leaks(self) -> list[RootLeak]:
        """Remove what the scan finds of later commits from the layer; return those findings."""
        order = self._order
        report = scan_root(order.layer, order.mirror, order.commit, seen_at=order.tree)
        leaks = [
            leak
            for leak in report.leaks
            if leak.kind in TAKEN_OUT or leak.path in report.repositories
        ]
        for leak in leaks:
            path = encode_name(leak.path).partition(b"!")[0]
            remove_tree(order.layer / os.fsdecode(path))
        if not exists(order.layer):
            self.changed = 0
        return [replace(leak, path=f"{order.tree}/{leak.path}", hidden=True) for leak in leaks]


def _slashes(path: str) -> Iterator[int]:
    return (index for index, letter in enumerate(path) if letter == "/")


def _is_same(one: Path, other: Path) -> bool:
    """Return whether git sees no difference: kind, content, and whether a file is executable."""
    try:
        a, b = one.lstat(), other.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    if stat.S_IFMT(a.st_mode) != stat.S_IFMT(b.st_mode):
        return False
    if stat.S_ISLNK(a.st_mode):
        return one.readlink() == other.readlink()
    is_executable = (a.st_mode ^ b.st_mode) & stat.S_IXUSR
    return not is_executable and a.st_size == b.st_size and filecmp.cmp(one, other, shallow=False)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno != errno.EMLINK:  # ext4 has 65,000 links for a file
            raise
        shutil.copy2(source, target, follow_symlinks=False)
