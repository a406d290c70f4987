"""The pool backend: real working trees, changed in place to move between commits.

The manifest beside a tree always describes an earlier clean state and is replaced last, so a call
that was killed can be repeated. Without a usable manifest or top directory the tree is written
again. A released tree is removed, never reused; a new checkout takes a spare one if there is one
(`spares.py`). A restart removes spares, which have no lease.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio.to_thread

from .. import errors
from ..errors import full_disk_named
from ..host.files import mounted_on, open_directory, opened
from ..host.mounts import Visible, mounts_below, visible_to
from ..host.trash import Trash, TrashDirectory, find_trash, new_trash, remove_tree
from ..model import Backend, History, MirrorName, Target
from ..patches import journal
from ..protocol import Proof
from ..quoting import quote_name
from ..telemetry import elapsed_s, log
from ..trees import dotgit
from ..trees.manifest import DIRECTORY, Manifest, clock_ns
from ..trees.scan import ScanResult, examine, hash_tree, is_control, prove_directories, scan
from ..trees.tree import materialise, move, must_fit_from, repair
from .backend import DIFF_TIMEOUT, ChangedPaths, CopyRule, Taken, must_prove
from .changes import PoolTree, copy_pool, has_top, pool_changes
from .layers import lay, layer_path, with_layers
from .leases import Directories, Lease, Leases, LeaseState, resetting
from .spares import Spares

if TYPE_CHECKING:  # workers load this module, and need neither
    from ..templates.builder import StoreBuilder
    from ..workers.pool import Workers

_TIMEOUT = timedelta(minutes=10)
_ROUNDS = 3
_LAID = "manifest-laid"  # of the tree with prepared layers, which changes are relative to


@dataclass(eq=False, repr=False)
class PoolBackend:
    """Checkouts as plain directories below `state_dir/checkouts`."""

    name = Backend.POOL

    state_dir: Path
    workers: Workers
    stores: StoreBuilder
    mirrors_path: Callable[[MirrorName], Path]
    trash: Trash

    def __post_init__(self) -> None:
        self.spares = Spares(self._write_spare, self.trash)

    async def open(self) -> None:
        """Remove the records of linked worktrees whose checkout is gone."""
        mirrors = self.state_dir / "mirrors"
        if pruned := await anyio.to_thread.run_sync(dotgit.prune_worktrees, mirrors):
            log.info("worktrees.pruned", count=pruned)

    async def close(self) -> None:
        await self.spares.close()

    async def create(self, lease: Lease) -> tuple[str, dict[str, float]]:
        began = time.perf_counter()
        async with self._paths(lease) as paths:
            sealed_s = elapsed_s(began)
            spare = await self.spares.take(lease)
            if spare is None:
                await self.stores.room.ensure(f"write a tree of {lease.base.commit}")
            try:
                tree, timings = await self.workers.run(
                    make, paths, lease.base.commit, lease.base.tree, spare, timeout=_TIMEOUT
                )
            finally:
                if spare is not None:
                    self.trash.add(*spare)
        if spare is not None:
            self.spares.order(lease)
        return tree, {"seal": sealed_s} | timings

    async def _write_spare(self, like: Lease) -> None:
        doing = f"write a spare tree of {like.base.commit}"
        await anyio.to_thread.run_sync(self.stores.room.must_suffice, doing)
        for directory in like.directories:
            directory.mkdir(mode=0o700)
        async with self._paths(like) as paths:
            await self.workers.run(
                make, paths, like.base.commit, like.base.tree, None, timeout=_TIMEOUT
            )

    async def reset(self, to: Lease, leases: Leases) -> Proof:
        """Reset in place. A failure after the tree was touched leaves the lease RESETTING."""
        await self.trash.keep_up()
        async with self._paths(to) as paths:
            if mounted := await anyio.to_thread.run_sync(mounts_below, str(to.tree_path)):
                raise mounted_on(os.fsencode(mounted[0]))  # what is mounted there is not ours
            before = leases.find(to.id)
            leases.save(resetting(to))
            try:
                proof = await self.workers.run(
                    make_clean, paths, to.base.commit, to.base.tree, timeout=_TIMEOUT
                )
            except errors.TreeTooLargeError:
                leases.save(before or to)  # nothing was touched yet
                raise
        journal.end(to.private)  # of an apply that was killed: the tree is as `to` says
        leases.save(to)
        return proof

    async def adopt(self, lease: Lease) -> None:
        for trash in find_trash(lease.directory):
            self.trash.add(trash)
        if lease.state is LeaseState.LIVE:  # a reset makes a tree anew, also without a manifest
            os.stat(lease.tree_path, follow_symlinks=False)

    async def take_down(self, directories: Directories, lease: Lease | None) -> bool:
        if lease is not None and lease.history is History.LINKED:
            await anyio.to_thread.run_sync(
                dotgit.remove_worktree, self.mirrors_path(lease.mirror), lease.id
            )
        return False

    def released(self, lease: Lease) -> None:
        """Have a tree ready for the next checkout. A linked one is known to the mirror by path."""
        if lease.state is LeaseState.LIVE and lease.history is not History.LINKED:
            self.spares.order(lease)

    async def template_proven_at(self, lease: Lease) -> datetime | None:
        return None

    async def copy_layer(
        self, lease: Lease, directory: Path, earlier: Path | None, what: CopyRule
    ) -> Taken:
        return await self.workers.run(
            copy_pool, directory, self._tree(lease), earlier, what, timeout=DIFF_TIMEOUT
        )

    def visible_to(self, pid: int) -> Visible:
        return visible_to(pid, self.state_dir / "checkouts")

    def clone(self, lease: Lease, target: Target) -> int:
        raise errors.BackendUnavailableError(
            f"cannot attach checkout {lease.id}: it is a plain directory, not a mount",
            hint=f"bind {lease.directory} with rbind,rslave, or ask for the backend overlay",
        )

    def changed_paths(self, lease: Lease) -> ChangedPaths:
        return partial(pool_changes, self._tree(lease))

    def _tree(self, lease: Lease) -> PoolTree:
        manifest = lease.private / (_LAID if lease.base.saved else "manifest")
        return PoolTree(lease.tree_path, manifest, lease.owner, lease.history is History.LINKED)

    @asynccontextmanager
    async def _paths(self, lease: Lease) -> AsyncIterator[PoolPaths]:
        """Yield the paths for a worker. The store is kept meanwhile; the trash is removed after."""
        mirror = self.mirrors_path(lease.mirror)
        layer = layer_path(self.state_dir, lease.base.layer) if lease.base.layer else None
        saved = lease.base.saved.layers if lease.base.saved else ()
        below = tuple(layer_path(self.state_dir, each) for each in reversed(saved))
        trash = new_trash(lease.directory.parent)
        with ExitStack() as stack:
            store, head = None, lease.base.commit
            if lease.history is not History.LINKED:
                sealed = await self.stores.ensure(*lease.template)
                stack.enter_context(self.stores.holding(sealed))
                store, head = sealed.git, sealed.head
            try:
                yield PoolPaths(
                    *lease.directories, mirror, store, head, lease.owner, trash, layer, below
                )
            finally:
                if trash.exists():
                    self.trash.add(trash)


# -- in workers ----------------------------------------------------------------------------------


class PoolPaths(NamedTuple):
    """What a worker needs of a checkout.

    `store` is the sealed `.git`; None links to the mirror. Everything that is taken away goes to
    `trash`, which the caller removes. On the clean tree, which the manifest describes, are laid the
    prepared layers `below`, the lowest first, and on them `layer`.
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

    @property
    def tree(self) -> Path:
        return self.directory / "tree"

    @property
    def manifest(self) -> Path:
        return self.private / "manifest"


def make(
    paths: PoolPaths, commit: str, tree: str, spare: Directories | None
) -> tuple[str, dict[str, float]]:
    """Make a checkout, of a spare tree if given; return its verified hash, and timings."""
    began = time.perf_counter()
    with full_disk_named(f"checkout {paths.directory.name}"):
        if spare is not None:
            with suppress(FileNotFoundError):  # somebody removed it
                (spare.private / "manifest").rename(paths.manifest)
                (spare.public / "tree").rename(paths.tree)
                taken_s, taken = elapsed_s(began), time.perf_counter()
                verified = make_clean(paths, commit, tree).tree
                return verified, {"take": taken_s, "reset": elapsed_s(taken)}
        with closing(TrashDirectory(paths.trash)) as trash:
            manifest = _write_tree(paths, commit, tree, trash)
            tree_s, written = elapsed_s(began), time.perf_counter()
            store = dotgit.read_store(paths.store) if paths.store else None
            manifest = _converge(paths, store, commit, manifest, ScanResult(), trash)
        timings = {"tree": tree_s, "git": elapsed_s(written)}
        manifest.save(paths.manifest)
        _lay(paths, manifest)
    return manifest.tree, timings


def make_clean(paths: PoolPaths, commit: str, tree: str) -> Proof:
    """Bring the tree to `commit`, whatever was done to it, and prove it."""
    with full_disk_named(f"checkout {paths.directory.name}"):
        store = dotgit.read_store(paths.store) if paths.store else None
        before = _find_manifest(paths)
        if before and before.commit != commit:
            must_fit_from(paths.mirror, before, tree)
        found = scan(paths.tree, before) if before else ScanResult()
        try:
            with closing(TrashDirectory(paths.trash)) as trash, full_disk_named("the tree"):
                manifest = before or _write_tree(paths, commit, tree, trash)
                after = _converge(paths, store, commit, manifest, found, trash)
        except errors.DiskFullError:  # again, removing files at once instead of at the end
            remove_tree(paths.trash)
            trash = TrashDirectory(paths.trash, has_room=False)
            manifest = before or _write_tree(paths, commit, tree, trash)
            after = _converge(paths, store, commit, manifest, found, trash)
        if after is not before:
            after.save(paths.manifest)
        _lay(paths, after)
    method = "written again, read back"
    if before:
        method = "stat against the private manifest, content where stat proves nothing"
        if before.commit != commit:
            method += ", moved by the tree difference"
    restored = [path for path in (*found.modified, *found.missing) if path and not is_control(path)]
    proof = Proof(
        head=paths.head,
        tree=after.tree,
        index=after.index,
        control_files=sum(not entry.is_directory for entry in after.control.values()),
        files_checked=found.looked_at,
        files_restored=len(restored),
        files_removed=sum(not is_control(path) for path in found.extra),
        refs=store.refs if store else [],
        packs=store.pack_names if store else [],
        method=method,
    )
    return must_prove(proof, head=paths.head, tree=tree)


def _converge(
    paths: PoolPaths,
    store: dotgit.DotGit | None,
    commit: str,
    before: Manifest,
    found: ScanResult,
    trash: TrashDirectory,
) -> Manifest:
    """Undo the changes found, move to `commit`, and examine what was touched until all agrees.

    Returns `before` itself if there was nothing to do or record.
    """
    manifest, settled_ns = before.with_stats(found.proven), max(before.recorded_ns, found.began_ns)
    for turn in range(_ROUNDS):
        begun = manifest
        if found.in_tree():
            manifest = repair(paths.mirror, manifest, found, paths.tree, trash)
        if manifest.commit != commit:
            old = manifest.files
            manifest = move(paths.mirror, manifest, commit, paths.tree, trash)
            new = {path: manifest.files[path] for path in manifest.files.recorded_since(old)}
            directories = [path for path, entry in new.items() if entry.mode == DIRECTORY]
            prove_directories(
                manifest,
                [each for each in directories if each not in old or old[each].oid != new[each].oid],
            )
        if store is None:
            index = dotgit.index_bytes(manifest)
            manifest = dotgit.link_worktree(paths.directory, paths.mirror, manifest, index, trash)
        elif manifest is begun and dotgit.has_index(manifest, found):
            manifest = dotgit.write_store(paths.tree, manifest, found, store, None, trash)
        else:
            index = dotgit.index_bytes(manifest)
            manifest = dotgit.write_store(paths.tree, manifest, found, store, index, trash)
        control = [
            path for path, entry in manifest.control.items() if begun.control.get(path) is not entry
        ]
        touched = manifest.files.recorded_since(begun.files) + control
        left = examine(paths.tree, manifest, touched)
        if turn == 0 and found.youngest_ns < found.began_ns - before.slack_ns:
            settled_ns = left.began_ns  # a change since the scan would show in its times
        if left.is_empty:
            if manifest is before and not found.unsettled:
                return manifest
            return manifest.settled(settled_ns)
        found, manifest = left, manifest.with_stats(left.proven)
    dirty = [*found.modified, *found.missing, *found.extra][:10]
    raise errors.ProofFailedError(
        f"cannot prove the checkout clean: a process still writes to it after {_ROUNDS} rounds",
        hint="the checkout was removed; ask for another, and end its processes before a reset",
        paths=[quote_name(path) for path in dirty],
    )


def _lay(paths: PoolPaths, clean: Manifest) -> None:
    """Lay a checkout's layers on its clean tree; record the result of the prepared ones."""
    with closing(TrashDirectory(paths.trash)) as trash:
        for layer in paths.below:
            lay(layer, paths.tree, paths.owner, trash)
        if paths.below:
            with_layers(clean, paths.below, paths.tree).save(paths.private / _LAID)
        if paths.layer is not None:
            lay(paths.layer, paths.tree, paths.owner, trash)


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


def _find_manifest(paths: PoolPaths) -> Manifest | None:
    """Return the manifest if it and the tree's top directory are usable."""
    if not has_top(paths.tree, paths.owner):
        return None
    try:
        manifest = Manifest.load(paths.manifest)
    except (FileNotFoundError, errors.ProofFailedError):
        return None
    return manifest if manifest.owner == paths.owner else None
