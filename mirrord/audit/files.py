"""Which files of a mirror are not what git wrote: judged by what they hold, never by what another file says of them.

Every file that git writes for itself ends with the checksum of what is before it: packs, their indexes, reverse indexes, bitmaps,
multi-pack indexes, commit-graphs. A loose object has the hash that is its name. Reads only; a file that vanishes meanwhile was
repacked, and what looks bad is looked at twice. Runs in a worker.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ..checkouts.survey import loose_digest
from ..errors import CorruptObjectError
from ..git.packs import ID_BYTES, PackIndex, pack_is_whole, pack_trailer
from ..model import AuditLevel

_CHECKSUM = re.compile(r"[0-9a-f]{40}")
_LOOSE_NAME = re.compile(r"[0-9a-f]{38}")
_PACK_HEADER = struct.Struct(">4sII")
_CHUNK = struct.Struct(">4sQ")
_CHUNK_COUNT_AT, _CHUNKS_AT = 6, 12
_PLANTED = {
    "objects/info/alternates": "it lends objects from elsewhere",
    "objects/info/http-alternates": "it lends objects from elsewhere",
    "info/grafts": "it gives commits other parents",
    "shallow": "it takes the parents of commits away",
}
_HALF_S = 2.0
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
    yield from _packs(objects / "pack", level)
    if level is not AuditLevel.QUICK:
        yield from _derived(objects)
        yield from _loose(objects, _is_sound_loose if level is AuditLevel.CONTENT else _is_plausible_loose)
    for name, reason in _PLANTED.items():
        if (git_dir / name).exists():
            yield BadFile(name, FileKind.PLANTED, f"{reason}, and no mirror of ours has one")


# -- packs and their indexes ------------------------------------------------------------------------------------------


def _packs(directory: Path, level: AuditLevel) -> Iterator[BadFile]:
    stems = {file.with_suffix("") for pattern in ("pack-*.pack", "pack-*.idx") for file in directory.glob(pattern)}
    for stem in sorted(stems):
        pack, index = stem.with_suffix(".pack"), stem.with_suffix(".idx")
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
                yield BadFile(f"objects/pack/{pack.name}", FileKind.PACK, "its index is there and it is not")
            else:
                yield BadFile(f"objects/pack/{index.name}", FileKind.INDEX, "it is gone, and its pack is there")
            return
        time.sleep(_HALF_S / 20)


def _pair(pack: Path, index: Path, level: AuditLevel) -> Iterator[BadFile]:
    reason = _index_fault(index, deep=level is not AuditLevel.QUICK)
    if reason:
        yield BadFile(f"objects/pack/{index.name}", FileKind.INDEX, reason)
        if not _is_whole(pack):
            yield BadFile(f"objects/pack/{pack.name}", FileKind.PACK, "its bytes are not what they were")
        return
    known = PackIndex(index)
    if level is AuditLevel.CONTENT and not _is_whole(pack):
        yield BadFile(f"objects/pack/{pack.name}", FileKind.PACK, _how(pack, known))
    elif not _fits(pack, known):
        kind, name = (FileKind.INDEX, index.name) if _is_whole(pack) else (FileKind.PACK, pack.name)
        yield BadFile(f"objects/pack/{name}", kind, _how(pack, known))


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
        return (signature, version, count) == (b"PACK", 2, index.count) and pack_trailer(pack) == index.pack_checksum
    except struct.error:
        return False


def _is_whole(pack: Path) -> bool:
    return pack.stat().st_size > _PACK_HEADER.size + ID_BYTES and pack_is_whole(pack)


# -- what git derives from packs and commits --------------------------------------------------------------------------


def _derived(objects: Path) -> Iterator[BadFile]:
    pack = objects / "pack"
    for file in sorted((*pack.glob("pack-*.rev"), *pack.glob("pack-*.mtimes"), *pack.glob("pack-*.bitmap"))):
        yield from _judged(file, _belongs_to_its_pack)
    yield from _judged(pack / "multi-pack-index", _names_its_packs)
    for file in sorted((*pack.glob("multi-pack-index-*"), objects / "info/commit-graph")):
        yield from _judged(file, _ends_with_checksum)
    for file in sorted((objects / "info/commit-graphs").glob("*.graph")):
        yield from _judged(file, _ends_with_checksum)
    yield from _judged(objects / "info/commit-graphs/commit-graph-chain", _names_its_graphs)


def _judged(file: Path, is_sound: Callable[[Path], bool]) -> Iterator[BadFile]:
    try:
        if is_sound(file):
            return
    except FileNotFoundError:
        return
    except OSError as error:
        yield _unreadable(error, _below(file), FileKind.DERIVED)
    else:
        yield BadFile(_below(file), FileKind.DERIVED, "its bytes are not what they were")


def _below(file: Path) -> str:
    return str(file.relative_to(next(parent for parent in file.parents if parent.name == "objects").parent))


def _unreadable(error: OSError, path: str, kind: FileKind) -> BadFile:
    """A file that the disk does not give back is as good as damaged; any other error is not the file's."""
    if error.errno != errno.EIO:
        raise error
    return BadFile(path, kind, f"it cannot be read: {error.strerror}")


def _ends_with_checksum(file: Path) -> bool:
    return file.stat().st_size > ID_BYTES and pack_is_whole(file)


def _belongs_to_its_pack(file: Path) -> bool:
    if not _ends_with_checksum(file):
        return False
    try:
        wanted = PackIndex(file.with_suffix(".idx")).pack_checksum
    except (CorruptObjectError, FileNotFoundError):  # that is said of the index
        return True
    data = file.read_bytes()
    named = data[_BITMAP_AT : _BITMAP_AT + ID_BYTES] if file.suffix == ".bitmap" else data[-2 * ID_BYTES : -ID_BYTES]
    return named == wanted


def _names_its_packs(file: Path) -> bool:
    """The names of the packs are a chunk of a multi-pack index: each ends with a zero byte."""
    if not _ends_with_checksum(file):
        return False
    data = file.read_bytes()
    try:
        table = [_CHUNK.unpack_from(data, _CHUNKS_AT + n * _CHUNK.size) for n in range(data[_CHUNK_COUNT_AT] + 1)]
    except (struct.error, IndexError):
        return False
    chunks = [(at, table[n + 1][1]) for n, (identity, at) in enumerate(table[:-1]) if identity == b"PNAM"]
    names = [name for start, end in chunks for name in data[start:end].rstrip(b"\0").split(b"\0")]
    return bool(names) and all((file.parent / os.fsdecode(name)).exists() for name in names)


def _names_its_graphs(chain: Path) -> bool:
    names = chain.read_text("ascii", "replace").split("\n")
    whole = names.pop() == "" and bool(names)
    return whole and all(_CHECKSUM.fullmatch(name) and _is_whole_graph(chain.parent / f"graph-{name}.graph") for name in names)


def _is_whole_graph(file: Path) -> bool:
    return file.exists() and _ends_with_checksum(file)


# -- loose objects ----------------------------------------------------------------------------------------------------


def _loose(objects: Path, is_sound: Callable[[Path, str], bool]) -> Iterator[BadFile]:
    for directory in sorted(objects.glob("[0-9a-f][0-9a-f]")):
        for file in _files_in(directory):
            oid = directory.name + file.name
            if not _LOOSE_NAME.fullmatch(file.name):
                continue
            try:
                sound = is_sound(file, oid)
            except FileNotFoundError:
                continue
            except OSError as error:
                yield _unreadable(error, f"objects/{directory.name}/{file.name}", FileKind.LOOSE)
                continue
            if not sound:
                yield BadFile(f"objects/{directory.name}/{file.name}", FileKind.LOOSE, "its bytes do not hash to its name")


def _files_in(directory: Path) -> list[Path]:
    """None where it went: git removes the directory of loose objects that it packed."""
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []


def _is_sound_loose(file: Path, oid: str) -> bool:
    return loose_digest(file) == oid


def _is_plausible_loose(file: Path, _oid: str) -> bool:
    """A zlib stream begins there; whether it is the right one takes all of it."""
    with file.open("rb") as stream:
        head = stream.read(2)
    return len(head) == 2 and head[0] & 0x0F == 8 and (head[0] << 8 | head[1]) % 31 == 0
