"""The object ids of a pack, read from its index file (versions 1 and 2, SHA-1).

Reads bytes and never starts git, so it can look at a repository that somebody else made. A file that is not a whole, consistent
index is a CorruptObjectError. Ids are raw: 20 bytes each.
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
_MAGIC = b"\377tOc"
_FANOUT_BYTES = 256 * 4
_LARGE = 1 << 31  # offsets from here on are in a table of their own


class PackIndex:
    """One index, in memory. `pack_checksum` is the trailer its pack must have; iterating yields every object id, sorted.

    A `mapped` index is read where it is needed; only for files that nobody shortens, as a shortened one would kill the process.
    """

    __slots__ = ("_data", "_fanout", "_start", "_version2", "count", "path")

    def __init__(self, path: Path, *, mapped: bool = False) -> None:
        self.path = path
        self._data = _map(path) if mapped else path.read_bytes()
        self._version2 = self._data[:4] == _MAGIC
        at = 8 if self._version2 else 0
        self._fanout = _fanout(path, self._data[at : at + _FANOUT_BYTES])
        self._start = at + _FANOUT_BYTES
        self.count = self._fanout[-1]
        self._check_size()

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
            at = self._start
            return (
                int.from_bytes(self._data[at + n * 24 : at + n * 24 + 4], "big")
                for n in range(self.count)
            )
        small = self._start + self.count * (ID_BYTES + 4)
        large = small + self.count * 4
        words = struct.unpack_from(f">{self.count}I", self._data, small)
        return (
            word
            if word < _LARGE
            else int.from_bytes(self._data[large + 8 * (word - _LARGE) :][:8], "big")
            for word in words
        )

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

    def _check_size(self) -> None:
        record = ID_BYTES + 8 if self._version2 else ID_BYTES + 4
        least = self._start + self.count * record + 2 * ID_BYTES
        most = least + 8 * self.count if self._version2 else least
        unknown = self._version2 and self._data[4:8] != b"\0\0\0\2"
        if unknown or not least <= len(self._data) <= most:
            raise _corrupt(self.path, "it is truncated or of an unknown version")


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise _corrupt(path, "it is empty") from error


def _fanout(path: Path, raw: bytes) -> tuple[int, ...]:
    if len(raw) < _FANOUT_BYTES:
        raise _corrupt(path, "it is truncated")
    table = struct.unpack(">256I", raw)
    if any(left > right for left, right in pairwise(table)):
        raise _corrupt(path, "its fan-out table does not grow")
    return table


def pack_trailer(path: Path) -> bytes:
    """The checksum that a pack file ends with; it says nothing of the bytes before it."""
    return _tail(path, ID_BYTES)


def has_both_ends(pack: Path, size_bytes: int) -> bool:
    """Whether a pack and its index have `size_bytes` in all, and the index ends in the checksum that the pack ends with.

    It says nothing of the bytes between, but costs no more than two reads: enough for what a power cut shortened or emptied.
    """
    index = pack.with_suffix(".idx")
    try:
        sizes = pack.stat().st_size + index.stat().st_size
        return sizes == size_bytes and pack_trailer(pack) == _tail(index, 2 * ID_BYTES)[:ID_BYTES]
    except OSError:
        return False


def _tail(path: Path, size: int) -> bytes:
    """The last bytes; all there are of a file that is shorter."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read(size)


def pack_is_whole(path: Path) -> bool:
    """Whether the bytes of a pack, or of an index, can be read and have the checksum it ends with: half a second for 300 MB."""
    try:
        return _has_its_checksum(path)
    except OSError as error:
        if error.errno == errno.EIO:
            return False
        raise


def _has_its_checksum(path: Path) -> bool:
    digest = hashlib.sha1(usedforsecurity=False)
    remaining = path.stat().st_size - ID_BYTES
    with path.open("rb") as file:
        while remaining > 0 and (block := file.read(min(remaining, 1 << 20))):
            digest.update(block)
            remaining -= len(block)
        return remaining == 0 and digest.digest() == file.read(ID_BYTES)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        if error.errno == errno.EIO:
            raise _corrupt(path, f"it cannot be read: {error.strerror}") from error
        raise


def _corrupt(path: Path, fact: str) -> CorruptObjectError:
    return CorruptObjectError(
        f"cannot read pack index {path.name}: {fact}",
        hint="rebuild it with git index-pack",
        file=path.name,
    )


_HEADER_BYTES = 8
_CHUNK_BYTES = 12
_BLOCK_BYTES = 1 << 20
_START = b"CGPH\1\1"  # version 1, SHA-1
_KNOWN_CHUNKS = {
    b"OIDF",
    b"OIDL",
    b"CDAT",
    b"GDA2",
    b"GDO2",
    b"EDGE",
    b"BASE",
}  # no Bloom filters: nobody can read them back


def files(store: Path) -> Iterator[Path]:
    """The commit-graph files of an object store, a chain's among them."""
    single = store / "info/commit-graph"
    if single.exists():
        yield single
    yield from sorted((store / "info/commit-graphs").glob("*.graph"))


def graph_commits(path: Path) -> list[bytes]:
    """Every commit that the graph has something to say about."""
    data = path.read_bytes()
    chunks = _chunks(path, data[: _HEADER_BYTES + 256 * _CHUNK_BYTES], len(data))
    start, end = chunks.get(b"OIDL", (0, 0))
    return [data[at : at + ID_BYTES] for at in range(start, end, ID_BYTES)]


def graph_has_known_chunks_only(path: Path) -> bool:
    """Whether every byte between the table of contents and the checksum belongs to a chunk that git can verify."""
    data = path.read_bytes()
    chunks = _chunks(path, data[: _HEADER_BYTES + 256 * _CHUNK_BYTES], len(data))
    begin = _HEADER_BYTES + (data[6] + 1) * _CHUNK_BYTES
    return chunks.keys() <= _KNOWN_CHUNKS and min(start for start, _ in chunks.values()) == begin


def graph_is_whole(path: Path) -> bool:
    """Whether the file is as long as its table says: a look at its beginning, enough for what a power cut shortened."""
    try:
        with path.open("rb") as file:
            _chunks(path, file.read(_HEADER_BYTES + 256 * _CHUNK_BYTES), path.stat().st_size)
    except (OSError, CorruptObjectError):
        return False
    return True


def _chunks(path: Path, head: bytes, size: int) -> dict[bytes, tuple[int, int]]:
    """Where each chunk begins and ends; the one without a name, the last of the table, is the end of them all."""
    if not head.startswith(_START) or len(head) < _HEADER_BYTES + (head[6] + 1) * _CHUNK_BYTES:
        raise _corrupt_graph(path, "it is truncated or of an unknown version")
    rows = [
        struct.unpack_from(">4sQ", head, _HEADER_BYTES + number * _CHUNK_BYTES)
        for number in range(head[6] + 1)
    ]
    ends = [offset for _, offset in rows[1:]]
    found = {name: (offset, end) for (name, offset), end in zip(rows, ends, strict=False)}
    start, end = found.get(b"OIDL", (0, 0))
    if (
        rows[-1][1] + ID_BYTES != size
        or any(begin > end for begin, end in found.values())
        or (end - start) % ID_BYTES
    ):
        raise _corrupt_graph(path, "its table of contents does not fit its size")
    return found


def _corrupt_graph(path: Path, fact: str) -> CorruptObjectError:
    return CorruptObjectError(
        f"cannot read commit-graph {path.name}: {fact}", hint="git writes it again", file=path.name
    )


def loose_digest(file: Path) -> str | None:
    """The id that a loose object's bytes hash to; None when they do not inflate, or more follows. In bounded memory."""
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
