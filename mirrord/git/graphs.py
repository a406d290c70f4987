"""Commit-graphs, version 1 (gitformat-commit-graph)."""

import struct
from itertools import pairwise
from pathlib import Path

from ..errors import CorruptObjectError
from ..host.files import open_plain, read_plain
from .packs import ID_BYTES, corrupt

_GRAPH_START = b"CGPH\1\1"  # version 1, SHA-1

# signature, version, hash, number of chunks and of base graphs (gitformat-commit-graph)
_GRAPH_HEADER_BYTES = 8

# of a line of the table of contents: an id of 4 bytes, an offset of 8
_CHUNK_BYTES = 12

# the number of chunks is one byte
_GRAPH_HEAD_BYTES = _GRAPH_HEADER_BYTES + 256 * _CHUNK_BYTES

# no Bloom filters: they cannot be verified
_KNOWN_CHUNKS = {b"OIDF", b"OIDL", b"CDAT", b"GDA2", b"GDO2", b"EDGE", b"BASE"}


def graph_commits(path: Path) -> list[bytes]:
    """Return every commit of the graph. Refuses bytes outside of the chunks that git verifies."""
    data = read_plain(path)
    chunks = _chunks(path, data[:_GRAPH_HEAD_BYTES], len(data))
    begin = _GRAPH_HEADER_BYTES + (data[6] + 1) * _CHUNK_BYTES
    first = min((start for start, _ in chunks.values()), default=0)
    if not chunks.keys() <= _KNOWN_CHUNKS or first != begin:
        raise corrupt("commit-graph", path, "it has bytes that git does not verify")
    start, end = chunks.get(b"OIDL", (0, 0))
    return [data[offset : offset + ID_BYTES] for offset in range(start, end, ID_BYTES)]


def graph_is_whole(path: Path) -> bool:
    """Return whether the file is as long as its table says: finds truncation by a power cut."""
    try:
        with open_plain(path) as file:
            _chunks(path, file.read(_GRAPH_HEAD_BYTES), path.stat().st_size)
    except (OSError, CorruptObjectError):
        return False
    return True


def _chunks(path: Path, head: bytes, size: int) -> dict[bytes, tuple[int, int]]:
    """Return start and end of each chunk. The table's last row has no name; it ends the last."""
    size_of_table = (int.from_bytes(head[6:7], "big") + 1) * _CHUNK_BYTES
    table = head[_GRAPH_HEADER_BYTES : _GRAPH_HEADER_BYTES + size_of_table]
    if not head.startswith(_GRAPH_START) or len(table) < size_of_table:
        raise corrupt("commit-graph", path, "it is truncated or of an unknown version")
    rows = list(struct.iter_unpack(">4sQ", table))
    chunks = {name: (start, end) for (name, start), (_, end) in pairwise(rows)}
    start, end = chunks.get(b"OIDL", (0, 0))
    is_ordered = all(start <= end for start, end in chunks.values())
    if rows[-1][1] + ID_BYTES != size or not is_ordered or (end - start) % ID_BYTES:
        raise corrupt("commit-graph", path, "its table of contents does not fit its size")
    return chunks
