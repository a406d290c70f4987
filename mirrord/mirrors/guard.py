"""The guard before a mirror follows its upstream: most refs gone at once, or another history under the same name.

Either is what an accident, a takeover or a name given to another project looks like. Nothing would be lost by following, every
tip is kept; but checkouts by branch, and whoever asks for `main`, would get something else. So a person has to say yes, once.
"""

from __future__ import annotations

from ..errors import UpstreamLossError
from ..model import MirrorName
from ..protocol import RefChange
from .refs import Offer
from .repository import Refs, Repository

_FEW = 10
"""So many refs may go at once: a small project that tidies up is no accident."""


def must_not_vanish(name: MirrorName, old: Refs, offer: Offer) -> None:
    """Refuse an offer that lacks most of the refs there were, or every branch; asks upstream for nothing."""
    faulty = {fault.ref for fault in offer.faults}
    gone = [ref for ref in old if ref not in offer.refs and ref not in faulty]
    branches = [ref for ref in old if ref.startswith("refs/heads/")]
    if len(gone) > _FEW and 2 * len(gone) > len(old):
        raise _refused(name, f"{len(gone)} of its {len(old)} refs are gone from upstream", len(gone), len(old))
    if branches and not any(ref.startswith("refs/heads/") for ref in [*offer.refs, *faulty]):
        raise _refused(name, "upstream has no branch any more", len(gone), len(old))


async def must_be_the_same(repository: Repository, old: Refs, target: Refs, changes: list[RefChange]) -> None:
    """Refuse branches of which none has any commit in common with those there were. All objects are here already."""
    before, after = _branches(old), _branches(target)
    moved = {change.ref for change in changes if change.kind == "forced"}
    if not before or not after or any(ref in after and ref not in moved for ref in before):
        return
    if not await repository.roots(before.values()) & await repository.roots(after.values()):
        raise _refused(repository.name, "upstream has another history, with no commit in common", len(moved), len(old))


def _branches(refs: Refs) -> Refs:
    return {ref: oid for ref, oid in refs.items() if ref.startswith("refs/heads/")}


def _refused(name: MirrorName, fact: str, lost: int, total: int) -> UpstreamLossError:
    return UpstreamLossError(
        f"cannot follow the upstream of mirror {name}: {fact}",
        hint=f"nothing was changed and the mirror serves on; when upstream means it, `mirrord mirror sync {name} --accept-loss`"
        " follows it and keeps every tip; when it is another project now, remove its URL or add it under another name",
        mirror=str(name),
        lost=lost,
        total=total,
    )
