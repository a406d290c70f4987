"""The portable backend: real working trees, kept warm, that move between commits by what differs. Needs no mount.

Owns which released trees are kept and for whom: only for the same uid, because a descriptor that is still open somewhere would
otherwise be a file that two clients share. What is done to one tree is `worktree.py`'s, in workers. A restart removes kept trees.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import anyio.to_thread
import structlog

from ...errors import TreeTooLargeError
from ...git.workers import Workers
from ...host.files import mounted_on
from ...host.mounts import mounts_below
from ...host.trash import Trash, find_trash, new_trash
from ...model import Backend, CommitId, History, MirrorName
from ...protocol import Proof
from ..backend import DIFF_TIMEOUT
from ..leases import Directories, Lease, Leases, LeaseState, resetting
from ..stores.builder import StoreBuilder
from . import dotgit, worktree
from .worktree import Place

_TIMEOUT = timedelta(minutes=10)
_WARM = ".warm-"
_KEPT_EACH = 4
_KEPT = 32

log = structlog.get_logger()


class PoolBackend:
    """Checkouts as plain directories below `state_dir/checkouts`."""

    name = Backend.POOL

    def __init__(
        self,
        *,
        state_dir: Path,
        workers: Workers,
        gitdirs: StoreBuilder,
        mirrors_path: Callable[[MirrorName], Path],
        trash: Trash,
    ) -> None:
        self._mirrors = state_dir / "mirrors"
        self._workers = workers
        self._gitdirs = gitdirs
        self._mirrors_path = mirrors_path
        self._trash = trash
        self._warm: list[tuple[tuple[int, str], Directories]] = []
        self._closed = False

    async def open(self) -> None:
        """Forget linked worktrees whose checkout is gone. Kept trees have no lease, so whoever reads the leases removes them."""
        if pruned := await anyio.to_thread.run_sync(dotgit.prune_worktrees, self._mirrors):
            log.info("worktrees.pruned", count=pruned)

    async def close(self) -> None:
        self._closed = True

    async def create(self, lease: Lease) -> tuple[str, dict[str, float]]:
        began = time.perf_counter()
        place = await self._place(lease, lease.commit)
        sealed = time.perf_counter()
        warm = self._take_warm(lease)
        with self._removed_after(place.grave):
            tree, timings = await self._workers.run(
                worktree.make, place, lease.commit, lease.tree, warm, timeout=_TIMEOUT
            )
        return tree, {"seal": round(sealed - began, 6), **timings}

    async def reset(self, to: Lease, leases: Leases) -> Proof:
        """In place: the lease says where it goes before anything is touched. What fails then cannot be undone."""
        await self._trash.keep_up()
        place = await self._place(to, to.commit)
        await anyio.to_thread.run_sync(_must_be_unmounted, to)
        before = leases.find(to.id)
        leases.save(resetting(to))
        try:
            with self._removed_after(place.grave):
                proof = await self._workers.run(
                    worktree.make_clean, place, to.commit, to.tree, timeout=_TIMEOUT
                )
        except TreeTooLargeError:
            leases.save(before or to)  # found out before anything was touched
            raise
        leases.save(to)
        return proof

    async def adopt(self, lease: Lease) -> bool:
        for grave in find_trash(lease.directory):
            self._trash.add(grave)
        return (lease.private / "manifest").exists()

    async def take_down(self, directories: Directories, lease: Lease | None) -> bool:
        if lease is not None and lease.history is History.LINKED:
            await anyio.to_thread.run_sync(
                dotgit.remove_worktree, self._mirrors_path(lease.mirror), lease.id
            )
        is_mounted = bool(await anyio.to_thread.run_sync(mounts_below, str(directories.public)))
        return lease is not None and not is_mounted and self._keep(directories, lease)

    async def changed_paths(self, lease: Lease) -> list[bytes]:
        place = await self._place(lease, lease.commit)
        return await self._workers.run(worktree.changed_paths, place, timeout=DIFF_TIMEOUT)

    async def _place(self, lease: Lease, commit: CommitId) -> Place:
        store, head = None, commit
        if lease.history is not History.LINKED:
            gitdir = await self._gitdirs.ensure(lease.mirror, commit, lease.history)
            store, head = gitdir.git, gitdir.head
        owner = (lease.owner_uid, lease.owner_gid)
        mirror, grave = self._mirrors_path(lease.mirror), new_trash(lease.directory.parent)
        return Place(lease.directory, lease.private, mirror, store, head, owner, grave)

    @contextmanager
    def _removed_after(self, grave: Path) -> Iterator[None]:
        try:
            yield
        finally:
            if grave.exists():
                self._trash.add(grave)

    # -- kept trees ---------------------------------------------------------------------------------------------------

    def _take_warm(self, lease: Lease) -> Directories | None:
        """The kept tree of this owner and mirror that was released last."""
        wanted = _key(lease)
        for place in range(len(self._warm) - 1, -1, -1):
            if self._warm[place][0] == wanted:
                return self._warm.pop(place)[1]
        return None

    def _keep(self, directories: Directories, lease: Lease) -> bool:
        """Keep a released tree for its owner's next checkout, unless there are enough."""
        key = _key(lease)
        of_owner = sum(1 for kept, _ in self._warm if kept == key)
        is_done = lease.state is LeaseState.LIVE
        if (
            self._closed
            or not is_done
            or of_owner >= _KEPT_EACH
            or len(self._warm) >= _KEPT
            or not (directories.private / "manifest").exists()
        ):
            return False
        warm = directories.renamed(f"{_WARM}{lease.id}")
        try:
            directories.private.rename(warm.private)
            directories.public.rename(warm.public)
        except OSError:
            return False
        self._warm.append((key, warm))
        return True


def _must_be_unmounted(lease: Lease) -> None:
    """What is mounted in a tree is not the checkout's: nobody may empty it."""
    if mounted := mounts_below(str(lease.tree_path)):
        raise mounted_on(os.fsencode(mounted[0]))


def _key(lease: Lease) -> tuple[int, str]:
    return lease.owner_uid, lease.mirror.key
