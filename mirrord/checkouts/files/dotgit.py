"""The `.git` of checkouts as files: copied from a sealed store, or a git worktree of the mirror.

Small files are written, packs are copied, sharing blocks where the file system can. Never a hard
link: root in a container that sees the checkout alone could write the store through one. No file
that its user wrote is ever read: it is the recorded one, or it is replaced. The index is written
from the manifest, so that git need not look at any file. Sync; runs in workers. A crash leaves a
`.git` that its record does not match, which the next call repairs.
"""

import hashlib
import os
import re
import shutil
import stat
import struct
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ...host.files import opened
from ...host.processes import ActingAs
from ...host.trash import TrashDirectory
from .manifest import DIRECTORY, NO_OBJECT, SUBMODULE, Entry, Manifest, Records, blob_id
from .reader import TreeReader, file_id, open_top
from .scan import Changes, is_control
from .writer import TreeWriter

_GIT = b".git"
_INDEX = b".git/index"


class DotGit(NamedTuple):
    """The content of a `.git`, by path from the root of the tree; packs by their source."""

    directories: list[bytes]
    contents: dict[bytes, bytes]
    packs: dict[bytes, Path]

    @property
    def pack_names(self) -> list[str]:
        return [path.name for path in self.packs.values() if path.suffix == ".pack"]

    @property
    def refs(self) -> list[str]:
        """The names in packed-refs: a sealed store has no other refs."""
        lines = self.contents.get(b".git/packed-refs", b"").splitlines()
        named = (line.partition(b" ")[2] for line in lines if not line.startswith((b"#", b"^")))
        return [name.decode(errors="surrogateescape") for name in named]


def read_store(source: Path) -> DotGit:
    """Read a sealed `.git`; an index in it is another checkout's."""
    store = DotGit([], {}, {})
    for above, _, names in os.walk(source):
        directory = os.fsencode(Path(".git") / Path(above).relative_to(source))
        store.directories.append(directory)
        for name in sorted(names):
            path, file = directory + b"/" + os.fsencode(name), Path(above, name)
            if path.startswith(b".git/objects/pack/"):
                store.packs[path] = file
            elif path != _INDEX:
                store.contents[path] = file.read_bytes()
    return store


def _unchanged(manifest: Manifest, found: Changes) -> dict[bytes, Entry]:
    """The recorded control files that a scan found unchanged; none where `.git` itself is not one
    of them, or is the file of a worktree.
    """
    differing = {*found.modified, *found.missing}
    kept = {path: entry for path, entry in manifest.control.items() if path not in differing}
    return kept if _GIT in kept and kept[_GIT].is_directory else {}


def has_index(manifest: Manifest, found: Changes) -> bool:
    """Whether the index is still the written one."""
    return _INDEX in _unchanged(manifest, found)


def read_index(tree: Path, manifest: Manifest) -> bytes:
    """As many bytes of whatever is the index now as the written one had; none where that fails."""
    entry = manifest.control.get(_INDEX)
    if entry is None:
        return b""
    try:
        with (
            opened(open_top(tree)) as root,
            ActingAs(manifest.owner) as owner,
            TreeReader(root, owner) as descent,
            opened(owner.open_regular(*descent.locate(_INDEX))) as fd,
        ):
            return os.read(fd, entry.size)
    except OSError:
        return b""


def write_store(
    tree: Path,
    manifest: Manifest,
    found: Changes,
    store: DotGit,
    index: bytes | None,
    trash: TrashDirectory,
) -> Manifest:
    """Make `.git` equal to the store; an `index` of None stays.

    Touches only what a scan `found`, and what another store had.
    """
    contents = store.contents if index is None else store.contents | {_INDEX: index}
    wanted = {*store.directories, *store.contents, *store.packs, _INDEX}
    unchanged = _unchanged(manifest, found)
    control = {path: entry for path, entry in unchanged.items() if path in wanted}
    with _opened(tree, manifest, trash) as writer:
        if unchanged:
            gone = [path for path in found.extra if is_control(path)]
            for path in (*gone, *sorted(unchanged.keys() - wanted, reverse=True)):
                writer.remove(path)
        else:
            writer.remove(_GIT)
        for path in store.directories:
            if path not in control:
                writer.make_directory(path)
                control[path] = Entry(DIRECTORY, NO_OBJECT, NO_OBJECT, 0, 0, 0, 0, 0, 0, 0)
        for path, data in contents.items():
            content = blob_id(data)
            if path not in control or control[path].content != content:
                control[path] = _record(content, writer.write_file(path, data))
        for path, pack in store.packs.items():
            entry = control.get(path)
            # a recorded pack of the same name has the same bytes: a store never reuses a name
            if not (entry and stat.S_ISREG(entry.st_mode) and entry.size == pack.stat().st_size):
                with pack.open("rb") as source:
                    copied = writer.copy_file(path, source.fileno(), permissions=0o444)
                    control[path] = _record(file_id(source.fileno()), copied)
        files = manifest.files.copy()
        with writer.owner:
            for path in writer.touched:
                where: MutableMapping[bytes, Entry] = control if is_control(path) else files
                if path in where:
                    where[path] = where[path].with_stat(writer.get_stat(path))
    if not writer.touched:
        return manifest
    checksum = manifest.index if index is None else index[-20:].hex()
    return replace(manifest, files=files, control=control, index=checksum)


@contextmanager
def _opened(tree: Path, manifest: Manifest, trash: TrashDirectory) -> Iterator[TreeWriter]:
    owner, now_ns = ActingAs(manifest.owner), time.time_ns()
    with (
        opened(open_top(tree)) as root,
        TreeWriter(root, owner, mtime_ns=now_ns, trash=trash) as writer,
    ):
        yield writer


def _record(content: bytes, found: os.stat_result) -> Entry:
    return Entry(0o100000, NO_OBJECT, content, 0, 0, 0, 0, 0, 0, 0).with_stat(found)


# -- worktrees of the mirror, for trusted callers who may see all of it ----------------------------


def link_worktree(
    directory: Path, mirror: Path, manifest: Manifest, index: bytes, trash: TrashDirectory
) -> Manifest:
    """Make `directory/tree` a worktree of `mirror` with a detached HEAD, whatever its `.git` was.

    Written by hand: libgit2's `add_worktree` always makes a branch in the mirror, and a killed
    `git worktree add` leaves a lock.
    """
    admin = _admin(mirror, directory.name)
    shutil.rmtree(admin, ignore_errors=True)
    admin.mkdir(parents=True)
    # first: `git worktree prune` leaves it alone from now on
    (admin / "locked").write_text("held by a checkout of mirrord\n")
    (admin / "commondir").write_text("../..\n")
    (admin / "gitdir").write_text(f"{directory}/tree/.git\n")
    (admin / "HEAD").write_text(f"{manifest.commit}\n")
    (admin / "index").write_bytes(index)
    with _opened(directory / "tree", manifest, trash) as writer:
        writer.remove(_GIT)
        name = f"gitdir: {admin}\n".encode()
        control = {_GIT: _record(blob_id(name), writer.write_file(_GIT, name))}
        files = manifest.files | {b"": manifest.files[b""].with_stat(writer.get_stat(b""))}
    return replace(manifest, files=files, control=control, index=index[-20:].hex())


def remove_worktree(mirror: Path, checkout: str) -> None:
    """Remove the mirror's record of a checkout's worktree; idempotent. Raises OSError."""
    with suppress(FileNotFoundError):
        shutil.rmtree(_admin(mirror, checkout))


def prune_worktrees(mirrors: Path) -> int:
    """Remove the records of worktrees whose checkout is gone; answers how many."""
    count = 0
    for admin in list(mirrors.glob("*/worktrees/mirrord-*")):
        try:
            is_alive = Path((admin / "gitdir").read_text().strip()).parent.parent.exists()
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
# git's index, version 2, with the cached-tree extension: `git status` compares stat data and hashes
# nothing, `git write-tree` finds the trees of what did not change. An index of ours is spliced into
# the next: what both have is copied.

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


def is_as_written(manifest: Manifest, index: bytes) -> bool:
    """Whether an index has the bytes that were written from a manifest."""
    return hashlib.sha1(index[:-_CHECKSUM_BYTES]).hexdigest() == manifest.index


def index_bytes(manifest: Manifest) -> bytes:
    """The index of the tree that a manifest is of."""
    files = manifest.files.decoded()
    paths = sorted(path for path, entry in files.items() if entry.mode != DIRECTORY)
    return _joined(len(paths), [*_packed_entries(files, paths), _cached_trees(files, paths)])


def spliced_index(previous: Manifest, old: bytes, manifest: Manifest) -> bytes:
    """The bytes of `index_bytes`, for a manifest that goes back to `previous`, whose index is
    `old`.
    """
    before, files = previous.files, manifest.files
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
    if manifest.tree != previous.tree:
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
