"""One pooled tree: made, brought back to clean, moved on. The sync half of `backend.py`, run in workers.

Owns the order of the steps. The manifest beside the tree always describes an earlier clean state, and is replaced last: a call
that was killed can simply be made again. Where the manifest or the tree's top is unusable, the tree is written anew.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, MutableMapping
from contextlib import closing, suppress
from dataclasses import replace
from typing import TypeVar

from ...errors import CheckoutBusyError, DiskFullError, ProofFailedError
from ...host.files import full_disk_named, open_directory, opened
from ...host.trash import TrashDirectory
from ...protocol import Proof
from ..backend import must_prove
from ..files.hashing import hash_tree, prove_directories
from ..files.index import Former, index_bytes, spliced_index
from ..files.manifest import DIRECTORY, Entry, Manifest, clock_ns
from ..files.reader import open_top
from ..files.scan import Changes, examine, is_control, scan
from ..files.tree import materialise, move, must_fit_from, repair
from ..leases import Directories
from ..worker_calls import Place
from . import dotgit
from .dotgit import Store, read_store

_ROUNDS = 3
_METHOD = "stat against the private manifest, content where stat proves nothing"
T = TypeVar("T")


def make(
    place: Place, commit: str, tree: str, warm: Directories | None
) -> tuple[str, dict[str, float]]:
    """Make the checkout, of the warm tree in the directory `warm` where there is one; the verified tree and seconds per step."""
    timings: dict[str, float] = {}
    with full_disk_named(f"checkout {place.directory.name}"):
        if warm is not None and _timed(timings, "take", lambda: _take(warm, place)):
            with suppress(CheckoutBusyError):  # something was mounted in it since it was released
                proof = _timed(timings, "reset", lambda: reset(place, commit, tree))
                return proof.tree, timings
        with closing(TrashDirectory(place.grave)) as graves:
            manifest = _timed(timings, "tree", lambda: _write_anew(place, commit, tree, graves))
            manifest = _timed(
                timings,
                "git",
                lambda: _bring(place, _store(place), commit, manifest, Changes(), graves),
            )
        manifest.save(place.manifest)
    return manifest.tree, timings


def reset(place: Place, commit: str, tree: str) -> Proof:
    """Bring the checkout to `commit`, whatever was done to it, and prove it. What had to go is left in `place.grave`."""
    with full_disk_named(f"checkout {place.directory.name}"):
        store = _store(place)
        before = _find_manifest(place) if _has_top(place) else None
        if before and before.commit != commit:
            must_fit_from(place.mirror, before, tree)
        found = scan(place.tree, before) if before else Changes()

        def bring(graves: TrashDirectory) -> Manifest:
            return _bring(
                place,
                store,
                commit,
                before or _write_anew(place, commit, tree, graves),
                found,
                graves,
            )

        after = _with_room(place, bring)
        if after is not before:
            after.save(place.manifest)
    method = _METHOD if before else "written anew, read back"
    if before and before.commit != commit:
        method += ", moved by the tree difference"
    proof = Proof(
        head=place.head,
        tree=after.tree,
        index=after.index,
        control_files=sum(1 for entry in after.control.values() if not entry.is_directory),
        files_checked=found.looked_at,
        files_restored=len(
            [path for path in (*found.modified, *found.missing) if path and not is_control(path)]
        ),
        files_removed=len([path for path in found.extra if not is_control(path)]),
        refs=list(store.refs if store else ()),
        packs=list(store.pack_names if store else ()),
        method=method,
    )
    return must_prove(proof, head=place.head, tree=tree)


def _with_room(place: Place, bring: Callable[[TrashDirectory], Manifest]) -> Manifest:
    """Do it with what shall go only moved away; once more without, where that is what fills the disk."""
    try:
        with closing(TrashDirectory(place.grave)) as graves, full_disk_named("the tree"):
            return bring(graves)
    except DiskFullError:
        dotgit.discard(place.grave)
        return bring(TrashDirectory(place.grave, has_room=False))


def changed_paths(place: Place) -> list[bytes]:
    """What may differ from the clean state; everything, where the tree's top is not what it was."""
    manifest = Manifest.load(place.manifest)
    if not _has_top(place):
        return sorted(filter(None, manifest.files))
    return sorted(path for path in scan(place.tree, manifest).in_tree() if path)


def _bring(
    place: Place,
    store: Store | None,
    commit: str,
    before: Manifest,
    found: Changes,
    graves: TrashDirectory,
) -> Manifest:
    """Undo what was found and move on; then look again at all that was touched, and so on until nothing differs.

    The answer is `before` itself where there is nothing to do, and nothing to record.
    """
    manifest, settled_ns = _proven(before, found), max(before.recorded_ns, found.began_ns)
    for turn in range(_ROUNDS):
        begun = manifest
        manifest = _step(place, store, commit, manifest, found, graves)
        left = examine(place.tree, manifest, _touched(begun, manifest))
        if (
            turn == 0 and found.youngest_ns < found.began_ns - before.slack_ns
        ):  # a change since that reading would show
            settled_ns = left.began_ns
        if left.is_empty:
            return (
                manifest
                if manifest is before and not found.unsettled
                else manifest.settled(settled_ns)
            )
        found, manifest = left, _proven(manifest, left)
    dirty = [*found.modified, *found.missing, *found.extra][:10]
    raise ProofFailedError(
        f"cannot prove the checkout clean: something still writes to it after {_ROUNDS} rounds",
        hint="end the processes that run in the checkout before the reset; it was destroyed,"
        " ask for another",
        paths=[path.decode(errors="backslashreplace") for path in dirty],
    )


def _proven(manifest: Manifest, found: Changes) -> Manifest:
    """The record with the stat of the directories that only look changed."""
    if not found.proven:
        return manifest
    files, control = manifest.files.copy(), dict(manifest.control)
    for path, seen in found.proven.items():
        where: MutableMapping[bytes, Entry] = control if is_control(path) else files
        where[path] = where[path].with_stat(seen)
    return replace(manifest, files=files, control=control)


def _step(
    place: Place,
    store: Store | None,
    commit: str,
    manifest: Manifest,
    found: Changes,
    graves: TrashDirectory,
) -> Manifest:
    """One round over tree and `.git`, which ends with a record of what was left there."""
    begun = manifest
    if found.in_tree():
        manifest = repair(place.mirror, manifest, found, place.tree, graves)
    if manifest.commit != commit:
        before, manifest = manifest, move(place.mirror, manifest, commit, place.tree, graves)
        prove_directories(manifest, _changed_directories(before, manifest))
    if store is None:
        return dotgit.link_worktree(
            place.directory, place.mirror, manifest, index_bytes(manifest), graves
        )
    is_new = manifest is not begun or not dotgit.has_index(manifest, found)
    index = _index(place, begun, manifest) if is_new else None
    return dotgit.bring(place.tree, manifest, found, store, index, graves)


def _index(place: Place, begun: Manifest, manifest: Manifest) -> bytes:
    """The index of `manifest`: that of `begun` with what differs, where it lies there still."""
    former = Former.proven(begun, dotgit.read_index(place.tree, begun))
    return spliced_index(former, manifest) if former else index_bytes(manifest)


def _store(place: Place) -> Store | None:
    return read_store(place.store) if place.store else None


def _touched(before: Manifest, after: Manifest) -> list[bytes]:
    """What was recorded anew."""
    control = [
        path for path, entry in after.control.items() if before.control.get(path) is not entry
    ]
    return after.files.recorded_since(before.files) + control


def _changed_directories(before: Manifest, after: Manifest) -> list[bytes]:
    trees = [
        path
        for path in after.files.recorded_since(before.files)
        if after.files[path].mode == DIRECTORY
    ]
    return [
        path
        for path in trees
        if path not in before.files or before.files[path].oid != after.files[path].oid
    ]


def _write_anew(place: Place, commit: str, tree: str, graves: TrashDirectory) -> Manifest:
    """Write the whole tree into a new directory, and read it back."""
    with opened(open_directory(place.directory)) as above:
        graves.bury(above, b"tree")
    manifest = materialise(place.mirror, commit, place.tree, owner=place.owner)
    written_ns = clock_ns()
    seen = hash_tree(place.tree, manifest)
    if seen != tree:
        raise ProofFailedError(
            f"cannot prove tree {tree}: what was written is {seen}",
            hint="audit the mirror",
            wanted=tree,
            seen=seen,
        )
    return manifest.settled(written_ns)


def _find_manifest(place: Place) -> Manifest | None:
    try:
        manifest = Manifest.load(place.manifest)
    except (FileNotFoundError, ProofFailedError):
        return None
    return manifest if manifest.owner == place.owner else None


def _has_top(place: Place) -> bool:
    """Whether the tree's top is a directory of its owner's, not a link or something else in its place."""
    try:
        with opened(open_top(place.tree)) as top:
            found = os.fstat(top)
    except OSError:
        return False
    return (found.st_uid, found.st_gid) == place.owner


def _take(warm: Directories, place: Place) -> bool:
    """Move a kept tree and its manifest into a new checkout."""
    try:
        (warm.private / "manifest").rename(place.manifest)
        (warm.public / "tree").rename(place.tree)
    except FileNotFoundError:
        return False
    finally:
        for directory in (warm.public, warm.private):
            with suppress(OSError, CheckoutBusyError):
                dotgit.discard(directory)
    return True


def _timed(timings: dict[str, float], step: str, work: Callable[[], T]) -> T:
    began = time.perf_counter()
    try:
        return work()
    finally:
        timings[step] = round(time.perf_counter() - began, 6)
