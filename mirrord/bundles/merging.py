"""The refs of a bundle, merged into those of a mirror.

A ref that the mirror lacks is created; one that is ahead of the mirror's moves it forward. Any
other stays where it is, and the bundle's tip is kept. Pins are added. The longer ref history is
continued; one that a heal restarted is joined with the bundle's older one.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..errors import InvalidBundleError, MirrordError
from ..mirrors import history, lfs
from ..mirrors.pinrefs import pin_ref, read_pins
from ..mirrors.refs import Moves, directories_of, drop_shadowed, followed_refs, is_followed
from ..mirrors.repository import HISTORY, KEPT, OURS, Refs, Repository
from ..model import CommitId, MirrorName
from ..protocol import RefChange
from . import bundle_file

RECORDS = "refs/mirrord/records/"


class BundleRefs(NamedTuple):
    """The refs of a bundle by kind, those with names that a mirror may have."""

    followed: Refs
    kept: list[str]
    pins: list[tuple[str, CommitId]]
    history: str | None
    records: str | None
    mirror: str | None
    head: str | None
    lfs: str | None = None

    @property
    def tips(self) -> Refs:
        """All objects to be proven, by ref."""
        ours = {HISTORY: self.history, RECORDS: self.records}
        return (
            self.followed
            | {f"{KEPT}{oid}": oid for oid in self.kept}
            | {pin_ref(owner, commit): str(commit) for owner, commit in self.pins}
            | {ref: oid for ref, oid in ours.items() if oid}
        )


def sort_refs(refs: Refs) -> BundleRefs:
    """Sort the refs of a bundle by kind; raises InvalidBundleError, InvalidNameError."""
    refs, _ = bundle_file.split_parts(refs)
    followed = {ref: oid for ref, oid in refs.items() if is_followed(ref)}
    drop_shadowed(followed)
    named = [ref for ref in refs if ref.startswith(RECORDS)]
    if len(named) > 1:
        raise InvalidBundleError("cannot read the bundle: it holds the records of several mirrors")
    mirror = named[0].removeprefix(RECORDS) if named else ""
    # a bundle names HEAD's commit, but not its branch
    tip = refs.get("HEAD")
    at_head = [ref for ref, oid in refs.items() if ref.startswith("refs/heads/") and oid == tip]
    usual = [ref for ref in ("refs/heads/main", "refs/heads/master") if ref in at_head]
    return BundleRefs(
        followed=followed,
        kept=sorted({oid for ref, oid in refs.items() if ref == f"{KEPT}{oid}"}),
        pins=read_pins({ref: oid for ref, oid in refs.items() if ref.startswith(OURS)}),
        history=refs.get(HISTORY),
        records=refs[named[0]] if named else None,
        mirror=str(MirrorName.parse(mirror)) if mirror else None,
        head=next(iter([*usual, *sorted(at_head)]), None),
        lfs=refs.get(f"{lfs.IN_BUNDLE}{mirror}"),
    )


@dataclass(slots=True)
class MergePlan:
    """A merge into a mirror; `target` has its refs that follow upstream after it."""

    target: Refs
    moves: Moves = field(default_factory=dict)
    changes: list[RefChange] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


async def plan_merge(
    repository: Repository, bundle: BundleRefs, pins: list[tuple[str, CommitId]], head: str | None
) -> MergePlan:
    """Plan the merge into a repository that has all objects; `pins` have their future owners."""
    present = await repository.all_refs()
    plan = MergePlan(followed_refs(present))
    above = {directory for ref in plan.target for directory in directories_of(ref, 2)}
    for ref, oid in bundle.followed.items():
        now = plan.target.get(ref)
        if now == oid:
            continue
        is_shadowed = ref in above or not plan.target.keys().isdisjoint(directories_of(ref))
        # a tag is not moved forward: the mirror's stays, and the bundle's is kept
        if ref.startswith("refs/tags/") if now else is_shadowed:
            plan.kept.append(oid)
        elif now and not await repository.is_ancestor(now, oid):
            if not await repository.is_ancestor(oid, now):
                plan.kept.append(oid)
        else:
            kind: Literal["forwarded", "created"] = "forwarded" if now else "created"
            plan.changes.append(RefChange(ref=ref, kind=kind, old=now, new=oid))
            plan.moves[ref] = (now, oid)
            plan.target[ref] = oid
            above.update(directories_of(ref, 2))
    created = {f"{KEPT}{oid}": oid for oid in sorted({*bundle.kept, *plan.kept})}
    created |= {pin_ref(owner, commit): commit for owner, commit in pins}
    plan.moves |= {ref: (None, oid) for ref, oid in created.items() if ref not in present}
    await _plan_history(repository, plan, present, bundle.history, head)
    return plan


async def _plan_history(
    repository: Repository, plan: MergePlan, present: Refs, offered: str | None, head: str | None
) -> None:
    own = present.get(HISTORY)
    parents = [own] if own else []
    if offered and (own is None or await repository.is_ancestor(own, offered)):
        parents = [offered]
    elif offered and own:
        first = (await history.list_records(repository, history.EVERY_RECORD, start=own))[-1]
        newest = (await history.list_records(repository, limit=1, start=offered))[0]
        if first.summary.startswith(history.RESTARTED) and newest.at <= first.at:
            # the mirror lost its history, and began anew after the bundle was made
            parents = [offered, own]
    last = await history.read_last(repository, own)
    named = [*present, *plan.moves]
    kept = last.kept | {ref.removeprefix(KEPT) for ref in named if ref.startswith(KEPT)}
    tip = parents[0] if len(parents) == 1 else None
    if tip:
        recorded = await history.read_record(repository, tip)
        wanted = (plan.target, head if head in plan.target else None, kept)
    if not tip or (recorded.followed, recorded.head, recorded.kept) != wanted:
        tip = await history.write_record(
            repository, plan.target, head, plan.changes,
            kept=kept, parents=parents, why="import", last=last,
        )  # fmt: skip
    if tip != own:
        plan.moves[HISTORY] = (own, tip)


async def must_be_history(repository: Repository, offered: str) -> None:
    """Raise InvalidBundleError for a ref history that cannot be read."""
    try:
        await history.list_records(repository, start=offered)
        await history.read_record(repository, offered)
    except (MirrordError, ValueError) as error:
        hint = "nothing was changed; make the bundle again"
        fact = "its ref history is invalid"
        raise InvalidBundleError(f"cannot import the bundle: {fact}", hint=hint) from error
