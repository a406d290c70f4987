"""The life of a lease: made, adopted, reset, ended. The order in which lease file and tree change is here.

A lease is written when its tree stands, and loses its name before its tree goes: so after a crash, leases stand or are cleanly
gone. What a reset changes first is the backend's to say. A checkout whose proof fails is destroyed and counted. Knows nothing of
peers; the caller holds the lock of the lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import anyio.to_thread
import structlog

from ..errors import BackendUnavailableError, MirrordError, ProofFailedError
from ..jobs.events import Events
from ..model import Backend, CheckoutId, new_checkout_id
from ..protocol import Proof
from .backend import CheckoutBackend, Made, Target
from .leases import Directories, Lease, Leases, LeaseState, resetting
from .removal import Removal

_STOP_BOUND = timedelta(seconds=5)

log = structlog.get_logger()

Locking = Callable[[CheckoutId], AbstractAsyncContextManager[None]]
Draft = Callable[[CheckoutId, Directories, Backend], Lease]


class Lifecycle:
    """Leases with their trees, made by `backends`, the preferred one first."""

    def __init__(
        self, state_dir: Path, backends: Sequence[CheckoutBackend], events: Events, locked: Locking
    ) -> None:
        self.leases = Leases(state_dir)
        self.removal = Removal()
        self._backends = backends
        self._events = events
        self._locked = locked
        self._mending: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Adopt the leases of an earlier daemon; remove what is half-made or half-released."""
        leases, rubbish = self.leases.open()
        for backend in self._backends:
            await backend.open()
        for directories in rubbish:
            self.removal.start(self.leases.discard(directories), None, self._backends)
        for lease in leases:
            await self._adopt(lease)
        log.info(
            "checkouts.adopted",
            count=len(self.leases),
            lost=len(leases) - len(self.leases),
            rubbish=len(rubbish),
        )

    async def close(self) -> None:
        """Checkouts stay: leases outlive the daemon."""
        for task in list(self._mending):
            task.cancel()
        await asyncio.gather(*self._mending, return_exceptions=True)
        await self.removal.close(_STOP_BOUND)
        for backend in self._backends:
            await backend.close()

    def backend_of(self, lease: Lease) -> CheckoutBackend:
        found = self._find_backend(lease)
        if found is None:
            raise BackendUnavailableError(
                f"cannot use checkout {lease.id}: this host no longer has the backend {lease.backend}",
                hint="release it",
            )
        return found

    async def make(self, draft: Draft, backends: Sequence[CheckoutBackend]) -> tuple[Lease, Made]:
        """Make a checkout with the first backend that can."""
        for backend in backends[:-1]:
            try:
                return await self._make(draft, backend)
            except BackendUnavailableError as error:
                log.info("backend.skipped", backend=str(backend.name), reason=error.message)
        return await self._make(draft, backends[-1])

    async def reset(
        self, lease: Lease, target: Target, instance: str | None
    ) -> tuple[Lease, Proof]:
        """Bring a checkout to `target`, and answer the lease as it stands there."""
        to = replace(
            lease, commit=target.commit, tree=target.tree, instance=instance, state=LeaseState.LIVE
        )
        try:
            proof = await self.backend_of(lease).reset(to, self.leases)
        except ProofFailedError as error:
            self._count_failure(to, error)
            self.end(resetting(to))
            raise
        return to, proof

    def end(self, lease: Lease) -> None:
        """Take the lease away at once; its files go in the background."""
        self._remove(self.leases.drop(lease), lease)

    def _undo(self, lease: Lease) -> None:
        """Take away what nobody was told of; where it cannot even be renamed, under the name it has."""
        try:
            self.end(lease)
        except OSError:
            self._remove(lease.directories, lease)

    def _remove(self, directories: Directories, lease: Lease) -> None:
        backend = self._find_backend(lease)
        self.removal.start(directories, lease, [backend] if backend else self._backends)

    async def renew(self, lease: Lease) -> None:
        """Give a live lease another deadline. A power cut leaves the old one or the new one."""
        await anyio.to_thread.run_sync(self.leases.prepare, lease)
        self.leases.put(lease)

    async def _make(self, draft: Draft, backend: CheckoutBackend) -> tuple[Lease, Made]:
        checkout = new_checkout_id()
        lease = draft(checkout, self.leases.directories(checkout), backend.name)
        try:
            self.leases.begin(lease)
            made = await backend.create(lease)
            _must_match(lease, made)
            self.leases.put(lease)
        except BaseException as error:
            half_made = resetting(lease)
            self._count_failure(half_made, error)
            self._undo(half_made)
            raise
        return lease, made

    async def _adopt(self, lease: Lease) -> None:
        """Let a lease stand. One that was being reset is reset again, in the background, with its lock held."""
        backend = self._find_backend(lease)
        if backend is None or not await backend.adopt(lease):
            log.warning("checkout.lost", checkout=lease.id, backend=str(lease.backend))
            self.end(resetting(lease))
        elif lease.state is LeaseState.RESETTING:
            task = asyncio.get_running_loop().create_task(self._mend(lease, backend))
            self._mending.add(task)
            task.add_done_callback(self._mending.discard)

    async def _mend(self, lease: Lease, backend: CheckoutBackend) -> None:
        async with self._locked(lease.id):
            try:
                await backend.reset(replace(lease, state=LeaseState.LIVE), self.leases)
            except (MirrordError, OSError) as error:
                self._count_failure(lease, error)
                self.end(lease)

    def _find_backend(self, lease: Lease) -> CheckoutBackend | None:
        return next((backend for backend in self._backends if backend.name is lease.backend), None)

    def _count_failure(self, lease: Lease, error: BaseException) -> None:
        """Tell of a failed proof; other errors are the caller's to hear."""
        if isinstance(error, ProofFailedError):
            self._events.publish(
                "proof.failed", checkout=lease.id, mirror=str(lease.mirror), commit=lease.commit, owner_uid=lease.owner_uid,
                taken_by=lease.taken_by, detail=error.message,
            )  # fmt: skip


def _must_match(lease: Lease, made: Made) -> None:
    if made.tree != lease.tree:
        raise ProofFailedError(
            f"cannot prove checkout {lease.id}: its tree is {made.tree}, not {lease.tree}", hint="audit the mirror",
            wanted=lease.tree, seen=made.tree,
        )  # fmt: skip
