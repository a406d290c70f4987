"""The service of checkouts: makes, resets, forks, snapshots, patches and releases them."""

import builtins
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread

from .. import protocol
from ..errors import (
    CheckoutBusyError,
    CommitNotFoundError,
    InvalidRequestError,
    MirrorNotFoundError,
)
from ..host.mount_tables import Visible
from ..host.peers import Peer, Process
from ..host.trash import Trash
from ..mirrors.service import Mirrors
from ..model import ApplyStrategy, Backend, CommitRole, DiffFormat, Direction, History, LayerId
from ..presence import exists
from ..telemetry import elapsed_s, log
from ..templates.builder import StoreBuilder
from ..templates.store import StoreKey, find_leaks
from .forks import Forks
from .layers import Layers
from .lease import Base, Lease, LeaseState, Volume
from .leases import Leases
from .lifecycle import Lifecycle
from .patching import DiffAnswer, Patches
from .pool.backend import PoolBackend
from .prepared import LayerRecord, PreparedLayers
from .receipts import Receipts, report
from .requests.admission import Leasing, checkout_fields, copied_of, must_be_live, snapshot_of
from .requests.quotas import Quotas
from .requests.resolve import Resolver

T = TypeVar("T")


@dataclass(kw_only=True, eq=False, repr=False)
class Checkouts:
    """All checkouts of one state directory, put together by `engine/composition.py`.

    Belongs to one event loop.
    """

    leases: Leases
    layers: Layers
    lifecycle: Lifecycle
    leasing: Leasing
    quotas: Quotas
    resolver: Resolver
    forks: Forks
    patches: Patches
    prepared: PreparedLayers
    receipts: Receipts
    pool: PoolBackend
    stores: StoreBuilder
    mirrors: Mirrors
    trash: Trash
    clock: Callable[[], datetime]

    async def open(self) -> None:
        """Adopt the leases of an earlier daemon; end those whose process is gone."""
        await anyio.to_thread.run_sync(self.prepared.open)
        await self.lifecycle.open()
        for lease in self.leases:
            if lease.state is LeaseState.LIVE:
                with suppress(CheckoutBusyError):  # the next request for it tries again
                    await self.patches.complete(lease)
        await self.leasing.expiry.open()

    async def close(self) -> None:
        """Refuse new work. Checkouts stay as they are."""
        self.leasing.is_closing = True
        self.leasing.expiry.close()
        await self.receipts.records.close()
        await self.lifecycle.close()

    async def expire(self) -> int:
        """Release expired checkouts that are not in use; return how many."""
        return await self.leasing.expiry.expire()

    async def complete_resets(self) -> int:
        """Repeat the resets that failed half-way; return how many there were."""
        return await self.lifecycle.complete_resets()

    @property
    def backend(self) -> Backend:
        """The backend of a request that names none."""
        return self.leasing.choose_backends(None, History.SEALED, Visible.MOUNTS)[0]

    @property
    def needed_templates(self) -> frozenset[StoreKey]:
        """The templates of all checkouts and of their snapshots."""
        return frozenset(
            (lease.mirror.key, commit, lease.history)
            for lease in self.leases
            for commit in {base.commit for base in lease.bases}
        )

    # -- requests ----------------------------------------------------------------------------------

    async def checkout(
        self,
        request: protocol.StartCheckout,
        peer: Peer,
        process: Process | None = None,
        volumes: tuple[Volume, ...] = (),
    ) -> protocol.Checkout:
        """Make a checkout for the peer's uid, or another that it may ask for.

        It ends with `process`, if given.
        """
        began = time.perf_counter()
        admitted = await self.leasing.admit(request, peer, process)
        resolved = await self.resolver.resolve_start(request, self.leasing.naming(peer))
        history = await self.resolver.choose_history(
            resolved, request.view, request.history, admitted.history
        )
        admitted = admitted._replace(history=history)
        async with self.resolver.completed(request, resolved, history, peer) as resolved:
            resolved_s = elapsed_s(began)
            draft = self.leasing.draft(admitted, resolved.mirror, resolved.base)
            draft = draft.with_volumes(*volumes)
            lease, timings = await self.leasing.begin(draft, admitted)
        timings = {"resolve": resolved_s, **timings, "total": elapsed_s(began)}
        self.leasing.publish("checkout.made", lease, duration_s=timings["total"])
        return protocol.Checkout(**checkout_fields(lease, timings))

    async def fork(
        self,
        checkout: str,
        request: protocol.ForkCheckout,
        peer: Peer,
        process: Process | None = None,
        volumes: tuple[Volume, ...] = (),
    ) -> protocol.Fork:
        """Make a checkout for the same owner with the content of this one, or of a snapshot."""
        began = time.perf_counter()
        async with self.leasing.held(checkout, peer, live=True) as parent:
            self.leasing.check(peer, parent.owner, parent.terms.view, parent.history)
            ttl = self.leasing.ttl(request.ttl, peer)
            await self.quotas.ensure("fork a checkout", peer.uid, parent.terms.owner_uid)
            with self.leasing.counted(peer.uid, parent.terms.owner_uid):
                async with self.forks.source(parent, request.snapshot) as source:
                    copied_s = elapsed_s(began)
                    now = self.clock()
                    terms = replace(
                        parent.terms, taken_by=peer.uid, created_at=now, expires_at=now + ttl,
                        bound_to=process,
                    )  # fmt: skip
                    draft = replace(
                        self.leases.like(parent, parent.backend), base=source.base, terms=terms,
                        resets=0, reset_at=None, parent=parent.id, snapshots=(),
                    ).with_volumes(*volumes)  # fmt: skip
                    lease, timings = await self.leasing.make(draft)
        timings = {"copy": copied_s, **timings, "total": elapsed_s(began)}
        fields = {"parent": parent.id, "snapshot": request.snapshot, "files": source.files}
        self.leasing.publish("checkout.forked", lease, duration_s=timings["total"], **fields)
        return protocol.Fork(
            **checkout_fields(lease, timings), snapshot=request.snapshot, copied=copied_of(source)
        )

    async def snapshot(
        self, checkout: str, request: protocol.MakeSnapshot, peer: Peer
    ) -> protocol.Snapshot:
        """Save the present state of a checkout under a name."""
        began = time.perf_counter()
        async with self.leasing.held(checkout, peer, live=True) as lease:
            await self.quotas.ensure("make a snapshot", peer.uid, lease.terms.owner_uid)
            made = await self.forks.make(lease, request.name)
            self.quotas.add(lease.terms.owner_uid, made.size_bytes)
        fields = {"snapshot": made.name, "files": made.files, "duration_s": elapsed_s(began)}
        self.leasing.publish("snapshot.made", lease, **fields)
        return snapshot_of(lease, made)

    async def list_snapshots(self, checkout: str, peer: Peer) -> list[protocol.Snapshot]:
        """Return the snapshots of a checkout, oldest first."""
        lease = self.leasing.get(checkout, peer)
        return [snapshot_of(lease, snapshot) for snapshot in lease.snapshots]

    async def remove_snapshot(self, checkout: str, name: str, peer: Peer) -> None:
        async with self.leasing.held(checkout, peer) as lease:
            self.forks.remove(lease, name)
        self.leasing.publish("snapshot.removed", lease, snapshot=name)

    async def reset(
        self, checkout: str, request: protocol.ResetCheckout, peer: Peer
    ) -> protocol.ResetAnswer:
        """Reset a checkout to clean, to another commit of its mirror, or to a snapshot of it."""
        began = time.perf_counter()
        async with (
            self.leasing.held(checkout, peer) as before,
            self._base_of(request, before, peer) as base,
        ):
            lease = replace(
                before, base=base, resets=before.resets + 1, reset_at=self.clock(),
                state=LeaseState.LIVE,
            )  # fmt: skip
            proof = await self.lifecycle.make_clean(lease)
        proof = replace(proof, snapshot=request.to)
        timings = {"total": elapsed_s(began)}
        fields: dict[str, Any] = {"snapshot": request.to} if request.to else {}
        fields |= {"restored": proof.files_restored, "removed": proof.files_removed}
        name = "checkout.rolled_back" if request.to else "checkout.reset"
        self.leasing.publish(name, lease, duration_s=timings["total"], **fields)
        return protocol.ResetAnswer(**checkout_fields(lease, timings), proof=proof)

    async def renew(
        self, checkout: str, request: protocol.RenewCheckout, peer: Peer
    ) -> protocol.Checkout:
        """Set the deadline to the time to live from now, which may be earlier than before."""
        async with self.leasing.held(checkout, peer) as lease:
            expires_at = self.clock() + self.leasing.ttl(request.ttl, peer)
            lease = lease.until(expires_at)
            await anyio.to_thread.run_sync(self.leases.prepare, lease)  # flushed: see leases.py
            self.leases.put(lease)
        return protocol.Checkout(**checkout_fields(lease, {}))

    async def attach(
        self, checkout: str, request: protocol.AttachCheckout, peer: Peer
    ) -> tuple[protocol.Attachment, int]:
        """Return the descriptor of a mount for the peer's namespace; the caller closes it."""
        async with self.leasing.held(checkout, peer, live=True) as lease:
            mount = self.lifecycle.backend_of(lease).clone(lease, request.target)
        fields = {"target": str(request.target), "by": peer.uid}
        self.leasing.publish("checkout.attached", lease, **fields)
        return protocol.Attachment(
            checkout=lease.id, target=request.target, resets=lease.resets
        ), mount

    async def release(self, checkout: str, peer: Peer) -> None:
        """End a lease. The checkout is gone at once; its files are removed in the background.

        Only an administrator releases a checkout that was set aside: its owner may be unknown.
        """
        if aside := self.leases.find_aside(checkout):
            self.leasing.must_be_admin(peer, f"release checkout {aside}, which is set aside")
            self.lifecycle.end_aside(aside)
            log.info("checkout.given_up", checkout=aside, uid=peer.uid)
            return
        async with self.leasing.held(checkout, peer) as lease:
            self.lifecycle.end(lease)
        self.leasing.publish("checkout.released", lease)
        await self.trash.keep_up()

    async def get(self, checkout: str, peer: Peer) -> protocol.Checkout:
        return protocol.Checkout(**checkout_fields(self.leasing.get(checkout, peer), {}))

    async def list(self, peer: Peer, label: str | None = None) -> list[protocol.Checkout]:
        """Return the checkouts that the peer may see, with `label` if given, oldest first."""
        leases = (it for it in self.leases_of(peer) if label is None or it.terms.label == label)
        return [protocol.Checkout(**checkout_fields(lease, {})) for lease in leases]

    def leases_of(self, peer: Peer) -> builtins.list[Lease]:
        """Return the leases that the peer may see, oldest first."""
        return [lease for lease in self.leases if self.leasing.may_see(lease, peer)]

    def must_be_usable(self, checkout: str, peer: Peer) -> None:
        """Raise what `diff` and `apply` would raise before they begin."""
        self.leasing.must_be_open()
        must_be_live(self.leasing.get(checkout, peer))

    async def diff(
        self, checkout: str, peer: Peer, form: DiffFormat = DiffFormat.PATCH
    ) -> DiffAnswer:
        """Return all changes since the base commit as a patch, untracked files included.

        A long patch is a file, which the caller removes.
        """
        async with self.leasing.held(checkout, peer, live=True) as lease:
            changed = self.lifecycle.backend_of(lease).changed_paths(lease)
            return await self.patches.diff(lease, changed, form)

    async def receipt(self, checkout: str, peer: Peer) -> protocol.Receipt:
        """Issue a receipt: what the checkout is now, and how that was proven."""
        async with self.leasing.held(checkout, peer, live=True) as lease:
            backend = self.lifecycle.backend_of(lease)
            proven_at = await backend.template_proven_at(lease)
            receipt = await self.receipts.issue(lease, backend.changed_paths(lease), proven_at)
        await self.receipts.keep(receipt, lease)
        return receipt

    async def seal(self, checkout: str, peer: Peer) -> protocol.SealReport:
        """Check that the checkout's store is as it was built, and lacks the instance's gold and bug
        commits, unless one of them is the base commit.
        """
        async with self.leasing.held(checkout, peer, live=True) as lease:
            store = await self.stores.ensure(*lease.template)
            row = await self.patches.find_row(lease)
            answers = (CommitRole.GOLD, CommitRole.BUG)
            secret = {commit for commit, role in row.commits if role in answers} if row else set()
            secret.discard(lease.base.commit)
            leaks = await anyio.to_thread.run_sync(find_leaks, store, secret)
        return protocol.SealReport(
            path=str(lease.tree_path),
            base=lease.base.commit,
            sealed=not leaks,
            head=store.head,
            leaks=leaks,
            checked=[f"history {lease.history}", f"{len(store.packs)} packs", "control files"],
        )

    async def verify_receipt(
        self, receipt: protocol.Receipt, digest: str | None, peer: Peer
    ) -> protocol.ReceiptReport:
        """Compare a receipt with the mirror, for a peer that may check its commit out.

        `digest` is that of the whole receipt, by which the record of its issue is found.
        """
        compared = await self._compare_receipt(receipt, peer)
        if await self.receipts.is_recorded(receipt, digest):
            return replace(compared, proven_by=["record"])
        return compared

    async def _compare_receipt(
        self, receipt: protocol.Receipt, peer: Peer
    ) -> protocol.ReceiptReport:
        self.leasing.must_be_open()
        wanted = protocol.StartCheckout(mirror=receipt.mirror, commit=receipt.commit)
        try:
            resolved = await self.resolver.resolve_start(wanted, self.leasing.naming(peer))
        except MirrorNotFoundError:
            return report(receipt, {"mirror": None})
        except CommitNotFoundError:
            return report(receipt, {"mirror": receipt.mirror, "commit": None})
        base = None
        if receipt.instance is not None:
            base = await self.resolver.find_base(receipt.instance, receipt.dataset)
        return await self.receipts.verify(receipt, resolved, base)

    async def apply(
        self,
        checkout: str,
        peer: Peer,
        *,
        patch: bytes | Path | None,
        named: str | None = None,
        reverse: bool = False,
        strategy: ApplyStrategy | None = None,
    ) -> protocol.ApplyAnswer:
        """Apply a patch to the files, all of it or nothing.

        Without a patch, apply the instance's own one that is `named`: `@patch`, in the direction
        that fixes the bug, or `@test_patch` (grader view); by default tolerantly, as it was
        recorded by others.
        """
        async with self.leasing.held(checkout, peer, live=True) as lease:
            backwards = reverse
            strategy = strategy or (ApplyStrategy.EXACT if patch else ApplyStrategy.TOLERANT)
            if patch is None:
                self.leasing.must_be_admin(peer, "apply the instance's own patch")
                patch, direction = await self.patches.named_patch(lease, named or "")
                # in some sets, such as SWE-smith, the patch of a row makes the bug
                backwards ^= direction is Direction.REVERSE
            paths, applied_by, notes = await self.patches.apply(
                lease, patch, reverse=backwards, strategy=strategy
            )
        fields = {"files": len(paths), "reverse": reverse, "strategy": str(applied_by)}
        self.leasing.publish("checkout.patched", lease, **fields)
        return protocol.ApplyAnswer(**checkout_fields(lease, {}), strategy=applied_by, notes=notes)

    async def restore(
        self, checkout: str, peer: Peer, request: protocol.RestorePaths
    ) -> protocol.RestoreAnswer:
        """Write files of a pinned commit into the checkout (grader view)."""
        async with self.leasing.held(checkout, peer, live=True) as lease:
            paths = await self.patches.restore(lease, request)
        self.leasing.publish("checkout.restored", lease, files=len(paths))
        return protocol.RestoreAnswer(paths=paths)

    @asynccontextmanager
    async def _base_of(
        self, request: protocol.ResetCheckout, lease: Lease, peer: Peer
    ) -> AsyncIterator[Base]:
        """Yield what the checkout has after a reset; its layers are kept meanwhile."""
        resolver, history = self.resolver, lease.history
        if request.to is None:
            resolved = await resolver.resolve_reset(request, lease, self.leasing.naming(peer))
            if resolved.base.commit != lease.base.commit:
                await resolver.choose_history(resolved, lease.terms.view, history, history)
            async with resolver.completed(request, resolved, history, peer, lease) as resolved:
                yield resolved.base
            return
        others = (request.instance, request.commit, request.dataset)
        if any((*others, request.layer, request.environment)):
            raise InvalidRequestError(
                "cannot reset to a snapshot and to anything else at once",
                hint="name one of them",
            )
        yield self.forks.get(lease, request.to).base

    # -- prepared layers and environments ----------------------------------------------------------

    async def save(
        self, checkout: str, request: protocol.SaveLayer, peer: Peer
    ) -> protocol.PreparedLayer:
        """Save the changes in a checkout as a layer for other checkouts of its commit."""
        began = time.perf_counter()
        async with self.leasing.held(checkout, peer, live=True) as lease:
            await self.quotas.ensure("save a layer", peer.uid, peer.uid)
            changed = self.lifecycle.backend_of(lease).changed_paths(lease)
            job = self.patches.job(lease)
            record = await self.prepared.save(lease, request.name, peer.uid, job, changed)
            self.quotas.add(peer.uid, record.copied["size_bytes"])
        fields = {"layer": record.saved.name, "files": record.copied["files"]}
        self.leasing.publish("layer.saved", lease, duration_s=elapsed_s(began), **fields)
        return self.prepared.describe(record)

    async def show_layer(
        self, checkout: str, write: Callable[[Path, Path], Awaitable[T]], peer: Peer
    ) -> T:
        """Show in a clean checkout the new layer that `write` makes, given the tree and the path of
        the layer, if it makes one. The layer is removed with the checkout.
        """
        async with self.leasing.held(checkout, peer, live=True) as lease:
            with self.layers.making() as layer:
                written = await write(lease.tree_path, layer)
                if exists(layer):
                    base = replace(lease.base, layer=LayerId(layer.name))
                    await self.lifecycle.make_clean(replace(lease, base=base))
        return written

    async def list_layers(
        self, mirror: str | None, peer: Peer
    ) -> builtins.list[protocol.PreparedLayer]:
        """Return the prepared layers that a peer may use, oldest first."""
        key = self.mirrors.get_name(mirror).key if mirror else None
        return [
            self.prepared.describe(record)
            for record in self.prepared.visible_to(peer.uid)
            if key in (None, record.mirror.key)
        ]

    async def remove_layer(self, layer: str, peer: Peer) -> None:
        """Remove a prepared layer. Raises ConflictError."""
        record = self.prepared.remove(layer, peer.uid)
        log.info("layer.removed", layer=record.saved.name, mirror=str(record.mirror), uid=peer.uid)

    def layers_of(self, peer: Peer) -> builtins.list[tuple[LayerRecord, int]]:
        """Return the prepared layers that a peer may remove, with the checkouts that use each."""
        return [
            (record, self.prepared.holders(record))
            for record in self.prepared.visible_to(peer.uid)
            if self.prepared.may_remove(record, peer.uid)
        ]
