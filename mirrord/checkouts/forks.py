"""Forks and snapshots of held checkouts: their names, bounds and layers.

A snapshot is a layer with a name in the lease, and goes with it. A fork is a lease of its own on
such a layer, or on one that is made for it. The caller holds the lock of the checkout.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from ..errors import SnapshotExistsError, SnapshotNotFoundError, TooManySnapshotsError
from ..model import CheckoutId, LayerId, shown
from .backend import CopyRule, Taken
from .leases import Lease, Leases, SavedState
from .lifecycle import Lifecycle
from .snapshots.layers import Layers

SNAPSHOTS_LIMIT = 128
_LATEST_MAX = 4096


class Forks:
    """Belongs to the event loop."""

    def __init__(self, leases: Leases, layers: Layers, lifecycle: Lifecycle) -> None:
        self._leases = leases
        self._layers = layers
        self._lifecycle = lifecycle
        # what was copied last of a checkout, or of its environment
        self._latest: dict[tuple[CheckoutId, CopyRule], LayerId] = {}

    @asynccontextmanager
    async def source(self, lease: Lease, name: str | None) -> AsyncIterator[SavedState]:
        """What a fork is made of: a snapshot, or the tree as it is. Its layer is removed at the end
        unless a lease refers to it by then.
        """
        if name is not None:
            yield self.get(lease, name)
            return
        async with AsyncExitStack() as stack:
            layer, taken = await stack.enter_async_context(self._copied(lease, CopyRule()))
            environment_layer = None
            if lease.environment is not None:
                copied = self._copied(lease, CopyRule(of_environment=True))
                environment_layer, beside = await stack.enter_async_context(copied)
                taken = taken.plus(beside)
            yield SavedState(
                name="",
                layer=layer,
                commit=lease.commit,
                tree=lease.tree,
                instance=lease.instance,
                dataset=lease.dataset,
                taken_at=taken.at,
                files=taken.files,
                size_bytes=taken.size_bytes,
                left_out=taken.left_out,
                git=taken.git,
                saved=lease.saved,
                environment=lease.environment,
                environment_layer=environment_layer,
            )

    @asynccontextmanager
    async def _copied(self, lease: Lease, what: CopyRule) -> AsyncIterator[tuple[LayerId, Taken]]:
        """A layer with a part of a checkout, made now, or before where nothing changed since."""
        latest = self._latest.get((lease.id, what))
        with self._layers.held(latest) as earlier, self._layers.making() as new:
            backend = self._lifecycle.backend_of(lease)
            taken = await backend.copy_layer(lease, new.path, earlier, what)
            layer = latest if latest and taken.is_same else new.id
            if len(self._latest) >= _LATEST_MAX:
                self._latest.clear()
            self._latest[lease.id, what] = layer
            yield layer, taken

    async def make(self, lease: Lease, name: str | None) -> SavedState:
        """Keep the tree as it is under a name, by default a new one."""
        names = {snapshot.name for snapshot in lease.snapshots}
        if name in names:
            raise SnapshotExistsError(
                f"cannot make snapshot {name}: checkout {lease.id} has one of this name",
                hint="remove it first, or choose another name",
            )
        if len(names) >= SNAPSHOTS_LIMIT:
            raise TooManySnapshotsError(
                f"cannot make a snapshot: checkout {lease.id} has {SNAPSHOTS_LIMIT}",
                hint="remove some, or fork the checkout",
                max=SNAPSHOTS_LIMIT,
            )
        numbers = (f"s{number}" for number in range(1, len(names) + 2))
        async with self.source(lease, None) as source:
            made = replace(source, name=name or next(each for each in numbers if each not in names))
            self._leases.save(replace(lease, snapshots=(*lease.snapshots, made)))
        return made

    def get(self, lease: Lease, name: str) -> SavedState:
        for snapshot in lease.snapshots:
            if snapshot.name == name:
                return snapshot
        raise SnapshotNotFoundError(
            f"cannot find snapshot {shown(name)}: checkout {lease.id} has none of this name",
            hint=f"see `mirrord snapshots {lease.id}`",
        )

    def remove(self, lease: Lease, name: str) -> None:
        """Forget a snapshot; its layer stays as long as a checkout is on it."""
        gone = self.get(lease, name)
        left = tuple(each for each in lease.snapshots if each is not gone)
        self._leases.save(replace(lease, snapshots=left))
        self._layers.drop_unused([gone.layer])
