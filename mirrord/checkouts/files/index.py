"""The index of a checkout, written from its manifest, so that git need not look at any file.

Owns the bytes of git's index, version 2, with the cached-tree extension: `git status` compares stat
data and hashes nothing, `git write-tree` finds the trees of what did not change. Pure: the caller
writes the bytes. An index of ours is spliced into the next: what both have is copied.
"""

import hashlib
import re
import stat
import struct
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .manifest import DIRECTORY, SUBMODULE, Entry, Manifest, Records

_ENTRY = struct.Struct(">10I20sH")
_HEADER_BYTES = 12
_CHECKSUM_BYTES = 20
_LOW = 0xFFFFFFFF
_LONGEST_NAME = 0xFFF
_EXECUTABLE = 0o100
_SECOND_NS = 10**9
_PADDING = [bytes(8 - (_ENTRY.size + length) % 8) for length in range(8)]
_EXTENSION = struct.Struct(">4sI")
_NODE = re.compile(rb"(([^\0]*)\0(\d+) (\d+)\n.{20})", re.DOTALL)


class PreviousIndex(NamedTuple):
    """An index that was written from `manifest`, as it is on disk."""

    manifest: Manifest
    data: bytes

    @classmethod
    def proven(cls, manifest: Manifest, index: bytes) -> "PreviousIndex | None":
        """None where the bytes are not those that were written."""
        checksum = hashlib.sha1(index[:-_CHECKSUM_BYTES]).hexdigest()
        return cls(manifest, index) if checksum == manifest.index else None


def index_bytes(manifest: Manifest) -> bytes:
    """The index of the tree that a manifest is of."""
    files = manifest.files.decoded()
    paths = sorted(path for path, entry in files.items() if entry.mode != DIRECTORY)
    return _joined(len(paths), [*_packed_entries(files, paths), _cached_trees(files, paths)])


def spliced_index(previous: PreviousIndex, manifest: Manifest) -> bytes:
    """The bytes of `index_bytes`, for a manifest that goes back to the previous one's."""
    old, before, files = previous.data, previous.manifest.files, manifest.files
    names, offsets = _located(old)
    pieces, done, count = list[bytes](), 0, len(names)
    for path in sorted(files.changed_since(before)):
        place = bisect_left(names, path)
        was_there = names[place : place + 1] == [path]
        exists = path in files and files[path].mode != DIRECTORY
        if was_there or exists:
            pieces.append(old[offsets[done] : offsets[place]])
            pieces += _packed_entries(files, [path]) if exists else []
            done = place + was_there
            count += exists - was_there
    pieces.append(old[offsets[done] : offsets[-1]])
    trees = old[offsets[-1] : -_CHECKSUM_BYTES]
    if manifest.tree != previous.manifest.tree:
        trees = _spliced_trees(trees, before, files)
    return _joined(count, [*pieces, trees])


def _joined(count: int, pieces: Iterable[bytes]) -> bytes:
    body = b"".join([struct.pack(">4sII", b"DIRC", 2, count), *pieces])
    return body + hashlib.sha1(body).digest()


def _located(index: bytes) -> tuple[list[bytes], list[int]]:
    """The paths in an index of ours, and where each entry begins; last where the entries end."""
    names, offsets, at = [], [], _HEADER_BYTES
    for _ in range(int.from_bytes(index[8:_HEADER_BYTES], "big")):
        begin = at + _ENTRY.size
        length = int.from_bytes(index[begin - 2 : begin], "big")
        if length == _LONGEST_NAME:
            length = index.index(b"\0", begin) - begin
        names.append(index[begin : begin + length])
        offsets.append(at)
        at = begin + length + 8 - (_ENTRY.size + length) % 8
    return names, [*offsets, at]


def _packed_entries(files: Mapping[bytes, Entry], paths: list[bytes]) -> list[bytes]:
    """Entries, padded with NULs to a multiple of eight; st_dev is 0: git's USE_STDEV is off."""
    parts: list[bytes] = []
    pack = _ENTRY.pack
    for path in paths:
        mode, oid, _, _, size, ino, mtime_ns, ctime_ns, uid, gid = files[path]
        length = min(len(path), _LONGEST_NAME)
        if mode == SUBMODULE:
            fixed = pack(0, 0, 0, 0, 0, 0, SUBMODULE, 0, 0, 0, oid, length)
        else:
            if stat.S_ISREG(mode):  # old trees hold modes like 100664
                mode = 0o100755 if mode & _EXECUTABLE else 0o100644
            ctime, mtime = ctime_ns // _SECOND_NS & _LOW, mtime_ns // _SECOND_NS & _LOW
            times = ctime, ctime_ns % _SECOND_NS, mtime, mtime_ns % _SECOND_NS
            fixed = pack(*times, 0, ino & _LOW, mode, uid, gid, size & _LOW, oid, length)
        parts += (fixed, path, _PADDING[len(path) & 7])
    return parts


# -- cached trees: for each directory how many entries are below it, and its tree ------------------


def _cached_trees(files: Mapping[bytes, Entry], paths: list[bytes]) -> bytes:
    """The extension for all `files`: each directory before those in it, shorter names first."""
    counts = Counter([path.rpartition(b"/")[0] for path in paths])
    below: dict[bytes, list[bytes]] = {
        path: [] for path, entry in files.items() if entry.mode == DIRECTORY
    }
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
        parts.append(_node(path, counts[path], len(subtrees), files[path]))
        subtrees.sort(reverse=True)
        subtrees.sort(key=len, reverse=True)  # the last of the pending is next
        pending += subtrees
    return _extension(b"".join(parts))


def _spliced_trees(extension: bytes, before: Records, files: Records) -> bytes:
    """The extension, made of the one for `before`: unchanged directories are copied.

    A node is named by its place in the old extension; None is a directory that it has not.
    """
    nodes: list[tuple[bytes, bytes, bytes, bytes]] = _NODE.findall(extension, _EXTENSION.size)
    ends = [0] * len(nodes)  # for each node the place after it and all below it
    for place in reversed(range(len(nodes))):
        end = place + 1
        for _ in range(int(nodes[place][3])):
            end = ends[end]
        ends[place] = end
    growth: Counter[bytes] = Counter()
    changed = {b""}
    gone: defaultdict[bytes, set[bytes]] = defaultdict(set)
    added: defaultdict[bytes, set[bytes]] = defaultdict(set)
    for path in files.changed_since(before):
        old, new = before.get(path), files.get(path)
        was_tree, is_tree = (entry is not None and entry.mode == DIRECTORY for entry in (old, new))
        more = (new is not None and not is_tree) - (old is not None and not was_tree)
        above, _, name = path.rpartition(b"/")
        if was_tree != is_tree:
            (added if is_tree else gone)[above].add(name)
        if is_tree:
            changed.add(path)
        while path:
            path = path.rpartition(b"/")[0]
            changed.add(path)
            growth[path] += more

    def render(path: bytes, place: int | None) -> bytes:
        """A directory in which something changed, with all below it."""
        was: dict[bytes, int] = {}
        count = growth[path]
        if place is not None:
            count += int(nodes[place][2])
            at = place + 1
            for _ in range(int(nodes[place][3])):
                was[nodes[at][1]] = at
                at = ends[at]
        names = (was.keys() - gone[path]) | added[path]
        parts = [_node(path, count, len(names), files[path])]
        for name in sorted(names, key=lambda name: (len(name), name)):
            child = path + b"/" + name if path else name
            if child in changed:
                parts.append(render(child, was.get(name)))
            else:
                parts += [node[0] for node in nodes[was[name] : ends[was[name]]]]
        return b"".join(parts)

    return _extension(render(b"", 0))


def _node(path: bytes, count: int, subtrees: int, entry: Entry) -> bytes:
    return b"%s\0%d %d\n%s" % (path.rpartition(b"/")[2], count, subtrees, entry.oid)


def _extension(nodes: bytes) -> bytes:
    return _EXTENSION.pack(b"TREE", len(nodes)) + nodes
