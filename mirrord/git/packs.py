"""git's binary files, read without git: pack indexes, checksums, loose objects, commit-graphs.

Starts no process, so it can look at a repository that somebody else made. A file that is not a
whole, consistent index or graph is a CorruptObjectError. Ids are raw: 20 bytes each (SHA-1).
"""

from __future__ import annotations

import bisect
import errno
import hashlib
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from ..errors import CorruptObjectError

ID_BYTES = 20
_BLOCK_BYTES = 1 << 20
_MAGIC = b"\377tOc"
_FANOUT = struct.Struct(">256I")
_LARGE = 1 << 31  # offsets from here on are in a table of their own
_GRAPH_START = b"CGPH\1\1"  # version 1, SHA-1
_GRAPH_HEADER_BYTES = 8
_CHUNK_BYTES = 12
_GRAPH_HEAD_BYTES = _GRAPH_HEADER_BYTES + 256 * _CHUNK_BYTES
# no Bloom filters: nobody can read them back
_KNOWN_CHUNKS = {b"OIDF", b"OIDL", b"CDAT", b"GDA2", b"GDO2", b"EDGE", b"BASE"}


class PackIndex:
    """The ids of a pack, from its index (versions 1 and 2); iterating yields them sorted.

    `pack_checksum` is the trailer that its pack must have. A `mapped` index is read where it is
    needed; only for files that nobody shortens, as a shortened one would kill the process.
    """

    __slots__ = ("_data", "_fanout", "_start", "_version2", "count", "path")

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
        self._version2 = self._data[:4] == _MAGIC
        at = 8 if self._version2 else 0
        self._start = at + _FANOUT.size
        if len(self._data) < self._start:
            raise _corrupt("pack index", path, "it is truncated")
        self._fanout = _FANOUT.unpack(self._data[at : self._start])
        if any(left > right for left, right in pairwise(self._fanout)):
            raise _corrupt("pack index", path, "its fan-out table does not grow")
        self.count = self._fanout[-1]
        record = ID_BYTES + 8 if self._version2 else ID_BYTES + 4
        least = self._start + self.count * record + 2 * ID_BYTES
        most = least + 8 * self.count if self._version2 else least
        is_unknown = self._version2 and self._data[4:8] != b"\0\0\0\2"
        if is_unknown or not least <= len(self._data) <= most:
            raise _corrupt("pack index", path, "it is truncated or of an unknown version")

    @property
    def ids(self) -> bytes:
        """Every object id, sorted and joined."""
        if self._version2:
            return self._data[self._start : self._start + self.count * ID_BYTES]
        return b"".join(self._id(position) for position in range(self.count))

    @property
    def pack_checksum(self) -> bytes:
        return self._data[-2 * ID_BYTES : -ID_BYTES]

    def offsets(self) -> Iterator[int]:
        """Where in the pack each object begins, in the order of the ids."""
        if not self._version2:
            for at in range(self._start, self._start + self.count * 24, 24):
                yield int.from_bytes(self._data[at : at + 4], "big")
            return
        small = self._start + self.count * (ID_BYTES + 4)
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
        at = self._start + position * (ID_BYTES if self._version2 else ID_BYTES + 4)
        at += 0 if self._version2 else 4
        return self._data[at : at + ID_BYTES]


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
    """The last bytes; all there are of a shorter file."""
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
    """Every commit that the graph names."""
    data = path.read_bytes()
    start, end = _chunks(path, data[:_GRAPH_HEAD_BYTES], len(data)).get(b"OIDL", (0, 0))
    return [data[at : at + ID_BYTES] for at in range(start, end, ID_BYTES)]


def graph_has_known_chunks_only(path: Path) -> bool:
    """Whether every byte between table and checksum is of a chunk that git can verify."""
    data = path.read_bytes()
    chunks = _chunks(path, data[:_GRAPH_HEAD_BYTES], len(data))
    begin = _GRAPH_HEADER_BYTES + (data[6] + 1) * _CHUNK_BYTES
    return chunks.keys() <= _KNOWN_CHUNKS and min(start for start, _ in chunks.values()) == begin


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
    begin = _GRAPH_HEADER_BYTES
    if not head.startswith(_GRAPH_START) or len(head) < begin + (head[6] + 1) * _CHUNK_BYTES:
        raise _corrupt("commit-graph", path, "it is truncated or of an unknown version")
    rows = [
        struct.unpack_from(">4sQ", head, begin + number * _CHUNK_BYTES)
        for number in range(head[6] + 1)
    ]
    found = {name: (start, end) for (name, start), (_, end) in pairwise(rows)}
    start, end = found.get(b"OIDL", (0, 0))
    is_ordered = all(start <= end for start, end in found.values())
    if rows[-1][1] + ID_BYTES != size or not is_ordered or (end - start) % ID_BYTES:
        raise _corrupt("commit-graph", path, "its table of contents does not fit its size")
    return found


def _corrupt(kind: str, path: Path, fact: str) -> CorruptObjectError:
    hint = "git writes it again" if kind == "commit-graph" else "rebuild it with git index-pack"
    return CorruptObjectError(f"cannot read {kind} {path.name}: {fact}", hint=hint, file=path.name)
