"""Build the layers of overlay templates: a whole tree (keyframe), or the difference from another
layer's tree (delta), with its index, under a temporary name.

A delta's `files` hold the changed files, and a whiteout (character device 0/0) for each name to
hide. A layer is proven by content before anybody gets it. Sync; runs in workers.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...git.objects.commits import CommitInfo, read_commit
from ...git.objects.repository import Objects, open_objects
from ...git.objects.trees import TreeChange, changes
from ...host.credentials import ActingAs
from ...host.files import full_disk_named, open_directory, opened
from ..files.blobs import Blobs
from ..files.hashing import hash_tree, tree_id
from ..files.manifest import Manifest
from ..files.tree import (
    conversions_for,
    is_attributes,
    materialise,
    mtime_for,
    reconverted,
    recorded,
    root_entry,
    share_entries,
    unrecorded,
)
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
_DEPTH_COST_BYTES = 64 * 1024  # the price of one more layer to look names up in
_BLOCK_BYTES = 4096
_FIRST_SHARED = 2  # links: ours, and that among the shared files


def build_layer(
    git_dir: Path, commit: str, trees: Path, temporary: Path, known: Sequence[Layer]
) -> Layer:
    """Build and prove the layer of a commit's tree in the directory `temporary`: on one of the
    `known` layers that are still in `trees` when the difference is small, else whole.

    Raises CommitUnservableError, TreeTooLargeError, CorruptObjectError, ProofFailedError,
    DiskFullError.
    """
    with open_objects(git_dir) as objects, full_disk_named(f"a template of {commit[:12]}"):
        info = read_commit(objects, commit)
        files = temporary / "files"
        temporary.mkdir(mode=0o700)
        there = [layer for layer in known if (trees / layer.name).is_dir()]
        base = _choose_base(objects, info, there, Blobs(blobs_path(trees)))
        removed: list[bytes] = []
        if base is None:
            whole = manifest = materialise(git_dir, info.commit, files)
            prove_tree_id(hash_tree(files, manifest), info.tree)
            prove_nothing_else(files, set(manifest.files))
        else:
            below = read_manifest(trees, chain_of(base, {layer.tree: layer for layer in known}))
            steps = list(changes(objects, base.tree, info.tree))
            hidden, removed = _gone(steps)
            files.mkdir(mode=0o755)
            manifest = _write_delta(objects, info, trees, files, below, steps, hidden)
            prove_delta(files, manifest, hidden)
            whole = laid_on(below, manifest, removed)
            prove_tree_id(tree_id(whole), info.tree)
        manifest.save(temporary / "manifest")
        own_bytes, shared_bytes = _weigh(temporary)
        layer = Layer(
            tree=info.tree,
            base=base.tree if base else None,
            commit=info.commit,
            time=info.time,
            depth=base.depth + 1 if base else 1,
            size_bytes=own_bytes + write_index(whole, temporary),
            shared_bytes=shared_bytes if base else 0,
            whole_bytes=base.whole_bytes if base else own_bytes,
            removed=tuple(path.decode("latin-1") for path in removed),
        )
        write_record(temporary, layer)
        return layer


def _choose_base(
    objects: Objects, info: CommitInfo, known: Sequence[Layer], shared: Blobs
) -> Layer | None:
    """The layer that costs least to build on, of the few nearest in time of each depth; None where
    a whole tree is better.

    Less may be built on a deeper layer: there is room below for near trees, and wide steps start
    high.
    """
    best: tuple[int, Layer] | None = None
    seen: Counter[int] = Counter()
    for layer in sorted(known, key=lambda layer: abs(layer.time - info.time)):
        if layer.depth >= DEPTH_MAX or seen[layer.depth] >= NEAR:
            continue
        seen[layer.depth] += 1
        penalty = layer.depth * _DEPTH_COST_BYTES
        limit = int(layer.whole_bytes / (_DELTA_SHARE * _DEPTH_RATIO ** (layer.depth - 1)))
        if best is not None:
            limit = min(limit, best[0] - penalty - 1)
        cost = _find_cost(objects, layer.tree, info.tree, limit, shared)
        if cost is not None:
            best = cost + penalty, layer
    return best[1] if best else None


def _find_cost(objects: Objects, old: str, new: str, limit: int, shared: Blobs) -> int | None:
    """The cost of a delta: the disk space of files that no layer has, and a block for each name.
    None over `limit`.

    A directory takes a block. Another link to a shared file takes none, but about the time in which
    one is written; whiteouts are few.
    """
    total = 0
    for step in changes(objects, old, new):
        entry = step.new
        if entry is None:
            continue
        total += _BLOCK_BYTES
        is_file = not entry.is_tree and not entry.is_submodule
        if is_file and not shared.has(entry.oid, executable=entry.is_executable):
            total += objects.blob_size(entry.oid)
        if total > limit:
            return None
    return total


def _gone(steps: Sequence[TreeChange]) -> tuple[list[bytes], list[bytes]]:
    """The paths that a delta hides by whiteouts, and the top-most paths that its tree lacks.

    Only a name that vanishes from a directory of both trees needs a whiteout: below a file that
    replaces a directory overlayfs looks no further.
    """
    kept, replaced = {b""}, []
    for step in steps:
        if step.old and step.new and step.old.is_tree:
            if step.new.is_tree or step.new.is_submodule:
                kept.add(step.path)
            else:
                replaced.append(step.path)
    hidden = [s.path for s in steps if s.new is None and s.path.rpartition(b"/")[0] in kept]
    return hidden, sorted({*hidden, *replaced})


def _write_delta(
    objects: Objects,
    info: CommitInfo,
    trees: Path,
    files: Path,
    below: Manifest,
    steps: Sequence[TreeChange],
    hidden: Sequence[bytes],
) -> Manifest:
    """Write changed files, directories and whiteouts into `files`."""
    new = [step.new for step in steps if step.new]
    kept = below.files.copy()
    for path in {step.path for step in steps if step.old}:
        del kept[path]
    after = conversions_for(
        objects, info.commit, kept | {entry.path: unrecorded(entry) for entry in new}
    )
    if any(is_attributes(step.path) for step in steps):
        new += reconverted(objects, below, after, kept)
    directories = {
        entry.path: unrecorded(entry) for entry in new if entry.is_tree or entry.is_submodule
    }
    with (
        opened(open_directory(files)) as root,
        TreeWriter(root, ActingAs(None), mtime_ns=mtime_for(info.time)) as writer,
    ):

        def make_directories(paths: Iterable[bytes]) -> None:
            above = {each for path in paths for each in parents(path)}
            for directory in sorted(above - writer.touched):
                writer.make_directory(directory)

        writer.make_directory(b"")
        make_directories([*(entry.path for entry in new), *(path + b"/" for path in directories)])
        plain = [entry for entry in new if entry.path not in directories]
        written = share_entries(objects, after, plain, writer, Blobs(blobs_path(trees)))
        manifest = recorded(info, {b"": root_entry(info.tree), **directories, **written}, writer)
        make_directories(hidden)
        for path in hidden:
            writer.write_whiteout(path)
    return manifest


def _weigh(layer: Path) -> tuple[int, int]:
    """A layer's own bytes on disk, and those of files that it is the first to share."""
    own = shared = 0
    for above, directories, names in os.walk(layer):
        for name in (*directories, *names):
            found = os.lstat(os.path.join(above, name))
            if not stat.S_ISREG(found.st_mode) or found.st_nlink == 1:
                own += found.st_blocks * 512
            elif found.st_nlink == _FIRST_SHARED:
                shared += found.st_blocks * 512
    return own, shared
