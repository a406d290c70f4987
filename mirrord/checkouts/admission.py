"""Who gets which checkout, who may work on one, and what is answered of it.

Decides whose it is, with what view, how long, how many, on which backend, and under which names of
commits. A checkout answers to its owner, to the uid that took it, and to administrators; for others
it does not exist. The work itself is in `service.py`.
"""

import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import anyio.to_thread

from .. import errors, protocol
from ..config import Settings
from ..errors import CheckoutBusyError, StoppingError
from ..host.mounts import Visible, shares_mounts, visible_to
from ..host.peers import Access, Owners, Peer, Process, Role
from ..host.processes import Owner, may_give_files_away
from ..host.trash import Trash
from ..jobs.events import Events
from ..model import Backend, Bind, History, View
from ..units import format_duration
from .leases import Lease, Leases, LeaseState, SavedState, not_found
from .lifecycle import Expiry, Lifecycle
from .quotas import Quotas
from .resolve import Naming, ResolvedRequest

_SHOWN = (
    *("id", "commit", "tree", "instance", "history", "view", "backend", "label"),
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
    label: str | None


@dataclass(eq=False, repr=False)
class Leasing:
    """The leases of a daemon, for those who may have them. Belongs to one event loop."""

    settings: Callable[[], Settings]
    access: Access
    leases: Leases
    lifecycle: Lifecycle
    quotas: Quotas
    events: Events
    trash: Trash
    clock: Callable[[], datetime]
    _: KW_ONLY
    has_overlay: bool
    is_closing: bool = False

    def __post_init__(self) -> None:
        self._owners = Owners(self.settings, self.access)
        self._directory = self.leases.public
        self._visible: WeakKeyDictionary[Peer, Visible] = WeakKeyDictionary()
        self._may_give_files_away = may_give_files_away()
        self.expiry = Expiry(self.leases, self.lifecycle, self.trash, self.publish, self.clock)

    # -- who may have what -------------------------------------------------------------------------

    def may_see(self, lease: Lease, peer: Peer) -> bool:
        return peer.uid in {lease.owner_uid, lease.taken_by} or self.access.is_admin(peer.uid)

    def must_be_admin(self, peer: Peer, what: str) -> None:
        """A grader's checkout may be owned by a plain uid, which runs what the agent wrote."""
        if not self.access.is_admin(peer.uid):
            raise errors.AccessError(
                f"cannot {what}: only administrators may",
                hint="see access.admins in the configuration",
            )

    def check(self, peer: Peer, owner: Owner, view: View, history: History) -> None:
        """Raise AccessError unless the peer may have such a checkout for that owner."""
        if view is View.GRADER:
            self.must_be_admin(peer, "check out with the grader view")
        if owner[0] != os.geteuid() and not self._may_give_files_away:
            raise errors.AccessError(
                f"cannot make a checkout for uid {owner[0]}: this daemon runs as uid"
                f" {os.geteuid()} and cannot give files away",
                hint="run the daemon as root, or by systemd/mirrord.service, to serve other users",
            )
        if history is History.LINKED and (peer.uid != os.geteuid() or owner[0] != peer.uid):
            raise errors.AccessError(
                "cannot link a checkout to the mirror: only the daemon's own user can read mirrors",
                hint="ask for sealed or squashed",
            )

    def must_be_gradable(self, graded: Lease, owner: Owner) -> None:
        """Refuse a grade for the uid that the agent had: what it left running reaches both trees.
        Refuse that of a checkout whose owner saved its layer: that is no change of theirs, and
        could be anything.

        Root and the daemon's own user may grade what they ran themselves, administrators what they
        saved.
        """
        agent, saved = graded.owner_uid, graded.saved
        if owner[0] == agent and agent not in (0, os.geteuid()):
            raise errors.AccessError(
                f"cannot grade checkout {graded.id} for uid {owner[0]}: the agent had this uid",
                hint="name another with --owner, or grade as root",
            )
        if saved is not None and saved.saved_by == agent and not self.access.is_admin(agent):
            raise errors.AccessError(
                f"cannot grade checkout {graded.id}: its owner, uid {agent}, saved its layer"
                f" {saved.name}",
                hint="let an administrator save it, or the one who takes the checkouts; or grade"
                " the patch of `mirrord diff` without it",
            )

    def naming(self, peer: Peer) -> Naming:
        role = self.access.role(peer)
        if role is Role.ADMIN:
            return Naming.ANYTHING
        if role is not Role.MEMBER:
            return Naming.NOTHING
        return Naming.PUBLIC if self.settings().access.commits == "any" else Naming.RECORDED

    def ttl(self, asked: float | None, peer: Peer) -> timedelta:
        """The time to live, of `asked` seconds or the default, within `access.ttl_max`."""
        settings = self.settings()
        length = timedelta(seconds=asked) if asked else settings.checkouts.ttl
        longest = settings.access.ttl_max
        if length <= longest or self.access.is_admin(peer.uid):
            return length
        if asked:
            raise errors.TtlTooLongError(
                f"cannot hold a checkout for {format_duration(length)}:"
                f" {format_duration(longest)} is the longest",
                hint="ask for less and renew, or raise access.ttl_max",
                max_s=longest.total_seconds(),
            )
        return longest

    @contextmanager
    def counted(self, taken_by: int, owner_uid: int) -> Iterator[None]:
        """Count a checkout that is being made; raises TooManyCheckoutsError over a limit.

        The limits are `checkouts.max` and, except for administrators, `access.max_per_user` of
        taker and owner. Other users' checkouts never keep an administrator out.
        """
        settings, leases = self.settings(), self.leases
        most, most_each, held = settings.checkouts.max, settings.access.max_per_user, leases.count
        if self.access.is_admin(taken_by):
            held = sum(n for uid, n in leases.taken_by.items() if self.access.is_admin(uid))
        else:
            for uid in (taken_by, owner_uid):
                if leases.held_by[uid] >= most_each:
                    message = f"cannot make another checkout: uid {uid} has {most_each}"
                    hint = "release some, or raise access.max_per_user"
                    raise errors.TooManyCheckoutsError(message, hint=hint, max=most_each, uid=uid)
        if held >= most:
            message = f"cannot make another checkout: {most} are held"
            hint = "release some, or raise checkouts.max"
            raise errors.TooManyCheckoutsError(message, hint=hint, max=most)
        leases.add(taken_by, owner_uid)
        try:
            yield
        finally:
            leases.add(taken_by, owner_uid, -1)

    async def visible_to(self, peer: Peer) -> Visible:
        """How much of the checkouts the peer's mount namespace shows; read once a connection."""
        if (known := self._visible.get(peer)) is None:
            known = Visible.MOUNTS
            if not shares_mounts(peer.pid):
                known = await anyio.to_thread.run_sync(visible_to, peer.pid, self._directory)
            self._visible[peer] = known
        return known

    def choose_backends(
        self, asked: Backend | None, history: History, visible: Visible
    ) -> list[Backend]:
        """The backends to try, the best first.

        The pool is never refused by name: other processes may see what the peer does not.
        """
        wanted = asked or self.settings().checkouts.backend
        if (wanted is Backend.AUTO and visible is Visible.NOTHING) or (
            wanted is Backend.OVERLAY and visible < Visible.MOUNTS
        ):
            raise errors.BackendUnavailableError(
                "cannot make a checkout: the mount namespace of the asking process does not show"
                f" {'mounts in ' if visible is Visible.FILES else ''}{self._directory}",
                hint=f"ask with attach and attach it there, mount {self._directory} there with"
                " propagation rslave, or ask for the backend pool",
            )
        if wanted is Backend.POOL or visible is Visible.FILES:
            return [Backend.POOL]
        if self.has_overlay and history is not History.LINKED:
            return [Backend.OVERLAY, Backend.POOL] if wanted is Backend.AUTO else [Backend.OVERLAY]
        if wanted is Backend.AUTO:
            return [Backend.POOL]
        if history is History.LINKED:
            raise errors.InvalidRequestError(
                "cannot link an overlay checkout to a mirror",
                hint="use the backend pool with linked",
            )
        raise errors.BackendUnavailableError(
            "cannot use the overlay backend: this host does not allow it",
            hint="see `mirrord doctor`",
        )

    # -- handed out and held -----------------------------------------------------------------------

    async def admit(
        self, request: protocol.StartCheckout, peer: Peer, process: Process | None
    ) -> Admitted:
        """Judge whether the peer may have such a checkout; nothing was looked up before."""
        self.must_be_open()
        history = request.history or self.settings().checkouts.history
        ttl = self.ttl(request.ttl, peer)
        owner = await self._owners.find(request.owner, peer)
        self.check(peer, owner, request.view, history)
        await self.quotas.ensure("make a checkout", peer.uid, owner[0])
        asked, visible = request.backend, Visible.MOUNTS
        if request.attach:
            asked = asked or Backend.OVERLAY
        else:
            visible = await self.visible_to(peer)
        backends = self.choose_backends(asked, history, visible)
        if request.environment is not None:
            backends = must_mount(backends)
        return Admitted(
            owner, peer.uid, backends, ttl, history, request.view, process, request.label
        )

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
            label=admitted.label,
            **more,
        )
        with self.counted(admitted.taken_by, admitted.owner[0]):
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
    async def held(self, checkout: str, peer: Peer, *, whole: bool = False) -> AsyncIterator[Lease]:
        """The peer's lease, with its lock; it may end while we wait for that. A `whole` one has its
        commit's tree, or its owner's work on it: CheckoutBusyError where a reset failed half-way.
        """
        self.must_be_open()
        checkout_id = self.get(checkout, peer).id
        async with self.lifecycle.locked(checkout_id):
            lease = self.leases.find(checkout_id)
            if lease is None:
                raise not_found(checkout)
            if whole:
                must_be_whole(lease)
            yield lease

    def get(self, checkout: str, peer: Peer) -> Lease:
        lease = self.leases.get(checkout)
        if not self.may_see(lease, peer):
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


def must_mount(backends: list[Backend]) -> list[Backend]:
    """Those that can show an environment; raises BackendUnavailableError where none can."""
    if Backend.OVERLAY in backends:
        return [Backend.OVERLAY]
    raise errors.BackendUnavailableError(
        "cannot show an environment: the backend pool mounts nothing",
        hint="ask for the backend overlay, which needs a host that `mirrord doctor` finds fit,"
        " or for no environment",
    )


def must_be_whole(lease: Lease) -> None:
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
