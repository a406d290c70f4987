"""Trees of commits on disk: made, moved on to another commit by what differs, and mended.

Owns what a working tree must look like: what `git checkout` with umask 022 writes, submodules as empty directories. Sync; runs in
workers, since it reads objects. `.git` is not its business. A crash leaves a tree without a manifest, or one that its manifest
does not match: the first is removed, the second found by a scan.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ...errors import CommitUnservableError
from ...git.objects.commits import CommitInfo, read_commit
from ...git.objects.filters import Conversions
from ...git.objects.repository import Objects, open_objects
from ...git.objects.trees import TreeChange, TreeEntry, changes, must_fit, walk
from ...host.credentials import ActingAs
from ...host.files import full_disk_named, opened
from ...host.trash import TrashDirectory
from .blobs import Blobs
from .manifest import DIRECTORY, NO_OBJECT, SUBMODULE, Entry, Manifest, Records, blob_id, clock_ns
from .reader import open_top
from .scan import Changes, is_control
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


Owner = tuple[int, int]


def materialise(git_dir: Path, commit: str, dest: Path, *, owner: Owner | None = None) -> Manifest:
    """Write the tree of `commit` into `dest`, which is made, or is an empty directory.

    `owner` is (uid, gid) of all files; the daemon's own when None. Raises CommitUnservableError, TreeTooLargeError,
    CorruptObjectError, DiskFullError.
    """
    dest.mkdir(mode=0o755, exist_ok=True)
    with open_objects(git_dir) as objects, _opened_tree(dest, commit) as root:
        info = read_commit(objects, commit)
        must_fit(objects, info.tree)
        entries = list(walk(objects, info.tree))
        conversions = conversions_for(objects, info.commit, entries)
        if owner and owner != (os.geteuid(), os.getegid()):
            os.fchown(root, *owner)
        with TreeWriter(root, ActingAs(owner), mtime_ns=mtime_for(info.time)) as writer:
            writer.make_directory(b"")
            files = {
                b"": root_entry(info.tree),
                **write_entries(objects, conversions, entries, writer),
            }
            return recorded(info, files, writer)


def must_fit_from(git_dir: Path, manifest: Manifest, tree: str) -> None:
    """Raise TreeTooLargeError where the tree that `manifest` records cannot be moved to another."""
    with open_objects(git_dir) as objects:
        must_fit(objects, tree, near=manifest.tree)


def move(
    git_dir: Path, manifest: Manifest, commit: str, dest: Path, trash: TrashDirectory | None = None
) -> Manifest:
    """Bring the clean tree that `manifest` records to `commit`, touching only what differs. `.git` stays as it is."""
    with open_objects(git_dir) as objects, _opened_tree(dest, commit) as root:
        info = read_commit(objects, commit)
        steps = list(changes(objects, manifest.tree, info.tree))
        files = manifest.files.copy()
        with _writer(root, manifest, info, trash) as writer:
            _remove_old(steps, files, writer)
            new = [step.new for step in steps if step.new and not step.is_within]
            staying = {
                step.path: unrecorded(step.new) for step in steps if step.new and step.is_within
            }
            after = conversions_for(
                objects, info.commit, files | {entry.path: unrecorded(entry) for entry in new}
            )
            if any(is_attributes(step.path) for step in steps):
                new += reconverted(objects, manifest, after, files)
            files |= (
                write_entries(objects, after, new, writer) | staying | {b"": root_entry(info.tree)}
            )
            writer.touched |= {b"", *staying}
            record_directories(files, writer)
            return replace(manifest, commit=info.commit, tree=info.tree, files=files)


def repair(
    git_dir: Path,
    manifest: Manifest,
    found: Changes,
    dest: Path,
    trash: TrashDirectory | None = None,
) -> Manifest:
    """Undo in the tree what a scan found: remove what is extra, write again what is gone or changed, each as a new file.

    Control files are left to whoever builds `.git`.
    """
    with open_objects(git_dir) as objects, _opened_tree(dest, manifest.commit) as root:
        info = read_commit(objects, manifest.commit)
        damaged = sorted(
            path for path in (*found.modified, *found.missing) if path in manifest.files
        )
        conversions = conversions_for(objects, info.commit, manifest.files)
        with _writer(root, manifest, info, trash) as writer:
            writer.make_directory(b"")
            for path in found.extra:
                if not is_control(path):
                    writer.remove(path)
            entries = [
                TreeEntry(path, manifest.files[path].mode, manifest.files[path].oid.hex())
                for path in damaged
                if path
            ]
            files = manifest.files | write_entries(objects, conversions, entries, writer)
            record_directories(files, writer)
            return replace(manifest, files=files)


def root_entry(tree: str) -> Entry:
    return unrecorded(TreeEntry(b"", DIRECTORY, tree))


def reconverted(
    objects: Objects, manifest: Manifest, after: Conversions, kept: Records
) -> list[TreeEntry]:
    """Of the files that stay, those that a changed `.gitattributes` writes in another way."""
    before = conversions_for(objects, manifest.commit, manifest.files)
    regular = [path for path, entry in kept.items() if entry.mode & 0o170000 == 0o100000]
    old = {
        path: before.find(path) for path in regular
    }  # all of one commit first: libgit2 keeps the attributes of one at a time
    return [
        TreeEntry(path, kept[path].mode, kept[path].oid.hex())
        for path in regular
        if old[path] != after.find(path)
    ]


def _remove_old(steps: list[TreeChange], files: Records, writer: TreeWriter) -> None:
    """Remove what the new tree does not have. What changes its kind is replaced when it is written, but for a submodule, which
    would keep what is in the directory that it becomes.
    """
    for step in steps:
        if step.old is None:
            continue
        del files[step.path]
        gone = step.new is None and not step.inherited
        if gone or (step.new and step.new.is_submodule and step.old.is_tree):
            writer.remove(step.path)


def _writer(
    root: int, manifest: Manifest, info: CommitInfo, trash: TrashDirectory | None
) -> TreeWriter:
    return TreeWriter(root, ActingAs(manifest.owner), mtime_ns=mtime_for(info.time), trash=trash)


@contextmanager
def _opened_tree(dest: Path, commit: str) -> Iterator[int]:
    """Open the tree, and say what a refused write means."""
    with opened(open_top(dest)) as root, full_disk_named(f"the tree of {commit[:12]}"):
        try:
            yield root
        except OSError as error:
            if error.errno not in (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL):
                raise
            raise CommitUnservableError(
                f"cannot check out commit {commit}: this file system refuses one of its names: {error.strerror}",
                hint="put state_dir on ext4, xfs or btrfs",
            ) from error
