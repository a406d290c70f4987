"""The commits that a commit-graph file names (version 1, SHA-1; gitformat-commit-graph).

Reads bytes and never starts git, so it can look at a repository that somebody else made. A file that is not whole is a
CorruptObjectError. Ids are raw: 20 bytes each.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from ..errors import CorruptObjectError
from .packfile import ID_BYTES

_HEADER_BYTES = 8
_CHUNK_BYTES = 12
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


def commit_ids(path: Path) -> list[bytes]:
    """Every commit that the graph has something to say about."""
    data = path.read_bytes()
    chunks = _chunks(path, data[: _HEADER_BYTES + 256 * _CHUNK_BYTES], len(data))
    start, end = chunks.get(b"OIDL", (0, 0))
    return [data[at : at + ID_BYTES] for at in range(start, end, ID_BYTES)]


def has_known_chunks_only(path: Path) -> bool:
    """Whether every byte between the table of contents and the checksum belongs to a chunk that git can verify."""
    data = path.read_bytes()
    chunks = _chunks(path, data[: _HEADER_BYTES + 256 * _CHUNK_BYTES], len(data))
    begin = _HEADER_BYTES + (data[6] + 1) * _CHUNK_BYTES
    return chunks.keys() <= _KNOWN_CHUNKS and min(start for start, _ in chunks.values()) == begin


def is_whole(path: Path) -> bool:
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
        raise _corrupt(path, "it is truncated or of an unknown version")
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
        raise _corrupt(path, "its table of contents does not fit its size")
    return found


def _corrupt(path: Path, fact: str) -> CorruptObjectError:
    return CorruptObjectError(
        f"cannot read commit-graph {path.name}: {fact}", hint="git writes it again", file=path.name
    )
