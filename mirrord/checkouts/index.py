"""The index of a checkout, written from its manifest, so that git need not look at any file.

Owns the bytes of git's index format, version 2, with the cached-tree extension: `git status` compares stat data and hashes
nothing, `git write-tree` and `git commit` find the trees of what did not change. Pure: the caller writes the bytes.
"""

from __future__ import annotations

import hashlib
import struct

from .manifest import DIRECTORY, SUBMODULE, Entry, Manifest

_ENTRY = struct.Struct(">10I20sH")
_LOW = 0xFFFFFFFF
_LONGEST_NAME = 0xFFF
_EXECUTABLE = 0o100
_SECOND_NS = 10**9


def index_bytes(manifest: Manifest, *, owner: tuple[int, int] | None = None) -> bytes:
    """The index. `owner` (uid, gid) is who the files will seem to belong to, where that is not whom the manifest has (idmapped
    mounts): git compares it.
    """
    paths = sorted(path for path, entry in manifest.files.items() if entry.mode != DIRECTORY)
    parts = [b"DIRC", struct.pack(">II", 2, len(paths))]
    parts += [_pack_entry(path, manifest.files[path], owner) for path in paths]
    trees = _cached_trees(manifest, paths)
    parts += [b"TREE", struct.pack(">I", len(trees)), trees]
    body = b"".join(parts)
    return body + hashlib.sha1(body).digest()


def _pack_entry(path: bytes, entry: Entry, owner: tuple[int, int] | None) -> bytes:
    """One entry, padded with NULs to a multiple of eight; st_dev is left 0, git ignores it (USE_STDEV is off)."""
    if entry.mode == SUBMODULE:
        fixed = _ENTRY.pack(0, 0, 0, 0, 0, 0, SUBMODULE, 0, 0, 0, entry.oid, min(len(path), _LONGEST_NAME))
    else:
        uid, gid = owner or (entry.uid, entry.gid)
        ctime, ctime_ns = divmod(entry.ctime_ns, _SECOND_NS)
        mtime, mtime_ns = divmod(entry.mtime_ns, _SECOND_NS)
        fixed = _ENTRY.pack(
            ctime & _LOW,
            ctime_ns,
            mtime & _LOW,
            mtime_ns,
            0,
            entry.ino & _LOW,
            _canonical(entry.mode),
            uid,
            gid,
            entry.size & _LOW,
            entry.oid,
            min(len(path), _LONGEST_NAME),
        )
    return b"".join((fixed, path, bytes(8 - (len(fixed) + len(path)) % 8)))


def _canonical(mode: int) -> int:
    """Old trees hold modes like 100664; an index knows two kinds of file."""
    if mode & 0o170000 != 0o100000:
        return mode
    return 0o100755 if mode & _EXECUTABLE else 0o100644


def _cached_trees(manifest: Manifest, paths: list[bytes]) -> bytes:
    """The TREE extension: each directory before those in it, with the number of index entries below it and of its subtrees."""
    counts: dict[bytes, int] = dict.fromkeys((p for p, e in manifest.files.items() if e.mode == DIRECTORY), 0)
    subtrees: dict[bytes, list[bytes]] = {path: [] for path in counts}
    for path in counts:
        if path:
            subtrees[path.rpartition(b"/")[0]].append(path)
    for path in paths:
        above = path
        while above:
            above = above.rpartition(b"/")[0]
            counts[above] += 1
    parts: list[bytes] = []
    pending = [b""]
    while pending:
        path = pending.pop()
        below = sorted(subtrees[path], key=lambda p: (len(p), p))  # git's own order: shorter names first
        name = path.rpartition(b"/")[2]
        parts.append(b"%s\0%d %d\n%s" % (name, counts[path], len(below), manifest.files[path].oid))
        pending += reversed(below)
    return b"".join(parts)
