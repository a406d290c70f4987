"""One sync of one mirror: ask, fetch, move.

The order makes a crash harmless: objects first, then the record of the new refs, then one
transaction that moves all refs and the ref history, and keeps every tip that upstream left. A sync
that finds nothing new writes nothing. The caller holds the mirror's lock.

Where upstream cannot give the objects of some refs, those refs become faults and all others arrive.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import NamedTuple

from .. import errors
from ..errors import MirrordError, TransferBrokenError, UpstreamLossError
from ..git.command import lines_of
from ..model import CommitId, MirrorName, utc_now
from ..protocol import RefChange, RefFault, Synced
from . import refs
from .history import read_last, write_record
from .repository import HISTORY, KEPT, Refs, Repository
from .upstreams.fetching import Fetcher
from .upstreams.shallow import fetch_parentless, is_shallow


async def sync(
    fetcher: Fetcher,
    patterns: Sequence[str],
    *,
    known_faults: Sequence[RefFault] = (),
    accept_loss: bool = False,
    retry_faults: bool = False,
) -> Synced:
    """Bring the mirror up to date; bad refs become faults.

    `known_faults` are refs that upstream could not give last time. They are fetched last, and
    where nothing moved upstream not before a day has passed, unless `retry_faults`. Raises an
    UpstreamError when nothing could be fetched; an UpstreamLossError where upstream lost most of
    its refs, unless `accept_loss`.
    """
    repository = fetcher.repository
    await refs.recover(repository)
    present = await repository.all_refs()
    old = refs.followed_refs(present)
    is_empty = HISTORY in present and not old  # after an accepted loss
    offer = await fetcher.offer(patterns, may_be_empty=accept_loss or is_empty)
    if not accept_loss:
        must_not_vanish(repository.name, old, offer)
    earlier = {it.commit: it for it in known_faults if offer.refs.get(it.ref) == it.commit}
    must_rest = not retry_faults and _must_rest(offer, old, earlier.values())
    failed = await _fetch_missing(fetcher, offer, present, earlier, must_rest=must_rest)
    offer = await _without_strange_branches(fetcher, offer, present, failed)
    if offer.redirected_to and not accept_loss:
        await _must_continue(repository, old, offer, failed.keys())
    parentless = await _fetch_parentless(fetcher, failed, earlier)
    if offer.refs and not parentless and len(failed) == len(set(offer.refs.values())) and not old:
        raise next(iter(failed.values()))
    asked = {oid: it.asked_at for oid, it in earlier.items()} if must_rest else {}
    faults = [*offer.faults, *_as_faults(offer, failed, asked, parentless)]
    target = {ref: oid for ref, oid in offer.refs.items() if oid not in failed}
    target |= _held_back(old, target, faults)
    moved = await move_refs(
        repository, present, target, offer.head,
        why="sync, loss accepted" if accept_loss else "sync", keep=parentless.values(),
        held=fetcher.held,
    )  # fmt: skip
    return Synced(
        mirror=str(repository.name),
        changed=bool(moved.changes),
        summary=refs.summarise(moved.changes),
        ref_count=len(target),
        kept_count=moved.kept_count,
        default_branch=moved.head.removeprefix("refs/heads/") if moved.head else None,
        # the record in the mirror's history has them all
        changes=moved.changes[:1000],
        faults=faults,
        redirected_to=offer.redirected_to,
    )


def _as_faults(
    offer: refs.Offer,
    failed: Mapping[str, MirrordError],
    asked: Mapping[str, datetime | None],
    parentless: Mapping[str, CommitId],
) -> list[RefFault]:
    """Return a fault for each ref that failed; one of `asked` was not asked for this time."""
    now = utc_now()
    return [
        RefFault(
            ref=ref,
            commit=oid,
            reason=failed[oid].message,
            code=failed[oid].code,
            asked_at=asked.get(oid, now),
            parentless=parentless.get(oid),
        )
        for ref, oid in offer.refs.items()
        if oid in failed
    ]


def _held_back(old: Refs, arrived: Refs, faults: Iterable[RefFault]) -> Refs:
    """Return the refs that stay, as their new objects did not arrive and no ref took their place.

    A fault without a code is of a name that the mirror cannot hold.
    """
    lacking = [fault.ref for fault in faults if fault.code and fault.ref in old]
    if not lacking:  # an upstream may have 100,000 refs
        return {}
    directories = {directory for ref in arrived for directory in refs.directories_of(ref)}
    return {
        ref: old[ref]
        for ref in lacking
        if ref not in directories and arrived.keys().isdisjoint(refs.directories_of(ref))
    }


# how long faults are left alone while upstream moves nothing
_REST = timedelta(days=1)


def _must_rest(offer: refs.Offer, old: Refs, earlier: Collection[RefFault]) -> bool:
    """True if known faults are left alone: upstream moved nothing else, and a day has not passed.

    A search for what is damaged costs an upstream many fetches.
    """
    faulty = {fault.ref for fault in earlier}
    offered = {ref: oid for ref, oid in offer.refs.items() if ref not in faulty}
    held = {ref: oid for ref, oid in old.items() if ref not in faulty}
    now = utc_now()
    return offered == held and all(it.asked_at and now - it.asked_at < _REST for it in earlier)


# fetches in a row that bring none of what a line garbled; it is a fault of upstream then
_FUTILE_MAX = 3


async def _fetch_missing(
    fetcher: Fetcher,
    offer: refs.Offer,
    present: Refs,
    earlier: Mapping[str, RefFault],
    *,
    must_rest: bool,
) -> dict[str, MirrordError]:
    """Fetch what no ref of the mirror holds yet: the default branch, branches, tags, the rest."""

    def rank(ref: str) -> tuple[bool, bool, bool, str]:
        is_branch, is_tag = ref.startswith("refs/heads/"), ref.startswith("refs/tags/")
        return ref != offer.head, not is_branch, not is_tag, ref

    held = set(present.values())
    missing = (ref for ref, oid in offer.refs.items() if oid not in held)
    wanted = list(dict.fromkeys(offer.refs[ref] for ref in sorted(missing, key=rank)))
    fresh = [oid for oid in wanted if oid not in earlier]
    again = [oid for oid in wanted if oid in earlier]
    if must_rest:
        return {oid: _as_error(earlier[oid]) for oid in again}
    failed = await fetcher.fetch(fresh) if fresh else {}
    futile = 0
    while broken := [oid for oid in fresh if isinstance(failed.get(oid), TransferBrokenError)]:
        # a line that changes bytes now and then blames what was asked for alone at that moment
        rest = {oid: error for oid, error in failed.items() if oid not in broken}
        failed = rest | await fetcher.fetch(broken)
        futile = futile + 1 if all(oid in failed for oid in broken) else 0
        if futile == _FUTILE_MAX:
            break
    for error in failed.values():
        if isinstance(error, errors.UpstreamUnavailableError):
            return failed | dict.fromkeys(again, error)
    reasons = {oid: fault.reason for oid, fault in earlier.items()}
    return failed | (await fetcher.fetch(again, reasons) if again else {})


def _as_error(fault: RefFault) -> MirrordError:
    return errors.from_problem({"code": fault.code, "detail": fault.reason})


# refs of a shallow upstream that squashed checkouts can be made from; each is two git processes
_PARENTLESS_MAX = 400


async def _fetch_parentless(
    fetcher: Fetcher, failed: Mapping[str, MirrordError], earlier: Mapping[str, RefFault]
) -> dict[str, CommitId]:
    """Return what the mirror has in place of commits of a shallow upstream."""
    shallow = [oid for oid, error in failed.items() if is_shallow(error.message)]
    held = {oid: earlier[oid].parentless for oid in shallow if oid in earlier}
    parentless = {oid: CommitId(commit) for oid, commit in held.items() if commit}
    absent = await fetcher.repository.absent(parentless.values()) if parentless else set()
    missing = [oid for oid in shallow if oid not in parentless or parentless[oid] in absent]
    with suppress(errors.UpstreamError, errors.GitFailedError):  # the fault of their refs remains
        parentless |= await fetch_parentless(fetcher, missing[:_PARENTLESS_MAX])
    return {oid: commit for oid, commit in parentless.items() if commit not in absent}


_NO_COMMIT = "no-commit"


async def _without_strange_branches(
    fetcher: Fetcher, offer: refs.Offer, present: Refs, failed: Collection[str]
) -> refs.Offer:
    """Make branches that name no commit faults: git (2.39) refuses to write one."""
    repository = fetcher.repository
    branches = {ref: oid for ref, oid in offer.refs.items() if ref.startswith("refs/heads/")}
    new = {ref: oid for ref, oid in branches.items() if present.get(ref) != oid}
    oids = set(new.values()) - set(failed)
    kinds = fetcher.kinds | await repository.kinds(oids - fetcher.kinds.keys())
    strange = {oid: kinds[oid] for oid in oids if kinds[oid] != "commit"}
    faults = [
        RefFault(
            ref=ref,
            commit=oid,
            reason=f"it is a branch, and a {strange[oid]} is no commit",
            code=_NO_COMMIT,
        )
        for ref, oid in new.items()
        if oid in strange
    ]
    names = {fault.ref for fault in faults}
    good = {ref: oid for ref, oid in offer.refs.items() if ref not in names}
    head = offer.head if offer.head in good else None
    return replace(offer, refs=good, head=head, faults=[*offer.faults, *faults])


async def _must_continue(
    repository: Repository, old: Refs, offer: refs.Offer, failed: Collection[str]
) -> None:
    """Raise UpstreamLossError where a redirect ends at a repository with another history.

    It continues where the new refs reach a tip of an old one. A name that is given away may be
    taken by anybody.
    """
    new = set(offer.refs.values()) - set(failed)
    tips = {oid for ref, oid in old.items() if ref.startswith("refs/heads/")} or {*old.values()}
    if not old or new & tips:
        return
    listing = await repository.run(
        "rev-list", "--stdin",
        stdin=lines_of([*sorted(tips), *(f"^{oid}" for oid in sorted(new))]),
        doing=f"compare the history of mirror {repository.name} with its upstream's",
    )  # fmt: skip
    # rev-list leaves out what the new refs reach, so a tip that it lacks goes on in them
    if not tips.issubset(listing.lines):
        return
    raise UpstreamLossError(
        f"cannot follow the upstream of mirror {repository.name}: it redirects to"
        f" {offer.redirected_to}, which has another history",
        hint="nothing was changed; if it is the right one,"
        f" `mirrord mirror sync {repository.name} --accept-loss` follows it and keeps every tip",
        mirror=str(repository.name),
        redirected_to=offer.redirected_to,
    )


def must_not_vanish(name: MirrorName, old: Refs, offer: refs.Offer) -> None:
    """Raise UpstreamLossError for an offer that lacks most of the old refs, or every branch.

    An accident or a takeover looks like that. Every tip would be kept, but checkouts by branch
    would change, so a person has to accept it once. A force push is followed.
    """
    faulty = {fault.ref for fault in offer.faults}
    gone = [ref for ref in old if ref not in offer.refs and ref not in faulty]
    has_branches = any(ref.startswith("refs/heads/") for ref in [*offer.refs, *faulty])
    # a small project may tidy up
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


class MovedRefs(NamedTuple):
    """What a move of refs did: the differences, the target of HEAD, how many tips are kept."""

    changes: list[RefChange]
    head: str | None
    kept_count: int


async def move_refs(
    repository: Repository,
    present: Refs,
    target: Refs,
    wanted_head: str | None,
    *,
    why: str,
    keep: Iterable[str] = (),
    held: Collection[str] = (),
) -> MovedRefs:
    """Move the refs that follow upstream, and HEAD, to `target`, in one transaction.

    Keeps the tips that they leave, and the commits of `keep`, and records the move; writes nothing
    where nothing moves. HEAD gets the wanted branch, or else one that exists. `held` are ids whose
    objects were just seen in the mirror.
    """
    changes = await refs.classify(repository, refs.compare(refs.followed_refs(present), target))
    now = await repository.head()
    branches = sorted(ref for ref in target if ref.startswith("refs/heads/"))
    choices = (wanted_head, now, "refs/heads/main", "refs/heads/master", *branches)
    head = next((ref for ref in choices if ref in target), None)
    left = [change.old for change in changes if change.kept and change.old]
    kept_refs = {f"{KEPT}{oid}": oid for oid in (*keep, *left)}
    kept = {ref.removeprefix(KEPT) for ref in (*present, *kept_refs) if ref.startswith(KEPT)}
    moved = MovedRefs(changes, head, len(kept))
    if not changes and head in {None, now} and kept_refs.keys() <= present.keys():
        return moved
    moves: refs.Moves = {change.ref: (change.old, change.new) for change in changes}
    moves |= {ref: (None, oid) for ref, oid in kept_refs.items() if ref not in present}
    parent = present.get(HISTORY)
    # with those that only the last record has, so that audits miss a kept ref removed by hand
    last = await read_last(repository, parent)
    record = await write_record(
        repository, target, head, changes,
        kept=last.kept | kept, parents=[parent] if parent else [], why=why, last=last,
    )  # fmt: skip
    moves[HISTORY] = (parent, record)
    await refs.commit(repository, moves, head if head != now else None, held={*held, record})
    return moved
