"""The life of a lease: made, adopted, reset, ended by its deadline or on request.

A lease is published when its tree is complete, and renamed before the tree is removed, so after a
crash it is whole or gone. A checkout whose proof fails is removed, and reported by an event.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import anyio

from ..errors import BackendUnavailableError, CheckoutBusyError, MirrordError, ProofFailedError
from ..host.peers import ProcessWatch, process_gone
from ..host.trash import Trash
from ..jobs.events import Events
from ..model import Backend, CheckoutId, utc_now
from ..protocol import Proof
from ..telemetry import log
from .backend import CheckoutBackend
from .layers import Layers
from .lease import Directories, Lease, LeaseState, resetting
from .leases import Leases


@dataclass(eq=False, repr=False)
class Lifecycle:
    """Leases with their trees. A lock for each checkout makes work on it run in sequence."""

    leases: Leases
    layers: Layers
    backends: dict[Backend, CheckoutBackend]
    events: Events
    trash: Trash

    def __post_init__(self) -> None:
        self._locks: dict[CheckoutId, anyio.Lock] = {}
        self._finishing: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Adopt the leases of an earlier daemon; remove half-made and released checkouts."""
        leases, trash = self.leases.open()
        self.layers.open()
        for backend in self.backends.values():
            await backend.open()
        for directories in trash:
            # a read-only disk does not even rename: they are removed under their present names
            with suppress(OSError):
                directories = self.leases.discard(directories)
            self._remove(directories, None)
        for lease in leases:
            if not await self._adopt(lease):
                continue
            if lease.state is LeaseState.RESETTING:
                task = asyncio.get_running_loop().create_task(self._complete_reset(lease))
                # asyncio itself refers to its tasks weakly
                self._finishing.add(task)
                task.add_done_callback(self._finishing.discard)
        count, aside = len(self.leases), len(self.leases.aside)
        log.info("checkouts.adopted", count=count, set_aside=aside, trash=len(trash))

    async def _adopt(self, lease: Lease) -> bool:
        """Take over a lease; one that cannot be is set aside, or ended if its deadline is past."""
        try:
            await self.backend_of(lease).adopt(lease)
        except (MirrordError, OSError) as error:
            reason = error.message if isinstance(error, MirrordError) else str(error)
        else:
            return True
        if lease.terms.expires_at <= utc_now():
            with suppress(OSError):
                self.end(resetting(lease))
                return False
        self.leases.set_aside(lease.id, f"cannot show its tree: {reason}")
        return False

    async def close(self) -> None:
        """Stop. Leases outlive the daemon."""
        for task in self._finishing:
            task.cancel()
        await asyncio.gather(*self._finishing, return_exceptions=True)
        await self.trash.close()  # before the backends, which do the unmounting
        for backend in self.backends.values():
            await backend.close()

    @asynccontextmanager
    async def locked(self, checkout: CheckoutId) -> AsyncIterator[None]:
        """Hold the checkout's lock. Raises CheckoutBusyError after half a minute of waiting."""
        lock = self._locks.setdefault(checkout, anyio.Lock())
        try:
            # anyio's `acquire` goes through the event loop even where the lock is free
            lock.acquire_nowait()
        except anyio.WouldBlock:
            with anyio.move_on_after(30.0) as waiting:
                await lock.acquire()
            if waiting.cancelled_caught:
                raise CheckoutBusyError(
                    f"cannot work on checkout {checkout}: another request is using it",
                    hint="wait for it to end, then try again",
                ) from None
        try:
            yield
        finally:
            lock.release()

    def is_locked(self, checkout: CheckoutId) -> bool:
        return checkout in self._locks and self._locks[checkout].locked()

    def backend_of(self, lease: Lease) -> CheckoutBackend:
        if lease.backend not in self.backends:
            raise BackendUnavailableError(
                f"cannot use checkout {lease.id}: this host no longer has the backend"
                f" {lease.backend}",
                hint="release it",
            )
        return self.backends[lease.backend]

    async def make(
        self, lease: Lease, others: Sequence[Backend] = ()
    ) -> tuple[Lease, dict[str, float]]:
        """Make a checkout on the lease's backend, or the first of `others` that can; return the
        lease that it has, and seconds per step.
        """
        for other in others:
            try:
                return await self._make(lease)
            except BackendUnavailableError as error:
                log.info("backend.skipped", backend=str(lease.backend), reason=error.message)
                lease = self.leases.like(lease, other)
        return await self._make(lease)

    async def _make(self, lease: Lease) -> tuple[Lease, dict[str, float]]:
        try:
            self.leases.begin(lease)
            tree, timings = await self.backends[lease.backend].create(lease)
            if tree != lease.base.tree:
                raise ProofFailedError(
                    f"cannot prove checkout {lease.id}: its tree is {tree}, not {lease.base.tree}",
                    hint="audit the mirror",
                    wanted=lease.base.tree,
                    seen=tree,
                )
            self.leases.put(lease)
        except BaseException as error:
            if isinstance(error, ProofFailedError):
                self._report(lease, error)
            # RESETTING, because for a live one the pool would write a spare tree
            half_made = resetting(lease)
            try:
                self.end(half_made)
            except OSError:  # the disk does not even rename: remove it under its present name
                self._remove(lease.directories, half_made)
            raise
        return lease, timings

    async def make_clean(self, to: Lease) -> Proof:
        """Reset a checkout to the state of the lease `to`; the caller holds its lock."""
        before = self.leases.find(to.id)
        try:
            return await self.backend_of(to).reset(to, self.leases)
        except ProofFailedError as error:
            self._report(to, error)
            self.end(resetting(to))
            raise
        finally:
            if before and before.layers:
                self.layers.drop_unused(before.layers)

    def end(self, lease: Lease) -> None:
        """End the lease at once; its files are removed in the background."""
        self._remove(self.leases.release(lease), lease)
        if lease.backend in self.backends:
            self.backends[lease.backend].released(lease)
        # who waits for the lock finds no lease afterwards
        self._locks.pop(lease.id, None)

    def end_aside(self, checkout: CheckoutId) -> None:
        """Remove a checkout that was set aside, with all that its owner made."""
        lease = self.leases.aside[checkout].lease
        self._remove(self.leases.drop_aside(checkout), lease and resetting(lease))

    def _remove(self, directories: Directories, lease: Lease | None) -> None:
        """Have the lease's backend remove its directories; without a lease, each backend."""
        own = self.backends.get(lease.backend) if lease else None

        async def take_down() -> bool:
            backends = [own] if own else self.backends.values()
            # a list, because `any` alone would stop at the first backend that had nothing left
            is_gone = any([await backend.take_down(directories, lease) for backend in backends])
            self.layers.drop_unused(lease.layers if lease else ())  # after the unmount
            return is_gone

        self.trash.add(directories.private, directories.public, take_down=take_down)

    async def complete_resets(self) -> int:
        """Repeat the resets that failed half-way, and that nobody repeated; return how many."""
        unfinished = [lease for lease in self.leases if lease.state is LeaseState.RESETTING]
        for lease in unfinished:
            if not self.is_locked(lease.id):
                await self._complete_reset(lease)
        return len(unfinished)

    async def _complete_reset(self, lease: Lease) -> None:
        async with self.locked(lease.id):
            # reset or released while this waited
            if self.leases.find(lease.id) != lease:
                return
            try:
                await self.make_clean(replace(lease, state=LeaseState.LIVE))
            except ProofFailedError:
                # `make_clean` has ended the lease
                return
            except (MirrordError, OSError) as error:
                # as after a reset that failed: the next turn, or another reset, completes it
                log.warning("reset.unfinished", checkout=lease.id, error=str(error))

    def _report(self, lease: Lease, error: ProofFailedError) -> None:
        self.events.publish(
            "proof.failed",
            checkout=lease.id,
            mirror=str(lease.mirror),
            commit=lease.base.commit,
            owner_uid=lease.terms.owner_uid,
            taken_by=lease.terms.taken_by,
            detail=error.message,
        )


@dataclass(eq=False, repr=False)
class Expiry:
    """Ends leases at their deadlines and with the processes that they are bound to.

    Renews those that are mounted as volumes. `publish` takes the name of an event and the lease.
    Belongs to one event loop.
    """

    leases: Leases
    lifecycle: Lifecycle
    trash: Trash
    publish: Callable[[str, Lease], Any]
    clock: Callable[[], datetime]

    def __post_init__(self) -> None:
        self._closing = False
        self._stuck: set[CheckoutId] = set()
        # deadlines that steps of the wall clock left behind, and those steps
        self._behind: dict[CheckoutId, tuple[datetime, timedelta]] = {}
        self._process_ended = asyncio.Event()
        self._processes = ProcessWatch(self._process_ended.set)
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """End the leases whose process ended while no daemon ran; watch the other processes."""
        for lease in self.leases:
            if lease.terms.bound_to:
                self._processes.hold(lease.terms.bound_to)
        await self.expire()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        self._closing = True
        if self._watching:
            self._watching.cancel()
        self._processes.keep_only(())

    def watch_process(self, lease: Lease) -> None:
        """Watch the process of a new lease. Raises ProcessGoneError, and ends the lease."""
        try:
            if lease.terms.bound_to and not self._processes.hold(lease.terms.bound_to):
                raise process_gone(lease.terms.bound_to.pid)
        except BaseException:
            self.lifecycle.end(lease)
            raise

    async def expire(self) -> int:
        """Release checkouts that are past their deadline or whose process ended, unless a request
        works on them; return how many.
        """
        if self._closing:
            return 0
        self.clock()  # tells of a step
        self._catch_up()
        self._processes.keep_only(
            {lease.terms.bound_to for lease in self.leases if lease.terms.bound_to}
        )
        count = 0
        for lease in filter(self._is_over, self.leases):
            if self.lifecycle.is_locked(lease.id):
                continue
            async with self.lifecycle.locked(lease.id):
                current = self.leases.find(lease.id)
                if current is None or not self._is_over(current):
                    continue
                mounted = [volume for volume in current.volumes if volume.mounted_by]
                if mounted and not self._is_orphaned(current):
                    ttl = timedelta(seconds=max(volume.ttl_s for volume in mounted))
                    self.leases.save(current.until(self.clock() + ttl))
                    continue
                if not self._try_to_end(current):
                    continue
            self.publish("checkout.expired", current)
            await self.trash.keep_up()
            count += 1
        return count

    def follow(self, step: timedelta) -> None:
        """Follow a step of the wall clock: each lease keeps the time that it had left."""
        for lease in self.leases:
            deadline, earlier = self._behind.get(lease.id, (None, timedelta()))
            due = lease.terms.expires_at
            self._behind[lease.id] = due, step + (earlier if deadline == due else timedelta())
        self._catch_up()

    def _catch_up(self) -> None:
        """Move the deadlines that a step left behind, but of leases that a request works on."""
        now = self.clock() if self._behind else None
        for checkout, (deadline, step) in list(self._behind.items()):
            lease = self.leases.find(checkout)
            if now and lease and lease.terms.expires_at == deadline:
                if self.lifecycle.is_locked(checkout):
                    continue
                self.leases.amend(lease.shifted(step, now))
            del self._behind[checkout]

    def _try_to_end(self, lease: Lease) -> bool:
        """End a lease; on a disk that does not even rename, say so once, and leave it to the next
        turn: neither a start nor the other leases depend on it.
        """
        try:
            self.lifecycle.end(lease)
        except OSError as error:
            if lease.id not in self._stuck:
                log.warning("checkout.not_ended", checkout=lease.id, reason=str(error))
            self._stuck.add(lease.id)
            return False
        self._stuck.discard(lease.id)
        return True

    def _is_over(self, lease: Lease) -> bool:
        return self._is_orphaned(lease) or lease.terms.expires_at <= self.clock()

    def _is_orphaned(self, lease: Lease) -> bool:
        return lease.terms.bound_to is not None and lease.terms.bound_to not in self._processes

    async def _watch(self) -> None:
        while True:
            await self._process_ended.wait()
            self._process_ended.clear()
            await self.expire()
