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
