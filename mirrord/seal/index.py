"""Read what a git index says, byte for byte (versions 2 to 4, SHA-1; gitformat-index).

Nothing in the file is left unread: an extension that can hold what no object of the closure holds, or a byte that the format has
no use for, is a fault.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field

_ID = 20
_ENTRY = struct.Struct(">10I20sH")  # ctime, mtime, dev, ino, mode, uid, gid, size; object id; flags
_MODE = 6
_EXTENDED = 0x4000
_HARMLESS = {b"EOIE": 24, b"IEOT": None}  # offsets into the index itself


@dataclass(slots=True)
class Index:
    """`objects` are the raw ids that entries and cached trees name, `gitlinks` those of submodules by path."""

    paths: set[bytes] = field(default_factory=set)
    objects: set[bytes] = field(default_factory=set)
    gitlinks: dict[bytes, bytes] = field(default_factory=dict)


def read_index(data: bytes) -> Index:
    """Raises ValueError, with the fact, where the file is not exactly an index."""
    if len(data) < 12 + _ID or data[:4] != b"DIRC":
        raise ValueError("it is not an index")
    version, count = struct.unpack_from(">2I", data, 4)
    end = len(data) - _ID
    if version not in {2, 3, 4}:
        raise ValueError(f"its version is {version}")
    if data[end:] not in {hashlib.sha1(data[:end], usedforsecurity=False).digest(), bytes(_ID)}:
        raise ValueError("its checksum is wrong")
    index, at, before = Index(), 12, b""
    try:
        for _ in range(count):
            at, before = _read_entry(data, at, version, before, index)
        while at < end:
            name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "big")
            _read_extension(name, data[at + 8 : at + 8 + size], index)
            at += 8 + size
    except (struct.error, IndexError) as error:
        raise ValueError("it is truncated") from error
    if at != end:
        raise ValueError("an extension is longer than the file")
    return index


def _read_entry(
    data: bytes, at: int, version: int, before: bytes, index: Index
) -> tuple[int, bytes]:
    """Where the next entry begins, and this one's path."""
    *facts, oid, flags = _ENTRY.unpack_from(data, at)
    start = at + _ENTRY.size + (2 if version > 2 and flags & _EXTENDED else 0)
    if version == 4:  # each path is what it shares with the one before, and a rest
        cut, start = _read_varint(data, start)
        end = data.index(b"\0", start)
        path, following = before[: len(before) - cut] + data[start:end], end + 1
    else:
        end = data.index(b"\0", start)
        path, following = data[start:end], end + 8 - (end - at) % 8
        if data[end:following].strip(b"\0"):
            raise ValueError("there are bytes between two entries")
    index.paths.add(path)
    if facts[_MODE] == 0o160000:
        index.gitlinks[path] = oid
    else:
        index.objects.add(oid)
    return following, path


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at] & 0x7F
    while data[at] & 0x80:
        at += 1
        value = ((value + 1) << 7) | (data[at] & 0x7F)
    return value, at + 1


def _read_extension(name: bytes, data: bytes, index: Index) -> None:
    if name in _HARMLESS and len(data) == (_HARMLESS[name] or len(data)):
        return
    if name != b"TREE":
        raise ValueError(
            f"it has an extension {name.decode('ascii', 'backslashreplace')}, which may hold anything"
        )
    at = 0
    while at < len(
        data
    ):  # per directory: name, NUL, entries, blank, subtrees, newline, id unless it is invalid
        line = data.index(b"\n", data.index(b"\0", at))
        entries, _, _ = data[data.index(b"\0", at) + 1 : line].partition(b" ")
        at = line + 1
        if int(entries) >= 0:
            index.objects.add(data[at : at + _ID])
            at += _ID
