"""A pool tree in a worker: written, brought back to clean, moved to another commit, proven."""

import errno
import os
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from .. import errors
from ..errors import full_disk_named
from ..git.modes import DIRECTORY
from ..host.files import mounted_on, open_directory, open_top, opened
from ..host.mount_tables import mounts_below
from ..host.trash import TrashDirectory, remove_tree
from ..protocol import Proof
from ..quoting import quote_name
from ..telemetry import elapsed_s, log
from . import dotgit
from .layer import lay, with_layers
from .manifest import Manifest, clock_ns
from .proof import must_prove
from .scan import ScanResult, examine, hash_tree, is_control, prove_directories, scan, tree_id
from .sources import LayerFiles
from .tree import materialise, move, must_fit_from, repair

_LAID = "manifest-laid"  # of the tree with prepared layers, which changes are relative to


class PoolPaths(NamedTuple):
    """What a worker needs of a checkout.

    `store` is the sealed `.git`, which the checkout's own copies or `borrows` from; None links to
    the mirror. `template` are the layers that a new tree is copied from, top first; without them
    it is written from git's objects. Everything that is taken away goes to
    `trash`, which the caller removes. On the clean tree, which the manifest describes, are laid the
    prepared layers `below`, the lowest first, and on them `layer`; first of all what stands beside
    the `.git` in `modules`, a sealed store with submodules.
    """

    directory: Path
    private: Path
    mirror: Path
    store: Path | None
    head: str
    owner: tuple[int, int]
    trash: Path
    layer: Path | None = None
    below: tuple[Path, ...] = ()
    borrows: bool = False
    modules: Path | None = None
    template: tuple[LayerFiles, ...] = ()

    @property
    def tree(self) -> Path:
        return self.directory / "tree"

    @property
    def manifest(self) -> Path:
        return self.private / "manifest"


def make(
    paths: PoolPaths, commit: str, tree: str, spare: tuple[Path, Path] | None
) -> tuple[str, dict[str, float]]:
    """Make a checkout, of a spare tree if given; return its verified hash, and timings."""
    began = time.perf_counter()
    with full_disk_named(f"checkout {paths.directory.name}"):
        if spare is not None:
            public, private = spare
            with suppress(FileNotFoundError):  # somebody removed it
                (private / "manifest").rename(paths.manifest)
                (public / "tree").rename(paths.tree)
                taken_s, taken = elapsed_s(began), time.perf_counter()
                verified = make_clean(paths, commit, tree).tree
                return verified, {"take": taken_s, "reset": elapsed_s(taken)}
        with closing(TrashDirectory(paths.trash)) as trash:
            manifest = _write_new(paths, commit, tree, trash)
            tree_s, written = elapsed_s(began), time.perf_counter()
            store = _read_store(paths)
            manifest = _converge(paths, store, commit, manifest, ScanResult(), trash)
        timings = {"tree": tree_s, "git": elapsed_s(written)}
        manifest.save(paths.manifest)
        _lay(paths, manifest)
    return manifest.tree, timings


def make_clean(paths: PoolPaths, commit: str, tree: str) -> Proof:
    """Bring the tree to `commit`, whatever was done to it, and prove it.

    Raises TooLargeError, and TreeMountedError, before it has touched anything.
    """
    root, record = paths.tree, paths.manifest
    if mounted := mounts_below(str(root)):  # what is mounted there is not ours
        raise mounted_on(os.fsencode(mounted[0]), errors.TreeMountedError)
    with full_disk_named(f"checkout {paths.directory.name}"):
        store = _read_store(paths)
        before = _find_manifest(paths)
        if before and before.commit != commit:
            must_fit_from(paths.mirror, before, tree)
        scanned = scan(root, before) if before else ScanResult()
        try:
            with closing(TrashDirectory(paths.trash)) as trash, full_disk_named("the tree"):
                manifest = before or _write_tree(paths, commit, tree, trash)
                after = _converge(paths, store, commit, manifest, scanned, trash)
        except errors.DiskFullError:  # again, removing files at once instead of at the end
            remove_tree(paths.trash)
            trash = TrashDirectory(paths.trash, has_room=False)
            manifest = before or _write_tree(paths, commit, tree, trash)
            after = _converge(paths, store, commit, manifest, scanned, trash)
        if after is not before:
            after.save(record)
        _lay(paths, after)
    method = "written again, read back"
    if before:
        method = "stat against the private manifest, content where stat proves nothing"
        if before.commit != commit:
            method += ", moved by the tree difference"
    proof = Proof(
        head=paths.head,
        tree=after.tree,
        index=after.index,
        control_files=after.control_files,
        files_checked=scanned.looked_at,
        files_restored=scanned.count_restored(),
        files_removed=scanned.count_removed(),
        refs=store.refs if store else [],
        packs=store.pack_names if store else [],
        method=method,
    )
    return must_prove(proof, head=paths.head, tree=tree)


# each scans every path; who still writes in the third writes all the time
_ROUNDS = 3


def _converge(
    paths: PoolPaths,
    store: dotgit.DotGit | None,
    commit: str,
    before: Manifest,
    scanned: ScanResult,
    trash: TrashDirectory,
) -> Manifest:
    """Undo the changes found, move to `commit`, and examine what was touched until all agrees.

    Returns `before` itself if there was nothing to do or record.
    """
    tree = paths.tree
    manifest = before.with_stats(scanned.proven)
    settled_ns = max(before.recorded_ns, scanned.began_ns)
    for turn in range(_ROUNDS):
        begun = manifest
        if scanned.in_tree():
            manifest = repair(paths.mirror, manifest, scanned, tree, trash)
        if manifest.commit != commit:
            old = manifest.files
            manifest = move(paths.mirror, manifest, commit, tree, trash)
            new = {path: manifest.files[path] for path in manifest.files.recorded_since(old)}
            directories = [path for path, entry in new.items() if entry.mode == DIRECTORY]
            prove_directories(
                manifest,
                [path for path in directories if path not in old or old[path].oid != new[path].oid],
            )
        if store is None:
            index = dotgit.index_bytes(manifest)
            manifest = dotgit.link_worktree(paths.directory, paths.mirror, manifest, index, trash)
        elif dotgit.keeps_index(begun, manifest, scanned):
            manifest = dotgit.write_store(tree, manifest, scanned, store, None, trash)
        else:
            index = dotgit.index_bytes(manifest)
            manifest = dotgit.write_store(tree, manifest, scanned, store, index, trash)
        control = [
            path for path, entry in manifest.control.items() if begun.control.get(path) is not entry
        ]
        touched = manifest.files.recorded_since(begun.files) + control
        left = examine(tree, manifest, touched)
        if turn == 0 and scanned.youngest_ns < scanned.began_ns - before.slack_ns:
            settled_ns = left.began_ns  # a change since the scan would show in its times
        if left.is_empty:
            # unsettled: with a later time the next scan need not read those files again
            if manifest is before and not scanned.unsettled:
                return manifest
            return manifest.settled(settled_ns)
        scanned, manifest = left, manifest.with_stats(left.proven)
    dirty = [*scanned.modified, *scanned.missing, *scanned.extra][:10]
    raise errors.ProofFailedError(
        f"cannot prove the checkout clean: a process still writes to it after {_ROUNDS} rounds",
        hint="the checkout was removed; make another, and end its processes before a reset",
        paths=[quote_name(path) for path in dirty],
    )


def _lay(paths: PoolPaths, clean: Manifest) -> None:
    """Lay a checkout's layers on its clean tree; record the result of the prepared ones."""
    if not (paths.modules or paths.below or paths.layer):
        return
    with closing(TrashDirectory(paths.trash)) as trash:
        if paths.modules:
            lay(paths.modules, paths.tree, paths.owner, trash, skips=is_control)
        for layer in paths.below:
            lay(layer, paths.tree, paths.owner, trash)
        if paths.below or paths.modules:
            laid = with_layers(clean, paths.below, paths.tree, paths.modules)
            laid.save(paths.private / _LAID)
        if paths.layer is not None:
            lay(paths.layer, paths.tree, paths.owner, trash)


def _write_new(paths: PoolPaths, commit: str, tree: str, trash: TrashDirectory) -> Manifest:
    """Write the tree of a new checkout, copied from its template where that is sound.

    It is not read back: its bytes had the hashes of git when they were written, and only the
    daemon's user, who could change the manifest as well, knows the path of a checkout until then.
    """
    try:
        manifest = materialise(
            paths.mirror, commit, paths.tree, owner=paths.owner, template=paths.template
        )
        if tree_id(manifest) == tree:
            return manifest.settled(clock_ns())
    except errors.ProofFailedError as error:
        log.warning("template.unsound", tree=tree, problem=error.message)
    return _write_tree(paths, commit, tree, trash)


def _write_tree(paths: PoolPaths, commit: str, tree: str, trash: TrashDirectory) -> Manifest:
    """Write the whole tree to a new directory, and read it back."""
    with opened(open_directory(paths.directory)) as above:
        trash.discard(above, b"tree")
    manifest = materialise(paths.mirror, commit, paths.tree, owner=paths.owner)
    written_ns = clock_ns()
    seen = hash_tree(paths.tree, manifest)
    if seen != tree:
        raise errors.ProofFailedError(
            f"cannot prove tree {tree}: what was written is {seen}",
            hint="audit the mirror",
            wanted=tree,
            seen=seen,
        )
    return manifest.settled(written_ns)


def _read_store(paths: PoolPaths) -> dotgit.DotGit | None:
    return dotgit.read_store(paths.store, borrows=paths.borrows) if paths.store else None


def has_top(tree: Path, owner: tuple[int, int]) -> bool:
    """Return whether the tree's top is a real directory of its owner."""
    try:
        with opened(open_top(tree)) as top:
            st = os.fstat(top)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise  # unreadable is not replaced
        return False
    return (st.st_uid, st.st_gid) == owner


def _find_manifest(paths: PoolPaths) -> Manifest | None:
    """Return the manifest if it and the tree's top directory are usable."""
    record = paths.manifest
    if not has_top(paths.tree, paths.owner):
        return None
    try:
        manifest = Manifest.load(record)
    except (FileNotFoundError, errors.ProofFailedError):
        return None
    return manifest if manifest.owner == paths.owner else None
