"""The service of checkouts: hands them out, takes them back to clean, on, or away.

Owns who may do what, the limits, and the deadlines. A checkout answers to its owner, to the uid
that took it, and to administrators; to others it does not exist. Work on one checkout runs one
after the other; after half a minute of waiting comes CheckoutBusyError. What happens to a lease and
its tree, and what a crash leaves of them, is `lifecycle.py`'s.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import anyio
import anyio.to_thread

from ..config import Settings
from ..errors import (
    AccessError,
    BackendUnavailableError,
    CheckoutBusyError,
    InvalidRequestError,
    StoppingError,
    TooManyCheckoutsError,
    TtlTooLongError,
)
from ..git.workers import Workers
from ..host.namespaces import Visible, shares_mounts, visible_to
from ..host.peers import Access, Owners, Peer, Role
from ..host.pidfds import Process, ProcessWatch, process_gone
from ..host.processes import Owner, may_give_files_away
from ..jobs.events import Events
from ..mirrors.service import Mirrors
from ..model import Backend, Bind, CheckoutId, History, View, utc_now
from ..protocol import (
    Checkout,
    RenewCheckout,
    ResetAnswer,
    ResetCheckout,
    RestoreAnswer,
    RestorePaths,
    StartCheckout,
)
from ..units import format_duration
from .backend import CheckoutBackend
from .leases import Directories, Lease, LeaseState, not_found
from .lifecycle import Lifecycle
from .patches.revisions import Revisions
from .pool.backend import PoolBackend
from .resolve import Instances, Naming, Requests
from .stores.builder import StoreBuilder

_PATIENCE = timedelta(seconds=30)


class Checkouts:
    """All checkouts of one state directory. Belongs to one event loop.

    The pool can serve every request; `overlay`, where the host allows mounts, serves those it can, and is preferred.
    """

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        state_dir: Path,
        workers: Workers,
        mirrors: Mirrors,
        datasets: Instances,
        gitdirs: StoreBuilder,
        overlay: CheckoutBackend | None,
        access: Access,
        events: Events,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._settings = settings
        self._access = access
        self._owners = Owners(settings, access)
        self._events = events
        self._clock = clock
        self._overlay = overlay
        self._pool = PoolBackend(
            state_dir=state_dir, workers=workers, gitdirs=gitdirs, mirrors_path=mirrors.path
        )
        self._requests = Requests(instances=datasets, commits=mirrors, learn=gitdirs.commits.learn)
        self._revisions = Revisions(workers=workers, mirrors=mirrors, instances=datasets)
        backends = [backend for backend in (overlay, self._pool) if backend is not None]
        self._keeper = Lifecycle(state_dir, backends, events, self._locked)
        self._leases = self._keeper.leases
        self._directory = state_dir / "checkouts"
        self._visible: WeakKeyDictionary[Peer, Visible] = WeakKeyDictionary()
        self._locks: dict[CheckoutId, anyio.Lock] = {}
        self._may_give_files_away = may_give_files_away()
        self._closing = False
        self._process_ended = asyncio.Event()
        self._lifelines = ProcessWatch(self._process_ended.set)
        self._expiring: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Adopt the leases of an earlier daemon; those whose process has ended meanwhile end too."""
        await self._keeper.open()
        for lease in self._leases:
            if lease.bound_to:
                self._lifelines.hold(lease.bound_to)
        await self.expire()
        self._expiring = asyncio.get_running_loop().create_task(self._expire_when_processes_end())

    async def close(self) -> None:
        """Refuse new work. Checkouts stay as they are."""
        self._closing = True
        if self._expiring:
            self._expiring.cancel()
        self._lifelines.keep_only(())
        await self._keeper.close()

    @property
    def count(self) -> int:
        return len(self._leases)

    @property
    def backend(self) -> Backend:
        """What a request that names no backend gets."""
        return self._choose(None, History.SEALED, Visible.MOUNTS)[0].name

    # -- requests -----------------------------------------------------------------------------------------------------

    async def checkout(
        self, request: StartCheckout, peer: Peer, process: Process | None = None
    ) -> Checkout:
        """Hand out a new checkout, owned by the peer's uid or by another that it may ask for.

        It ends with `process`, where one is given.
        """
        began = time.perf_counter()
        history = request.history or self._settings().checkouts.history
        expires_at = self._deadline(request.ttl, peer)
        owner = await self._owners.find(request.owner, peer)
        self._must_be_allowed(peer, owner, request.view, history)
        backends = self._choose(request.backend, history, await self._visible_to(peer))
        wanted = await self._requests.read_start(request, self._naming(peer))
        resolved_s = time.perf_counter() - began

        def draft(checkout: CheckoutId, directories: Directories, backend: Backend) -> Lease:
            return Lease(
                id=checkout,
                directories=directories,
                mirror=wanted.mirror,
                commit=wanted.target.commit,
                tree=wanted.target.tree,
                instance=wanted.instance.id if wanted.instance else None,
                dataset=wanted.instance.dataset if wanted.instance else None,
                history=history,
                view=request.view,
                backend=backend,
                owner_uid=owner[0],
                owner_gid=owner[1],
                taken_by=peer.uid,
                created_at=self._clock(),
                expires_at=expires_at,
                bound_to=process,
            )

        with self._counted(peer.uid, owner[0]):
            lease, made = await self._keeper.make(draft, backends)
        if process is not None:
            self._hold(lease, process)
        timings = {
            "resolve": round(resolved_s, 6),
            **made.timings,
            "total": round(time.perf_counter() - began, 6),
        }
        self._publish("checkout.made", lease, duration_s=timings["total"])
        return _answer(lease, timings)

    async def reset(self, checkout: str, request: ResetCheckout, peer: Peer) -> ResetAnswer:
        """Bring a checkout back to clean, or on to another commit of its mirror, with proof."""
        began = time.perf_counter()
        async with self._held(checkout, peer) as lease:
            wanted = await self._requests.read_reset(request, lease, self._naming(peer))
            instance = wanted.instance
            lease = replace(lease, dataset=instance.dataset if instance else None)
            lease, proof = await self._keeper.reset(
                lease, wanted.target, instance.id if instance else None
            )
        duration_s = round(time.perf_counter() - began, 6)
        self._publish(
            "checkout.reset",
            lease,
            duration_s=duration_s,
            restored=proof.files_restored,
            removed=proof.files_removed,
        )
        return ResetAnswer(**_members(lease, {"total": duration_s}), proof=proof)

    async def renew(self, checkout: str, request: RenewCheckout, peer: Peer) -> Checkout:
        """Move the deadline to the time to live from now; a shorter one is taken too."""
        async with self._held(checkout, peer) as lease:
            lease = replace(lease, expires_at=self._deadline(request.ttl, peer))
            await self._keeper.renew(lease)
        return _answer(lease)

    async def release(self, checkout: str, peer: Peer) -> None:
        """Take a checkout away. It is gone when this returns; its files are deleted in the background."""
        async with self._held(checkout, peer) as lease:
            self._end(lease)
        self._publish("checkout.released", lease)
        await self._keeper.removal.keep_up()

    async def get(self, checkout: str, peer: Peer) -> Checkout:
        return _answer(self._get(checkout, peer))

    async def list(self, peer: Peer) -> list[Checkout]:
        """The checkouts that the peer owns or took, oldest first; everybody's for an administrator."""
        return [_answer(lease) for lease in self._leases if self._may_see(lease, peer)]

    def must_be_usable(self, checkout: str, peer: Peer) -> None:
        """Raise what `diff` and `apply` would raise at once."""
        self._must_be_open()
        _must_be_whole(self._get(checkout, peer))

    async def diff(self, checkout: str, peer: Peer) -> bytes | Path:
        """What changed since the base commit, untracked files included, as a patch that `git apply` takes; a long one as a
        file, which is the caller's to remove.
        """
        async with self._held_whole(checkout, peer) as lease:
            changed = await self._keeper.backend_of(lease).changed_paths(lease)
            return await self._revisions.diff(lease, changed)

    async def apply(
        self,
        checkout: str,
        peer: Peer,
        *,
        patch: bytes | Path | None,
        named: str | None = None,
        reverse: bool = False,
    ) -> Checkout:
        """Apply a patch to the files, or the instance's own `@patch` or `@test_patch` (grader view): all of it or nothing."""
        async with self._held_whole(checkout, peer) as lease:
            if patch is None:
                self._must_be_admin(peer, "apply the instance's own patch")
                patch = await self._revisions.named_patch(lease, named or "")
            changed = await self._keeper.backend_of(lease).changed_paths(lease)
            paths = await self._revisions.apply(lease, changed, patch, reverse=reverse)
        self._publish("checkout.patched", lease, files=len(paths), reverse=reverse)
        return _answer(lease)

    async def restore(self, checkout: str, peer: Peer, request: RestorePaths) -> RestoreAnswer:
        """Write files of a pinned commit into the checkout (grader view)."""
        async with self._held_whole(checkout, peer) as lease:
            paths = await self._revisions.restore(lease, request)
        self._publish("checkout.restored", lease, files=len(paths))
        return RestoreAnswer(paths=paths)

    async def expire(self) -> int:
        """Release what is past its deadline, or has outlived the process it is bound to, and is not
        at work; answers how many."""
        if self._closing:
            return 0
        self._lifelines.keep_only({lease.bound_to for lease in self._leases if lease.bound_to})
        over = [lease for lease in self._leases if self._is_over(lease)]
        return sum([await self._expire(lease) for lease in over])

    def _is_over(self, lease: Lease) -> bool:
        return lease.is_expired(self._clock()) or (
            lease.bound_to is not None and lease.bound_to not in self._lifelines
        )

    async def _expire_when_processes_end(self) -> None:
        while True:
            await self._process_ended.wait()
            self._process_ended.clear()
            await self.expire()

    def _hold(self, lease: Lease, process: Process) -> None:
        """Have the lease end with the process; it may have ended meanwhile."""
        try:
            held = self._lifelines.hold(process)
        except OSError:
            self._end(lease)
            raise
        if not held:
            self._end(lease)
            raise process_gone(process.pid)

    # -- one lease at a time ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _held(self, checkout: str, peer: Peer) -> AsyncIterator[Lease]:
        """The peer's lease, with its lock; it may have ended while we waited."""
        self._must_be_open()
        wanted = self._get(checkout, peer)
        async with self._locked(wanted.id):
            lease = self._leases.find(wanted.id)
            if lease is None:
                raise not_found(checkout)
            yield lease

    @asynccontextmanager
    async def _held_whole(self, checkout: str, peer: Peer) -> AsyncIterator[Lease]:
        """One whose tree is its commit's, or its owner's work on it."""
        async with self._held(checkout, peer) as lease:
            _must_be_whole(lease)
            yield lease

    @asynccontextmanager
    async def _locked(self, checkout: CheckoutId) -> AsyncIterator[None]:
        lock = self._locks.setdefault(checkout, anyio.Lock())
        try:
            lock.acquire_nowait()
        except anyio.WouldBlock:
            await _acquire(lock, checkout)
        try:
            yield
        finally:
            lock.release()

    async def _expire(self, lease: Lease) -> bool:
        if self._locks.setdefault(lease.id, anyio.Lock()).locked():
            return False
        async with self._locked(lease.id):
            current = self._leases.find(lease.id)
            if current is None or not self._is_over(current):
                return False
            self._end(current)
        self._publish("checkout.expired", current)
        await self._keeper.removal.keep_up()
        return True

    def _end(self, lease: Lease) -> None:
        self._keeper.end(lease)
        self._locks.pop(lease.id, None)

    def _deadline(self, ttl: float | None, peer: Peer) -> datetime:
        settings = self._settings()
        length = timedelta(seconds=ttl) if ttl else settings.checkouts.ttl
        longest = settings.access.ttl_max
        if length > longest and not self._access.is_admin(peer.uid):
            if ttl:
                raise TtlTooLongError(
                    f"cannot hold a checkout for {format_duration(length)}: {format_duration(longest)} is the longest",
                    hint="ask for less and renew, or raise access.ttl_max",
                    max_s=longest.total_seconds(),
                )
            length = longest
        return self._clock() + length

    # -- who may, and how many ----------------------------------------------------------------------------------------

    def _get(self, checkout: str, peer: Peer) -> Lease:
        lease = self._leases.get(checkout)
        if not self._may_see(lease, peer):
            raise not_found(checkout)
        return lease

    def _may_see(self, lease: Lease, peer: Peer) -> bool:
        return peer.uid in {lease.owner_uid, lease.taken_by} or self._access.is_admin(peer.uid)

    def has_checkout(self, uid: int) -> bool:
        """Whether the uid owns a checkout, or took one."""
        return uid in self._leases.holdings.of

    def _naming(self, peer: Peer) -> Naming:
        role = self._access.role(peer)
        if role is Role.ADMIN:
            return Naming.ANYTHING
        if role is not Role.MEMBER:
            return Naming.NOTHING
        return Naming.PUBLIC if self._settings().access.commits == "any" else Naming.RECORDED

    def _must_be_open(self) -> None:
        if self._closing:
            raise StoppingError(
                "cannot work on checkouts: the daemon is stopping", hint="try again in a moment"
            )

    def _must_be_admin(self, peer: Peer, what: str) -> None:
        """A grader's checkout may be owned by a plain uid, which runs what the agent wrote."""
        if not self._access.is_admin(peer.uid):
            raise AccessError(
                f"cannot {what}: only administrators may",
                hint="see access.admins in the configuration",
            )

    def _must_be_allowed(self, peer: Peer, owner: Owner, view: View, history: History) -> None:
        self._must_be_open()
        if view is View.GRADER and not self._access.is_admin(peer.uid):
            raise AccessError(
                "cannot check out with the grader view: only administrators may",
                hint="see access.admins in the configuration",
            )
        if owner[0] != os.geteuid() and not self._may_give_files_away:
            raise AccessError(
                f"cannot make a checkout for uid {owner[0]}: this daemon runs as uid {os.geteuid()} and cannot give files away",
                hint="run the daemon as root, or by systemd/mirrord.service, to serve other users",
            )
        if history is History.LINKED and (peer.uid != os.geteuid() or owner[0] != peer.uid):
            raise AccessError(
                "cannot link a checkout to the mirror: only the daemon's own user can read mirrors",
                hint="ask for sealed or squashed",
            )

    @contextmanager
    def _counted(self, taken_by: int, owner_uid: int) -> Iterator[None]:
        """Take one place among `checkouts.max` and, for who is no administrator, among `access.max_per_user` of asker and owner.

        Those being made count. What others hold never keeps an administrator out: only what administrators took counts then.
        """
        settings, holdings = self._settings(), self._leases.holdings
        most, held = settings.checkouts.max, holdings.count
        if self._access.is_admin(taken_by):
            held = sum(n for uid, n in holdings.taken_by.items() if self._access.is_admin(uid))
        else:
            for uid in (taken_by, owner_uid):
                if holdings.of[uid] >= settings.access.max_per_user:
                    raise TooManyCheckoutsError(
                        f"cannot make another checkout: uid {uid} has {settings.access.max_per_user}",
                        hint="release some, or raise access.max_per_user",
                        max=settings.access.max_per_user,
                        uid=uid,
                    )
        if held >= most:
            raise TooManyCheckoutsError(
                f"cannot make another checkout: {most} are held",
                hint="release some, or raise checkouts.max",
                max=most,
            )
        holdings.add(taken_by, owner_uid)
        try:
            yield
        finally:
            holdings.add(taken_by, owner_uid, -1)

    async def _visible_to(self, peer: Peer) -> Visible:
        """What a peer sees of the checkouts; looked at once for each connection."""
        if (known := self._visible.get(peer)) is None:
            known = Visible.MOUNTS
            if not shares_mounts(peer.pid):
                known = await anyio.to_thread.run_sync(visible_to, peer.pid, self._directory)
            self._visible[peer] = known
        return known

    def _choose(
        self, asked: Backend | None, history: History, visible: Visible
    ) -> Sequence[CheckoutBackend]:
        """The backends to try, the best first. Who asks for the pool by name may see nothing of it: others may."""
        wanted = asked or self._settings().checkouts.backend
        if (wanted is Backend.AUTO and visible is Visible.NOTHING) or (
            wanted is Backend.OVERLAY and visible < Visible.MOUNTS
        ):
            raise BackendUnavailableError(
                "cannot make a checkout: the process that asks is in another mount namespace,"
                f" which does not show {'mounts in ' if visible is Visible.FILES else ''}{self._directory}",
                hint=f"mount {self._directory} there with propagation rslave, or ask for the backend pool",
            )
        if (
            visible is Visible.FILES
            or wanted is Backend.POOL
            or (history is History.LINKED and wanted is Backend.AUTO)
        ):
            return [self._pool]
        if history is History.LINKED:
            raise InvalidRequestError(
                "cannot link an overlay checkout to a mirror",
                hint="use the backend pool with linked",
            )
        if wanted is Backend.AUTO:
            return [self._overlay, self._pool] if self._overlay else [self._pool]
        if self._overlay is None:
            raise BackendUnavailableError(
                "cannot use the overlay backend: this host does not allow it",
                hint="see `mirrord doctor`",
            )
        return [self._overlay]

    def _publish(self, name: str, lease: Lease, **fields: Any) -> None:
        self._events.publish(
            name, checkout=lease.id, mirror=str(lease.mirror), commit=lease.commit, instance=lease.instance,
            backend=str(lease.backend), history=str(lease.history), owner_uid=lease.owner_uid, taken_by=lease.taken_by,
            **fields,
        )  # fmt: skip


def _must_be_whole(lease: Lease) -> None:
    if lease.state is LeaseState.RESETTING:
        raise CheckoutBusyError(
            f"cannot work on checkout {lease.id}: its last reset failed half-way",
            hint="reset it again, or release it",
        )


async def _acquire(lock: anyio.Lock, checkout: CheckoutId) -> None:
    try:
        with anyio.fail_after(_PATIENCE.total_seconds()):
            await lock.acquire()
    except TimeoutError as error:
        raise CheckoutBusyError(
            f"cannot work on checkout {checkout}: other work on it goes on",
            hint="wait for it to end, then try again",
        ) from error


def _answer(lease: Lease, timings: dict[str, float] | None = None) -> Checkout:
    return Checkout(**_members(lease, timings or {}))


def _members(lease: Lease, timings: dict[str, float]) -> dict[str, Any]:
    return {
        "id": lease.id,
        "path": f"{lease.directory}/tree",
        "directory": str(lease.directory),
        "mirror": str(lease.mirror),
        "commit": lease.commit,
        "tree": lease.tree,
        "instance": lease.instance,
        "history": lease.history,
        "view": lease.view,
        "backend": lease.backend,
        "owner_uid": lease.owner_uid,
        "owner_gid": lease.owner_gid,
        "taken_by": lease.taken_by,
        "bind": Bind.PROCESS if lease.bound_to else Bind.LEASE,
        "created_at": lease.created_at,
        "expires_at": lease.expires_at,
        "timings": timings,
    }
