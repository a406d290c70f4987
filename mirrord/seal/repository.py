"""Untrusted repositories: find one, list its files, read the objects of its stores.

Never runs git in it, and follows no symbolic link below it. Reads are bounded and of regular files
only: a FIFO, a device or a file of a terabyte cannot block. Object stores are verified to the last
byte: names prove nothing, and bytes can be hidden after the end of an object.
"""

import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from ..errors import CorruptObjectError, GitFailedError, PathNotFoundError
from ..git.command import run_git_sync
from ..git.configuration import UNTRUSTING
from ..git.graphs import graph_commits
from ..git.packs import PackIndex, loose_digest, pack_is_whole, reverse_index
from ..model import shown
from ..presence import is_dir, is_file, is_symlink, lexists
from ..protocol import SealLeak
from ..quoting import decode_name

# of one git; the repository may be as large as its mirror
TIMEOUT = timedelta(hours=1)
# shorter files are ignored: a coding line, one import, a line feed
TRIVIAL_BYTES = 64
# the first bytes of packs and bundles
PACKS = (b"PACK\0\0\0", b"# v2 git bundle\n", b"# v3 git bundle\n")
# of a control file in memory; a line of packed-refs has some 70 bytes
READ_LIMIT_BYTES = 256 * 1024**2
# git follows five levels; a circle ends here
_ALTERNATES_LIMIT = 64
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}


class ForeignRepository(NamedTuple):
    """A repository of unknown origin.

    `git_dir` has HEAD; `common_dir`, different in a linked worktree, refs and configuration.
    `stores` are its object directory and all alternates, recursively. `work_tree` is None if a
    `.git` or a bare repository was named. `lender` is the git directory of its only alternate,
    where that has the form of a sealed store's.
    """

    path: Path
    git_dir: Path
    common_dir: Path
    stores: tuple[Path, ...]
    alternates: tuple[str, ...]
    work_tree: Path | None
    lender: Path | None = None

    @property
    def directories(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys([self.git_dir, self.common_dir]))


class ForeignFile(NamedTuple):
    """A name below a directory; `where` is relative to it."""

    where: str
    path: Path
    kind: str  # file, link, mount, other or unreadable


def locate(path: Path) -> ForeignRepository:
    """Find the repository at `path`: a working tree, its `.git`, or a bare repository.

    Raises PathNotFoundError.
    """
    path = path.absolute()
    git_dir = _git_dir(path)
    if git_dir is None:
        raise PathNotFoundError(
            f"cannot judge {shown(str(path))}: it is not a git repository",
            hint="give a working tree, its .git, or a bare repository",
        )
    repository = repository_at(git_dir)
    work_tree = path if lexists(path / ".git") else None
    return repository._replace(path=path, work_tree=work_tree)


def repository_at(git_dir: Path, root: Path | None = None) -> ForeignRepository:
    """Return the repository of a git directory, without a working tree.

    `root` is a directory that stands for `/`: no directory outside of it is read, whatever the
    repository's files and links name.
    """
    pointer = (read_text(git_dir / "commondir") or "").strip()
    common_dir = _target(git_dir, pointer, root) if pointer else git_dir
    stores, alternates = _stores(_target(common_dir, "objects", root), root)
    lender = _find_lender(stores) if root is None and len(alternates) == 1 else None
    return ForeignRepository(git_dir, git_dir, common_dir, stores, alternates, None, lender)


def _find_lender(stores: tuple[Path, ...]) -> Path | None:
    """Return the git directory of a second store that is named as mirrord names a sealed one."""
    if len(stores) != 2 or lexists(stores[0] / "info/http-alternates"):
        return None
    line = (read_text(stores[0] / "info/alternates") or "").removesuffix("\n")
    is_exact = os.path.isabs(line) and os.path.normpath(line) == line == str(stores[1])
    is_link = is_symlink(stores[1]) or is_symlink(stores[1].parent)
    is_store = stores[1].parts[-2:] == (".git", "objects") and not is_link
    return stores[1].parent if is_exact and is_store else None


def _git_dir(path: Path) -> Path | None:
    for candidate in (path / ".git", path):
        if is_dir(candidate) and lexists(candidate / "HEAD"):
            return candidate
        pointer = read_text(candidate) if is_file(candidate) else None
        if pointer and pointer.startswith("gitdir: "):
            target = candidate.parent / pointer.removeprefix("gitdir: ").rstrip("\n")
            return target if is_dir(target) else None
    return None


def _target(directory: Path, pointer: str, root: Path | None) -> Path:
    """Resolve a path in a file of `directory`; `directory` itself if it leads out of `root`."""
    if root is None:
        return directory / pointer
    target = root / pointer.lstrip("/") if pointer.startswith("/") else directory / pointer
    return target if target.resolve().is_relative_to(root.resolve()) else directory


def _stores(own: Path, root: Path | None) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Return all object directories, and the alternates as written."""
    stores, written, pending, seen = [own], list[str](), [own], {os.path.realpath(own)}
    while pending and len(written) < _ALTERNATES_LIMIT:
        store = pending.pop()
        names = ("info/alternates", "info/http-alternates")
        lines = [line for name in names for line in (read_text(store / name) or "").splitlines()]
        for line in lines:
            if not line or line.startswith("#"):
                continue
            written.append(line)
            target = _target(store, line, root)
            if is_dir(target) and (real := os.path.realpath(target)) not in seen:
                seen.add(real)
                stores.append(target)
                pending.append(target)
    return tuple(stores), tuple(written)


def borrow(scratch: Path, repository: ForeignRepository) -> Path:
    """Make the empty directory `scratch` a git directory that borrows the repository's stores.

    Its alternates are links, because git unquotes the names of alternates.
    """
    (scratch / "objects/info").mkdir(parents=True)
    (scratch / "refs").mkdir()
    (scratch / "HEAD").write_text("ref: refs/heads/none\n")
    links = [scratch / f"store{number}" for number in range(len(repository.stores))]
    for link, store in zip(links, repository.stores, strict=True):
        link.symlink_to(os.path.realpath(store))
    (scratch / "objects/info/alternates").write_text("".join(f"{link}\n" for link in links))
    return scratch


def read_bytes(path: Path, *, start: int = 0) -> bytes | None:
    """Read a regular file, or its first `start` bytes; None if too large or of another kind."""
    try:
        # a FIFO opens at once, and a terminal does not become this process's own
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or (not start and status.st_size > READ_LIMIT_BYTES):
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read(start or READ_LIMIT_BYTES)


def read_text(path: Path) -> str | None:
    content = read_bytes(path)
    return None if content is None else decode_name(content)


def walk(
    top: Path, *, skip: frozenset[str] = frozenset(), one_device: bool = False
) -> Iterator[ForeignFile]:
    """Iterate everything but directories below `top`, outside of the directories in `skip`.

    With `one_device` a directory of another file system has the kind `mount`. Not by `os.walk`,
    which recurses before Python 3.12 and fails at a depth of 1,000.
    """
    pending = [("", top)]
    device = os.lstat(top).st_dev if one_device else None
    while pending:
        above, directory = pending.pop()
        try:
            with os.scandir(directory) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            yield ForeignFile(above or ".", directory, "unreadable")
            continue
        for entry in listed:
            where = f"{above}/{entry.name}" if above else entry.name
            try:
                status = entry.stat(follow_symlinks=False)
                kind = _KINDS.get(stat.S_IFMT(status.st_mode), "other")
                if kind == "directory" and device not in {None, status.st_dev}:
                    kind = "mount"
            except OSError:
                kind = "unreadable"
            if kind != "directory":
                yield ForeignFile(where, Path(entry.path), kind)
            elif where not in skip:
                pending.append((where, Path(entry.path)))


# -- object stores ---------------------------------------------------------------------------------

_LOOSE = re.compile(r"([0-9a-f]{2})/([0-9a-f]{38})")
_PACKED = re.compile(r"pack/pack-[0-9a-f]{40}\.(pack|idx|rev|keep)")
_GRAPH = re.compile(r"info/commit-graph|info/commit-graphs/graph-[0-9a-f]{40}\.graph")
_LISTS = {  # path: form, kind of leak, content
    "info/commit-graphs/commit-graph-chain": (
        re.compile(rb"([0-9a-f]{40}\n)+"), "commit-graph", "commit-graphs",
    ),
    "info/packs": (re.compile(rb"(P pack-[0-9a-f]{40}\.pack\n)*\n?"), "stray-file", "packs"),
}  # fmt: skip
_ALTERNATES = {"info/alternates", "info/http-alternates"}  # a leak in `judge_control`


@dataclass(slots=True)
class StoreContents:
    """The raw ids and pack indexes of all stores, and the commits in each commit-graph."""

    ids: set[bytes] = field(default_factory=set)
    leaks: list[SealLeak] = field(default_factory=list)
    packs: list[Path] = field(default_factory=list)
    graphed: dict[str, list[bytes]] = field(default_factory=dict)

    def leak(self, kind: str, detail: str) -> None:
        self.leaks.append(SealLeak(kind=kind, detail=detail))


def read_contents(repository: ForeignRepository, private: Path) -> StoreContents:
    """Read every object of every store. `private` was made by `borrow`."""
    contents = StoreContents()
    for number, store in enumerate(repository.stores):
        files = {file.where: file for file in walk(store)}
        prefix = "the alternate's " if number else ""
        for file in files.values():
            _read_file(prefix, file, files.keys(), contents)
        if contents.leaks or not contents.graphed:
            continue
        directory = private / f"store{number}"
        command = ("commit-graph", "verify", f"--object-dir={directory}")
        doing = "verify the commit-graph"
        try:  # git compares the graph's parents, trees and dates with the commits
            run_git_sync(*command, git_dir=private, timeout=TIMEOUT, doing=doing)
        except (CorruptObjectError, GitFailedError) as error:
            fact = f"a commit-graph differs from its commits: {error.message}"
            contents.leak("commit-graph", fact)
    # verify-pack hashes every object of a pack. If it fails for all, each is verified alone.
    pending = [contents.packs] if contents.packs else []
    while pending:
        indexes = pending.pop()
        verify = ("verify-pack", *map(str, indexes))
        try:
            run_git_sync(*verify, git_dir=private, timeout=TIMEOUT, doing="verify packs")
        except (CorruptObjectError, GitFailedError) as error:
            if len(indexes) > 1:
                pending = [[index] for index in reversed(indexes)]
                continue
            fact = f"{indexes[0].name} does not match its pack: {error.message}"
            contents.leak("damaged", fact)
    return contents


def _read_file(
    prefix: str, file: ForeignFile, names: Collection[str], contents: StoreContents
) -> None:
    where, path = f"{prefix}objects/{file.where}", file.path
    if file.kind != "file":
        contents.leak("stray-file", f"{where} is not a regular file")
    elif loose := _LOOSE.fullmatch(file.where):
        oid = loose[1] + loose[2]
        contents.ids.add(bytes.fromhex(oid))
        if loose_digest(path) != oid:
            contents.leak("damaged", f"loose object {oid} does not match its id")
    elif packed := _PACKED.fullmatch(file.where):
        _read_packed(packed[1], file, names, contents)
    elif _GRAPH.fullmatch(file.where):
        contents.graphed[where] = []
        try:  # a commit-graph ends with a checksum as a pack does
            if not pack_is_whole(path):
                raise CorruptObjectError(f"cannot read {where}: checksum mismatch")
            contents.graphed[where] = graph_commits(path)
        except (CorruptObjectError, OSError):
            contents.leak("commit-graph", f"{where} is not a valid commit-graph")
    elif file.where in _LISTS:
        form, kind, listed = _LISTS[file.where]
        if not form.fullmatch(read_bytes(path) or b"-"):
            contents.leak(kind, f"{where} is not a list of {listed}")
    elif file.where not in _ALTERNATES:
        contents.leak("stray-file", f"{where} is not part of a sealed object store")


def _read_packed(
    part: str, file: ForeignFile, names: Collection[str], contents: StoreContents
) -> None:
    where, path = f"objects/{file.where}", file.path
    if part == "pack":
        if file.where.removesuffix("pack") + "idx" not in names:
            fact = "has no index: git does not see its objects, but can index them"
            contents.leak("stray-file", f"{where} {fact}")
    elif file.where.removesuffix(part) + "pack" not in names:
        contents.leak("stray-file", f"{where} has no pack")
    elif part == "keep":
        if path.stat().st_size:
            contents.leak("stray-file", f"{where} is not empty")
    elif part == "rev":
        with suppress(CorruptObjectError, OSError):
            if read_bytes(path) == reverse_index(PackIndex(path.with_suffix(".idx"))):
                return
        contents.leak("damaged", f"{where} is not the reverse index of its pack")
    else:
        try:
            contents.ids.update(PackIndex(path))
            contents.packs.append(path)
        except (CorruptObjectError, OSError) as error:
            contents.leak("damaged", f"{path.name} cannot be read: {error}")


def read_closure(git_dir: Path, tip: str, scratch: Path) -> tuple[set[bytes], bool]:
    """Return the raw ids of the closure of `tip`, and whether it is complete.

    `scratch` is a directory for a temporary file.
    """
    listing, complete = scratch / "closure", False
    command = (*UNTRUSTING, "rev-list", "--objects", "--no-object-names")
    # git ends at the first missing object; only then does the second walk skip what is missing
    for options in ((), ("--missing=allow-any",)):
        try:
            run_git_sync(
                *command, *options, tip,
                git_dir=git_dir, stdout_path=listing, timeout=TIMEOUT, doing=f"walk {tip}",
            )  # fmt: skip
        except (CorruptObjectError, GitFailedError):
            continue
        complete = not options
        break
    with listing.open("rb") as file:
        return {bytes.fromhex(line[:40].decode()) for line in file}, complete
