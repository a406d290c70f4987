"""Decide which checkouts a peer may have: whose, with what view, how long, how many, on which
backend, and under which names of commits.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakKeyDictionary

import anyio.to_thread

from .. import errors
from ..config import Settings
from ..host.namespaces import Visible, shares_mounts, visible_to
from ..host.peers import Access, Peer, Role
from ..host.processes import Owner, may_give_files_away
from ..model import Backend, History, View
from ..units import format_duration
from .leases import Lease, Leases
from .resolve import Naming


class Admission:
    """Judges peers by the settings and the leases there are."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        access: Access,
        leases: Leases,
        *,
        has_overlay: bool,
    ) -> None:
        self._settings = settings
        self._access = access
        self._leases = leases
        self._directory = leases.public
        self._has_overlay = has_overlay
        self._visible: WeakKeyDictionary[Peer, Visible] = WeakKeyDictionary()
        self._may_give_files_away = may_give_files_away()

    def may_see(self, lease: Lease, peer: Peer) -> bool:
        return peer.uid in {lease.owner_uid, lease.taken_by} or self._access.is_admin(peer.uid)

    def must_be_admin(self, peer: Peer, what: str) -> None:
        """A grader's checkout may be owned by a plain uid, which runs what the agent wrote."""
        if not self._access.is_admin(peer.uid):
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

    def must_be_apart(self, graded: Lease, owner: Owner) -> None:
        """Refuse a grade for the uid that the agent had: what it left running reaches both trees.

        Root and the daemon's own user may grade what they ran themselves.
        """
        if owner[0] == graded.owner_uid and owner[0] not in (0, os.geteuid()):
            raise errors.AccessError(
                f"cannot grade checkout {graded.id} for uid {owner[0]}: the agent had this uid",
                hint="name another with --owner, or grade as root",
            )

    def naming(self, peer: Peer) -> Naming:
        role = self._access.role(peer)
        if role is Role.ADMIN:
            return Naming.ANYTHING
        if role is not Role.MEMBER:
            return Naming.NOTHING
        return Naming.PUBLIC if self._settings().access.commits == "any" else Naming.RECORDED

    def ttl(self, asked: float | None, peer: Peer) -> timedelta:
        """The time to live, of `asked` seconds or the default, within `access.ttl_max`."""
        settings = self._settings()
        length = timedelta(seconds=asked) if asked else settings.checkouts.ttl
        longest = settings.access.ttl_max
        if length <= longest or self._access.is_admin(peer.uid):
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
        settings, leases = self._settings(), self._leases
        most, most_each, held = settings.checkouts.max, settings.access.max_per_user, leases.count
        if self._access.is_admin(taken_by):
            held = sum(n for uid, n in leases.taken_by.items() if self._access.is_admin(uid))
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
        wanted = asked or self._settings().checkouts.backend
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
        if self._has_overlay and history is not History.LINKED:
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


def must_mount(backends: list[Backend]) -> list[Backend]:
    """Those that can show an environment; raises BackendUnavailableError where none can."""
    if Backend.OVERLAY in backends:
        return [Backend.OVERLAY]
    raise errors.BackendUnavailableError(
        "cannot show an environment: the backend pool mounts nothing",
        hint="ask for the backend overlay, which needs a host that `mirrord doctor` finds fit,"
        " or for no environment",
    )
