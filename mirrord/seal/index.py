"""The index of git, versions 2 to 4 (gitformat-index), with every byte checked.

An extension that can contain other data is a fault, and so is a byte without a meaning in the
format.
"""

import hashlib
import struct
from typing import NamedTuple

from ..git.modes import SUBMODULE

# of a SHA-1; a repository with SHA-256 ids has another format (gitformat-index)
_ID_BYTES = 20


class Index(NamedTuple):
    """The paths of an index, raw ids of entries and cached trees, submodule commits by path."""

    paths: set[bytes]
    objects: set[bytes]
    gitlinks: dict[bytes, bytes]


def read_index(data: bytes) -> Index:
    """Parse an index. Raises ValueError with a reason."""
    if len(data) < 12 + _ID_BYTES or data[:4] != b"DIRC":
        raise ValueError("it is not an index")
    version, count = struct.unpack_from(">2I", data, 4)
    end = len(data) - _ID_BYTES
    if version not in {2, 3, 4}:
        raise ValueError(f"its version is {version}")
    checksum = hashlib.sha1(data[:end], usedforsecurity=False).digest()
    # git 2.40 and later write zeros with index.skipHash
    if data[end:] not in {checksum, bytes(_ID_BYTES)}:
        raise ValueError("its checksum is wrong")
    index, offset, path = Index(set(), set(), {}), 12, b""
    try:
        for _ in range(count):
            offset, path = _read_entry(data, offset, version, path, index)
        while offset < end:
            name = data[offset : offset + 4]
            size = int.from_bytes(data[offset + 4 : offset + 8], "big")
            _read_extension(name, data[offset + 8 : offset + 8 + size], index)
            offset += 8 + size
    except (struct.error, IndexError) as error:
        raise ValueError("it is truncated") from error
    if offset != end:
        raise ValueError("an extension is longer than the file")
    return index


_ENTRY = struct.Struct(">10I20sH")  # ctime, mtime, dev, ino, mode, uid, gid, size; id; flags
# its place among the fields of `_ENTRY`
_MODE = 6
# the bit of the flags that says that sixteen more follow (gitformat-index, version 3)
_EXTENDED = 0x4000


def _read_entry(
    data: bytes, offset: int, version: int, before: bytes, index: Index
) -> tuple[int, bytes]:
    """Read one entry; return the offset of the next, and this one's path."""
    *fields, oid, flags = _ENTRY.unpack_from(data, offset)
    start = offset + _ENTRY.size + (2 if version > 2 and flags & _EXTENDED else 0)
    if version == 4:  # prefix compression: bytes to cut from the previous path, then a suffix
        cut = data[start] & 0x7F
        while data[start] & 0x80:
            start += 1
            # git's encoding of offsets (as in OFS_DELTA): each further byte adds one
            cut = ((cut + 1) << 7) | (data[start] & 0x7F)
        start += 1
        end = data.index(b"\0", start)
        path, following = before[: len(before) - cut] + data[start:end], end + 1
    else:
        end = data.index(b"\0", start)
        # 1 to 8 NULs, so that the next entry begins at a multiple of eight
        path, following = data[start:end], end + 8 - (end - offset) % 8
        if data[end:following].strip(b"\0"):
            raise ValueError("there are bytes between two entries")
    index.paths.add(path)
    if fields[_MODE] == SUBMODULE:
        index.gitlinks[path] = oid
    else:
        index.objects.add(oid)
    return following, path


_HARMLESS = {b"EOIE": 24, b"IEOT": None}  # name: size; they have only offsets into the index


def _read_extension(name: bytes, data: bytes, index: Index) -> None:
    if name in _HARMLESS and len(data) == (_HARMLESS[name] or len(data)):
        return
    if name != b"TREE":
        named = name.decode("ascii", "backslashreplace")
        raise ValueError(f"it has an extension {named}, which may contain anything")
    offset = 0
    # name, NUL, entries, space, subtrees, newline; id unless entries is -1
    while offset < len(data):
        after_name = data.index(b"\0", offset) + 1
        line = data.index(b"\n", after_name - 1)
        entries, _, _ = data[after_name:line].partition(b" ")
        offset = line + 1
        if int(entries) >= 0:
            index.objects.add(data[offset : offset + _ID_BYTES])
            offset += _ID_BYTES
