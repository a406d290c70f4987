"""git's binary files: packs, their indexes, and loose objects.

Starts no process, so it is safe on a repository of unknown origin. An incomplete or inconsistent
index raises CorruptObjectError. Ids are raw: 20 bytes each (SHA-1).
"""

import bisect
import errno
import hashlib
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

from ..errors import CorruptObjectError
from ..host.files import NOT_PLAIN, open_plain, read_plain

# of SHA-1
ID_BYTES = 20
# hashed at a time: packs are larger than memory
_BLOCK_BYTES = 1 << 20
INDEX_MAGIC = b"\377tOc\0\0\0\2"  # of a pack index, version 2
FANOUT = struct.Struct(">256I")
# after magic number, version and fan-out table
_IDS_AT = 8 + FANOUT.size
_LARGE = 1 << 31  # a set high bit: an index into the table of 8-byte offsets


class PackIndex:
    """The ids of a pack, from its index; iterating yields them sorted.

    `pack_checksum` is the trailer that its pack must have. Map (`mapped`) only files that are
    never truncated: reading a mapping past the end of its file is a SIGBUS.
    """

    __slots__ = ("_data", "_fanout", "count", "path")

    def __init__(self, path: Path, *, mapped: bool = False) -> None:
        self.path = path
        if mapped:
            with open_plain(path) as file:
                try:
                    # a look-up touches a few pages; the index of 2 million objects has 56 MB
                    self._data: bytes | mmap.mmap = mmap.mmap(
                        file.fileno(), 0, access=mmap.ACCESS_READ
                    )
                except ValueError as error:
                    raise corrupt("pack index", path, "it is empty") from error
        else:
            self._data = read_plain(path)
        # git writes version 2 since 1.6; version 1 had no magic number
        if self._data[:8] != INDEX_MAGIC or len(self._data) < _IDS_AT:
            raise corrupt("pack index", path, "it is truncated or of an unknown version")
        self._fanout = FANOUT.unpack(self._data[8:_IDS_AT])
        if any(left > right for left, right in pairwise(self._fanout)):
            raise corrupt("pack index", path, "its fan-out table is not sorted")
        self.count = self._fanout[-1]
        # for each object id, CRC and offset; at the end the checksums of the pack and of the index
        least = _IDS_AT + self.count * (ID_BYTES + 8) + 2 * ID_BYTES
        if not least <= len(self._data) <= least + 8 * self.count:
            raise corrupt("pack index", path, "it is truncated")

    @property
    def ids(self) -> bytes:
        """Every object id, sorted and joined."""
        return self._data[_IDS_AT : _IDS_AT + self.count * ID_BYTES]

    @property
    def pack_checksum(self) -> bytes:
        return self._data[-2 * ID_BYTES : -ID_BYTES]

    def offsets(self) -> Iterator[int]:
        """The offset in the pack of each object, in the order of the ids."""
        small = _IDS_AT + self.count * (ID_BYTES + 4)
        large = small + self.count * 4
        for word in struct.unpack_from(f">{self.count}I", self._data, small):
            if word >= _LARGE:
                start = large + 8 * (word - _LARGE)
                word = int.from_bytes(self._data[start : start + 8], "big")
            yield word

    def __iter__(self) -> Iterator[bytes]:
        ids = self.ids
        return (ids[start : start + ID_BYTES] for start in range(0, len(ids), ID_BYTES))

    def __contains__(self, oid: bytes) -> bool:
        position = self.position_of(oid)
        return position < self.count and self._id(position) == oid

    def position_of(self, oid: bytes) -> int:
        """Return where the id is among those of the pack, or would be."""
        low, high = self._fanout[oid[0] - 1] if oid[0] else 0, self._fanout[oid[0]]
        return bisect.bisect_left(range(self.count), oid, low, high, key=self._id)

    def _id(self, position: int) -> bytes:
        start = _IDS_AT + position * ID_BYTES
        return self._data[start : start + ID_BYTES]


def merged_ids(indexes: Sequence[PackIndex]) -> bytes:
    """Return the ids of some packs: each once, sorted and joined.

    A sealed store has one large pack and small ones. To sort all ids of 46,000 objects took five
    times as long.
    """
    largest, *others = sorted(indexes, key=attrgetter("count"), reverse=True)
    ids, pieces, start = largest.ids, [], 0
    for oid in sorted({oid for index in others for oid in index if oid not in largest}):
        end = largest.position_of(oid) * ID_BYTES
        pieces += [ids[start:end], oid]
        start = end
    return b"".join([*pieces, ids[start:]])


def reverse_index(index: PackIndex) -> bytes:
    """Return what git writes as `.rev`: positions in the index, in pack order."""
    offsets = list(index.offsets())
    order = sorted(range(index.count), key=offsets.__getitem__)
    made = b"RIDX\0\0\0\1\0\0\0\1" + struct.pack(f">{index.count}I", *order)  # version 1, SHA-1
    made += index.pack_checksum
    return made + hashlib.sha1(made, usedforsecurity=False).digest()


def packs_in(directory: Path, *suffixes: str) -> list[Path]:
    """List the packs and indexes in a directory, or files with other `suffixes` beside them.

    git (2.39) reads every `*.idx`, whatever its name. Names with a dot at the start are of a repack
    that has not ended.
    """
    wanted = suffixes or (".pack", ".idx")
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(directory / it for it in names if it.endswith(wanted) and not it.startswith("."))


def pack_trailer(path: Path) -> bytes:
    """Return the checksum at the end of a pack, unverified."""
    return _tail(path, ID_BYTES)


def has_both_ends(pack: Path, size_bytes: int) -> bool:
    """Return whether a pack and its index have `size_bytes` together and the same pack checksum.

    Two reads: finds files that a power cut truncated. Other damage is not looked for.
    """
    index = pack.with_suffix(".idx")
    try:
        sizes = pack.stat().st_size + index.stat().st_size
        return sizes == size_bytes and pack_trailer(pack) == _tail(index, 2 * ID_BYTES)[:ID_BYTES]
    except OSError:
        return False


def _tail(path: Path, size: int) -> bytes:
    with open_plain(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read(size)


def pack_is_whole(path: Path) -> bool:
    """Return whether a pack or index is readable and matches its checksum. 300 MB take 0.5 s."""
    digest = hashlib.sha1(usedforsecurity=False)
    try:
        remaining = path.stat().st_size - ID_BYTES
        with open_plain(path) as file:
            while remaining > 0 and (block := file.read(min(remaining, _BLOCK_BYTES))):
                digest.update(block)
                remaining -= len(block)
            return remaining == 0 and digest.digest() == file.read(ID_BYTES)
    except OSError as error:
        # a bad sector or a pipe is damage of this file; any other error says nothing of it
        if error.errno in {errno.EIO, NOT_PLAIN}:
            return False
        raise


def loose_digest(file: Path) -> str | None:
    """Hash a loose object in bounded memory; None if it does not inflate or has trailing bytes."""
    digest, inflate = hashlib.sha1(usedforsecurity=False), zlib.decompressobj()
    try:
        with open_plain(file) as stream:
            while block := inflate.unconsumed_tail or stream.read(_BLOCK_BYTES):
                if inflate.eof:
                    return None
                # a kilobyte may inflate to a megabyte: what is over the bound waits in
                # `unconsumed_tail`
                digest.update(inflate.decompress(block, _BLOCK_BYTES))
    except zlib.error:
        return None
    return digest.hexdigest() if inflate.eof and not inflate.unused_data else None


def corrupt(kind: str, path: Path, fact: str) -> CorruptObjectError:
    hint = "git writes it again" if kind == "commit-graph" else "rebuild it with git index-pack"
    return CorruptObjectError(f"cannot read {kind} {path.name}: {fact}", hint=hint, file=path.name)
