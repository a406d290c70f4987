"""Which files of a mirror are not what git wrote: judged by what they hold, never by what another
file says of them.

What is no plain file or directory where one belongs is found first, and never opened: git ends at
it, and a named pipe blocks its reader for ever. Every file that git writes for itself ends with the
checksum of what is before it: packs, their indexes, reverse indexes, bitmaps, multi-pack indexes,
commit-graphs. A loose object has the hash that is its name. Reads only; a file that vanishes
meanwhile was repacked, and what looks bad is looked at twice. Runs in a worker.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ..errors import CorruptObjectError, GitFailedError
from ..git.command import run_git_sync
from ..git.packs import ID_BYTES, PackIndex, loose_digest, pack_is_whole, pack_trailer
from ..model import AuditLevel, FindingKind

TIMEOUT = timedelta(hours=1)


_CHECKSUM = re.compile(r"[0-9a-f]{40}")
_LOOSE_NAME = re.compile(r"[0-9a-f]{38}")
_FAN_OUT = re.compile(r"[0-9a-f]{2}")
_OF_PACKS = re.compile(r"pack-.+\.(pack|idx|rev|mtimes|bitmap|promisor)|multi-pack-index.*")
_PACK_HEADER = struct.Struct(">4sII")
_CHUNK = struct.Struct(">4sQ")
_CHUNK_COUNT_AT, _CHUNKS_AT = 6, 12
_PLANTED = {
    "objects/info/alternates": "it lends objects from elsewhere",
    "objects/info/http-alternates": "it lends objects from elsewhere",
    "info/grafts": "it gives commits other parents",
    "info/attributes": "it changes how git reads files",
    "shallow": "it takes the parents of commits away",
    "commondir": "it takes refs and objects from elsewhere",
    "config.worktree": "git reads it as configuration",
}
_REV_HEADER_BYTES = 12  # signature, version, hash
_HALF_S = 2.0
_TRIES = 3  # while the mirror is packed, which replaces the file
_BITMAP_AT = 12  # signature, version, flags and count come before the checksum of its pack


class FileKind(StrEnum):
    """What a bad file is, which decides how it is healed."""

    PACK = "pack"
    INDEX = "idx"
    LOOSE = "loose object"
    DERIVED = "derived"  # git makes it again from the rest
    REF = "ref"
    PACKED_REFS = "packed-refs"
    HEAD = "HEAD"
    CONFIG = "config"
    PLANTED = "planted"
    LAYOUT = "layout"  # no plain file or directory, where one has to be

    @property
    def finding(self) -> FindingKind:
        """What a finding about such a file is called."""
        return _FINDINGS.get(self) or FindingKind[self.name]


_FINDINGS = {
    FileKind.INDEX: FindingKind.PACK,
    FileKind.LOOSE: FindingKind.OBJECT,
    FileKind.PACKED_REFS: FindingKind.REF,
}


class Fault(NamedTuple):
    """Something wrong with a mirror; `reason` completes a sentence that begins with its subject."""

    kind: FindingKind
    reason: str


@dataclass(frozen=True, slots=True, order=True)
class BadFile:
    """`path` is below the mirror; `reason` completes a sentence that begins with it."""

    path: str
    kind: FileKind
    reason: str

    @property
    def name(self) -> str:
        """What a finding calls it: packs are known by their file names."""
        return self.path.removeprefix("objects/pack/")


def find_bad_files(git_dir: Path, level: AuditLevel) -> list[BadFile]:
    """Bad files below `objects/`. `quick` looks at both ends, `closure` hashes what is small, `content` hashes everything."""
    found = set(_look(git_dir, level))
    return sorted(found & set(_look(git_dir, level))) if found else []


def _look(git_dir: Path, level: AuditLevel) -> Iterator[BadFile]:
    objects = git_dir / "objects"
    strange = list(find_strange(git_dir))
    unopened = {git_dir / bad.path for bad in strange}
    yield from strange
    if objects in unopened:
        return
    yield from _packs(objects / "pack", level, unopened)
    if level is not AuditLevel.QUICK:
        yield from _derived(objects, unopened)
        is_sound = _is_sound_loose if level is AuditLevel.CONTENT else _is_plausible_loose
        yield from _loose(objects, is_sound, unopened)


# -- what is no plain file or directory, and what no mirror of ours has -------------------------------------------------


def find_strange(git_dir: Path) -> Iterator[BadFile]:
    """Objects that are no files, directories that are none, and files that change what git reads."""
    for name, reason in _PLANTED.items():
        if os.path.lexists(git_dir / name):
            yield BadFile(name, FileKind.PLANTED, f"{reason}, and no mirror of ours has one")
    for entry in _entries(git_dir / "hooks"):
        if not entry.name.endswith(".sample"):
            reason = "git runs it, and no mirror of ours has one"
            yield BadFile(f"hooks/{entry.name}", FileKind.PLANTED, reason)
    if wrong := no_directory(git_dir / "objects"):
        yield BadFile("objects", FileKind.LAYOUT, wrong)
        return
    for entry in _entries(git_dir / "objects"):
        is_ours = entry.name in {"pack", "info"} or _FAN_OUT.fullmatch(entry.name)
        if is_ours and (wrong := no_directory(Path(entry))):
            yield BadFile(f"objects/{entry.name}", FileKind.LAYOUT, wrong)
        elif is_ours:
            yield from _strange_below(Path(entry))


def _strange_below(directory: Path) -> Iterator[BadFile]:
    for entry in _entries(directory):
        kind = _kind_in(directory.name, entry.name)
        path = f"objects/{directory.name}/{entry.name}"
        if entry.name.endswith(".promisor"):
            yield BadFile(
                path, FileKind.PLANTED, "it excuses missing objects, and no mirror has one"
            )
        elif entry.name == "commit-graphs" and (wrong := no_directory(Path(entry))):
            yield BadFile(path, FileKind.DERIVED, wrong)
        elif kind and not entry.is_file(follow_symlinks=False) and (wrong := no_file(Path(entry))):
            yield BadFile(path, kind, wrong)


def _kind_in(directory: str, name: str) -> FileKind | None:
    if _FAN_OUT.fullmatch(directory):
        return FileKind.LOOSE if _LOOSE_NAME.fullmatch(name) else None
    if directory == "info":
        return FileKind.DERIVED if name == "commit-graph" else None
    if not _OF_PACKS.fullmatch(name):
        return None
    return {".pack": FileKind.PACK, ".idx": FileKind.INDEX}.get(Path(name).suffix, FileKind.DERIVED)


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    """None where it is no directory, or went: git removes that of loose objects that it packed."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def no_directory(path: Path) -> str | None:
    """What stands where a directory has to be; None where one does, or just went."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None if _FAN_OUT.fullmatch(path.name) else "the directory is lost"
    return None if stat.S_ISDIR(mode) else f"it is {_shape(mode)}, not a directory"


def no_file(path: Path) -> str | None:
    """What stands where a file has to be; None where one does, or nothing."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if stat.S_ISREG(mode) else f"it is {_shape(mode)}, not a file"


def _shape(mode: int) -> str:
    table = {stat.S_IFREG: "a file", stat.S_IFDIR: "a directory", stat.S_IFLNK: "a symbolic link"}
    return table.get(stat.S_IFMT(mode), "a special file")


# -- packs and their indexes ------------------------------------------------------------------------------------------


def _packs(directory: Path, level: AuditLevel, unopened: Collection[Path]) -> Iterator[BadFile]:
    stems = {
        file.with_suffix("")
        for pattern in ("pack-*.pack", "pack-*.idx")
        for file in directory.glob(pattern)
    }
    for stem in sorted(stems):
        pack, index = stem.with_suffix(".pack"), stem.with_suffix(".idx")
        if pack in unopened or index in unopened:
            continue
        try:
            yield from _pair(pack, index, level)
        except FileNotFoundError:
            yield from _half(pack, index)
        except OSError as error:
            yield _unreadable(error, f"objects/pack/{pack.name}", FileKind.PACK)


def _half(pack: Path, index: Path) -> Iterator[BadFile]:
    """One of the two is not there. git (2.39) removes a pack before its index, and a big one takes its time."""
    ends = time.monotonic() + _HALF_S
    while pack.exists() != index.exists():
        if time.monotonic() > ends:
            if index.exists():
                yield BadFile(
                    f"objects/pack/{pack.name}", FileKind.PACK, "its index is there and it is not"
                )
            else:
                yield BadFile(
                    f"objects/pack/{index.name}",
                    FileKind.INDEX,
                    "it is gone, and its pack is there",
                )
            return
        time.sleep(_HALF_S / 20)


def _pair(pack: Path, index: Path, level: AuditLevel) -> Iterator[BadFile]:
    reason = _index_fault(index, deep=level is not AuditLevel.QUICK)
    if reason:
        yield BadFile(f"objects/pack/{index.name}", FileKind.INDEX, reason)
        if not _is_whole(pack):
            yield BadFile(
                f"objects/pack/{pack.name}", FileKind.PACK, "its bytes are not what they were"
            )
        return
    known = PackIndex(index)
    if level is AuditLevel.CONTENT and not _is_whole(pack):
        yield BadFile(f"objects/pack/{pack.name}", FileKind.PACK, _how(pack, known))
    elif not _fits(pack, known):
        kind, name = (FileKind.INDEX, index.name) if _is_whole(pack) else (FileKind.PACK, pack.name)
        yield BadFile(f"objects/pack/{name}", kind, _how(pack, known))
    elif pack.stem != f"pack-{known.pack_checksum.hex()}":
        # git names a pack after its checksum; a multi-pack index finds objects by that name
        yield BadFile(
            f"objects/pack/{pack.name}", FileKind.PACK, "it is another pack than its name says"
        )


def _how(pack: Path, index: PackIndex) -> str:
    if _fits(pack, index):
        return "its bytes are not what they were"
    return "it does not end with the checksum that its index names"


def _index_fault(index: Path, *, deep: bool) -> str | None:
    try:
        PackIndex(index)
    except CorruptObjectError as error:
        return error.message.partition(": ")[2]
    return None if not deep or _ends_with_checksum(index) else "its bytes are not what they were"


def _fits(pack: Path, index: PackIndex) -> bool:
    """Whether both ends of a pack are what its index expects; git does not open one whose trailer is another."""
    try:
        with pack.open("rb") as file:
            signature, version, count = _PACK_HEADER.unpack(file.read(_PACK_HEADER.size))
        return (signature, version, count) == (b"PACK", 2, index.count) and pack_trailer(
            pack
        ) == index.pack_checksum
    except struct.error:
        return False


def _is_whole(pack: Path) -> bool:
    return pack.stat().st_size > _PACK_HEADER.size + ID_BYTES and pack_is_whole(pack)


# -- what git derives from packs and commits --------------------------------------------------------------------------


def _derived(objects: Path, unopened: Collection[Path]) -> Iterator[BadFile]:
    pack, info = objects / "pack", objects / "info"
    files: list[tuple[Path, Callable[[Path], bool]]] = [
        *(
            (file, _belongs_to_its_pack)
            for suffix in ("rev", "mtimes", "bitmap")
            for file in pack.glob(f"pack-*.{suffix}")
        ),
        (pack / "multi-pack-index", _names_its_packs),
        *((file, _ends_with_checksum) for file in pack.glob("multi-pack-index-*")),
        (info / "commit-graph", _ends_with_checksum),
        *((file, _ends_with_checksum) for file in (info / "commit-graphs").glob("*.graph")),
        (info / "commit-graphs/commit-graph-chain", _names_its_graphs),
    ]
    for file, is_sound in sorted(files, key=lambda row: row[0]):
        if file in unopened or file.with_suffix(".idx") in unopened:
            continue
        if wrong := no_file(file):
            yield BadFile(_below(file), FileKind.DERIVED, wrong)
        else:
            yield from _judged(file, is_sound)


def find_lying(git_dir: Path) -> dict[str, Fault]:
    """Commit-graphs and a multi-pack index that say something else than the objects and packs."""
    checks = {
        "objects/info/commit-graph": "commit-graph",
        "objects/info/commit-graphs/commit-graph-chain": "commit-graph",
        "objects/pack/multi-pack-index": "multi-pack-index",
    }
    lying = {}
    for path, command in checks.items():
        if fact := _lie(git_dir, path, command):
            name = path.removeprefix("objects/pack/")
            lying[name] = Fault(FindingKind.DERIVED, f"it is not what the objects are: {fact}")
    return lying


def _lie(git_dir: Path, path: str, command: str) -> str | None:
    """What git says of a file that is still the one it was, beside the same packs."""
    for _ in range(_TRIES):
        before = _identity(git_dir, path)
        if before is None:
            return None
        try:
            run_git_sync(
                command,
                "verify",
                "--no-progress",
                git_dir=git_dir,
                timeout=TIMEOUT,
                doing=f"verify the {command}",
            )
        except (CorruptObjectError, GitFailedError) as error:
            if before == _identity(git_dir, path):
                return error.message.partition(": ")[2]
        else:
            return None
    return None


def _identity(git_dir: Path, path: str) -> tuple[object, ...] | None:
    try:
        found = (git_dir / path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    packs = sorted(file.name for file in (git_dir / "objects/pack").glob("pack-*.pack"))
    return found.st_ino, found.st_mtime_ns, found.st_size, *packs


def _judged(file: Path, is_sound: Callable[[Path], bool]) -> Iterator[BadFile]:
    try:
        if is_sound(file):
            return
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        yield _unreadable(error, _below(file), FileKind.DERIVED)
    else:
        yield BadFile(_below(file), FileKind.DERIVED, "its bytes are not what they were")


def _below(file: Path) -> str:
    return str(
        file.relative_to(next(parent for parent in file.parents if parent.name == "objects").parent)
    )


def _unreadable(error: OSError, path: str, kind: FileKind) -> BadFile:
    """A file that cannot be read is as good as damaged; any other error is not the file's."""
    if error.errno not in {errno.EIO, errno.EACCES, errno.EPERM}:
        raise error
    return BadFile(path, kind, f"it cannot be read: {error.strerror}")


def _ends_with_checksum(file: Path) -> bool:
    return file.stat().st_size > ID_BYTES and pack_is_whole(file)


def _belongs_to_its_pack(file: Path) -> bool:
    if not _ends_with_checksum(file):
        return False
    try:
        index = PackIndex(file.with_suffix(".idx"))
    except (CorruptObjectError, FileNotFoundError):  # that is said of the index
        return True
    data = file.read_bytes()
    named = (
        data[_BITMAP_AT : _BITMAP_AT + ID_BYTES]
        if file.suffix == ".bitmap"
        else data[-2 * ID_BYTES : -ID_BYTES]
    )
    return named == index.pack_checksum and (file.suffix != ".rev" or _is_reverse_of(data, index))


def _is_reverse_of(data: bytes, index: PackIndex) -> bool:
    """Whether a reverse index lists the objects in the order in which they lie in the pack."""
    if len(data) != _REV_HEADER_BYTES + 4 * index.count + 2 * ID_BYTES:
        return False
    positions = struct.unpack_from(f">{index.count}I", data, _REV_HEADER_BYTES)
    offsets = list(index.offsets())
    if max(positions, default=0) >= max(index.count, 1):
        return False
    return all(left < right for left, right in pairwise(map(offsets.__getitem__, positions)))


def _names_its_packs(file: Path) -> bool:
    """The names of the packs are a chunk of a multi-pack index: each ends with a zero byte."""
    if not _ends_with_checksum(file):
        return False
    data = file.read_bytes()
    try:
        table = [
            _CHUNK.unpack_from(data, _CHUNKS_AT + n * _CHUNK.size)
            for n in range(data[_CHUNK_COUNT_AT] + 1)
        ]
    except (struct.error, IndexError):
        return False
    chunks = [
        (at, table[n + 1][1]) for n, (identity, at) in enumerate(table[:-1]) if identity == b"PNAM"
    ]
    names = [name for start, end in chunks for name in data[start:end].rstrip(b"\0").split(b"\0")]
    return bool(names) and all((file.parent / os.fsdecode(name)).exists() for name in names)


def _names_its_graphs(chain: Path) -> bool:
    names = chain.read_text("ascii", "replace").split("\n")
    whole = names.pop() == "" and bool(names)
    return whole and all(
        _CHECKSUM.fullmatch(name) and _is_whole_graph(chain.parent / f"graph-{name}.graph")
        for name in names
    )


def _is_whole_graph(file: Path) -> bool:
    return file.exists() and _ends_with_checksum(file)


# -- loose objects ----------------------------------------------------------------------------------------------------


def _loose(
    objects: Path, is_sound: Callable[[Path, str], bool], unopened: Collection[Path]
) -> Iterator[BadFile]:
    for directory in sorted(objects.glob("[0-9a-f][0-9a-f]")):
        for file in map(Path, _entries(directory)):
            oid = directory.name + file.name
            if not _LOOSE_NAME.fullmatch(file.name) or file in unopened:
                continue
            try:
                sound = is_sound(file, oid)
            except FileNotFoundError:
                continue
            except OSError as error:
                yield _unreadable(error, f"objects/{directory.name}/{file.name}", FileKind.LOOSE)
                continue
            if not sound:
                yield BadFile(
                    f"objects/{directory.name}/{file.name}",
                    FileKind.LOOSE,
                    "its bytes do not hash to its name",
                )


def _is_sound_loose(file: Path, oid: str) -> bool:
    return loose_digest(file) == oid


def _is_plausible_loose(file: Path, _oid: str) -> bool:
    """A zlib stream begins there; whether it is the right one takes all of it."""
    with file.open("rb") as stream:
        head = stream.read(2)
    return len(head) == 2 and head[0] & 0x0F == 8 and (head[0] << 8 | head[1]) % 31 == 0
