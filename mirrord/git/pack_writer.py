"""A small pack, made in memory: a few hundred objects, older versions as deltas on newer ones.

Owns the bytes of packs and indexes (version 2) that are written without git, which takes longer to
start than to write one. Every object is read back, inflated and hashed before the pack is used.
Never reads a repository, and flushes nothing: what it writes is a cache.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from ..errors import CorruptObjectError

KINDS = {1: b"commit", 2: b"tree", 3: b"blob"}
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


class _Written(NamedTuple):
    oid: bytes
    offset: int
    crc: int


def write_pack(objects: Mapping[bytes, PackObject], into: Path) -> Packed:
    """Write a pack of exactly `objects` and its index into the directory `into`."""
    pack, written = _encode(objects)
    _check(pack, written, objects)
    index = _index(written, pack[-20:])
    name = f"pack-{pack[-20:].hex()}"
    for suffix, data in ((".pack", pack), (".idx", index)):
        read_only = os.open(into / f"{name}{suffix}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
        with open(read_only, "wb") as file:
            file.write(data)
    return Packed(f"{name}.pack", len(written), len(pack) + len(index))


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
        written.append(_Written(oid, at, zlib.crc32(memoryview(pack)[at:])))
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


def _check(pack: bytes, written: Iterable[_Written], objects: Mapping[bytes, PackObject]) -> None:
    """Raise CorruptObjectError unless each object that the pack holds hashes to its name."""
    found: dict[int, bytes] = {}
    for oid, offset, _ in written:
        kind, at = pack[offset] >> 4 & 7, offset + 1
        while pack[at - 1] & 128:
            at += 1
        base = b""
        if kind == _DELTA:
            back = pack[at] & 127
            while pack[at] & 128:
                at += 1
                back = back + 1 << 7 | pack[at] & 127
            at += 1
            base = found[offset - back]
        data = zlib.decompressobj().decompress(memoryview(pack)[at:])
        if kind == _DELTA:
            data = patched(base, data)
        found[offset] = data
        named = b"%s %d\0" % (KINDS[objects[oid].kind], len(data))
        if hashlib.sha1(named + data, usedforsecurity=False).digest() != oid:
            raise CorruptObjectError(
                f"cannot pack object {oid.hex()}: the bytes written do not hash to it",
                objects=[oid.hex()],
            )


def patched(base: bytes, change: bytes) -> bytes:
    """The bytes that a delta makes of `base`."""
    at = 0
    for _ in ("size of base", "size of result"):
        while change[at] & 128:
            at += 1
        at += 1
    out = bytearray()
    while at < len(change):
        command, at = change[at], at + 1
        if command & 128:
            facts = bytearray(7)
            for bit in range(7):
                if command & 1 << bit:
                    facts[bit], at = change[at], at + 1
            offset = int.from_bytes(facts[:4], "little")
            size = int.from_bytes(facts[4:], "little") or _COPY_MAX
            out += base[offset : offset + size]
        else:
            out += change[at : at + command]
            at += command
    return bytes(out)


def _index(written: Iterable[_Written], trailer: bytes) -> bytes:
    rows = sorted(written)
    counts = [0] * 256
    for row in rows:
        counts[row.oid[0]] += 1
    pieces = [b"\377tOc\0\0\0\2", struct.pack(">256I", *accumulate(counts))]
    pieces += (row.oid for row in rows)
    pieces.append(struct.pack(f">{len(rows)}I", *(row.crc for row in rows)))
    pieces.append(struct.pack(f">{len(rows)}I", *(row.offset for row in rows)))
    data = b"".join([*pieces, trailer])
    return data + hashlib.sha1(data, usedforsecurity=False).digest()
