"""Entries of a commit's tree, written to disk as `git checkout` with umask 022 would.

Owns the way from a tree entry to a file, a symbolic link or a directory, conversions included. The caller decides which
entries, and in which order: a directory before what is in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping

from ...git.objects import CommitInfo, Conversions, Objects, TreeEntry
from .blobs import Blobs
from .manifest import Manifest, blob_id, clock_ns
from .records import DIRECTORY, NO_OBJECT, SUBMODULE, Entry, Records
from .writer import TreeWriter

_OLDEST_NS = 315_619_200 * 10**9  # 1980-01-02: zip files know no earlier time
_SETTLED_NS = 10 * 10**9  # git calls a file racy whose mtime is not older than its index
_ATTRIBUTES = b".gitattributes"
_BATCH = 64
_BATCH_BYTES = 4 * 1024**2


def mtime_for(commit_time: int) -> int:
    """The time that files of a commit get, in nanoseconds: the committer's, but safely in the past."""
    return max(_OLDEST_NS, min(commit_time * 10**9, time.time_ns() - _SETTLED_NS))


def write_entries(
    objects: Objects, conversions: Conversions, entries: Iterable[TreeEntry], writer: TreeWriter
) -> dict[bytes, Entry]:
    """Write entries, each directory before what is in it. The stat of a directory is not yet recorded: it will change."""
    written = {}
    for batch in _read_in_batches(objects, conversions, entries):
        with writer.owner:  # once for many: the writer may not read the mirror
            for entry, record, data in batch:
                written[entry.path] = _write(writer, entry, record, data)
    return written


def share_entries(
    objects: Objects,
    conversions: Conversions,
    entries: Iterable[TreeEntry],
    writer: TreeWriter,
    shared: Blobs,
) -> dict[bytes, Entry]:
    """The same for a layer, whose files nobody writes: they are links into `shared`."""
    return {entry.path: _share(objects, conversions, entry, writer, shared) for entry in entries}


def _read_in_batches(
    objects: Objects, conversions: Conversions, entries: Iterable[TreeEntry]
) -> Iterator[list[tuple[TreeEntry, Entry, bytes]]]:
    batch, size = [], 0
    for entry in entries:
        record, data = _read(objects, conversions, entry)
        batch.append((entry, record, data))
        size += len(data)
        if len(batch) == _BATCH or size > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


def _read(objects: Objects, conversions: Conversions, entry: TreeEntry) -> tuple[Entry, bytes]:
    """The record of an entry, and what is to be on disk."""
    record = unrecorded(entry)
    if entry.mode in (DIRECTORY, SUBMODULE):
        return record, b""
    data = objects.read_blob(entry.oid)
    if not entry.is_symlink and (conversion := conversions.find(entry.path)):
        data = conversion.apply(data, entry.oid)
        record = record._replace(content=blob_id(data))
    return record, data


def _write(writer: TreeWriter, entry: TreeEntry, record: Entry, data: bytes) -> Entry:
    if entry.mode in (DIRECTORY, SUBMODULE):
        writer.make_directory(entry.path)
        return record
    if entry.is_symlink:
        return record.with_stat(writer.write_symlink(entry.path, data))
    return record.with_stat(writer.write_file(entry.path, data, executable=entry.is_executable))


def _share(
    objects: Objects, conversions: Conversions, entry: TreeEntry, writer: TreeWriter, shared: Blobs
) -> Entry:
    path, executable = entry.path, entry.is_executable
    is_file = not (entry.is_symlink or entry.mode in (DIRECTORY, SUBMODULE))
    if (
        is_file
        and not conversions.find(path)
        and (lent := shared.lend(entry.oid, writer, path, executable=executable))
    ):
        return unrecorded(entry).with_stat(lent)
    record = _write(writer, entry, *_read(objects, conversions, entry))
    if not is_file:
        return record
    return record.with_stat(shared.keep(record.content.hex(), writer, path, executable=executable))


def unrecorded(entry: TreeEntry) -> Entry:
    """The record of an entry before its file was looked at."""
    oid = bytes.fromhex(entry.oid)
    content = NO_OBJECT if entry.mode in (DIRECTORY, SUBMODULE) else oid
    return Entry(entry.mode, oid, content, 0, 0, 0, 0, 0, 0, 0)


def conversions_for(
    objects: Objects, commit: str, files: Mapping[bytes, Entry] | Iterable[TreeEntry]
) -> Conversions:
    """The conversions of a commit, whose attribute files are among `files`."""
    if isinstance(files, Mapping):
        named = [path for path in files if path.endswith(_ATTRIBUTES)]
        entries: Iterable[TreeEntry] = [
            TreeEntry(path, files[path].mode, files[path].oid.hex()) for path in named
        ]
    else:
        entries = files
    found = [
        e
        for e in entries
        if e.path.endswith(_ATTRIBUTES) and is_attributes(e.path) and e.mode & 0o170000 == 0o100000
    ]
    return Conversions(objects, commit, found)


def is_attributes(path: bytes) -> bool:
    return path.rpartition(b"/")[2] == _ATTRIBUTES


def record_directories(files: MutableMapping[bytes, Entry], writer: TreeWriter) -> None:
    """Look at the directories that were made or written in, once everything in them is written."""
    with writer.owner:
        for path in sorted(writer.touched):
            entry = files.get(path)
            if entry is not None and entry.is_directory:
                files[path] = entry.with_stat(writer.get_stat(path))


def recorded(info: CommitInfo, files: dict[bytes, Entry], writer: TreeWriter) -> Manifest:
    """The manifest of a tree that was just written."""
    record_directories(files, writer)
    return Manifest(info.commit, info.tree, clock_ns(), Records(files))
