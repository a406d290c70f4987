"""The `.git` of pool checkouts: a copy of a sealed store, or a git worktree of the mirror.

Small files are written. Packs are borrowed from the store, by an alternate, or copied. A file that
the user wrote is never read, only replaced. The index is written from the manifest, so that git
need not read any file. Sync; runs in workers. A crash leaves a `.git` that differs from its record,
which the next call repairs.
"""

import hashlib
import os
import shutil
import stat
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..git.modes import DIRECTORY, FILE, SUBMODULE, file_mode
from ..host.files import open_plain, open_top, opened, read_plain
from ..host.processes import ActingAs
from ..host.trash import TrashDirectory
from ..presence import exists, matching, walk
from ..quoting import decode_name
from .manifest import NO_OBJECT, SECOND_NS, Entry, Manifest, blob_id
from .reader import file_id
from .scan import ScanResult, is_control
from .writer import TreeWriter

_GIT = b".git"
_INDEX = b".git/index"
_INFO = b".git/objects/info"


class DotGit(NamedTuple):
    """The content of a `.git`, by path from the root of the tree; packs by their source path.

    `pack_names` are those of the store, borrowed or copied.
    """

    directories: list[bytes]
    contents: dict[bytes, bytes]
    packs: dict[bytes, Path]
    pack_names: list[str]

    @property
    def refs(self) -> list[str]:
        return refs_in(self.contents.get(b".git/packed-refs", b""))


def refs_in(packed: bytes) -> list[str]:
    """Return the ref names in a packed-refs file; a sealed store has no other refs."""
    lines = (
        line for line in decode_name(packed).split("\n")[:-1] if not line.startswith(("#", "^"))
    )
    return [line.partition(" ")[2] for line in lines]


def read_store(source: Path, *, borrows: bool = False) -> DotGit:
    """Read a sealed `.git`, except an index, which belongs to another checkout.

    With `borrows` the result has no objects of its own: its alternate is the store.
    """
    store = DotGit([], {}, {}, [])
    top = os.fsencode(source)
    for above, _, names in walk(top):
        directory = _GIT + above[len(top) :]
        store.directories.append(directory)
        for name in sorted(names):
            path, file = directory + b"/" + name, os.path.join(above, name)
            if b"/objects/pack/" in path or b"/lfs/objects/" in path:  # also of a submodule
                # copied or borrowed, never hard links: root in a container could write the store
                # through one
                store.packs[path] = Path(os.fsdecode(file))
            elif path != _INDEX:
                store.contents[path] = read_plain(os.fsdecode(file))
    store.pack_names.extend(path.name for path in store.packs.values() if path.suffix == ".pack")
    if borrows and b"\n" not in os.fsencode(source):  # git reads one alternate a line
        for path in [path for path in store.packs if path.startswith(b".git/objects/")]:
            del store.packs[path]
        store.contents.pop(b".git/objects/info/commit-graph", None)  # git reads the store's
        store.directories.extend({_INFO} - set(store.directories))
        store.contents[_INFO + b"/alternates"] = b"%b/objects\n" % os.fsencode(source)
    return store


def _unchanged(manifest: Manifest, scanned: ScanResult) -> dict[bytes, Entry]:
    """Return the control files that a scan found unchanged; none where `.git` itself changed, or
    is the file of a worktree.
    """
    differing = {*scanned.modified, *scanned.missing}
    kept = {path: entry for path, entry in manifest.control.items() if path not in differing}
    return kept if _GIT in kept and kept[_GIT].mode == DIRECTORY else {}


def keeps_index(before: Manifest, manifest: Manifest, scanned: ScanResult) -> bool:
    """Return whether the index is the one of `before`, and valid for `manifest`."""
    return _INDEX in _unchanged(before, scanned) and manifest.is_same_to_git(before)


def write_store(
    tree: Path,
    manifest: Manifest,
    scanned: ScanResult,
    store: DotGit,
    index: bytes | None,
    trash: TrashDirectory,
) -> Manifest:
    """Make `.git` equal to the store; None as `index` keeps the current one.

    Writes only what differs: by the scan in `scanned`, and from the store before.
    """
    contents = store.contents if index is None else store.contents | {_INDEX: index}
    wanted = {*store.directories, *store.contents, *store.packs, _INDEX}
    unchanged = _unchanged(manifest, scanned)
    control = {path: entry for path, entry in unchanged.items() if path in wanted}
    if unchanged:
        gone = [path for path in scanned.extra if is_control(path)]
        # children before their directories
        gone += sorted(unchanged.keys() - wanted, reverse=True)
    else:
        gone = [_GIT]
    directories = [path for path in store.directories if path not in control]
    packs = [path for path, pack in store.packs.items() if not _has_pack(control.get(path), pack)]
    files = {}
    for path, data in contents.items():
        content = blob_id(data)
        if path not in control or control[path].content != content:
            files[path] = content
    if not (gone or directories or files or packs):
        return manifest
    with _opened(tree, manifest, trash) as writer:
        for path in gone:
            writer.remove(path)
        for path in directories:
            writer.make_directory(path)
            control[path] = Entry(DIRECTORY, NO_OBJECT, NO_OBJECT)
        for path, content in files.items():
            control[path] = _record(content, writer.write_file(path, contents[path]))
        for path in packs:
            with open_plain(store.packs[path]) as source:
                # read-only, as git makes its packs
                copied = writer.copy_file(path, source.fileno(), permissions=0o444)
                control[path] = _record(file_id(source.fileno()), copied)
        stats = writer.stats_of(
            [path for path in writer.touched if path in control or path in manifest.files]
        )
    # an index ends with the SHA-1 of what is before
    checksum = manifest.index if index is None else index[-20:].hex()
    return replace(manifest, control=control, index=checksum).with_stats(stats)


def _has_pack(entry: Entry | None, pack: Path) -> bool:
    """A recorded pack of the same name has the same bytes: stores never reuse a name."""
    if entry is None:
        return False
    return stat.S_ISREG(entry.st_mode) and entry.size == pack.stat().st_size


@contextmanager
def _opened(tree: Path, manifest: Manifest, trash: TrashDirectory) -> Iterator[TreeWriter]:
    owner, now_ns = ActingAs(manifest.owner), time.time_ns()
    with (
        opened(open_top(tree)) as root,
        TreeWriter(root, owner, mtime_ns=now_ns, trash=trash) as writer,
    ):
        yield writer


def _record(content: bytes, st: os.stat_result) -> Entry:
    return Entry(FILE, NO_OBJECT, content).with_stat(st)


# -- worktrees of the mirror, for the linked history -----------------------------------------------


def link_worktree(
    directory: Path, mirror: Path, manifest: Manifest, index: bytes, trash: TrashDirectory
) -> Manifest:
    """Make `directory/tree` a worktree of `mirror` with a detached HEAD; replaces its `.git`.

    Written by hand, because libgit2's `add_worktree` always makes a branch in the mirror, and a
    killed `git worktree add` leaves a lock.
    """
    admin = _admin(mirror, directory.name)
    shutil.rmtree(admin, ignore_errors=True)
    admin.mkdir(parents=True)
    # first, so that `git worktree prune` keeps it
    (admin / "locked").write_text("held by a checkout of mirrord\n")
    (admin / "commondir").write_text("../..\n")
    (admin / "gitdir").write_text(f"{directory}/tree/.git\n")
    (admin / "HEAD").write_text(f"{manifest.commit}\n")
    (admin / "index").write_bytes(index)
    with _opened(directory / "tree", manifest, trash) as writer:
        writer.remove(_GIT)
        name = os.fsencode(f"gitdir: {admin}\n")
        control = {_GIT: _record(blob_id(name), writer.write_file(_GIT, name))}
        stats = {b"": writer.get_stat(b"")}
    return replace(manifest, control=control, index=index[-20:].hex()).with_stats(stats)


def remove_worktree(mirror: Path, checkout: str) -> None:
    """Remove the mirror's record of a checkout's worktree; idempotent. Raises OSError."""
    with suppress(FileNotFoundError):
        shutil.rmtree(_admin(mirror, checkout))


def prune_worktrees(mirrors: Path) -> int:
    """Remove the records of worktrees whose checkout is gone; returns how many."""
    count = 0
    for admin in matching(mirrors, "*/worktrees/mirrord-*"):
        try:
            is_alive = exists(Path((admin / "gitdir").read_text().strip()).parent.parent)
        except OSError:
            is_alive = False
        if not is_alive:
            shutil.rmtree(admin, ignore_errors=True)
            count += 1
    return count


def _admin(mirror: Path, checkout: str) -> Path:
    return mirror / "worktrees" / f"mirrord-{checkout}"


# -- the index of a manifest -----------------------------------------------------------------------
#
# git's index, version 2, with the cached-tree extension: `git status` compares stat data only, and
# `git write-tree` finds the trees of unchanged directories.

_ENTRY = struct.Struct(">10I20sH")
# the index has 32 bits for times, inodes and sizes, and git compares as many (gitformat-index)
_LOW = 0xFFFFFFFF
# the length in the flags has 12 bits; of a longer name they are all set
_LONGEST_NAME = 0xFFF
# entries of version 2 end with one to eight zeros, at a multiple of eight
_PADDING = [bytes(8 - (_ENTRY.size + length) % 8) for length in range(8)]


def index_bytes(manifest: Manifest) -> bytes:
    """Return the index of a manifest's tree."""
    files = manifest.files.decoded()
    paths = sorted(path for path, entry in files.items() if entry.mode != DIRECTORY)
    header = struct.pack(">4sII", b"DIRC", 2, len(paths))
    body = b"".join([header, *_packed_entries(files, paths), *_cached_trees(files, paths)])
    return body + hashlib.sha1(body).digest()


def _packed_entries(files: Mapping[bytes, Entry], paths: list[bytes]) -> list[bytes]:
    """Return entries, padded with NULs to a multiple of 8; st_dev is 0, as git ignores it."""
    parts: list[bytes] = []
    pack = _ENTRY.pack
    for path in paths:
        mode, oid, _, _, size, ino, mtime_ns, ctime_ns, uid, gid = files[path]
        length = min(len(path), _LONGEST_NAME)
        if mode == SUBMODULE:
            fixed = pack(0, 0, 0, 0, 0, 0, SUBMODULE, 0, 0, 0, oid, length)
        else:
            if stat.S_ISREG(mode):  # old trees hold modes like 100664
                mode = file_mode(mode)
            ctime, mtime = ctime_ns // SECOND_NS & _LOW, mtime_ns // SECOND_NS & _LOW
            times = ctime, ctime_ns % SECOND_NS, mtime, mtime_ns % SECOND_NS
            fixed = pack(*times, 0, ino & _LOW, mode, uid, gid, size & _LOW, oid, length)
        parts += (fixed, path, _PADDING[len(path) & 7])
    return parts


def _cached_trees(files: Mapping[bytes, Entry], paths: list[bytes]) -> list[bytes]:
    """Return the number of entries and the tree of each directory, parents first, short names
    first.
    """
    counts = Counter([path.rpartition(b"/")[0] for path in paths])
    below: dict[bytes, list[bytes]] = {
        path: [] for path, entry in files.items() if entry.mode == DIRECTORY
    }
    for path in sorted(below, reverse=True):  # children before parents
        if path:
            above = path.rpartition(b"/")[0]
            counts[above] += counts[path]
            below[above].append(path)
    parts: list[bytes] = []
    pending = [b""]
    while pending:
        path = pending.pop()
        subtrees = below[path]
        header = path.rpartition(b"/")[2], counts[path], len(subtrees), files[path].oid
        parts.append(b"%s\0%d %d\n%s" % header)
        # git looks a subtree up by bisection in this order (`subtree_name_cmp`)
        subtrees.sort(reverse=True)
        subtrees.sort(key=len, reverse=True)  # `pending` is popped from its end
        pending += subtrees
    return [struct.pack(">4sI", b"TREE", sum(map(len, parts))), *parts]
