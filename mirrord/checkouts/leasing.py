"""Who gets a lease, who may work on one, what is answered of it, and when it ends by itself.

A checkout answers to its owner, to the uid that took it, and to administrators; for others it does
not exist. The work itself is in `service.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from .. import protocol
from ..errors import CheckoutBusyError, StoppingError
from ..host.namespaces import Visible
from ..host.peers import Owners, Peer
from ..host.pidfds import Process, ProcessWatch, process_gone
from ..host.processes import Owner
from ..host.trash import Trash
from ..jobs.events import Events
from ..model import Backend, Bind, History, View
from .admission import Admission, must_mount
from .leases import Lease, Leases, LeaseState, SavedState, not_found
from .lifecycle import Lifecycle
from .quotas import Quotas
from .resolve import ResolvedRequest

_SHOWN = (
    *("id", "commit", "tree", "instance", "history", "view", "backend"),
    *("owner_uid", "owner_gid", "taken_by", "created_at", "expires_at", "parent", "resets"),
)


class Admitted(NamedTuple):
    """A checkout that its asker may have."""

    owner: Owner
    taken_by: int
    backends: list[Backend]
    ttl: timedelta
    history: History
    view: View
    process: Process | None


@dataclass(kw_only=True, eq=False, repr=False)
class Leasing:
    """The leases of a daemon. Belongs to one event loop."""

    admission: Admission
    owners: Owners
    leases: Leases
    lifecycle: Lifecycle
    quotas: Quotas
    events: Events
    trash: Trash
    clock: Callable[[], datetime]
    default_history: Callable[[], History]
    is_closing: bool = False

    def __post_init__(self) -> None:
        self.expiry = Expiry(self.leases, self.lifecycle, self.trash, self.publish, self.clock)

    async def admit(
        self, request: protocol.StartCheckout, peer: Peer, process: Process | None
    ) -> Admitted:
        """Judge whether the peer may have such a checkout; nothing was looked up before."""
        self.must_be_open()
        history = request.history or self.default_history()
        ttl = self.admission.ttl(request.ttl, peer)
        owner = await self.owners.find(request.owner, peer)
        self.admission.check(peer, owner, request.view, history)
        await self.quotas.ensure("make a checkout", peer.uid, owner[0])
        asked, visible = request.backend, Visible.MOUNTS
        if request.attach:
            asked = asked or Backend.OVERLAY
        else:
            visible = await self.admission.visible_to(peer)
        backends = self.admission.choose_backends(asked, history, visible)
        if request.environment is not None:
            backends = must_mount(backends)
        return Admitted(owner, peer.uid, backends, ttl, history, request.view, process)

    async def begin(
        self, admitted: Admitted, found: ResolvedRequest, **more: Any
    ) -> tuple[Lease, dict[str, float]]:
        """Hand out a checkout of a commit."""
        now = self.clock()
        draft = partial(
            Lease,
            **found._asdict(),
            history=admitted.history,
            view=admitted.view,
            owner_uid=admitted.owner[0],
            owner_gid=admitted.owner[1],
            taken_by=admitted.taken_by,
            created_at=now,
            expires_at=now + admitted.ttl,
            bound_to=admitted.process,
            **more,
        )
        with self.admission.counted(admitted.taken_by, admitted.owner[0]):
            return await self.hand_out(draft, admitted.backends, admitted.process)

    async def hand_out(
        self, draft: Callable[..., Lease], backends: Sequence[Backend], process: Process | None
    ) -> tuple[Lease, dict[str, float]]:
        """Make a checkout, which ends with `process`, if one is given."""
        lease, timings = await self.lifecycle.make(draft, backends)
        if process is not None:
            self.expiry.bind(lease, process)
        return lease, timings

    @asynccontextmanager
    async def held(self, checkout: str, peer: Peer) -> AsyncIterator[Lease]:
        """The peer's lease, with its lock; it may end while we wait for that."""
        self.must_be_open()
        checkout_id = self.get(checkout, peer).id
        async with self.lifecycle.locked(checkout_id):
            lease = self.leases.find(checkout_id)
            if lease is None:
                raise not_found(checkout)
            yield lease

    def get(self, checkout: str, peer: Peer) -> Lease:
        lease = self.leases.get(checkout)
        if not self.admission.may_see(lease, peer):
            raise not_found(checkout)
        return lease

    def must_be_open(self) -> None:
        if self.is_closing:
            message = "cannot work on checkouts: the daemon is stopping"
            raise StoppingError(message, hint="try again in a moment")

    def publish(self, name: str, lease: Lease, **fields: Any) -> None:
        for plain in ("commit", "instance", "owner_uid", "taken_by"):
            fields[plain] = getattr(lease, plain)
        for enum in ("mirror", "backend", "history"):
            fields[enum] = str(getattr(lease, enum))
        self.events.publish(name, checkout=lease.id, **fields)


def must_be_whole(lease: Lease) -> None:
    """The tree is its commit's, or its owner's work on it."""
    if lease.state is LeaseState.RESETTING:
        raise CheckoutBusyError(
            f"cannot work on checkout {lease.id}: its last reset failed half-way",
            hint="reset it again, or release it",
        )


def members(lease: Lease, timings: dict[str, float]) -> dict[str, Any]:
    return {name: getattr(lease, name) for name in _SHOWN} | {
        "path": f"{lease.directory}/tree",
        "directory": str(lease.directory),
        "mirror": str(lease.mirror),
        "layer": lease.saved.name if lease.saved else None,
        "environment": str(lease.environment) if lease.environment else None,
        "bind": Bind.PROCESS if lease.bound_to else Bind.LEASE,
        "volumes": [volume.name for volume in lease.volumes],
        "timings": timings,
    }


def copied(snapshot: SavedState) -> protocol.Copied:
    names = ("taken_at", "files", "size_bytes", "left_out", "git")
    return protocol.Copied(**{name: getattr(snapshot, name) for name in names})


def shown_snapshot(lease: Lease, snapshot: SavedState) -> protocol.Snapshot:
    return protocol.Snapshot(
        name=snapshot.name,
        checkout=lease.id,
        commit=snapshot.commit,
        instance=snapshot.instance,
        copied=copied(snapshot),
    )


class Expiry:
    """Ends leases at their deadlines, and with the processes that they are bound to; renews those
    that are mounted as volumes.

    `publish` takes the name of an event and its lease. Belongs to one event loop.
    """

    def __init__(
        self,
        leases: Leases,
        lifecycle: Lifecycle,
        trash: Trash,
        publish: Callable[[str, Lease], Any],
        clock: Callable[[], datetime],
    ) -> None:
        self._leases = leases
        self._lifecycle = lifecycle
        self._trash = trash
        self._publish = publish
        self._clock = clock
        self._closing = False
        self._process_ended = asyncio.Event()
        self._processes = ProcessWatch(self._process_ended.set)
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """End the leases of an earlier daemon whose process has ended meanwhile; watch the rest."""
        for lease in self._leases:
            if lease.bound_to:
                self._processes.hold(lease.bound_to)
        await self.expire()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        self._closing = True
        if self._watching:
            self._watching.cancel()
        self._processes.keep_only(())

    def bind(self, lease: Lease, process: Process) -> None:
        """End a new lease with `process`; at once, with ProcessGoneError, where that has ended."""
        try:
            if not self._processes.hold(process):
                raise process_gone(process.pid)
        except BaseException:
            self._lifecycle.end(lease)
            raise

    async def expire(self) -> int:
        """Release idle checkouts that are past their deadline, or have outlived their process;
        answers how many.
        """
        if self._closing:
            return 0
        self._processes.keep_only({lease.bound_to for lease in self._leases if lease.bound_to})
        count = 0
        for lease in filter(self._is_over, self._leases):
            if self._lifecycle.is_locked(lease.id):
                continue
            async with self._lifecycle.locked(lease.id):
                current = self._leases.find(lease.id)
                if current is None or not self._is_over(current):
                    continue
                mounted = [each for each in current.volumes if each.mounted_by]
                if mounted and not self._is_orphaned(current):
                    ttl = timedelta(seconds=max(each.ttl_s for each in mounted))
                    self._leases.save(replace(current, expires_at=self._clock() + ttl))
                    continue
                self._lifecycle.end(current)
            self._publish("checkout.expired", current)
            await self._trash.keep_up()
            count += 1
        return count

    def _is_over(self, lease: Lease) -> bool:
        return self._is_orphaned(lease) or lease.expires_at <= self._clock()

    def _is_orphaned(self, lease: Lease) -> bool:
        return lease.bound_to is not None and lease.bound_to not in self._processes

    async def _watch(self) -> None:
        while True:
            await self._process_ended.wait()
            self._process_ended.clear()
            await self.expire()
