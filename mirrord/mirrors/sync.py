"""One sync of one mirror: ask, fetch, move.

Owns the order that makes a crash harmless: objects first, then the record of the new refs, then one transaction that moves all
refs, keeps every tip that upstream left, and moves the ref history. A sync that finds nothing new writes nothing. The caller
holds the mirror's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import MirrordError, UpstreamLossError
from ..model import MirrorName
from ..protocol import RefChange, RefFault
from .fetch import Fetcher
from .history import classify, read_kept, write_record
from .refs import Offer, compare, summarise, theirs
from .repository import HISTORY, KEPT, Refs, Repository
from .transaction import Transaction, commit, recover

_SHOWN_CHANGES = 1000
_USUAL_HEADS = ("refs/heads/main", "refs/heads/master")


@dataclass(frozen=True, slots=True)
class SyncResult:
    """What one sync did. `changes` is cut at a thousand; `summary` counts all."""

    mirror: str
    changed: bool
    summary: str
    ref_count: int
    kept_count: int
    default_branch: str | None
    changes: list[RefChange] = field(default_factory=list)
    faults: list[RefFault] = field(default_factory=list)
    redirected_to: str | None = None

    def as_dict(self) -> dict[str, object]:
        """JSON values, for the result of an operation."""
        return {
            "mirror": self.mirror,
            "changed": self.changed,
            "summary": self.summary,
            "ref_count": self.ref_count,
            "kept_count": self.kept_count,
            "default_branch": self.default_branch,
            "changes": [change.to_json() for change in self.changes],
            "faults": [fault.to_json() for fault in self.faults],
            "redirected_to": self.redirected_to,
        }


async def sync(
    fetcher: Fetcher,
    patterns: Sequence[str],
    *,
    known_faults: Mapping[str, str] | None = None,
    accept_loss: bool = False,
) -> SyncResult:
    """Bring the mirror up to date. Raises an UpstreamError when nothing could be had; single bad refs become faults.

    `known_faults` are objects that upstream could not give last time, with the reason: they are asked for again, but together and
    last. Without `accept_loss` an upstream that lost most of its refs is an UpstreamLossError.
    """
    repository = fetcher.repository
    await recover(repository)
    present = await repository.all_refs()
    is_empty = HISTORY in present and not theirs(present)  # as somebody accepted
    offer = await fetcher.offer(patterns, may_be_empty=accept_loss or is_empty)
    if not accept_loss:
        must_not_vanish(repository.name, theirs(present), offer)
    failed = await _fetch_missing(fetcher, offer, present, known_faults or {})
    if offer.refs and len(failed) == len(set(offer.refs.values())) and not theirs(present):
        raise next(iter(failed.values()))
    faults = [*offer.faults, *_faults(offer, failed)]
    target = _target(offer, theirs(present), failed)
    changes = await classify(repository, compare(theirs(present), target))
    why = "sync, loss accepted" if accept_loss else "sync"
    head = await _move(repository, offer, present, target, changes, why=why)
    return replace(
        _result(repository, present, target, changes, faults, head),
        redirected_to=offer.redirected_to,
    )


async def _fetch_missing(
    fetcher: Fetcher, offer: Offer, present: Refs, known_faults: Mapping[str, str]
) -> dict[str, MirrordError]:
    """Fetch what no ref of the mirror holds yet, the default branch first."""
    held = set(present.values())
    wanted = {
        oid: None
        for ref, oid in sorted(offer.refs.items(), key=lambda item: _rank(offer, item[0]))
        if oid not in held
    }
    fresh = [oid for oid in wanted if oid not in known_faults]
    again = [oid for oid in wanted if oid in known_faults]
    failed = await fetcher.fetch(fresh) if fresh else {}
    if (
        failed and len(fresh) == 1
    ):  # asked for only once: perhaps the connection broke, which says nothing of the object
        failed = await fetcher.fetch(fresh)
    return failed | (await fetcher.fetch(again, known_faults) if again else {})


def _rank(offer: Offer, ref: str) -> tuple[int, str]:
    if ref == offer.head:
        return 0, ref
    kinds = ("refs/heads/", "refs/tags/")
    return next((rank for rank, prefix in enumerate(kinds, 1) if ref.startswith(prefix)), 3), ref


def _faults(offer: Offer, failed: dict[str, MirrordError]) -> Iterable[RefFault]:
    for ref, oid in offer.refs.items():
        if oid in failed:
            yield RefFault(ref=ref, commit=oid, reason=failed[oid].message)


def _target(offer: Offer, old: Refs, failed: dict[str, MirrordError]) -> Refs:
    """Where the refs shall be. A ref whose new objects could not be had stays where it is, unless another took its place."""
    target = {ref: oid for ref, oid in offer.refs.items() if oid not in failed}
    directories = {
        "/".join(parts[:n])
        for parts in (ref.split("/") for ref in target)
        for n in range(3, len(parts))
    }
    for ref, oid in offer.refs.items():
        parts = ref.split("/")
        is_shadowed = (
            any("/".join(parts[:n]) in target for n in range(3, len(parts))) or ref in directories
        )
        if oid in failed and ref in old and not is_shadowed:
            target[ref] = old[ref]
    return target


async def _move(
    repository: Repository,
    offer: Offer,
    present: Refs,
    target: Refs,
    changes: Sequence[RefChange],
    *,
    why: str,
) -> str | None:
    """Move the refs and HEAD, keep the tips they leave, and record it, all in one transaction;
    answers the ref that HEAD names: upstream's default branch, or else one that exists."""
    now = await repository.head()
    branches = (ref for ref in sorted(target) if ref.startswith("refs/heads/"))
    choices = (offer.head, now, *_USUAL_HEADS, *branches)
    head = next((ref for ref in choices if ref in target), None)
    if not changes and head in {None, now}:
        return head
    transaction = Transaction(head=head if head != now else None)
    for change in changes:
        transaction.move(change.ref, change.old, change.new)
        if change.kept and change.old and f"{KEPT}{change.old}" not in present:
            transaction.create(f"{KEPT}{change.old}", change.old)
    parent = present.get(HISTORY)
    kept = await read_kept(repository, parent)  # one that was removed by hand is to be missed
    kept |= {
        ref.removeprefix(KEPT) for ref in [*present, *transaction.moves] if ref.startswith(KEPT)
    }
    record = await write_record(
        repository, target, head, changes, kept=kept, parents=[parent] if parent else [], why=why
    )
    transaction.move(HISTORY, parent, record)
    await commit(repository, transaction)
    return head


async def move_refs(
    repository: Repository, target: Refs, head: str | None, *, why: str
) -> list[RefChange]:
    """Put the refs that follow upstream where `target` says; nothing that a ref leaves is lost."""
    present = await repository.all_refs()
    changes = await classify(repository, compare(theirs(present), target))
    await _move(repository, Offer(target, head), present, target, changes, why=why)
    return changes


def _result(
    repository: Repository,
    present: Refs,
    target: Refs,
    changes: list[RefChange],
    faults: list[RefFault],
    head: str | None,
) -> SyncResult:
    kept = {ref for ref in present if ref.startswith(KEPT)} | {
        f"{KEPT}{c.old}" for c in changes if c.kept
    }
    return SyncResult(
        mirror=str(repository.name),
        changed=bool(changes),
        summary=summarise(changes),
        ref_count=len(target),
        kept_count=len(kept),
        default_branch=head.removeprefix("refs/heads/") if head else None,
        changes=changes[:_SHOWN_CHANGES],
        faults=faults,
    )


_FEW = 10
"""So many refs may go at once: a small project that tidies up is no accident."""


def must_not_vanish(name: MirrorName, old: Refs, offer: Offer) -> None:
    """Refuse an offer that lacks most of the refs there were, or every branch; asks upstream for nothing."""
    faulty = {fault.ref for fault in offer.faults}
    gone = [ref for ref in old if ref not in offer.refs and ref not in faulty]
    branches = [ref for ref in old if ref.startswith("refs/heads/")]
    if len(gone) > _FEW and 2 * len(gone) > len(old):
        raise _refused(
            name, f"{len(gone)} of its {len(old)} refs are gone from upstream", len(gone), len(old)
        )
    if branches and not any(ref.startswith("refs/heads/") for ref in [*offer.refs, *faulty]):
        raise _refused(name, "upstream has no branch any more", len(gone), len(old))


def _refused(name: MirrorName, fact: str, lost: int, total: int) -> UpstreamLossError:
    return UpstreamLossError(
        f"cannot follow the upstream of mirror {name}: {fact}",
        hint=f"nothing was changed and the mirror serves on; when upstream means it, `mirrord mirror sync {name} --accept-loss`"
        " follows it and keeps every tip",
        mirror=str(name),
        lost=lost,
        total=total,
    )
