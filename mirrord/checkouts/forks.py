"""Forks and snapshots: copies of a checkout as layers, under a name or for another lease."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from ..changes.pieces import CopyLimits, CopyRule, Taken
from ..errors import ConflictError, LimitReachedError, NotFoundError
from ..model import CheckoutId, LayerId, shown
from .backend import CheckoutBackend
from .layers import Layers
from .lease import Lease, SavedState
from .leases import Leases

# each is an entry of the lease's file, which is written whole
SNAPSHOTS_LIMIT = 128

# last copies, which the next one shares where nothing changed; one forgotten is copied again
_LATEST_MIN = 64


@dataclass(eq=False, repr=False)
class Forks:
    """Forks and snapshots of checkouts; the caller holds the checkout's lock."""

    leases: Leases
    layers: Layers
    backend_of: Callable[[Lease], CheckoutBackend]
    limits: Callable[[], CopyLimits]

    def __post_init__(self) -> None:
        # the last copy of each checkout, and of its environment
        self._latest: dict[tuple[CheckoutId, CopyRule], LayerId] = {}
        self._looked_through_at = _LATEST_MIN

    @asynccontextmanager
    async def source(self, lease: Lease, name: str | None) -> AsyncIterator[SavedState]:
        """Yield the state to fork: a snapshot, or a copy of the present one. The layers of a copy
        are removed at the end unless a lease refers to them.
        """
        if name is not None:
            yield self.get(lease, name)
            return
        async with AsyncExitStack() as stack:
            copied = self._copied(lease, CopyRule(self.limits()))
            layer, taken = await stack.enter_async_context(copied)
            environment_layer = None
            if lease.base.environment is not None:
                copied = self._copied(lease, CopyRule(self.limits(), of_environment=True))
                environment_layer, beside = await stack.enter_async_context(copied)
                taken = taken.plus(beside)
            yield SavedState(
                name="",
                base=replace(lease.base, layer=layer, environment_layer=environment_layer),
                taken_at=taken.taken_at,
                files=taken.files,
                size_bytes=taken.size_bytes,
                left_out=taken.left_out,
                git=taken.git,
            )

    @asynccontextmanager
    async def _copied(self, lease: Lease, what: CopyRule) -> AsyncIterator[tuple[LayerId, Taken]]:
        """Yield a layer with a copy of a checkout: the last one if nothing changed since."""
        latest = self._latest.get((lease.id, what))
        with self.layers.held(latest) as earlier, self.layers.making() as new:
            taken = await self.backend_of(lease).copy_layer(lease, new, earlier, what)
            layer = latest if latest and taken.is_same else LayerId(new.name)
            self._latest[lease.id, what] = layer
            if len(self._latest) > self._looked_through_at:
                self._forget_unused()
            yield layer, taken

    def _forget_unused(self) -> None:
        """Forget the copies that no lease has any more. At twice as many it is time again."""
        self._latest = {
            copied: layer for copied, layer in self._latest.items() if self.layers.is_used(layer)
        }
        self._looked_through_at = max(2 * len(self._latest), _LATEST_MIN)

    async def make(self, lease: Lease, name: str | None) -> SavedState:
        """Save the present state under a name, by default `s1`, `s2` and so on."""
        names = {snapshot.name for snapshot in lease.snapshots}
        if name in names:
            raise ConflictError(
                f"cannot make snapshot {name}: checkout {lease.id} has one of this name",
                hint="remove it first, or choose another name",
            )
        if len(names) >= SNAPSHOTS_LIMIT:
            raise LimitReachedError(
                f"cannot make a snapshot: checkout {lease.id} has {SNAPSHOTS_LIMIT}",
                hint="remove some, or fork the checkout",
                max=SNAPSHOTS_LIMIT,
            )
        # one more than there are names, so one of them is free
        numbers = (f"s{number}" for number in range(1, len(names) + 2))
        async with self.source(lease, None) as source:
            made = replace(
                source,
                name=name or next(candidate for candidate in numbers if candidate not in names),
            )
            self.leases.save(replace(lease, snapshots=(*lease.snapshots, made)))
        return made

    def get(self, lease: Lease, name: str) -> SavedState:
        for snapshot in lease.snapshots:
            if snapshot.name == name:
                return snapshot
        raise NotFoundError(
            f"cannot find snapshot {shown(name)}: checkout {lease.id} has no such snapshot",
            hint=f"see `mirrord snapshot list {lease.id}`",
            kind="snapshot",
        )

    def remove(self, lease: Lease, name: str) -> None:
        """Remove a snapshot, and its layer if no other lease refers to it."""
        gone = self.get(lease, name)
        left = tuple(snapshot for snapshot in lease.snapshots if snapshot is not gone)
        self.leases.save(replace(lease, snapshots=left))
        self.layers.drop_unused(gone.base.own_layers)
