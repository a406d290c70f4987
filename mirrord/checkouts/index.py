"""The index of a checkout, written from its manifest, so that git need not look at any file.

Owns the bytes of git's index format, version 2, with the cached-tree extension: `git status` compares stat data and hashes
nothing, `git write-tree` and `git commit` find the trees of what did not change. Pure: the caller writes the bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Mapping

from .manifest import DIRECTORY, SUBMODULE, Entry, Manifest

_ENTRY = struct.Struct(">10I20sH")
_LOW = 0xFFFFFFFF
_LONGEST_NAME = 0xFFF
_EXECUTABLE = 0o100
_SECOND_NS = 10**9
_PADDING = [bytes(8 - (_ENTRY.size + length) % 8) for length in range(8)]


def index_bytes(manifest: Manifest, *, owner: tuple[int, int] | None = None) -> bytes:
    """The index. `owner` (uid, gid) is who the files will seem to belong to, where that is not whom the manifest has (idmapped
    mounts): git compares it.
    """
    paths = sorted(path for path, entry in manifest.files.items() if entry.mode != DIRECTORY)
    trees = _cached_trees(manifest.files, paths)
    parts = [b"DIRC", struct.pack(">II", 2, len(paths))]
    parts += _packed_entries(manifest.files, paths, owner)
    parts += [b"TREE", struct.pack(">I", len(trees)), trees]
    body = b"".join(parts)
    return body + hashlib.sha1(body).digest()


def _packed_entries(files: Mapping[bytes, Entry], paths: list[bytes], owner: tuple[int, int] | None) -> list[bytes]:
    """The entries, each padded with NULs to a multiple of eight; st_dev is left 0, git ignores it (USE_STDEV is off)."""
    parts: list[bytes] = []
    pack = _ENTRY.pack
    modes = {entry.mode: _canonical(entry.mode) for entry in files.values()}
    for path in paths:
        mode, oid, _, _, size, ino, mtime_ns, ctime_ns, uid, gid = files[path]
        if owner:
            uid, gid = owner
        length = min(len(path), _LONGEST_NAME)
        if mode == SUBMODULE:
            fixed = pack(0, 0, 0, 0, 0, 0, SUBMODULE, 0, 0, 0, oid, length)
        else:
            ctime, mtime = ctime_ns // _SECOND_NS & _LOW, mtime_ns // _SECOND_NS & _LOW
            times = ctime, ctime_ns % _SECOND_NS, mtime, mtime_ns % _SECOND_NS
            fixed = pack(*times, 0, ino & _LOW, modes[mode], uid, gid, size & _LOW, oid, length)
        parts += (fixed, path, _PADDING[len(path) & 7])
    return parts


def _canonical(mode: int) -> int:
    """Old trees hold modes like 100664; an index knows two kinds of file."""
    if mode & 0o170000 != 0o100000:
        return mode
    return 0o100755 if mode & _EXECUTABLE else 0o100644


def _cached_trees(files: Mapping[bytes, Entry], paths: list[bytes]) -> bytes:
    """The TREE extension: each directory before those in it, with the number of index entries below it and of its subtrees."""
    counts = Counter([path.rpartition(b"/")[0] for path in paths])
    below: dict[bytes, list[bytes]] = {path: [] for path, entry in files.items() if entry.mode == DIRECTORY}
    for path in sorted(below, reverse=True):  # what is in a directory comes before it
        if path:
            above = path.rpartition(b"/")[0]
            counts[above] += counts[path]
            below[above].append(path)
    parts: list[bytes] = []
    pending = [b""]
    while pending:
        path = pending.pop()
        subtrees = below[path]
        parts.append(b"%s\0%d %d\n%s" % (path.rpartition(b"/")[2], counts[path], len(subtrees), files[path].oid))
        subtrees.sort(reverse=True)
        subtrees.sort(key=len, reverse=True)  # git's own order: shorter names first; the last of the pending is next
        pending += subtrees
    return b"".join(parts)
