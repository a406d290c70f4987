"""One sync of one mirror: ask, fetch, move.

The order makes a crash harmless: objects first, then the record of the new refs, then one
transaction that moves all refs, keeps every tip that upstream left, and moves the ref history. A
sync that finds nothing new writes nothing. The caller holds the mirror's lock.
"""

from collections.abc import Mapping, Sequence

from ..errors import MirrordError, UpstreamLossError
from ..model import MirrorName
from ..protocol import RefChange, RefFault, Synced
from .fetch import Fetcher
from .history import read_last, write_record
from .refs import Offer, classify, compare, directories_of, summarise, theirs
from .repository import HISTORY, KEPT, Refs, Repository
from .transaction import Moves, commit, recover


async def sync(
    fetcher: Fetcher,
    patterns: Sequence[str],
    *,
    known_faults: Mapping[str, str] | None = None,
    accept_loss: bool = False,
) -> Synced:
    """Bring the mirror up to date; single bad refs become faults.

    `known_faults` are objects that upstream could not give last time, with the reason: they are
    asked for again, but together and last. Raises an UpstreamError when nothing could be fetched;
    without `accept_loss` an upstream that lost most of its refs is an UpstreamLossError.
    """
    repository = fetcher.repository
    await recover(repository)
    present = await repository.all_refs()
    old = theirs(present)
    is_empty = HISTORY in present and not old  # as somebody accepted
    offer = await fetcher.offer(patterns, may_be_empty=accept_loss or is_empty)
    if not accept_loss:
        must_not_vanish(repository.name, old, offer)
    failed = await _fetch_missing(fetcher, offer, present, known_faults or {})
    if offer.refs and len(failed) == len(set(offer.refs.values())) and not old:
        raise next(iter(failed.values()))
    faults = [
        RefFault(ref=ref, commit=oid, reason=failed[oid].message)
        for ref, oid in offer.refs.items()
        if oid in failed
    ]
    target = {ref: oid for ref, oid in offer.refs.items() if oid not in failed}
    if stuck := [ref for ref, oid in offer.refs.items() if oid in failed and ref in old]:
        # a ref whose new objects did not come stays where it is, unless another took its place
        above = {directory for ref in target for directory in directories_of(ref)}
        for ref in stuck:
            if ref not in above and target.keys().isdisjoint(directories_of(ref)):
                target[ref] = old[ref]
    why = "sync, loss accepted" if accept_loss else "sync"
    changes, head = await move_refs(repository, present, target, offer.head, why=why)
    kept = {ref for ref in present if ref.startswith(KEPT)}
    kept |= {f"{KEPT}{change.old}" for change in changes if change.kept}
    return Synced(
        mirror=str(repository.name),
        changed=bool(changes),
        summary=summarise(changes),
        ref_count=len(target),
        kept_count=len(kept),
        default_branch=head.removeprefix("refs/heads/") if head else None,
        changes=changes[:1000],
        faults=[*offer.faults, *faults],
        redirected_to=offer.redirected_to,
    )


async def _fetch_missing(
    fetcher: Fetcher, offer: Offer, present: Refs, known_faults: Mapping[str, str]
) -> dict[str, MirrordError]:
    """Fetch what no ref of the mirror holds yet: the default branch, branches, tags, the rest."""

    def rank(ref: str) -> tuple[bool, bool, bool, str]:
        is_branch, is_tag = ref.startswith("refs/heads/"), ref.startswith("refs/tags/")
        return ref != offer.head, not is_branch, not is_tag, ref

    held = set(present.values())
    missing = (ref for ref, oid in offer.refs.items() if oid not in held)
    wanted = list(dict.fromkeys(offer.refs[ref] for ref in sorted(missing, key=rank)))
    fresh = [oid for oid in wanted if oid not in known_faults]
    again = [oid for oid in wanted if oid in known_faults]
    failed = await fetcher.fetch(fresh) if fresh else {}
    if failed and len(fresh) == 1:
        # asked for only once: perhaps the connection broke, which says nothing of the object
        failed = await fetcher.fetch(fresh)
    return failed | (await fetcher.fetch(again, known_faults) if again else {})


def must_not_vanish(name: MirrorName, old: Refs, offer: Offer) -> None:
    """Refuse an offer that lacks most of the old refs, or every branch; raises UpstreamLossError.

    That is what an accident or a takeover looks like. Every tip would be kept, but checkouts by
    branch would get something else, so a person has to accept it once. A rewritten history is
    followed: that is what force pushes do.
    """
    faulty = {fault.ref for fault in offer.faults}
    gone = [ref for ref in old if ref not in offer.refs and ref not in faulty]
    has_branches = any(ref.startswith("refs/heads/") for ref in [*offer.refs, *faulty])
    # a small project that tidies up is no accident
    if len(gone) > 10 and 2 * len(gone) > len(old):
        fact = f"{len(gone)} of its {len(old)} refs are gone from upstream"
    elif not has_branches and any(ref.startswith("refs/heads/") for ref in old):
        fact = "upstream has no branch any more"
    else:
        return
    raise UpstreamLossError(
        f"cannot follow the upstream of mirror {name}: {fact}",
        hint="nothing was changed and the mirror still serves what it has; if the loss is"
        f" intended, `mirrord mirror sync {name} --accept-loss` follows it and keeps every tip",
        mirror=str(name),
        lost=len(gone),
        total=len(old),
    )


async def move_refs(
    repository: Repository, present: Refs, target: Refs, wanted_head: str | None, *, why: str
) -> tuple[list[RefChange], str | None]:
    """Move the refs that follow upstream, and HEAD, to `target`, in one transaction.

    Keeps the tips that they leave, and records the move; writes nothing where nothing moves.
    Answers the changes, and the target of HEAD: the wanted one, or else one that exists.
    """
    changes = await classify(repository, compare(theirs(present), target))
    now = await repository.head()
    branches = sorted(ref for ref in target if ref.startswith("refs/heads/"))
    choices = (wanted_head, now, "refs/heads/main", "refs/heads/master", *branches)
    head = next((ref for ref in choices if ref in target), None)
    if not changes and head in {None, now}:
        return changes, head
    moves: Moves = {change.ref: (change.old, change.new) for change in changes}
    left = {f"{KEPT}{change.old}": change.old for change in changes if change.kept and change.old}
    moves |= {ref: (None, oid) for ref, oid in left.items() if ref not in present}
    parent = present.get(HISTORY)
    # also those that only the last record has: a kept ref that was removed by hand is to be missed
    last = await read_last(repository, parent)
    named = {ref.removeprefix(KEPT) for ref in [*present, *moves] if ref.startswith(KEPT)}
    record = await write_record(
        repository, target, head, changes,
        kept=last.kept | named, parents=[parent] if parent else [], why=why, last=last,
    )  # fmt: skip
    moves[HISTORY] = (parent, record)
    await commit(repository, moves, head if head != now else None)
    return changes, head
