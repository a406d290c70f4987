"""Find and read a repository that somebody else made, with linked worktrees and alternates.

Never runs git on it and never follows a symbolic link below it. Every read is bounded and of
regular files only, so that no FIFO, device or file of a terabyte holds us up.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import PathNotFoundError
from ..model import shown

READ_LIMIT_BYTES = 256 * 1024**2
_ALTERNATES_LIMIT = 64
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}


class ForeignRepository(NamedTuple):
    """`git_dir` holds HEAD; `common_dir`, another one in a linked worktree, refs and configuration.

    `stores` are its object directories: its own, then every alternate, those of alternates
    included. `work_tree` is None where only a `.git`, or a bare repository, was named.
    """

    path: Path
    git_dir: Path
    common_dir: Path
    stores: tuple[Path, ...]
    alternates: tuple[str, ...]
    work_tree: Path | None

    @property
    def directories(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys([self.git_dir, self.common_dir]))


class ForeignFile(NamedTuple):
    """One name below a directory, with its path from there.

    `kind` is file, directory, link, other or unreadable.
    """

    where: str
    path: Path
    kind: str


def locate(path: Path) -> ForeignRepository:
    """Find the repository at `path`: a working tree, its `.git`, or a bare repository.

    Raises PathNotFoundError.
    """
    path = path.absolute()
    git_dir = _git_dir(path)
    if git_dir is None:
        raise PathNotFoundError(
            f"cannot judge {shown(str(path))}: there is no git repository",
            hint="give a working tree, its .git, or a bare repository",
        )
    pointer = (read_text(git_dir / "commondir") or "").strip()
    common_dir = (git_dir / pointer) if pointer else git_dir
    stores, alternates = _stores(common_dir / "objects")
    work_tree = path if os.path.lexists(path / ".git") else None
    return ForeignRepository(path, git_dir, common_dir, stores, alternates, work_tree)


def _git_dir(path: Path) -> Path | None:
    for candidate in (path / ".git", path):
        if candidate.is_dir() and os.path.lexists(candidate / "HEAD"):
            return candidate
        pointer = read_text(candidate) if candidate.is_file() else None
        if pointer and pointer.startswith("gitdir: "):
            target = candidate.parent / pointer.removeprefix("gitdir: ").rstrip("\n")
            return target if target.is_dir() else None
    return None


def _stores(own: Path) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """All object directories, and the alternates as they are written."""
    stores, written, pending = [own], list[str](), [own]
    while pending and len(written) < _ALTERNATES_LIMIT:
        store = pending.pop()
        names = ("info/alternates", "info/http-alternates")
        lines = [line for name in names for line in (read_text(store / name) or "").splitlines()]
        for line in lines:
            if not line or line.startswith("#"):
                continue
            written.append(line)
            target = store / line
            if target.is_dir() and not any(_same(target, known) for known in stores):
                stores.append(target)
                pending.append(target)
    return tuple(stores), tuple(written)


def _same(left: Path, right: Path) -> bool:
    try:
        return left.samefile(right)
    except OSError:
        return False


def read_bytes(path: Path) -> bytes | None:
    """The content of a regular file that is not too large; None for anything else."""
    return _read(path, READ_LIMIT_BYTES, READ_LIMIT_BYTES)


def read_start(path: Path, count: int = 16) -> bytes:
    """The first bytes of a regular file of any size; nothing for anything else."""
    return _read(path, count, None) or b""


def _read(path: Path, count: int, limit_bytes: int | None) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return None
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or (limit_bytes is not None and facts.st_size > limit_bytes):
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read(count)


def read_text(path: Path) -> str | None:
    content = read_bytes(path)
    return None if content is None else content.decode("utf-8", "surrogateescape")


def walk(top: Path, *, skip: frozenset[str] = frozenset()) -> Iterator[ForeignFile]:
    """Every name below `top` but directories, which are entered, except those at `skip`.

    `os.walk` recurses before Python 3.12, and ends at a depth of 1,000.
    """
    pending = [("", top)]
    while pending:
        above, directory = pending.pop()
        try:
            with os.scandir(directory) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            yield ForeignFile(above or ".", directory, "unreadable")
            continue
        for entry in found:
            where = f"{above}/{entry.name}" if above else entry.name
            try:
                mode = entry.stat(follow_symlinks=False).st_mode
                kind = _KINDS.get(stat.S_IFMT(mode), "other")
            except OSError:
                kind = "unreadable"
            if kind != "directory":
                yield ForeignFile(where, Path(entry.path), kind)
            elif where not in skip:
                pending.append((where, Path(entry.path)))
