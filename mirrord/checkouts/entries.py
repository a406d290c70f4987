"""Entries of a commit's tree, written to disk as `git checkout` with umask 022 would.

Owns the way from a tree entry to a file, a symbolic link or a directory, conversions included. The caller decides which
entries, and in which order: a directory before what is in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, MutableMapping

from ..git.objects import CommitInfo, Conversions, Objects, TreeEntry
from .blobs import Blobs
from .manifest import Manifest, blob_id, clock_ns
from .records import DIRECTORY, NO_OBJECT, SUBMODULE, Entry, Records
from .writer import TreeWriter

_OLDEST_NS = 315_619_200 * 10**9  # 1980-01-02: zip files know no earlier time
_SETTLED_NS = 10 * 10**9  # git calls a file racy whose mtime is not older than its index
_ATTRIBUTES = b".gitattributes"


def mtime_for(commit_time: int) -> int:
    """The time that files of a commit get, in nanoseconds: the committer's, but safely in the past."""
    return max(_OLDEST_NS, min(commit_time * 10**9, time.time_ns() - _SETTLED_NS))


def write_entries(
    objects: Objects, conversions: Conversions, entries: Iterable[TreeEntry], writer: TreeWriter, shared: Blobs | None = None
) -> dict[bytes, Entry]:
    """Write entries, each directory before what is in it. The stat of a directory is not yet recorded: it will change.

    Files are links into `shared`, where they are given one: for layers, whose files nobody writes.
    """
    written = {}
    for entry in entries:
        if entry.mode in (DIRECTORY, SUBMODULE):
            writer.make_directory(entry.path)
            written[entry.path] = unrecorded(entry)
        else:
            written[entry.path] = _write_blob(objects, conversions, entry, writer, shared)
    return written


def _write_blob(objects: Objects, conversions: Conversions, entry: TreeEntry, writer: TreeWriter, shared: Blobs | None) -> Entry:
    path, _, oid = entry
    record = unrecorded(entry)
    if entry.is_symlink:
        return record.with_stat(writer.write_symlink(path, objects.read_blob(oid)))
    conversion = conversions.find(path)
    if shared and not conversion and (lent := shared.lend(oid, writer, path, executable=entry.is_executable)):
        return record.with_stat(lent)
    data = objects.read_blob(oid)
    if conversion:
        data = conversion.apply(data, oid)
        record = record._replace(content=blob_id(data))
    found = writer.write_file(path, data, executable=entry.is_executable)
    if shared:
        found = shared.keep(record.content.hex(), writer, path, executable=entry.is_executable)
    return record.with_stat(found)


def unrecorded(entry: TreeEntry) -> Entry:
    """The record of an entry before its file was looked at."""
    oid = bytes.fromhex(entry.oid)
    content = NO_OBJECT if entry.mode in (DIRECTORY, SUBMODULE) else oid
    return Entry(entry.mode, oid, content, 0, 0, 0, 0, 0, 0, 0)


def conversions_for(objects: Objects, commit: str, files: Mapping[bytes, Entry] | Iterable[TreeEntry]) -> Conversions:
    """The conversions of a commit, whose attribute files are among `files`."""
    if isinstance(files, Mapping):
        named = [path for path in files if path.endswith(_ATTRIBUTES)]
        entries: Iterable[TreeEntry] = [TreeEntry(path, files[path].mode, files[path].oid.hex()) for path in named]
    else:
        entries = files
    found = [e for e in entries if e.path.endswith(_ATTRIBUTES) and is_attributes(e.path) and e.mode & 0o170000 == 0o100000]
    return Conversions(objects, commit, found)


def is_attributes(path: bytes) -> bool:
    return path.rpartition(b"/")[2] == _ATTRIBUTES


def record_directories(files: MutableMapping[bytes, Entry], writer: TreeWriter) -> None:
    """Look at the directories that were made or written in, once everything in them is written."""
    for path in sorted(writer.touched):
        entry = files.get(path)
        if entry is not None and entry.is_directory:
            files[path] = entry.with_stat(writer.get_stat(path))


def recorded(info: CommitInfo, files: dict[bytes, Entry], writer: TreeWriter) -> Manifest:
    """The manifest of a tree that was just written."""
    record_directories(files, writer)
    return Manifest(info.commit, info.tree, clock_ns(), Records(files))
