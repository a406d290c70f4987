"""Receipts: what a checkout is and how that was proven; and their verification.

A closure's digest comes from the pack indexes of the sealed store when a receipt is issued, and
from a walk of the mirror when one is verified, so the two are independent.
"""

import hashlib
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread
from cachetools import LRUCache

from .. import __version__, protocol
from ..catalog import ReceiptRow
from ..errors import DeadlineError
from ..git.command import Git, lines_of
from ..git.packs import PackIndex
from ..mirrors.service import Mirrors
from ..mirrors.upstreams.upstream import public_url
from ..model import Backend, CommitId, DiffFormat, History, MirrorName, utc_now
from ..patches.diff import Diff, diff
from ..patches.worktree import PatchJob
from ..templates.builder import StoreBuilder, squashed_commit
from ..templates.packer import WALK, listed_ids
from ..templates.store import SealedStore
from ..workers.pool import Workers
from ..workers.turns import Turns
from .backend import ChangedPaths
from .lease import Lease
from .patching import DiffAnswer, Patches
from .receipt_records import ReceiptRecords
from .requests.resolve import ResolvedRequest

# of stores; the indexes of one forgotten are read again
_CACHED = 1024
_SEALED = "packs that hold exactly the closure, each object hashed when they were made"
_TEMPLATE = "each file hashed, the whole compared with the tree, since the host started"
_CLEAN = {
    Backend.OVERLAY: "an empty layer over the template",
    Backend.POOL: "written and read back, or compared with the private manifest of that",
}


class _Sealed(NamedTuple):
    """A store's objects, and when it was built."""

    closure: protocol.Closure
    built_at: datetime


@dataclass(eq=False, repr=False)
class Receipts:
    """Issues receipts for leases and verifies them. Belongs to one event loop."""

    git: Git
    workers: Workers
    mirrors: Mirrors
    stores: StoreBuilder
    patches: Patches

    def __post_init__(self) -> None:
        self._sealed: LRUCache[tuple[Path, tuple[str, ...]], _Sealed] = LRUCache(_CACHED)
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
        diff, sealed = await self._look(lease, changed, store)
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
            diff=_digest(diff)
            if isinstance(diff, bytes)
            else await anyio.to_thread.run_sync(_digest, diff),
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

    async def _look(
        self, lease: Lease, changed: ChangedPaths, store: SealedStore | None
    ) -> tuple[bytes | Path, _Sealed | None]:
        """Return the diff of a checkout and the facts of its store, which are read once.

        In one call of a worker: among many others each waits for its turn, up to 40 s were seen.
        """
        known = self._sealed.get((store.path, store.packs)) if store else None
        unread = None if known else store
        job, timeout = self.patches.job(lease), self.patches.timeout()
        async with self.patches.spool() as spool:
            try:
                made, read = await self.workers.run(
                    look, job, changed, spool, unread, timeout=timeout
                )
            except DeadlineError:
                if unread is None:
                    raise
                # a history of tens of millions of objects
                read = await self.workers.run(read_store, unread)
                made, _ = await self.workers.run(look, job, changed, spool, None, timeout=timeout)
        if store and read:
            self._sealed[store.path, store.packs] = read
        return DiffAnswer.of(made, spool).content, known or read

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


def look(
    job: PatchJob, changed: ChangedPaths, spool: Path, store: SealedStore | None
) -> tuple[Diff, _Sealed | None]:
    """Diff a checkout, and read a store if one is given. Runs in a worker."""
    made = diff(job, changed, DiffFormat.PATCH, spool)
    return made, read_store(store) if store else None


def read_store(store: SealedStore) -> _Sealed:
    """Count and hash the ids in the pack indexes of a store. Runs in a worker."""
    packs = (store.git / "objects/pack" / name for name in store.packs)
    closure = _closure(oid for pack in packs for oid in PackIndex(pack.with_suffix(".idx")))
    # its HEAD is never written again, so its time is that of the build
    built_at = (store.git / "HEAD").stat().st_mtime
    return _Sealed(closure, datetime.fromtimestamp(built_at, UTC))


def closure_of_listing(listing: Path, head: CommitId) -> protocol.Closure:
    """Count and hash the ids that a walk listed, and `head`. Runs in a worker."""
    return _closure([*listed_ids(listing), bytes.fromhex(head)])


def _closure(ids: Iterable[bytes]) -> protocol.Closure:
    ordered = sorted(set(ids))
    # an id a line: SHA-1 has 20 bytes
    lines = b"".join(ordered).hex("\n", 20) + "\n"
    return protocol.Closure(objects=len(ordered), sha256=hashlib.sha256(lines.encode()).hexdigest())


def _digest(diff: bytes | Path) -> protocol.Digest:
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
