"""Receipts: what a checkout is and how that was proven; and their verification.

A closure's digest comes from the pack indexes of the sealed store when a receipt is issued, and
from a walk of the mirror when one is verified, so the two are independent.
"""

import hashlib
import socket
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

import anyio.to_thread
from cachetools import LRUCache

from .. import __version__, protocol
from ..catalog import ReceiptRow
from ..git.command import Git, lines_of
from ..jobs.operations import task_group
from ..mirrors.service import Mirrors
from ..mirrors.upstreams.upstream import public_url
from ..model import Backend, CommitId, History, MirrorName, utc_now
from ..templates.builder import StoreBuilder, squashed_commit
from ..templates.packer import WALK
from ..templates.store import SealedStore
from ..workers.coalesce import Coalescer, SharedWork
from ..workers.pool import Workers
from ..workers.turns import Turns
from .backend import ChangedPaths
from .closures import StoreFacts, closure_of_listing, read_store
from .lease import Lease
from .patching import Patches
from .receipt_records import ReceiptRecords
from .requests.resolve import ResolvedRequest

# of stores; the indexes of one forgotten are read again
_CACHED = 1024
# as short as a diff, so that it waits behind no build: 1.7 million objects take a second
_READ_TIMEOUT = timedelta(minutes=1)
_SEALED = "packs that hold exactly the closure, each object hashed when they were made"
_TEMPLATE = "each file hashed, the whole compared with the tree, since the host started"
_CLEAN = {
    Backend.OVERLAY: "an empty layer over the template",
    Backend.POOL: "written and read back, or compared with the private manifest of that",
}


@dataclass(eq=False, repr=False)
class Receipts:
    """Issues receipts for leases and verifies them. Belongs to one event loop."""

    git: Git
    workers: Workers
    mirrors: Mirrors
    stores: StoreBuilder
    patches: Patches

    def __post_init__(self) -> None:
        self._sealed: LRUCache[tuple[Path, tuple[str, ...]], StoreFacts] = LRUCache(_CACHED)
        self._reads = Coalescer[StoreFacts]()
        self._walks = Turns(2)
        self.records = ReceiptRecords(self.mirrors.catalog)

    async def issue(
        self, lease: Lease, changed: ChangedPaths, template_proven_at: datetime | None
    ) -> protocol.Receipt:
        """Issue the receipt of a checkout; the caller holds its lock."""
        row = await self.mirrors.get(str(lease.mirror))
        store, saved = None, lease.base.saved
        if lease.history is not History.LINKED:
            store = await self.stores.ensure(*lease.template)
        async with task_group() as group:  # each waits for its turn among all calls of its user
            digest = group.create_task(self._digest(lease, changed))
            sealed = await self._find_sealed(store)
        clean = _CLEAN[lease.backend] + (", with a prepared layer" if lease.base.saved else "")
        return protocol.Receipt(
            format=protocol.RECEIPT_FORMAT,
            version=__version__,
            issued_at=utc_now(),
            checkout=lease.id,
            parent=lease.parent,
            instance=lease.base.instance,
            dataset=lease.base.dataset,
            mirror=str(row.name),
            upstream=public_url(row.url),
            commit=lease.base.commit,
            tree=lease.base.tree,
            head=store.head if store else lease.base.commit,
            history=lease.history,
            view=lease.terms.view,
            backend=lease.backend,
            created_at=lease.terms.created_at,
            expires_at=lease.terms.expires_at,
            resets=lease.resets,
            closure=sealed.closure if sealed else None,
            seal=protocol.Proven(method=_SEALED, at=sealed.built_at) if sealed else None,
            template=_proven(_TEMPLATE, template_proven_at),
            clean=None
            if lease.base.layer
            else _proven(clean, lease.reset_at or lease.terms.created_at),
            layer=protocol.LayerFacts(
                id=saved.id, name=saved.name, saved_by=saved.saved_by, tree=saved.tree
            )
            if saved
            else None,
            environment="@".join(lease.base.environment) if lease.base.environment else None,
            grade=_grade_of(lease),
            diff=digest.result(),
        )

    async def keep(self, receipt: protocol.Receipt, lease: Lease) -> None:
        """Store a receipt for the web page. A failure is logged: the client has the receipt."""
        identity = hashlib.sha256(receipt.canonical()).hexdigest()
        row = ReceiptRow(
            identity,
            self.mirrors.catalog.node,
            socket.gethostname(),
            lease.terms.owner_uid,
            lease.is_grader,
            receipt,
        )
        await self.records.keep(row)

    async def is_recorded(self, receipt: protocol.Receipt, digest: str | None) -> bool:
        """Return whether this receipt was issued here or by another daemon of the fleet.

        `digest` is its SHA-256 without the signature; the receipt itself may lack its grade.
        """
        digest = digest or hashlib.sha256(receipt.signed_bytes()).hexdigest()
        row = await self.records.find(digest)
        given = replace(receipt, grade=None, signature=None)
        return row is not None and replace(row.receipt, grade=None) == given

    async def verify(
        self, receipt: protocol.Receipt, target: ResolvedRequest, base: CommitId | None
    ) -> protocol.ReceiptReport:
        """Compare a receipt with the mirror, in which its commit was resolved to `target`.

        `base` is the base commit of its instance, if a dataset has that.
        """
        actual: dict[str, object] = {"mirror": receipt.mirror}
        actual |= {"instance": base} if base else {}
        wanted = target.base
        actual |= {"commit": wanted.commit, "tree": wanted.tree}
        if receipt.history is History.LINKED:  # shows all of the mirror: no closure is its own
            actual |= {"head": wanted.commit, "closure.objects": None, "closure.sha256": None}
            return report(receipt, actual)
        commit, tip, head = wanted.commit, str(wanted.commit), wanted.commit
        if receipt.history is History.SQUASHED:
            resolved = await self.stores.commits.get(target.mirror, commit)
            (head, _), tip = squashed_commit(resolved), wanted.tree
        closure = await self._walk(target.mirror, tip, head)
        actual |= {"head": head, "closure.objects": closure.objects}
        return report(receipt, actual | {"closure.sha256": closure.sha256})

    async def _digest(self, lease: Lease, changed: ChangedPaths) -> protocol.Digest:
        """Hash the diff of a checkout."""
        content = (await self.patches.diff(lease, changed)).content
        if isinstance(content, bytes):
            return _digest_of(content)
        return await anyio.to_thread.run_sync(_digest_of, content)

    async def _find_sealed(self, store: SealedStore | None) -> StoreFacts | None:
        """Return the facts of a store, read once for all who wait for them."""
        if store is None:
            return None
        key = store.path, store.packs
        if key in self._sealed:
            return self._sealed[key]

        async def read(_: SharedWork[StoreFacts]) -> StoreFacts:
            # kept before those who wait go on: who asks in between would read it again
            facts = await self.workers.run(read_store, store, timeout=_READ_TIMEOUT)
            self._sealed[key] = facts
            return facts

        # a crowd on one commit: 32 receipts read its store 32 times
        return await self._reads.join(" ".join((str(store.path), *store.packs)), read)

    async def _walk(self, name: MirrorName, tip: str, head: CommitId) -> protocol.Closure:
        """Count and hash what git finds from `tip` in the mirror, and `head`."""
        async with self._walks.turn(), self.mirrors.quarantine.directory("receipt") as scratch:
            listing = scratch / "listing"
            await self.git.run(
                *WALK,
                git_dir=self.mirrors.path(name),
                stdin=lines_of([tip]),
                stdout_path=listing,
                doing=f"walk {tip}",
            )  # fmt: skip
            return await self.workers.run(closure_of_listing, listing, head)


def report(receipt: protocol.Receipt, actual: dict[str, object]) -> protocol.ReceiptReport:
    """List the members of a receipt that differ from `actual`, of an instance its base commit."""
    closure = receipt.closure
    stated: dict[str, object] = {
        "mirror": receipt.mirror,
        "instance": receipt.commit,
        "commit": receipt.commit,
        "tree": receipt.tree,
        "head": receipt.head,
        "closure.objects": closure.objects if closure else None,
        "closure.sha256": closure.sha256 if closure else None,
    }
    mismatches = [
        protocol.Mismatch(member=member, stated=_text(stated[member]), found=_text(value))
        for member, value in actual.items()
        if _text(value) != _text(stated[member])
    ]
    return protocol.ReceiptReport(holds=not mismatches, mismatches=mismatches, checked=list(actual))


def _digest_of(diff: bytes | Path) -> protocol.Digest:
    """Hash a diff; if it is a file, remove it."""
    if isinstance(diff, bytes):
        return protocol.Digest(bytes=len(diff), sha256=hashlib.sha256(diff).hexdigest())
    with diff.open("rb") as file:
        # while it is open, so that no failure leaves it
        diff.unlink()
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return protocol.Digest(bytes=file.tell(), sha256=sha256)


def _grade_of(lease: Lease) -> protocol.GradeFacts | None:
    """Return how a grade was made, unless the checkout was reset to its commit since."""
    graded = lease.graded
    if graded is None or graded.layer != lease.base.layer:
        return None
    members = {name: getattr(graded, name) for name in ("policy", "strategy", "dropped_count")}
    return protocol.GradeFacts(**members, dropped=list(graded.dropped))


def _proven(method: str, proven_at: datetime | None) -> protocol.Proven | None:
    return protocol.Proven(method=method, at=proven_at) if proven_at else None


def _text(value: object) -> str | None:
    return None if value is None else str(value)
