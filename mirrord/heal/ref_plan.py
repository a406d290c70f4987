"""What the refs and HEAD of a mirror must be, where they are lost, broken or moved.

A pin and a kept ref carry the object in their name; HEAD and the others are in the newest record of
the ref history, which the catalog knows. Commits that a record, or a ref that is put right, had and
that nothing reaches any more are kept. Reads only, in a worker.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..audit.connectivity import iter_commits, look_up, object_kinds, parents_in, read_graph
from ..audit.refs import (
    RefFiles,
    is_record,
    oid_in_name,
    read_record,
    read_records,
    record_ids,
    unkept,
)
from ..mirrors.refs import parse_record
from ..mirrors.repository import HISTORY, KEPT, OURS

_OUR_COMMITTER = re.compile(rb"committer mirrord <mirrord@localhost> (\d+) ")


@dataclass(slots=True)
class RefPlan:
    """`restore` are refs to make, `drop` those to remove; `head` is what HEAD must name.

    `lines` are the tips of two lines of records that the history must join, where it has two.
    """

    restore: dict[str, str] = field(default_factory=dict)
    drop: set[str] = field(default_factory=set)
    head: str | None = None
    lines: tuple[str, ...] = ()

    def refs(self, found: RefFiles) -> dict[str, str]:
        """All refs as they must be."""
        staying = {ref: oid for ref, oid in found.refs.items() if ref not in self.drop}
        return {**staying, **self.restore}


def plan_refs(
    stand_in: Path, found: RefFiles, default_branch: str | None, known: str | None
) -> RefPlan:
    """Plan the refs. `stand_in` has those that could be read, and every object that could be had.

    `known` is a record that the history must have.
    """
    plan = RefPlan()
    wrong = {bad.path for bad in found.bad if bad.path.startswith("refs/")}
    plan.restore = {ref: oid for ref in wrong if (oid := oid_in_name(ref))}
    plan.drop = wrong - plan.restore.keys()
    history, plan.lines = _history(stand_in, found, known)
    if history and found.refs.get(HISTORY) != history:
        plan.restore[HISTORY] = history
    lines = plan.lines or ((history,) if history else ())
    records = [record for line in lines for record in read_records(stand_in, line)]
    recorded, head = read_record(stand_in, history) if history else ({}, None)
    plan.restore |= {ref: oid for ref, oid in recorded.items() if found.refs.get(ref) != oid}
    # refs that are a directory of a restored one, or below it
    above = {directory for ref in plan.restore for directory in _directories(ref)}
    restored = plan.restore.keys()
    below = {ref for ref in found.refs if not restored.isdisjoint(_directories(ref))}
    in_the_way = below | (above & found.refs.keys())
    plan.drop = (plan.drop | (in_the_way - recorded.keys())) - plan.restore.keys()

    refs = plan.refs(found)
    moved = {ref: oid for ref, oid in found.refs.items() if refs.get(ref) != oid}
    astray = {*found.astray.values(), *moved.values()}
    kinds = object_kinds(stand_in, astray - set(refs.values()))
    plan.restore |= {f"{KEPT}{oid}": oid for oid, kind in kinds.items() if kind == "tag"}
    as_record = ({f"refs/heads/{number}": oid for number, oid in enumerate(astray)}, None)
    plan.restore |= unkept(stand_in, [*records, as_record], plan.refs(found))

    refs = plan.refs(found)
    branches = [ref for ref in sorted(refs) if ref.startswith("refs/heads/")]
    default = f"refs/heads/{default_branch}" if default_branch else None
    wanted = [head, found.head, default, "refs/heads/main", "refs/heads/master", *branches]
    plan.head = next((ref for ref in wanted if ref in refs), found.head)
    return plan


def _directories(ref: str) -> list[str]:
    parts = ref.split("/")
    return ["/".join(parts[:n]) for n in range(2, len(parts))]


def _history(
    stand_in: Path, found: RefFiles, known: str | None
) -> tuple[str | None, tuple[str, ...]]:
    """The tip of the ref history; and both tips, where it lost `known` and got records since."""
    tip = found.refs.get(HISTORY)
    tip = tip if tip and is_record(stand_in, tip) else None
    if known is None or not is_record(stand_in, known):
        return tip or _find_history(stand_in, found.refs), ()
    past, since = record_ids(stand_in, known), record_ids(stand_in, tip) if tip else set()
    if tip is None or past is None or since is None or tip in past:
        return known, ()
    return tip, () if known in since else (known, tip)


def _find_history(stand_in: Path, refs: Mapping[str, str]) -> str | None:
    """The newest record that no other one builds on.

    What upstream's refs reach is upstream's, whatever it looks like.
    """
    kinds = object_kinds(stand_in, {oid for ref, oid in refs.items() if not ref.startswith(OURS)})
    upstreams = read_graph(stand_in, [oid for oid, kind in kinds.items() if kind == "commit"])
    candidates: dict[str, tuple[int, str]] = {}
    parents: dict[str, tuple[str, ...]] = {}
    for commit in iter_commits(stand_in):
        header = commit.data.partition(b"\n\n")[0]
        ours = _OUR_COMMITTER.search(header)
        if ours and b"\n\nRefs: " in commit.data and commit.oid not in upstreams:
            candidates[commit.oid] = int(ours[1]), commit.oid
            parents[commit.oid] = parents_in(commit.data)
    records = look_up(stand_in, (), read=[f"{oid}:refs" for oid in candidates])
    real = {
        oid
        for oid in candidates
        if (blob := records.get(f"{oid}:refs")) and parse_record(blob.data)[0]
    }
    last = real.difference(*(parents[oid] for oid in real))
    return max(last, key=lambda oid: candidates[oid], default=None)
