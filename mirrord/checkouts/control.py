"""The `.git` of a pooled checkout: always made anew, never mended.

Owns its life in a directory tree: built beside the tree where its user cannot reach it, compared with the sealed store byte for
byte, then renamed into the place of whatever lies there. So nothing that was done to the old one survives, and no file of it is
ever read. Sync; runs in workers. A crash leaves `.building` or `.old` in the checkout's directory, which the next call removes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import MirrordError, ProofFailedError
from ..host.files import find_stat, open_directory, opened, remove, unlock

_BUILDING = b".building"
_OLD = b".old"
_SHARED = Path("objects/pack")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Control:
    """What was put in place: `files` counts compared files, `index` is the checksum of the index, `packs` are file names."""

    files: int
    index: str
    packs: tuple[str, ...]
    refs: tuple[str, ...]


def build(directory: Path, source: Path, index: bytes, owner: tuple[int, int]) -> Control:
    """Make `directory/.building`, a copy of the store `source` with an index, and compare it.

    Packs are shared by hard link with an owner who cannot write them; one with the daemon's own uid could, and gets copies.
    """
    building = _fresh(directory)
    is_private = owner[0] == os.geteuid()
    for path in _iter_files(source):
        target = building / path
        if path.parent == _SHARED and not is_private:
            _link(source / path, target)
        else:
            _copy(source / path, target)
    (building / "index").write_bytes(index)
    control = _compare(building, source, index)
    _give_away(building, source, owner)
    return control


def build_file(directory: Path, content: bytes, owner: tuple[int, int]) -> None:
    """Make `directory/.building` a file, as the `.git` of a linked worktree is."""
    with opened(open_directory(directory)) as fd:
        remove(fd, _BUILDING)
    building = directory / os.fsdecode(_BUILDING)
    building.write_bytes(content)
    building.chmod(0o644)
    os.chown(building, *owner)


def install(directory: Path) -> None:
    """Put what was built into the place of the tree's `.git`, whatever that is, and remove the old one."""
    with opened(open_directory(directory)) as above, opened(open_directory(directory / "tree")) as tree:
        remove(above, _OLD)
        unlock(tree, b".git")
        if find_stat(tree, b".git") is not None:
            with suppress(FileNotFoundError):
                os.rename(b".git", _OLD, src_dir_fd=tree, dst_dir_fd=above)
        _put(above, tree)
        remove(above, _OLD)


def discard(directory: Path) -> None:
    """Remove a directory with all that is in it, whatever its modes and flags; nothing there is fine."""
    with opened(open_directory(directory.parent)) as above:
        remove(above, os.fsencode(directory.name))


def discard_all(directories: list[Path]) -> dict[Path, str]:
    """`discard` each; one that resists does not keep the others."""
    problems: dict[Path, str] = {}
    for directory in directories:
        try:
            discard(directory)
        except (MirrordError, OSError) as error:
            problems[directory] = str(error)
    return problems


def _put(above: int, tree: int) -> None:
    try:
        os.rename(_BUILDING, b".git", src_dir_fd=above, dst_dir_fd=tree)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR}:
            raise
        raise ProofFailedError("cannot put .git in place: something makes another at the same time") from error


def _fresh(directory: Path) -> Path:
    with opened(open_directory(directory)) as fd:
        remove(fd, _BUILDING)
    building = directory / os.fsdecode(_BUILDING)
    building.mkdir(mode=0o700)
    return building


def _iter_files(source: Path) -> Iterator[Path]:
    """Every file of the store, relative; the index is not part of it."""
    for above, _, names in os.walk(source):
        relative = Path(above).relative_to(source)
        yield from (relative / name for name in sorted(names) if name != "index")


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in {errno.EMLINK, errno.EXDEV, errno.EPERM}:
            raise
        shutil.copyfile(source, target)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o444 if source.parent.name == "pack" else 0o644)


def _compare(building: Path, source: Path, index: bytes) -> Control:
    """Read back what was written; a hard link is the file itself."""
    paths = list(_iter_files(source))
    for path in paths:
        written, wanted = building / path, source / path
        if not written.samefile(wanted) and _digest(written) != _digest(wanted):
            raise ProofFailedError(
                f"cannot prove .git/{path}: it is not what the sealed store has", hint="the disk may be failing"
            )
    if (building / "index").read_bytes() != index:
        raise ProofFailedError("cannot prove .git/index: it is not what was written", hint="the disk may be failing")
    packs = tuple(path.name for path in paths if path.suffix == ".pack")
    return Control(len(paths) + 1, index[-20:].hex(), packs, _refs(building))


def _refs(building: Path) -> tuple[str, ...]:
    """The names in packed-refs: a sealed store has no other refs."""
    try:
        lines = (building / "packed-refs").read_bytes().splitlines()
    except FileNotFoundError:
        return ()
    named = (line.partition(b" ")[2] for line in lines if not line.startswith((b"#", b"^")))
    return tuple(name.decode(errors="surrogateescape") for name in named)


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha1").digest()


def _give_away(building: Path, source: Path, owner: tuple[int, int]) -> None:
    """Make directories and own files the owner's; a shared file stays the daemon's. Directories that git wants are made."""
    for above, directories, _ in os.walk(source):
        for name in directories:
            (building / Path(above).relative_to(source) / name).mkdir(exist_ok=True)
    for above, _, names in os.walk(building):
        os.chmod(above, 0o755)  # noqa: S103  (as git makes them)
        os.chown(above, *owner)
        for name in names:
            path = os.path.join(above, name)
            if os.lstat(path).st_nlink == 1:
                os.chown(path, *owner)
