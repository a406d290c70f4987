"""The guard before a mirror follows its upstream: most refs gone at once.

That is what an accident or a takeover looks like. Nothing would be lost by following, every tip is kept; but checkouts by branch,
and whoever asks for `main`, would get something else. So a person has to say yes, once. A rewritten history is followed: that is
what force pushes do, and what was there is kept.
"""

from __future__ import annotations

from ..errors import UpstreamLossError
from ..model import MirrorName
from .refs import Offer
from .repository import Refs

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
