"""The portable backend: real working trees that move between commits by what differs.

Released trees are kept warm, only for the same uid: a descriptor that is still open somewhere would
otherwise be a file that two clients share. A restart removes them, as directories without a lease.
"""

import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import anyio.to_thread

from ..errors import BackendUnavailableError, TreeTooLargeError
from ..git.workers import Workers
from ..host.files import mounted_on
from ..host.mounts import mounts_below
from ..host.trash import Trash, find_trash, new_trash
from ..model import Backend, History, MirrorName, Target
from ..protocol import Proof
from ..telemetry import log
from .backend import DIFF_TIMEOUT, ChangedPaths, CopyRule, Taken
from .files.dotgit import prune_worktrees, remove_worktree
from .leases import Directories, Lease, Leases, LeaseState, resetting
from .pool_tree import PoolPaths, base_manifest, changed_paths, copy_checkout, make, make_clean
from .snapshots import layer_path
from .stores.builder import StoreBuilder

_TIMEOUT = timedelta(minutes=10)
_WARM_EACH_MAX, _WARM_MAX = 4, 32  # of one owner and mirror; in all


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
        self._warm: defaultdict[tuple[int, str], list[Directories]] = defaultdict(list)
        self._closed = False

    async def open(self) -> None:
        """Remove the records of linked worktrees whose checkout is gone."""
        if pruned := await anyio.to_thread.run_sync(prune_worktrees, self.state_dir / "mirrors"):
            log.info("worktrees.pruned", count=pruned)

    async def close(self) -> None:
        self._closed = True

    async def create(self, lease: Lease) -> tuple[str, dict[str, float]]:
        began = time.perf_counter()
        async with self._paths(lease) as paths:
            sealed_s = time.perf_counter() - began
            kept = self._warm[lease.owner_uid, lease.mirror.key]
            warm = kept.pop() if kept else None
            if warm is None:
                await self.stores.room.ensure(f"write a tree of {lease.commit}")
            tree, timings = await self.workers.run(
                make, paths, lease.commit, lease.tree, warm, timeout=_TIMEOUT
            )
        return tree, {"seal": round(sealed_s, 6)} | timings

    async def reset(self, to: Lease, leases: Leases) -> Proof:
        """In place: the lease is RESETTING before anything is touched, and a failure is final."""
        await self.trash.keep_up()
        async with self._paths(to) as paths:
            if mounted := await anyio.to_thread.run_sync(mounts_below, str(to.tree_path)):
                raise mounted_on(os.fsencode(mounted[0]))  # not the checkout's: nobody may empty it
            before = leases.find(to.id)
            leases.save(resetting(to))
            try:
                proof = await self.workers.run(
                    make_clean, paths, to.commit, to.tree, timeout=_TIMEOUT
                )
            except TreeTooLargeError:
                leases.save(before or to)  # nothing was touched yet
                raise
        leases.save(to)
        return proof

    async def adopt(self, lease: Lease) -> bool:
        for trash in find_trash(lease.directory):
            self.trash.add(trash)
        return (lease.private / "manifest").exists()

    async def take_down(self, directories: Directories, lease: Lease | None) -> bool:
        if lease is not None and lease.history is History.LINKED:
            await anyio.to_thread.run_sync(
                remove_worktree, self.mirrors_path(lease.mirror), lease.id
            )
        is_mounted = bool(await anyio.to_thread.run_sync(mounts_below, str(directories.public)))
        if self._closed or is_mounted or lease is None or lease.state is not LeaseState.LIVE:
            return False
        kept = self._warm[lease.owner_uid, lease.mirror.key]
        has_room = len(kept) < _WARM_EACH_MAX and sum(map(len, self._warm.values())) < _WARM_MAX
        if not has_room or not (directories.private / "manifest").exists():
            return False
        warm = directories.renamed(f".warm-{lease.id}")
        try:
            directories.private.rename(warm.private)
            directories.public.rename(warm.public)
        except OSError:
            return False
        kept.append(warm)
        return True

    async def template_proven_at(self, lease: Lease) -> datetime | None:
        return None

    async def copy_layer(
        self, lease: Lease, directory: Path, earlier: Path | None, what: CopyRule
    ) -> Taken:
        async with self._paths(lease) as paths:
            return await self.workers.run(
                copy_checkout, paths, directory, earlier, what, timeout=DIFF_TIMEOUT
            )

    def clone(self, lease: Lease, target: Target) -> int:
        raise BackendUnavailableError(
            f"cannot attach checkout {lease.id}: it is a plain directory, not a mount",
            hint=f"bind {lease.directory} with rbind,rslave, or ask for the backend overlay",
        )

    def changed_paths(self, lease: Lease) -> ChangedPaths:
        manifest = base_manifest(lease.private, has_layers=bool(lease.saved))
        return partial(changed_paths, lease.tree_path, manifest)

    @property
    def warm(self) -> list[Directories]:
        """The released trees that are kept."""
        return [each for kept in self._warm.values() for each in kept]

    def drop_warm(self, idle: timedelta) -> None:
        """Remove the released trees that are kept for so long."""
        before = time.time() - idle.total_seconds()
        for kept in self._warm.values():
            for directories in list(kept):
                # a rename set the ctime of what it moved
                with suppress(FileNotFoundError):
                    if directories.private.stat().st_ctime > before:
                        continue
                kept.remove(directories)
                self.trash.add(*directories)

    @asynccontextmanager
    async def _paths(self, lease: Lease) -> AsyncIterator[PoolPaths]:
        """What a worker is told; its store stays inside, and its trash is removed afterwards."""
        mirror = self.mirrors_path(lease.mirror)
        layer = layer_path(self.state_dir, lease.layer) if lease.layer else None
        saved = lease.saved.layers if lease.saved else ()
        below = tuple(layer_path(self.state_dir, each) for each in reversed(saved))
        trash = new_trash(lease.directory.parent)
        with ExitStack() as stack:
            store, head = None, lease.commit
            if lease.history is not History.LINKED:
                sealed = await self.stores.ensure(lease.mirror, lease.commit, lease.history)
                stack.enter_context(self.stores.holding(sealed))
                store, head = sealed.git, sealed.head
            try:
                yield PoolPaths(
                    *lease.directories, mirror, store, head, lease.owner, trash, layer, below
                )
            finally:
                if trash.exists():
                    self.trash.add(trash)
