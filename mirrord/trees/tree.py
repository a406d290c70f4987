"""Trees of commits on disk: written, moved to another commit by the tree difference, repaired.

Writes what `git checkout` with umask 022 writes, submodules as empty directories; never `.git`.
Sync; runs in workers. A crash leaves a tree without a manifest, which is removed, or one that
differs from its manifest, which a scan finds.
"""

import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..errors import CommitUnservableError, full_disk_named
from ..git.modes import DIRECTORY
from ..git.objects.repository import CommitInfo, Objects, open_objects, read_commit
from ..git.objects.text import Conversions
from ..git.objects.trees import TreeEntry, changes, must_fit, walk
from ..host.files import open_top, opened
from ..host.processes import ActingAs, Owner
from ..host.trash import TrashDirectory
from .conversions import conversions_for, is_attributes, reconverted, tree_entries
from .manifest import Entries, Entry, Manifest, clock_ns
from .scan import ScanResult, is_control
from .sharing import SharedFiles
from .sources import LayerFiles, Read, read_object, reading_layers, unrecorded
from .writer import TreeWriter


def materialise(
    git_dir: Path,
    commit: str,
    dest: Path,
    *,
    owner: Owner | None = None,
    template: Sequence[LayerFiles] = (),
) -> Manifest:
    """Write the tree of `commit` into `dest`, a new or empty directory.

    `owner` is (uid, gid) of all files, None for the daemon's own. `template` are the layers of the
    tree's template, top first; without, git's objects are read. Raises CommitUnservableError,
    TooLargeError, CorruptObjectError, DiskFullError; ProofFailedError for a damaged template.
    """
    dest.mkdir(mode=0o755, exist_ok=True)
    with (
        full_disk_named(f"the tree of {commit[:12]}"),
        open_objects(git_dir) as objects,
        _opened_tree(dest, commit) as root,
    ):
        info = read_commit(objects, commit)
        with (
            reading_layers(template) if template else _reading_tree(objects, info.tree) as source,
            TreeWriter(root, ActingAs(owner), mtime_ns=mtime_for(info.time)) as writer,
        ):
            entries, read = source
            if owner and owner != (os.geteuid(), os.getegid()):
                os.fchown(root, *owner)
            writer.make_directory(b"")
            written = write_entries(read, entries, writer)
            return recorded(info, {b"": root_entry(info.tree), **written}, writer)


@contextmanager
def _reading_tree(objects: Objects, tree: str) -> Iterator[tuple[list[TreeEntry], Read]]:
    with objects.reading_many():
        must_fit(objects, tree)
        entries = list(walk(objects, tree))
        yield entries, partial(read_object, objects, conversions_for(objects, entries))


def must_fit_from(git_dir: Path, manifest: Manifest, tree: str) -> None:
    """Raise TooLargeError where the tree of `manifest` cannot be moved to `tree`."""
    with open_objects(git_dir) as objects:
        must_fit(objects, tree, near=manifest.tree)


def move(
    git_dir: Path, manifest: Manifest, commit: str, dest: Path, trash: TrashDirectory | None = None
) -> Manifest:
    """Move the clean tree of `manifest` to `commit`: writes the paths that differ, never `.git`."""
    with open_objects(git_dir) as objects, _opened_tree(dest, commit) as root:
        info = read_commit(objects, commit)
        steps = list(changes(objects, manifest.tree, info.tree))
        files = manifest.files.copy()
        owner, mtime_ns = ActingAs(manifest.owner), mtime_for(info.time)
        with TreeWriter(root, owner, mtime_ns=mtime_ns, trash=trash) as writer:
            for step in steps:
                if step.old is None:
                    continue
                del files[step.path]
                # Writing replaces a path that changes its kind; a directory that becomes a
                # submodule would keep its content.
                becomes_submodule = step.new and step.new.is_submodule and step.old.is_tree
                if becomes_submodule or (step.new is None and not step.inherited):
                    writer.remove(step.path)
            new = [step.new for step in steps if step.new and not step.is_within]
            staying = {
                step.path: unrecorded(step.new) for step in steps if step.new and step.is_within
            }
            after = conversions_for(
                objects, files | {entry.path: unrecorded(entry) for entry in new}
            )
            # they decide about files that did not change, too
            if any(is_attributes(step.path) for step in steps):
                new += reconverted(objects, manifest, after, files)
            with objects.reading_many():
                written = write_entries(partial(read_object, objects, after), new, writer)
            files |= written | staying | {b"": root_entry(info.tree)}
            writer.touched |= {b"", *staying}
            _record_directories(files, writer)
            return replace(manifest, commit=info.commit, tree=info.tree, files=files)


def repair(
    git_dir: Path,
    manifest: Manifest,
    scanned: ScanResult,
    dest: Path,
    trash: TrashDirectory | None = None,
) -> Manifest:
    """Undo the differences that a scan found: writes missing and modified files as new ones.

    Leaves control files to `dotgit`.
    """
    with open_objects(git_dir) as objects, _opened_tree(dest, manifest.commit) as root:
        info = read_commit(objects, manifest.commit)
        conversions = conversions_for(objects, manifest.files)
        owner, mtime_ns = ActingAs(manifest.owner), mtime_for(info.time)
        with TreeWriter(root, owner, mtime_ns=mtime_ns, trash=trash) as writer:
            if b"" in scanned.modified:
                writer.make_directory(b"")
            with writer.owner:  # once for all
                for path in scanned.extra:
                    if not is_control(path):
                        writer.remove(path)
            damaged = sorted(filter(None, (*scanned.modified, *scanned.missing)))
            entries = tree_entries(manifest.files, damaged)
            with objects.reading_many():
                written = write_entries(partial(read_object, objects, conversions), entries, writer)
            files = manifest.files | written
            _record_directories(files, writer)
            return replace(manifest, files=files)


@contextmanager
def _opened_tree(dest: Path, commit: str) -> Iterator[int]:
    with opened(open_top(dest)) as root:
        try:
            yield root
        except OSError as error:
            # bytes that are not UTF-8 are EILSEQ for ZFS with `utf8only`, EINVAL for ext4 with
            # strict casefold
            if error.errno not in (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL):
                raise
            raise CommitUnservableError(
                f"cannot check out commit {commit}: this file system refuses one of its names:"
                f" {error.strerror}",
                hint="put state_dir on ext4, xfs or btrfs",
            ) from error


_OLDEST_NS = 315_619_200 * 10**9  # 1980-01-02: zip files hold no earlier time
_SETTLED_NS = 10 * 10**9  # git calls a file racy unless its mtime is older than its index


def mtime_for(commit_time: int) -> int:
    """Return the mtime of a commit's files in ns: the committer's time, but safely in the past."""
    return max(_OLDEST_NS, min(commit_time * 10**9, time.time_ns() - _SETTLED_NS))


def root_entry(tree: str) -> Entry:
    return unrecorded(TreeEntry(b"", DIRECTORY, tree))


# files written at a time as their owner, and their bytes in memory
_BATCH = 64
_BATCH_BYTES = 4 * 1024**2


def write_entries(
    read: Read, entries: Sequence[TreeEntry], writer: TreeWriter
) -> dict[bytes, Entry]:
    """Write entries, each directory before its content; `recorded` adds the stat of directories."""
    written: dict[bytes, Entry] = {}
    batch: list[tuple[TreeEntry, Entry, bytes]] = []
    size = 0
    for entry in entries:
        record, data = read(entry)
        batch.append((entry, record, data))
        size += len(data)
        if len(batch) == _BATCH or size > _BATCH_BYTES or entry is entries[-1]:
            with writer.owner:  # once for many; the owner may not read the mirror
                written |= {
                    tree_entry.path: _write(writer, tree_entry, record, it)
                    for tree_entry, record, it in batch
                }
            batch, size = [], 0
    return written


def share_entries(
    objects: Objects,
    conversions: Conversions,
    entries: Iterable[TreeEntry],
    writer: TreeWriter,
    shared: "SharedFiles",
) -> dict[bytes, Entry]:
    """Write entries of a layer, which is read-only: regular files are links into `shared`."""
    written: dict[bytes, Entry] = {}
    for entry in entries:
        path, executable = entry.path, entry.is_executable
        is_file = stat.S_ISREG(entry.mode)
        is_plain = is_file and not conversions.find(path)
        if is_plain and (st := shared.link(entry.oid, writer, path, executable=executable)):
            written[path] = unrecorded(entry).with_stat(st)
            continue
        record = _write(writer, entry, *read_object(objects, conversions, entry))
        if is_file:
            added = shared.add(record.content.hex(), writer, path, executable=executable)
            record = record.with_stat(added)
        written[path] = record
    return written


def _write(writer: TreeWriter, entry: TreeEntry, record: Entry, data: bytes) -> Entry:
    if entry.is_tree or entry.is_submodule:
        writer.make_directory(entry.path)
        return record
    if entry.is_symlink:
        return record.with_stat(writer.write_symlink(entry.path, data))
    return record.with_stat(writer.write_file(entry.path, data, executable=entry.is_executable))


def recorded(info: CommitInfo, files: dict[bytes, Entry], writer: TreeWriter) -> Manifest:
    """Return the manifest of a tree that was just written."""
    _record_directories(files, writer)
    return Manifest(info.commit, info.tree, clock_ns(), Entries(files))


def _record_directories(files: MutableMapping[bytes, Entry], writer: TreeWriter) -> None:
    """Record the stat of directories that were made or changed, once their content is written."""
    made = {}
    for path in sorted(writer.touched):
        entry = files.get(path)
        if entry is not None and entry.is_directory:
            made[path] = entry
    for path, seen in writer.stats_of(made).items():
        files[path] = made[path].with_stat(seen)
