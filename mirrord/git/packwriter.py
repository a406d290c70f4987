"""Small packs and loose objects, written without git, which takes longer to start.

Packs have no deltas: they would save 8 % of an increment of 10 commits, and no time. libgit2 1.9
(PackBuilder) takes six times as long, to search for deltas. The caller reads every object back
(`check_packs`).
"""

import hashlib
import os
import struct
import tempfile
import zlib
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from .packs import FANOUT, ID_BYTES, INDEX_MAGIC

_COMPRESSION = 1


class Packed(NamedTuple):
    """A pack that was written, with its index beside it."""

    name: str
    object_count: int
    size_bytes: int


def write_loose(objects: Path, kind: str, content: bytes) -> str:
    """Write a loose object, flushed as git does it, and return its id."""
    body = b"%s %d\0%s" % (kind.encode(), len(content), content)
    oid = hashlib.sha1(body, usedforsecurity=False).hexdigest()
    directory = objects / oid[:2]
    directory.mkdir(exist_ok=True)
    # git's prefix: what a crash leaves is removed as git's own
    fd, new = tempfile.mkstemp(prefix="tmp_obj_", dir=directory)
    with open(fd, "wb") as file:
        file.write(zlib.compress(body, _COMPRESSION))
        file.flush()
        # as git leaves objects, which never change
        os.fchmod(fd, 0o444)
        os.fsync(fd)
    # the name appears with the whole content, whoever else writes the same object
    os.replace(new, directory / oid[2:])
    return oid


def write_pack(objects: Mapping[bytes, tuple[int, bytes]], into: Path) -> Packed:
    """Write a pack of `objects`, a kind as packs number it and bytes by id, and its index (v2)."""
    # without deltas: they saved 8 % of ten commits and no time (docs/architecture.md)
    pack = bytearray(struct.pack(">4sII", b"PACK", 2, len(objects)))
    written: list[tuple[bytes, int, int]] = []  # id, offset, CRC
    for oid, (kind, data) in objects.items():
        offset = len(pack)
        pack += _object_header(kind, len(data)) + zlib.compress(data, _COMPRESSION)
        written.append((oid, offset, zlib.crc32(memoryview(pack)[offset:])))
    pack += hashlib.sha1(pack, usedforsecurity=False).digest()
    ids, offsets, checksums = zip(*sorted(written), strict=True) if written else ((), (), ())
    counts = [0] * 256
    for oid in ids:
        counts[oid[0]] += 1
    pieces = [INDEX_MAGIC, FANOUT.pack(*accumulate(counts)), *ids]
    pieces += (struct.pack(f">{len(ids)}I", *numbers) for numbers in (checksums, offsets))
    index = b"".join([*pieces, pack[-ID_BYTES:]])
    index += hashlib.sha1(index, usedforsecurity=False).digest()
    name = f"pack-{pack[-ID_BYTES:].hex()}"
    for suffix, content in ((".pack", pack), (".idx", index)):
        read_only = os.open(into / f"{name}{suffix}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
        with open(read_only, "wb") as file:
            file.write(content)
    return Packed(f"{name}.pack", len(written), len(pack) + len(index))


def _object_header(kind: int, size: int) -> bytes:
    """The kind and four bits of the size, then seven bits a byte; the high bit says more follow."""
    header = bytearray([kind << 4 | size & 0xF])
    size >>= 4
    while size:
        header[-1] |= 0x80
        header.append(size & 0x7F)
        size >>= 7
    return bytes(header)
