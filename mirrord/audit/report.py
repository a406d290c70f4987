"""What an audit found, as the message that everybody reads. Values only; no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from ..catalog.rows import RecordedRow
from ..model import AuditLevel, CommitState, MirrorName, utc_now
from ..protocol import Audit, AuditPart, Finding, Repair, StartAudit
from .examine import Examined

K = TypeVar("K")

_SERVABLE = {CommitState.OK, CommitState.UNPINNED}


@dataclass(frozen=True, slots=True)
class Judged:
    """One mirror after its audit: what is recorded of it and what was found."""

    name: MirrorName
    rows: Collection[RecordedRow]
    examined: Examined
    healed: int = 0
    repair: Repair | None = None


def part_of(judged: Judged, stores: Mapping[str, str]) -> AuditPart:
    """What is said of one mirror; `stores` are damaged things that checkouts of it are made from.

    What only persons pinned is told where it is not in order, and counts among what datasets recorded nowhere.
    """
    recorded = {row.commit for row in judged.rows}
    verdicts, reach = judged.examined.verdicts, judged.examined.reach
    damaged = [
        Finding(mirror=str(judged.name), state=CommitState.CORRUPT, detail=f"{what}: {fate}")
        for what, fate in sorted(stores.items())
    ]
    return AuditPart(
        mirror=str(judged.name),
        counts=dict(Counter(verdict.state for commit, verdict in verdicts.items() if commit in recorded)),
        reach=dict(Counter(kept_by for commit, kept_by in reach.items() if commit in recorded)),
        findings=[*findings_of(judged), *damaged],
        affected=sorted(set(_affected(judged))),
        healed=judged.healed,
        repair=judged.repair,
    )


def unjudged(name: MirrorName, reason: str) -> Finding:
    """A mirror that could not be looked at. Its commits are counted nowhere."""
    return Finding(mirror=str(name), state=CommitState.CORRUPT, detail=f"it could not be judged: {reason}")


@dataclass(slots=True)
class Round:
    """An audit under way: its parts by mirror key, the mirrors still to come, and those that could not be judged."""

    id: str
    started_at: datetime
    parts: dict[str, AuditPart] = field(default_factory=dict)
    left: dict[str, MirrorName] = field(default_factory=dict)
    failures: list[Finding] = field(default_factory=list)


def report(current: Round, request: StartAudit, level: AuditLevel) -> Audit:
    parts = sorted(current.parts.values(), key=lambda part: part.mirror.lower())
    return Audit(
        id=current.id,
        level=level,
        mirrors=[part.mirror for part in parts],
        left=sorted(str(name) for name in current.left.values()),
        dataset=request.dataset,
        started_at=current.started_at,
        finished_at=utc_now(),
        counts=_sum(part.counts for part in parts),
        reach=_sum(part.reach for part in parts),
        findings=[*(finding for part in parts for finding in part.findings), *current.failures],
        affected=sorted({instance for part in parts for instance in part.affected}),
        healed=sum(part.healed for part in parts),
        repairs=[part.repair for part in parts if part.repair],
    )


def _sum(counts: Iterable[Mapping[K, int]]) -> dict[K, int]:
    total: Counter[K] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def is_sound(judged: Judged) -> bool:
    """Whether there is nothing to heal."""
    states = {verdict.state for verdict in judged.examined.verdicts.values()}
    return states <= {CommitState.OK} and not judged.examined.faults


def findings_of(judged: Judged) -> Iterator[Finding]:
    """One for each commit that is not in order, one for each damaged file of the mirror."""
    instances: dict[str, set[str]] = {}
    for row in judged.rows:
        instances.setdefault(row.commit, set()).add(row.instance)
    for commit, verdict in sorted(judged.examined.verdicts.items()):
        if verdict.state is not CommitState.OK:
            yield Finding(
                mirror=str(judged.name),
                commit=commit,
                state=verdict.state,
                reach=judged.examined.reach.get(commit),
                instances=sorted(instances.get(commit, ())),
                objects=list(verdict.objects),
                detail=verdict.detail,
            )
    for file, fault in sorted(judged.examined.faults.items()):
        yield Finding(mirror=str(judged.name), state=CommitState.CORRUPT, detail=f"{file}: {fault}")


def _affected(judged: Judged) -> Iterator[str]:
    """Instances that cannot be served."""
    broken = {commit for commit, verdict in judged.examined.verdicts.items() if verdict.state not in _SERVABLE}
    return (row.instance for row in judged.rows if row.commit in broken)
