"""git's binary files without git: pack indexes, loose objects, commit-graphs; small packs made.

Starts no process, so it can look at a repository that somebody else made. A file that is not a
whole, consistent index or graph is a CorruptObjectError. Ids are raw: 20 bytes each (SHA-1).
"""

import bisect
import errno
import hashlib
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from ..errors import CorruptObjectError

ID_BYTES = 20
_BLOCK_BYTES = 1 << 20
_MAGIC = b"\377tOc\0\0\0\2"  # of an index, version 2
_FANOUT = struct.Struct(">256I")
_IDS = 8 + _FANOUT.size  # where the ids begin
_LARGE = 1 << 31  # offsets from here on are in a table of their own
_GRAPH_START = b"CGPH\1\1"  # version 1, SHA-1
_GRAPH_HEADER_BYTES = 8
_CHUNK_BYTES = 12
_GRAPH_HEAD_BYTES = _GRAPH_HEADER_BYTES + 256 * _CHUNK_BYTES
# no Bloom filters: nobody can read them back
_KNOWN_CHUNKS = {b"OIDF", b"OIDL", b"CDAT", b"GDA2", b"GDO2", b"EDGE", b"BASE"}


class PackIndex:
    """The ids of a pack, from its index; iterating yields them sorted.

    `pack_checksum` is the trailer that its pack must have. A `mapped` index is read where it is
    needed; only for files that nobody shortens, as a shortened one would kill the process.
    """

    __slots__ = ("_data", "_fanout", "count", "path")

    def __init__(self, path: Path, *, mapped: bool = False) -> None:
        self.path = path
        if mapped:
            with path.open("rb") as file:
                try:
                    self._data: bytes | mmap.mmap = mmap.mmap(
                        file.fileno(), 0, access=mmap.ACCESS_READ
                    )
                except ValueError as error:
                    raise _corrupt("pack index", path, "it is empty") from error
        else:
            self._data = path.read_bytes()
        # git writes version 2 since 1.6; the one before had no magic number
        if self._data[:8] != _MAGIC or len(self._data) < _IDS:
            raise _corrupt("pack index", path, "it is truncated or of an unknown version")
        self._fanout = _FANOUT.unpack(self._data[8:_IDS])
        if any(left > right for left, right in pairwise(self._fanout)):
            raise _corrupt("pack index", path, "its fan-out table does not grow")
        self.count = self._fanout[-1]
        least = _IDS + self.count * (ID_BYTES + 8) + 2 * ID_BYTES
        if not least <= len(self._data) <= least + 8 * self.count:
            raise _corrupt("pack index", path, "it is truncated")

    @property
    def ids(self) -> bytes:
        """Every object id, sorted and joined."""
        return self._data[_IDS : _IDS + self.count * ID_BYTES]

    @property
    def pack_checksum(self) -> bytes:
        return self._data[-2 * ID_BYTES : -ID_BYTES]

    def offsets(self) -> Iterator[int]:
        """Where in the pack each object begins, in the order of the ids."""
        small = _IDS + self.count * (ID_BYTES + 4)
        large = small + self.count * 4
        for word in struct.unpack_from(f">{self.count}I", self._data, small):
            if word >= _LARGE:
                at = large + 8 * (word - _LARGE)
                word = int.from_bytes(self._data[at : at + 8], "big")
            yield word

    def __iter__(self) -> Iterator[bytes]:
        ids = self.ids
        return (ids[at : at + ID_BYTES] for at in range(0, len(ids), ID_BYTES))

    def __contains__(self, oid: bytes) -> bool:
        low, high = self._fanout[oid[0] - 1] if oid[0] else 0, self._fanout[oid[0]]
        position = bisect.bisect_left(range(self.count), oid, low, high, key=self._id)
        return position < high and self._id(position) == oid

    def _id(self, position: int) -> bytes:
        at = _IDS + position * ID_BYTES
        return self._data[at : at + ID_BYTES]


def reverse_index(index: PackIndex) -> bytes:
    """The .rev file that git writes: positions in the index, in the order of the pack."""
    offsets = list(index.offsets())
    order = sorted(range(index.count), key=offsets.__getitem__)
    made = b"RIDX\0\0\0\1\0\0\0\1" + struct.pack(f">{index.count}I", *order)  # version 1, SHA-1
    made += index.pack_checksum
    return made + hashlib.sha1(made, usedforsecurity=False).digest()


# -- checksums -------------------------------------------------------------------------------------


def pack_trailer(path: Path) -> bytes:
    """The checksum that a pack file ends with; it says nothing of the bytes before it."""
    return _tail(path, ID_BYTES)


def has_both_ends(pack: Path, size_bytes: int) -> bool:
    """Whether a pack and its index have `size_bytes` in all, and end in the same pack checksum.

    Two reads, which find what a power cut shortened or emptied; the bytes between are not read.
    """
    index = pack.with_suffix(".idx")
    try:
        sizes = pack.stat().st_size + index.stat().st_size
        return sizes == size_bytes and pack_trailer(pack) == _tail(index, 2 * ID_BYTES)[:ID_BYTES]
    except OSError:
        return False


def _tail(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read(size)


def pack_is_whole(path: Path) -> bool:
    """Whether a pack or an index can be read and has its checksum: half a second for 300 MB."""
    digest = hashlib.sha1(usedforsecurity=False)
    try:
        remaining = path.stat().st_size - ID_BYTES
        with path.open("rb") as file:
            while remaining > 0 and (block := file.read(min(remaining, _BLOCK_BYTES))):
                digest.update(block)
                remaining -= len(block)
            return remaining == 0 and digest.digest() == file.read(ID_BYTES)
    except OSError as error:
        if error.errno == errno.EIO:
            return False
        raise


def loose_digest(file: Path) -> str | None:
    """The id that a loose object's bytes hash to, in bounded memory.

    None when they do not inflate, or more follows.
    """
    digest, inflate = hashlib.sha1(usedforsecurity=False), zlib.decompressobj()
    try:
        with file.open("rb") as stream:
            while block := inflate.unconsumed_tail or stream.read(_BLOCK_BYTES):
                if inflate.eof:
                    return None
                digest.update(inflate.decompress(block, _BLOCK_BYTES))
    except zlib.error:
        return None
    return digest.hexdigest() if inflate.eof and not inflate.unused_data else None


# -- commit-graphs (version 1; gitformat-commit-graph) ---------------------------------------------


def graph_commits(path: Path) -> list[bytes]:
    """Every commit that the graph names; every byte must be of a chunk that git can verify."""
    data = path.read_bytes()
    chunks = _chunks(path, data[:_GRAPH_HEAD_BYTES], len(data))
    begin = _GRAPH_HEADER_BYTES + (data[6] + 1) * _CHUNK_BYTES
    first = min((start for start, _ in chunks.values()), default=0)
    if not chunks.keys() <= _KNOWN_CHUNKS or first != begin:
        raise _corrupt("commit-graph", path, "it has bytes that git does not verify")
    start, end = chunks.get(b"OIDL", (0, 0))
    return [data[at : at + ID_BYTES] for at in range(start, end, ID_BYTES)]


def graph_is_whole(path: Path) -> bool:
    """Whether the file is as long as its table says: finds what a power cut shortened."""
    try:
        with path.open("rb") as file:
            _chunks(path, file.read(_GRAPH_HEAD_BYTES), path.stat().st_size)
    except (OSError, CorruptObjectError):
        return False
    return True


def _chunks(path: Path, head: bytes, size: int) -> dict[bytes, tuple[int, int]]:
    """Where each chunk begins and ends; the nameless last row of the table ends them all."""
    size_of_table = (int.from_bytes(head[6:7], "big") + 1) * _CHUNK_BYTES
    table = head[_GRAPH_HEADER_BYTES : _GRAPH_HEADER_BYTES + size_of_table]
    if not head.startswith(_GRAPH_START) or len(table) < size_of_table:
        raise _corrupt("commit-graph", path, "it is truncated or of an unknown version")
    rows = list(struct.iter_unpack(">4sQ", table))
    found = {name: (start, end) for (name, start), (_, end) in pairwise(rows)}
    start, end = found.get(b"OIDL", (0, 0))
    is_ordered = all(start <= end for start, end in found.values())
    if rows[-1][1] + ID_BYTES != size or not is_ordered or (end - start) % ID_BYTES:
        raise _corrupt("commit-graph", path, "its table of contents does not fit its size")
    return found


def _corrupt(kind: str, path: Path, fact: str) -> CorruptObjectError:
    hint = "git writes it again" if kind == "commit-graph" else "rebuild it with git index-pack"
    return CorruptObjectError(f"cannot read {kind} {path.name}: {fact}", hint=hint, file=path.name)


# -- small packs, made in memory -------------------------------------------------------------------
#
# git takes longer to start than this takes to write a few hundred objects, older versions as deltas
# on newer ones. Who uses such a pack reads every object back first (`check_packs`).

_DELTA = 6  # on an object so many bytes before this one
_LEVEL = 1
_DEPTH_MAX = 50  # git's own bound for chains of deltas
_COPY_MAX = 0x10000
_INSERT_MAX = 127
_WORTH_BYTES = 64


class PackObject(NamedTuple):
    """`kind` as packs number it. `near` is an earlier object of the pack to be a delta on."""

    oid: bytes
    kind: int
    data: bytes
    near: bytes | None


class Packed(NamedTuple):
    """A pack that was written, with its index beside it."""

    name: str
    object_count: int
    size_bytes: int


def write_pack(objects: Mapping[bytes, PackObject], into: Path) -> Packed:
    """Write a pack of exactly `objects` and its index (version 2) into the directory `into`."""
    pack, written = _encode(objects)
    ids, offsets, sums = zip(*sorted(written), strict=True) if written else ((), (), ())
    counts = [0] * 256
    for oid in ids:
        counts[oid[0]] += 1
    pieces = [_MAGIC, _FANOUT.pack(*accumulate(counts)), *ids]
    pieces += (struct.pack(f">{len(ids)}I", *numbers) for numbers in (sums, offsets))
    index = b"".join([*pieces, pack[-ID_BYTES:]])
    index += hashlib.sha1(index, usedforsecurity=False).digest()
    name = f"pack-{pack[-ID_BYTES:].hex()}"
    for suffix, data in ((".pack", pack), (".idx", index)):
        read_only = os.open(into / f"{name}{suffix}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
        with open(read_only, "wb") as file:
            file.write(data)
    return Packed(f"{name}.pack", len(written), len(pack) + len(index))


_Written = tuple[bytes, int, int]  # id, offset, CRC


def _encode(objects: Mapping[bytes, PackObject]) -> tuple[bytes, list[_Written]]:
    pack = bytearray(struct.pack(">4sII", b"PACK", 2, len(objects)))
    offsets, depths, written = dict[bytes, int](), dict[bytes, int](), list[_Written]()
    for oid, kind, data, near_id in objects.values():
        at = len(pack)
        change, depth = None, 0
        if near_id in offsets and (depth := depths[near_id]) < _DEPTH_MAX:
            near = objects[near_id]
            change = delta(near.data, data) if near.kind == kind else None
        if near_id is None or change is None:
            depths[oid] = 0
            pack += _header(kind, len(data)) + zlib.compress(data, _LEVEL)
        else:
            depths[oid] = depth + 1
            pack += _header(_DELTA, len(change)) + _distance(at - offsets[near_id])
            pack += zlib.compress(change, _LEVEL)
        offsets[oid] = at
        written.append((oid, at, zlib.crc32(memoryview(pack)[at:])))
    pack += hashlib.sha1(pack, usedforsecurity=False).digest()
    return bytes(pack), written


def _header(kind: int, size: int) -> bytes:
    first, size = kind << 4 | size & 15, size >> 4
    return bytes([first | 0x80]) + _varint(size) if size else bytes([first])


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _distance(number: int) -> bytes:
    out = [number & 127]
    while number := number >> 7:
        number -= 1
        out.append(number & 127 | 128)
    return bytes(reversed(out))


def delta(base: bytes, data: bytes) -> bytes | None:
    """Instructions that make `data` of `base`: a common beginning, new bytes, a common end.

    None where that saves little.
    """
    shortest = min(len(base), len(data))
    start = _alike(shortest, lambda size: base[:size] == data[:size])
    end = _alike(
        shortest - start, lambda size: base[len(base) - size :] == data[len(data) - size :]
    )
    new = data[start : len(data) - end]
    if 2 * len(new) + _WORTH_BYTES > len(data):
        return None
    inserts = (new[at : at + _INSERT_MAX] for at in range(0, len(new), _INSERT_MAX))
    pieces = [_varint(len(base)), _varint(len(data)), *_copies(0, start)]
    pieces += (bytes([len(piece)]) + piece for piece in inserts)
    return b"".join([*pieces, *_copies(len(base) - end, end)])


def _alike(most: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to `most` for which `holds`, where it holds for every smaller one."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _copies(offset: int, size: int) -> Iterator[bytes]:
    for at in range(offset, offset + size, _COPY_MAX):
        length = min(_COPY_MAX, offset + size - at) & 0xFFFF  # zero means the most
        facts = struct.pack("<IH", at, length)
        given = [bit for bit, byte in enumerate(facts) if byte]
        yield bytes([0x80 | sum(1 << bit for bit in given), *(facts[bit] for bit in given)])
