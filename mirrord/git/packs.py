"""The object ids of a pack, read from its index file (versions 1 and 2, SHA-1).

Reads bytes and never starts git, so it can look at a repository that somebody else made. A file that is not a whole, consistent
index is a CorruptObjectError. Ids are raw: 20 bytes each.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import CorruptObjectError

ID_BYTES = 20
_MAGIC = b"\377tOc"
_FANOUT_BYTES = 256 * 4


class PackIndex:
    """One index in memory. `ids` is every object id, sorted and joined; `pack_checksum` the trailer its pack must have."""

    __slots__ = ("_fanout", "count", "ids", "pack_checksum", "path")

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        self.path = path
        version2 = data[:4] == _MAGIC
        start = 8 if version2 else 0
        self._fanout = _fanout(path, data, start)
        self.count = self._fanout[-1]
        table = start + _FANOUT_BYTES
        self._check_size(data, table, version2=version2)
        self.ids = _ids(data, table, self.count, version2=version2)
        self.pack_checksum = data[-2 * ID_BYTES : -ID_BYTES]

    def _check_size(self, data: bytes, table: int, *, version2: bool) -> None:
        record = ID_BYTES + 4 + 4 if version2 else ID_BYTES + 4
        least = table + self.count * record + 2 * ID_BYTES
        most = least + 8 * self.count if version2 else least
        if (version2 and data[4:8] != b"\0\0\0\2") or not least <= len(data) <= most:
            raise _corrupt(self.path, "it is truncated or of an unknown version")

    def __contains__(self, oid: bytes) -> bool:
        low = self._fanout[oid[0] - 1] if oid[0] else 0
        position = bisect.bisect_left(range(self.count), oid, low, self._fanout[oid[0]], key=self._id)
        return position < self.count and self._id(position) == oid

    def __iter__(self) -> Iterator[bytes]:
        return (self.ids[at : at + ID_BYTES] for at in range(0, len(self.ids), ID_BYTES))

    def _id(self, position: int) -> bytes:
        return self.ids[position * ID_BYTES : (position + 1) * ID_BYTES]


def _fanout(path: Path, data: bytes, start: int) -> list[int]:
    raw = data[start : start + _FANOUT_BYTES]
    if len(raw) < _FANOUT_BYTES:
        raise _corrupt(path, "it is truncated")
    table = [int.from_bytes(raw[at : at + 4]) for at in range(0, _FANOUT_BYTES, 4)]
    if any(left > right for left, right in itertools.pairwise(table)):
        raise _corrupt(path, "its fan-out table does not grow")
    return table


def _ids(data: bytes, table: int, count: int, *, version2: bool) -> bytes:
    if version2:
        return data[table : table + count * ID_BYTES]
    records = range(table, table + count * (ID_BYTES + 4), ID_BYTES + 4)
    return b"".join(data[at + 4 : at + 4 + ID_BYTES] for at in records)


def pack_trailer(path: Path) -> bytes:
    """The checksum that a pack file ends with; it says nothing of the bytes before it."""
    with path.open("rb") as file:
        file.seek(-ID_BYTES, os.SEEK_END)
        return file.read(ID_BYTES)


def pack_is_whole(path: Path) -> bool:
    """Whether the bytes of a pack have the checksum it ends with: half a second for 300 MB."""
    digest = hashlib.sha1(usedforsecurity=False)
    remaining = path.stat().st_size - ID_BYTES
    with path.open("rb") as file:
        while remaining > 0 and (block := file.read(min(remaining, 1 << 20))):
            digest.update(block)
            remaining -= len(block)
        return remaining == 0 and digest.digest() == file.read(ID_BYTES)


def _corrupt(path: Path, fact: str) -> CorruptObjectError:
    return CorruptObjectError(
        f"cannot read pack index {path.name}: {fact}", hint="rebuild it with git index-pack", file=path.name
    )
