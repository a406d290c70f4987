"""One pooled tree: made, brought back to clean, moved on. The sync half of `pool.py`, run in workers.

Owns the order of the steps. The manifest beside the tree always describes an earlier clean state, and is replaced last: a call
that was killed can simply be made again. Where the manifest or the tree's top is unusable, the tree is written anew.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ..errors import ProofFailedError
from ..host.files import full_disk_named, open_directory, opened, remove
from ..protocol import Proof
from . import control, linked
from .calls import Place
from .hashing import hash_tree, tree_id
from .index import index_bytes
from .manifest import Manifest
from .proof import require, unsettled
from .scan import Changes, scan
from .tree import materialise, move, repair

_ROUNDS = 3
T = TypeVar("T")


def make(place: Place, commit: str, tree: str, warm: Path | None) -> tuple[str, dict[str, float]]:
    """Make the checkout, of the warm tree in the directory `warm` where there is one; the verified tree and seconds per step."""
    timings: dict[str, float] = {}
    with full_disk_named(f"checkout {place.directory.name}"):
        if warm is not None and _timed(timings, "take", lambda: _take(warm, place)):
            proof = _timed(timings, "reset", lambda: reset(place, commit, tree))
            return proof.tree, timings
        manifest = _timed(timings, "tree", lambda: _write_anew(place, commit, tree))
        _timed(timings, "git", lambda: _control(place, commit, manifest))
        manifest.save(place.manifest)
    return manifest.tree, timings


def reset(place: Place, commit: str, tree: str) -> Proof:
    """Bring the checkout to `commit`, whatever was done to it, and prove it."""
    with full_disk_named(f"checkout {place.directory.name}"):
        found, manifest, method = _clean(place, commit, tree)
        if manifest.commit != commit:
            manifest = move(place.mirror, manifest, commit, place.tree)
            method += ", moved by the tree difference"
        controlled = _control(place, commit, manifest)
        manifest.save(place.manifest)
    proof = Proof(
        head=place.head,
        tree=tree_id(manifest),
        index=controlled.index,
        control_files=controlled.files,
        files_checked=found.looked_at,
        files_restored=len([path for path in (*found.modified, *found.missing) if path]),
        files_removed=len([path for path in found.extra if path != b".git"]),
        refs=list(controlled.refs),
        packs=list(controlled.packs),
        method=method,
    )
    return require(proof, head=place.head, tree=tree)


def changed_paths(place: Place) -> list[bytes]:
    """What may differ from the clean state; everything, where the tree's top is not what it was."""
    manifest = Manifest.load(place.manifest)
    if not _has_top(place):
        return sorted(filter(None, manifest.files))
    return sorted(path for path in scan(place.tree, manifest).in_tree() if path)


def _clean(place: Place, commit: str, tree: str) -> tuple[Changes, Manifest, str]:
    """Make the tree equal to its manifest. Each round repairs what it found; the last one must find nothing."""
    manifest = _find_manifest(place)
    if manifest is None or not _has_top(place):
        return Changes(), _write_anew(place, commit, tree), "written anew, read back"
    first = found = scan(place.tree, manifest)
    for _ in range(_ROUNDS):
        if not found.in_tree():
            return first, manifest.settled(found.began_ns), "stat against the private manifest, content where stat proves nothing"
        manifest = repair(place.mirror, manifest, found, place.tree)
        found = scan(place.tree, manifest)
    if found.in_tree():
        raise unsettled(_ROUNDS, found.in_tree())
    return first, manifest.settled(found.began_ns), "stat against the private manifest, content where stat proves nothing"


def _write_anew(place: Place, commit: str, tree: str) -> Manifest:
    """Write the whole tree into a new directory, and read it back."""
    with opened(open_directory(place.directory)) as above:
        remove(above, b"tree")
    manifest = materialise(place.mirror, commit, place.tree, owner=place.owner)
    seen = hash_tree(place.tree, manifest)
    if seen != tree:
        raise ProofFailedError(
            f"cannot prove tree {tree}: what was written is {seen}", hint="audit the mirror", wanted=tree, seen=seen
        )
    return manifest


def _control(place: Place, commit: str, manifest: Manifest) -> control.Control:
    index = index_bytes(manifest)
    if place.store is None:
        return linked.link(place.directory, place.mirror, commit, index, place.owner)
    built = control.build(place.directory, place.store, index, place.owner)
    control.install(place.directory)
    return built


def _find_manifest(place: Place) -> Manifest | None:
    try:
        manifest = Manifest.load(place.manifest)
    except (FileNotFoundError, ProofFailedError):
        return None
    return manifest if (manifest.owner_uid, manifest.owner_gid) == place.owner else None


def _has_top(place: Place) -> bool:
    """Whether the tree's top is a directory of its owner's, not a link or something else in its place."""
    try:
        found = os.lstat(place.tree)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and (found.st_uid, found.st_gid) == place.owner


def _take(warm: Path, place: Place) -> bool:
    """Move a kept tree and its manifest into a new checkout."""
    try:
        (warm / "manifest").rename(place.manifest)
        (warm / "tree").rename(place.tree)
    except FileNotFoundError:
        return False
    finally:
        with suppress(OSError):
            control.discard(warm)
    return True


def _timed(timings: dict[str, float], step: str, work: Callable[[], T]) -> T:
    began = time.perf_counter()
    try:
        return work()
    finally:
        timings[step] = round(time.perf_counter() - began, 6)
