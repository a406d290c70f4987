"""Admission: who may have which checkout, for how long, and with how much disk.

A checkout answers to its owner, to the uid that took it, and to administrators; for others it does
not exist. Requests are judged before anything is looked up, so a refusal tells nothing about what
exists. The work itself is in `service.py`.
"""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import anyio
import anyio.to_thread

from ... import errors, protocol
from ...config import Settings
from ...host.mount_tables import Visible, shares_mounts
from ...host.namespaces import home
from ...host.peers import Access, Owners, Peer, Process, Role
from ...host.processes import Owner, is_mapped, may_give_files_away
from ...host.trash import Trash
from ...jobs.events import Events
from ...jsontext import loads
from ...model import Backend, Bind, History, MirrorName, ObjectSource, View, new_checkout_id
from ...templates.store import store_path
from ...units import format_duration
from ..lease import Base, Lease, LeaseState, SavedState, Terms
from ..leases import Leases, not_found
from ..lifecycle import Expiry, Lifecycle
from .quotas import Quotas
from .resolve import Naming


class Admitted(NamedTuple):
    """What a peer may check out, and the backends to try, the preferred first."""

    backends: list[Backend]
    history: History
    terms: Terms
    objects: ObjectSource


@dataclass(eq=False, repr=False)
class Leasing:
    """The leases of a daemon, behind the rights of its peers. Belongs to one event loop."""

    settings: Callable[[], Settings]
    access: Access
    leases: Leases
    lifecycle: Lifecycle
    quotas: Quotas
    events: Events
    trash: Trash
    clock: Callable[[], datetime]
    complete_change: Callable[[Lease], Awaitable[None]]
    _: KW_ONLY
    has_overlay: bool
    is_closing: bool = False

    def __post_init__(self) -> None:
        self._owners = Owners(self.settings, self.access)
        self._directory = self.leases.public
        self._may_give_files_away = may_give_files_away()
        self._visible: WeakKeyDictionary[Peer, Visible] = WeakKeyDictionary()
        self.expiry = Expiry(self.leases, self.lifecycle, self.trash, self.publish, self.clock)

    # -- rights ------------------------------------------------------------------------------------

    def may_see(self, lease: Lease, peer: Peer) -> bool:
        return peer.uid in {lease.terms.owner_uid, lease.terms.taken_by} or self.access.is_admin(
            peer.uid
        )

    def must_be_admin(self, peer: Peer, action: str) -> None:
        """Raise AccessError unless the peer is an administrator.

        A grader's view needs this beside ownership: its checkout may belong to a plain uid, under
        which the agent's code runs.
        """
        if not self.access.is_admin(peer.uid):
            raise errors.AccessError(
                f"cannot {action}: only administrators may",
                hint="see access.admins in the configuration",
            )

    def check(self, peer: Peer, owner: Owner, view: View, history: History) -> None:
        """Raise AccessError unless the peer may have a checkout with these properties."""
        if view is View.GRADER:
            self.must_be_admin(peer, "check out with the grader view")
        if owner[0] != os.geteuid() and not (self._may_give_files_away and is_mapped(owner)):
            raise self._foreign(owner)
        if history is History.LINKED and (peer.uid != os.geteuid() or owner[0] != peer.uid):
            raise errors.AccessError(
                "cannot link a checkout to the mirror: only the daemon's own user can read mirrors",
                hint="use history sealed or squashed",
            )

    def _foreign(self, owner: Owner) -> errors.AccessError:
        reason, hint = "cannot give files away", "use a daemon that runs as root"
        if home.is_inside():
            reason = "may give files to its subordinate uids alone"
            hint = "an administrator adds some to /etc/subuid and /etc/subgid (package uidmap)"
        return errors.AccessError(
            f"cannot make a checkout for uid {owner[0]}: this daemon runs as uid"
            f" {os.geteuid()} and {reason}",
            hint=hint,
        )

    def must_be_gradable(self, graded: Lease, owner_uid: int) -> None:
        """Raise AccessError where the agent could reach into its own grade.

        The grade's owner must not be the agent's uid, whose processes may still run. The checkout's
        owner must not have saved its prepared layer, which is no part of the graded change. Root
        and the daemon's own user may grade what they ran, administrators what they saved.
        """
        agent, saved = graded.terms.owner_uid, graded.base.saved
        if owner_uid == agent and agent not in (0, os.geteuid()):
            raise errors.AccessError(
                f"cannot grade checkout {graded.id} for uid {owner_uid}: the agent had this uid",
                hint="name another with --owner, or grade as root",
            )
        if saved is not None and saved.saved_by == agent and not self.access.is_admin(agent):
            raise errors.AccessError(
                f"cannot grade checkout {graded.id}: its owner, uid {agent}, saved its layer"
                f" {saved.name}",
                hint="have an administrator save the layer, or grade the patch of `mirrord diff`"
                " without it",
            )

    def naming(self, peer: Peer) -> Naming:
        """Return which commits the peer may name."""
        role = self.access.role(peer)
        if role is Role.ADMIN:
            return Naming.ANYTHING
        if role is not Role.MEMBER:
            return Naming.NOTHING
        return Naming.PUBLIC if self.settings().access.commits == "any" else Naming.RECORDED

    def ttl(self, asked: float | None, peer: Peer) -> timedelta:
        """Return the time to live: `asked` seconds or the default, bounded by `access.ttl_max`."""
        settings = self.settings()
        length = timedelta(seconds=asked) if asked else settings.checkouts.ttl
        longest = settings.access.ttl_max
        if length <= longest or self.access.is_admin(peer.uid):
            return length
        if asked:
            raise errors.InvalidRequestError(
                f"cannot hold a checkout for {format_duration(length)}:"
                f" {format_duration(longest)} is the longest",
                hint="use a shorter ttl and renew it, or raise access.ttl_max",
                max_s=longest.total_seconds(),
            )
        return longest

    @contextmanager
    def counted(self, taken_by: int, owner_uid: int) -> Iterator[None]:
        """Count a checkout while it is made. Raises TooManyCheckoutsError over a limit.

        The limits are `checkouts.max` and `access.max_per_user`, the latter for taker and owner and
        not for administrators, who compete with each other alone for `checkouts.max`.
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
            # one that was made is counted by its lease from now on
            leases.add(taken_by, owner_uid, -1)

    async def visible_to(self, peer: Peer) -> Visible:
        """Return how much of the checkouts the peer's mount namespace shows.

        Read once per connection, if it can be read.
        """
        if (visible := self._visible.get(peer)) is not None:
            return visible
        if shares_mounts(peer.pid):
            visible = Visible.MOUNTS
        else:
            backends = self.lifecycle.backends
            preferred = backends.get(Backend.OVERLAY) or backends[Backend.POOL]
            visible = await anyio.to_thread.run_sync(preferred.visible_to, peer.pid)
        if visible is not Visible.UNKNOWN:
            self._visible[peer] = visible
        return visible

    def choose_backends(
        self, asked: Backend | None, history: History, visible: Visible
    ) -> list[Backend]:
        """Return the backends to try, the preferred first.

        An explicit request for the pool is never refused: the tree may be for another process, with
        another mount namespace than the peer's.
        """
        wanted = asked or self.settings().checkouts.backend
        if wanted is Backend.OVERLAY and not self.has_overlay:
            raise errors.BackendUnavailableError(
                "cannot use the overlay backend: this host does not allow it",
                hint="see `place` in `mirrord doctor`; the backend pool serves plain trees",
            )
        if (wanted is Backend.AUTO and visible is Visible.NOTHING) or (
            wanted is Backend.OVERLAY and visible < Visible.MOUNTS
        ):
            where = "mounts in " if wanted is Backend.OVERLAY else ""
            fact = "does not show" if visible is not Visible.UNKNOWN else "may not show"
            raise errors.BackendUnavailableError(
                f"cannot make a checkout: the mount namespace of the asking process {fact}"
                f" {where}{self._directory}",
                hint=f"{home.SEEN_BY}; for a tree alone ask for the backend pool"
                if home.is_inside()
                else f"use --attach, mount {self._directory} there with propagation rslave, or"
                " use the backend pool",
            )
        if wanted is Backend.POOL or visible < Visible.MOUNTS:
            return [Backend.POOL]
        if self.has_overlay and history is not History.LINKED:
            return [Backend.OVERLAY, Backend.POOL] if wanted is Backend.AUTO else [Backend.OVERLAY]
        if wanted is Backend.AUTO:
            return [Backend.POOL]
        raise errors.InvalidRequestError(
            "cannot link an overlay checkout to a mirror",
            hint="use the backend pool with linked",
        )

    # -- leases ------------------------------------------------------------------------------------

    async def admit(
        self, request: protocol.StartCheckout, peer: Peer, process: Process | None
    ) -> Admitted:
        """Decide owner, backends, time to live and history of a requested checkout.

        Raises AccessError, QuotaExceededError, InvalidRequestError, BackendUnavailableError.
        """
        self.must_be_open()
        history = request.history or self.settings().checkouts.history
        ttl = self.ttl(request.ttl, peer)
        owner = await self._owners.find(request.owner, peer)
        self.check(peer, owner, request.view, history)
        await self.quotas.ensure("make a checkout", peer.uid, owner[0])
        backend, visible = request.backend, Visible.MOUNTS
        if request.attach:
            # only a mount can be attached; what the peer's own namespace shows does not matter
            backend = backend or Backend.OVERLAY
        elif not (request.sandbox and home.is_inside()):
            visible = await self.visible_to(peer)
        backends = self.choose_backends(backend, history, visible)
        now = self.clock()
        terms = Terms(
            owner_uid=owner[0], owner_gid=owner[1], taken_by=peer.uid, view=request.view,
            created_at=now, expires_at=now + ttl, bound_to=process, label=request.label,
        )  # fmt: skip
        objects = self._choose_objects(request.objects, owner, visible)
        return Admitted(backends, history, terms, objects)

    def _choose_objects(
        self, requested: ObjectSource | None, owner: Owner, visible: Visible
    ) -> ObjectSource:
        """Return whether the `.git` of a pool tree may borrow: its reader must see the store.

        Others than the daemon's own user may not enter `templates/`, another mount namespace need
        not show it, and where overlays are to be had the pool is asked for containers.
        """
        wanted = requested or self.settings().checkouts.objects
        is_seen = owner[0] == os.geteuid() and visible is Visible.MOUNTS
        if requested is ObjectSource.SHARED and not is_seen:
            raise errors.InvalidRequestError(
                "cannot borrow the objects of a sealed store: the reader of the tree cannot see it",
                hint="use private objects, or name the daemon's own user",
            )
        if not is_seen or (wanted is ObjectSource.AUTO and self.has_overlay):
            return ObjectSource.PRIVATE
        return ObjectSource.PRIVATE if wanted is ObjectSource.PRIVATE else ObjectSource.SHARED

    def draft(self, admitted: Admitted, mirror: MirrorName, base: Base) -> Lease:
        """Return the lease of a new checkout on the preferred backend."""
        checkout = new_checkout_id()
        return Lease(
            id=checkout, directories=self.leases.directories(checkout), mirror=mirror,
            history=admitted.history, backend=admitted.backends[0], base=base,
            terms=admitted.terms, objects=admitted.objects,
        )  # fmt: skip

    async def begin(self, draft: Lease, admitted: Admitted) -> tuple[Lease, dict[str, float]]:
        """Make an admitted checkout, within the limits."""
        with self.counted(draft.terms.taken_by, draft.terms.owner_uid):
            return await self.make(draft, admitted.backends[1:])

    async def make(
        self, draft: Lease, others: Sequence[Backend] = ()
    ) -> tuple[Lease, dict[str, float]]:
        """Make the checkout of a lease, if need be on another backend, and watch the process that
        it is bound to; return the lease that it has, and seconds per step.
        """
        lease, timings = await self.lifecycle.make(draft, others)
        self.expiry.watch_process(lease)
        return lease, timings

    @asynccontextmanager
    async def held(self, checkout: str, peer: Peer, *, live: bool = False) -> AsyncIterator[Lease]:
        """Hold the lock of the peer's lease. Raises CheckoutNotFoundError, also where the lease
        ended during the wait; with `live` CheckoutBusyError where a reset, or what undoes an
        apply, failed half-way.
        """
        self.must_be_open()
        checkout_id = self.get(checkout, peer).id
        async with self.lifecycle.locked(checkout_id):
            lease = self.leases.find(checkout_id)
            if lease is None:
                raise not_found(checkout)
            if live:
                must_be_live(lease)
                await self.complete_change(lease)
            yield lease

    def get(self, checkout: str, peer: Peer) -> Lease:
        """Return the lease of an id or path, if the peer may see it."""
        lease = self.leases.get(checkout)
        if not self.may_see(lease, peer):
            raise not_found(checkout)
        return lease

    def must_be_open(self) -> None:
        if self.is_closing:
            message = "cannot work on checkouts: the daemon is stopping"
            raise errors.StoppingError(message, hint="try again in a moment")

    def publish(self, name: str, lease: Lease, **fields: Any) -> None:
        """Publish an event about a checkout."""
        self.events.publish(
            name,
            checkout=lease.id,
            mirror=str(lease.mirror),
            commit=lease.base.commit,
            instance=lease.base.instance,
            history=str(lease.history),
            backend=str(lease.backend),
            owner_uid=lease.terms.owner_uid,
            taken_by=lease.terms.taken_by,
            **fields,
        )


def must_be_live(lease: Lease) -> None:
    if lease.state is LeaseState.RESETTING:
        raise errors.CheckoutBusyError(
            f"cannot work on checkout {lease.id}: its last reset failed half-way",
            hint="reset it again, or release it; the daemon repeats the reset every minute",
        )


def checkout_fields(lease: Lease, timings: dict[str, float]) -> dict[str, Any]:
    """Return the fields of `protocol.Checkout`."""
    base, terms = lease.base, lease.terms
    return {
        "id": lease.id,
        "path": f"{lease.directory}/tree",
        "directory": str(lease.directory),
        "mirror": str(lease.mirror),
        "commit": base.commit,
        "tree": base.tree,
        "instance": base.instance,
        "history": lease.history,
        "view": terms.view,
        "backend": lease.backend,
        "label": terms.label,
        "layer": base.saved.name if base.saved else None,
        "environment": str(base.environment) if base.environment else None,
        "workdir": base.workdir,
        "image": protocol.Image.from_json(loads(base.image)) if base.image else None,
        "owner_uid": terms.owner_uid,
        "owner_gid": terms.owner_gid,
        "taken_by": terms.taken_by,
        "created_at": terms.created_at,
        "expires_at": terms.expires_at,
        "bind": Bind.PROCESS if terms.bound_to else Bind.LEASE,
        "parent": lease.parent,
        "resets": lease.resets,
        "is_resetting": lease.state is LeaseState.RESETTING,
        "volumes": [volume.name for volume in lease.volumes],
        "borrows": str(objects_of(lease)) if lease.borrows else None,
        "timings": timings,
    }


def objects_of(lease: Lease) -> Path:
    """Return the objects of the sealed store of a checkout."""
    state_dir = lease.directory.parents[1]
    return store_path(state_dir, *lease.template) / ".git/objects"


def copied_of(state: SavedState) -> protocol.Copied:
    names = ("taken_at", "files", "size_bytes", "left_out", "git")
    return protocol.Copied(**{name: getattr(state, name) for name in names})


def snapshot_of(lease: Lease, state: SavedState) -> protocol.Snapshot:
    return protocol.Snapshot(
        name=state.name,
        checkout=lease.id,
        commit=state.base.commit,
        instance=state.base.instance,
        copied=copied_of(state),
    )
