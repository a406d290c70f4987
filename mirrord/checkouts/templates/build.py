"""Layers of overlay templates, built: a whole tree (keyframe), or what differs from another layer's tree (delta).

Owns the choice between the two, and what goes into `files/`, the directory that overlayfs gets: changed files, and a whiteout
(character device 0/0) for each name to hide. A layer is proven by content before it is anybody's. Sync; runs in workers. It is
built under a temporary name, which the caller renames or removes.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ...git.objects import CommitInfo, Objects, TreeChange, changes, open_objects, read_commit
from ...host.credentials import ActingAs
from ...host.files import full_disk_named, open_directory, opened
from ..files.blobs import Blobs
from ..files.entries import (
    conversions_for,
    is_attributes,
    mtime_for,
    recorded,
    share_entries,
    unrecorded,
)
from ..files.hashing import hash_tree, tree_id
from ..files.manifest import Manifest
from ..files.tree import materialise, reconverted, root_entry
from ..files.writer import TreeWriter
from .layers import NEAR, Layer, blobs_path, chain_of, write_record
from .stack import (
    laid_on,
    parents,
    prove_delta,
    prove_nothing_else,
    prove_tree_id,
    read_manifest,
    write_index,
)

DEPTH_MAX = 16
_DELTA_SHARE = 2  # a delta on a whole tree may be at most half of it
_DEPTH_RATIO = 1.2  # and that much less with each layer that it lies on
_DEPTH_COST_BYTES = 64 * 1024  # what one more layer to look names up in is worth
_BLOCK_BYTES = 4096
_FIRST_SHARED = 2  # links: ours, and that among the shared files


def build_layer(
    git_dir: Path, commit: str, trees: Path, temporary: Path, known: Sequence[Layer]
) -> Layer:
    """Build and verify the layer of a commit's tree in the directory `temporary`, with its index: on the nearest of the
    `known` layers that are still in `trees` when that is small, else whole.

    Raises CommitUnservableError, TreeTooLargeError, CorruptObjectError, ProofFailedError, DiskFullError.
    """
    with open_objects(git_dir) as objects, full_disk_named(f"a template of {commit[:12]}"):
        info = read_commit(objects, commit)
        temporary.mkdir(mode=0o700)
        there = [layer for layer in known if (trees / layer.name).is_dir()]
        base = _choose_base(objects, info, there, Blobs(blobs_path(trees)))
        if base is None:
            layer, whole = _build_keyframe(git_dir, info, temporary)
        else:
            layer, whole = _build_delta(objects, info, trees, temporary, base, known)
        layer = replace(layer, size_bytes=layer.size_bytes + write_index(whole, temporary))
        write_record(temporary, layer)
        return layer


# -- which base ---------------------------------------------------------------------------------------------------------


def _choose_base(
    objects: Objects, info: CommitInfo, known: Sequence[Layer], shared: Blobs
) -> Layer | None:
    """The layer that costs least to build on; None where a whole tree is better. Looks at those near in time only.

    The deeper a layer lies the less may be built on it, so that there is room below for what is near, and wide steps start high.
    """
    best: tuple[int, Layer] | None = None
    for layer in _candidates(known, info.time):
        penalty = layer.depth * _DEPTH_COST_BYTES
        limit = int(layer.whole_bytes / (_DELTA_SHARE * _DEPTH_RATIO ** (layer.depth - 1)))
        if best is not None:
            limit = min(limit, best[0] - penalty - 1)
        cost = _find_cost(objects, layer.tree, info.tree, limit, shared)
        if cost is not None:
            best = cost + penalty, layer
    return best[1] if best else None


def _candidates(known: Sequence[Layer], time: int) -> list[Layer]:
    """The layers nearest in time, a few of each depth, nearest first."""
    seen: Counter[int] = Counter()
    found: list[Layer] = []
    for layer in sorted(known, key=lambda layer: abs(layer.time - time)):
        if layer.depth < DEPTH_MAX and seen[layer.depth] < NEAR:
            seen[layer.depth] += 1
            found.append(layer)
    return found


def _find_cost(objects: Objects, old: str, new: str, limit: int, shared: Blobs) -> int | None:
    """What a delta costs: the disk space of files that no layer has, and a block for each name in it. None over `limit`.

    A directory takes a block. Another link to a shared file takes none, but about the time in which one is written; whiteouts are
    few.
    """
    total = 0
    for step in changes(objects, old, new):
        entry = step.new
        if entry is None:
            continue
        total += _BLOCK_BYTES
        if (
            not entry.is_tree
            and not entry.is_submodule
            and not shared.has(entry.oid, executable=entry.is_executable)
        ):
            total += objects.blob_size(entry.oid)
        if total > limit:
            return None
    return total


# -- building -----------------------------------------------------------------------------------------------------------


def _build_keyframe(git_dir: Path, info: CommitInfo, temporary: Path) -> tuple[Layer, Manifest]:
    manifest = materialise(git_dir, info.commit, temporary / "files")
    prove_tree_id(hash_tree(temporary / "files", manifest), info.tree)
    prove_nothing_else(temporary / "files", set(manifest.files))
    manifest.save(temporary / "manifest")
    size, _ = _weigh(temporary)
    return Layer(info.tree, None, info.commit, info.time, 1, size, 0, size), manifest


def _build_delta(
    objects: Objects,
    info: CommitInfo,
    trees: Path,
    temporary: Path,
    base: Layer,
    known: Sequence[Layer],
) -> tuple[Layer, Manifest]:
    """The layer, and the manifest of all that it shows."""
    below = read_manifest(trees, chain_of(base, {layer.tree: layer for layer in known}))
    steps = list(changes(objects, base.tree, info.tree))
    files = temporary / "files"
    files.mkdir(mode=0o755)
    with (
        opened(open_directory(files)) as root,
        TreeWriter(root, ActingAs(None), mtime_ns=mtime_for(info.time)) as writer,
    ):
        manifest = _write_delta(objects, info, below, steps, writer, Blobs(blobs_path(trees)))
        whiteouts = _whiteouts(steps)
        _make_directories(whiteouts, writer)
        for path in whiteouts:
            writer.write_whiteout(path)
    manifest.save(temporary / "manifest")
    size, shared = _weigh(temporary)
    layer = Layer(
        tree=info.tree,
        base=base.tree,
        commit=info.commit,
        time=info.time,
        depth=base.depth + 1,
        size_bytes=size,
        shared_bytes=shared,
        whole_bytes=base.whole_bytes,
        removed=tuple(path.decode("latin-1") for path in _removed(steps, whiteouts)),
    )
    prove_delta(files, manifest, whiteouts)
    whole = laid_on(below, manifest, layer)
    prove_tree_id(tree_id(whole), info.tree)
    return layer, whole


def _write_delta(
    objects: Objects,
    info: CommitInfo,
    below: Manifest,
    steps: list[TreeChange],
    writer: TreeWriter,
    shared: Blobs,
) -> Manifest:
    new = [step.new for step in steps if step.new]
    gone = {step.path for step in steps if step.old}
    kept = below.files.copy()
    for path in gone:
        del kept[path]
    after = conversions_for(
        objects, info.commit, kept | {entry.path: unrecorded(entry) for entry in new}
    )
    if any(is_attributes(step.path) for step in steps):
        new += reconverted(objects, below, after, kept)
    directories = {
        entry.path: unrecorded(entry) for entry in new if entry.is_tree or entry.is_submodule
    }
    writer.make_directory(b"")
    _make_directories(
        [*(entry.path for entry in new), *(path + b"/" for path in directories)], writer
    )
    files = share_entries(
        objects, after, [entry for entry in new if entry.path not in directories], writer, shared
    )
    return recorded(info, {b"": root_entry(info.tree), **directories, **files}, writer)


def _make_directories(paths: Iterable[bytes], writer: TreeWriter) -> None:
    """Make the directories above paths of a new layer, each once."""
    for directory in sorted({above for path in paths for above in parents(path)} - writer.touched):
        writer.make_directory(directory)


def _whiteouts(steps: list[TreeChange]) -> list[bytes]:
    """The paths to hide: what vanishes from a directory that is a directory in both trees.

    What is in a directory that a file replaces needs none: overlayfs looks no further down than a file.
    """
    both = {b""} | {
        s.path
        for s in steps
        if s.old and s.new and s.old.is_tree and (s.new.is_tree or s.new.is_submodule)
    }
    return [
        step.path for step in steps if step.new is None and step.path.rpartition(b"/")[0] in both
    ]


def _removed(steps: list[TreeChange], whiteouts: list[bytes]) -> list[bytes]:
    """The top-most paths that the manifest below has and the new tree has not."""
    replaced = [
        s.path
        for s in steps
        if s.old and s.new and s.old.is_tree and not s.new.is_tree and not s.new.is_submodule
    ]
    return sorted({*whiteouts, *replaced})


def _weigh(layer: Path) -> tuple[int, int]:
    """The bytes on disk that a layer has to itself, and those of files that it is the first to share."""
    own = shared = 0
    for above, directories, names in os.walk(layer):
        for name in (*directories, *names):
            found = os.lstat(os.path.join(above, name))
            if not stat.S_ISREG(found.st_mode) or found.st_nlink == 1:
                own += found.st_blocks * 512
            elif found.st_nlink == _FIRST_SHARED:
                shared += found.st_blocks * 512
    return own, shared
