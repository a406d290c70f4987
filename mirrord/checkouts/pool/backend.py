"""The pool backend: real working trees, changed in place to move between commits.

The manifest beside a tree always describes an earlier clean state and is replaced last, so a call
that was killed can be repeated. Without a usable manifest or top directory the tree is written
again. A released tree is removed, never reused (`spares.py`). An environment is a copy beside the
tree, which a reset restores.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread

from ... import errors
from ...changes.pieces import CopyRule, Taken
from ...changes.pools import PoolTree, copy_pool, pool_changes
from ...host.mount_tables import Visible, visible_to
from ...host.namespaces import home
from ...host.overlays import ENVIRONMENT
from ...host.trash import Trash, find_trash, new_trash
from ...model import Backend, CheckoutId, History, LayerId, MirrorName, Target
from ...patches import journal
from ...presence import exists
from ...protocol import Proof
from ...telemetry import elapsed_s, log
from ...trees import dotgit
from ...trees.pooled import _LAID, PoolPaths, make, make_clean
from ...trees.prefix import Prefix, make_prefix
from ..backend import ChangedPaths
from ..layers import layer_path
from ..lease import Directories, Lease, LeaseState, resetting
from ..leases import Leases
from .spares import Spares

if TYPE_CHECKING:  # workers load this module, and need none of them
    from ...templates.environments import EnvironmentStore
    from ...templates.service import Templates
    from ...workers.pool import Workers


@dataclass(eq=False, repr=False)
class PoolBackend:
    """Checkouts as plain directories below `state_dir/checkouts`."""

    name = Backend.POOL

    state_dir: Path
    workers: Workers
    templates: Templates
    mirrors_path: Callable[[MirrorName], Path]
    trash: Trash
    environments: EnvironmentStore

    def __post_init__(self) -> None:
        self.stores = self.templates.stores
        self.spares = Spares(self._write_spare, self.trash)
        # by checkout: the store that it borrows, and the digests of its environments
        self._borrowed: dict[CheckoutId, Path] = {}
        self._held: dict[CheckoutId, frozenset[str]] = {}

    async def open(self) -> None:
        """Remove the records of linked worktrees whose checkout is gone."""
        mirrors = self.state_dir / "mirrors"
        if pruned := await anyio.to_thread.run_sync(dotgit.prune_worktrees, mirrors):
            log.info("worktrees.pruned", count=pruned)

    async def close(self) -> None:
        await self.spares.close()

    async def create(self, lease: Lease) -> tuple[str, dict[str, float]]:
        self._must_be_possible(lease)
        began = time.perf_counter()
        async with self._paths(lease) as paths:
            sealed_s = elapsed_s(began)
            spare = await self.spares.take(lease)
            if spare is None:
                await self.stores.room.ensure(f"write a tree of {lease.base.commit}")
                tree, timings = await self._make(lease, paths)
            else:
                try:
                    tree, timings = await self.workers.run(
                        make, paths, lease.base.commit, lease.base.tree, spare
                    )
                finally:
                    self.trash.add(*spare)
            self._keep(lease)
            if lease.base.environment is not None:
                written = time.perf_counter()
                await self._make_environment(lease, paths.trash)
                timings["environment"] = elapsed_s(written)
        if spare is not None:
            self.spares.order(lease)
        return tree, {"seal": sealed_s} | timings

    async def _write_spare(self, like: Lease) -> None:
        doing = f"write a spare tree of {like.base.commit}"
        await anyio.to_thread.run_sync(self.stores.room.must_suffice, doing)
        for directory in like.directories:
            directory.mkdir(mode=0o700)
        async with self._paths(like) as paths:
            await self._make(like, paths)

    async def _make(self, lease: Lease, paths: PoolPaths) -> tuple[str, dict[str, float]]:
        """Write a new tree: a copy of its template, which serves each further one."""
        with ExitStack() as stack:
            if lease.history is not History.LINKED:
                wanted = lease.template
                template = self.templates.find(*wanted) or await self.templates.ensure(*wanted)
                stack.enter_context(self.templates.holding(template))
                paths = paths._replace(template=template.files)
            return await self.workers.run(make, paths, lease.base.commit, lease.base.tree, None)

    async def reset(self, to: Lease, leases: Leases) -> Proof:
        """Reset in place. A failure after the tree was touched leaves the lease RESETTING."""
        self._must_be_possible(to)
        await self.trash.keep_up()
        async with self._paths(to) as paths:
            before = leases.find(to.id)
            leases.save(resetting(to))
            try:
                proof = await self.workers.run(make_clean, paths, to.base.commit, to.base.tree)
            except (errors.TooLargeError, errors.TreeMountedError):
                leases.save(before or to)  # nothing was touched yet
                raise
            self._keep(to)
            await self._make_environment(to, paths.trash)
        journal.end(to.directories.private)  # of an apply that was killed: the tree is as `to` says
        leases.save(to)
        return proof

    async def adopt(self, lease: Lease) -> None:
        for trash in find_trash(lease.directory):
            self.trash.add(trash)
        self._keep(lease)
        if lease.borrows and self.stores.find(*lease.template) is None:
            try:  # templates are only a cache, which somebody may have removed
                await self.stores.ensure(*lease.template)
            except errors.MirrordError as error:
                log.warning("objects.missing", checkout=lease.id, error=error.message)
        if lease.state is LeaseState.LIVE:  # a reset makes a tree anew, also without a manifest
            # raises where the tree is gone, so that the lease is set aside
            os.stat(lease.tree_path, follow_symlinks=False)

    def _keep(self, lease: Lease) -> None:
        """Keep the store that a checkout borrows and its environments, instead of those before."""
        # the new ones first: what both leases need is never without a holder
        for digest in lease.environments:
            self.environments.hold(digest)
        store = self.stores.hold(self.stores.path(*lease.template)) if lease.borrows else None
        self._let_go(lease.id)
        self._held[lease.id] = lease.environments
        if store is not None:
            self._borrowed[lease.id] = store

    def _let_go(self, checkout: CheckoutId) -> None:
        for digest in self._held.pop(checkout, ()):
            self.environments.drop(digest)
        if (store := self._borrowed.pop(checkout, None)) is not None:
            self.stores.let_go(store)

    async def take_down(self, directories: Directories, lease: Lease | None) -> bool:
        if lease is not None:
            self._let_go(lease.id)
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
        source = self._tree(lease)
        if what.of_environment:
            prefix = self._prefix(lease, new_trash(lease.directory.parent))
            source = PoolTree(
                prefix.path, prefix.manifest, prefix.owner, relocation=prefix.as_built
            )
        return await self.workers.run(
            copy_pool, directory, source, earlier, what, timeout=what.limits.timeout
        )

    def visible_to(self, pid: int) -> Visible:
        return visible_to(pid, self.state_dir / "checkouts")

    def clone(self, lease: Lease, target: Target) -> int:
        raise errors.BackendUnavailableError(
            f"cannot attach checkout {lease.id}: it is a plain directory, not a mount",
            hint=f"bind {lease.directory} with rbind,rslave; where `mirrord doctor` finds"
            " overlays, use the backend overlay",
        )

    def changed_paths(self, lease: Lease) -> ChangedPaths:
        return partial(pool_changes, self._tree(lease))

    def _tree(self, lease: Lease) -> PoolTree:
        manifest = lease.private / (_LAID if lease.base.saved or lease.base.whole else "manifest")
        return PoolTree(lease.tree_path, manifest, lease.owner, lease.history is History.LINKED)

    # -- environments ------------------------------------------------------------------------------

    def _must_be_possible(self, lease: Lease) -> None:
        if lease.base.image is not None:
            raise errors.BackendUnavailableError(
                f"cannot show image {lease.base.environment}: the backend pool mounts nothing, and"
                " a whole root file system is shown by mounts alone",
                hint=f"use the backend overlay; {home.SEEN_BY}"
                if home.is_inside()
                else "use the backend overlay, or no environment; `mirrord doctor` says"
                " what to ask the administrator for",
            )

    async def _make_environment(self, lease: Lease, trash: Path) -> None:
        """Have the environment beside the tree as the lease says; take one away that it lacks."""
        if lease.base.environment is not None:
            await self.workers.run(make_prefix, self._prefix(lease, trash))
        elif exists(left := lease.directories.public / ENVIRONMENT):
            gone = new_trash(lease.directories.public)
            left.rename(gone)
            self.trash.add(gone)

    def _prefix(self, lease: Lease, trash: Path) -> Prefix:
        def path(layer: LayerId) -> Path:
            return layer_path(self.state_dir, layer)

        base, layers = lease.base, tuple[Path, ...]()
        if base.environment is not None:
            saved = base.saved.environment_layers if base.saved else ()
            layers = (
                *map(path, saved),
                *self.environments.lowers(base.environment.digest, base.cover),
            )
        own = path(base.environment_layer) if base.environment_layer else None
        return Prefix(
            lease.directory / ENVIRONMENT, lease.tree_path, lease.private / "environment-manifest",
            layers[::-1], own, lease.owner, trash,
        )  # fmt: skip

    @asynccontextmanager
    async def _paths(self, lease: Lease) -> AsyncIterator[PoolPaths]:
        """Yield the paths for a worker. The store is kept meanwhile; the trash is removed after."""
        layer = layer_path(self.state_dir, lease.base.layer) if lease.base.layer else None
        saved = lease.base.saved.layers if lease.base.saved else ()
        # bottom first: each is written over those before it
        below = tuple(layer_path(self.state_dir, identity) for identity in reversed(saved))
        mirror = self.mirrors_path(lease.mirror)
        trash = new_trash(lease.directories.public.parent)
        wanted, borrows, owner = lease.template, lease.borrows, lease.owner
        with ExitStack() as stack:
            store, head, modules = None, lease.base.commit, None
            if lease.history is not History.LINKED:
                sealed = await self.stores.ensure(*wanted)
                if borrows:
                    # root of a container that was shown it may have written to it
                    sealed = await self.stores.ensure_intact(sealed)
                stack.enter_context(self.stores.holding(sealed))
                store, head = sealed.git, sealed.head
                modules = sealed.path if lease.base.whole else None
            try:
                yield PoolPaths(
                    *lease.directories, mirror, store, head, owner, trash, layer, below,
                    borrows, modules,
                )  # fmt: skip
            finally:
                if exists(trash):
                    self.trash.add(trash)
