"""What an audit found, as the message that everybody reads. Values only; no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from ..catalog import MirrorRow, RecordedRow
from ..model import AuditLevel, CommitState, FindingKind, MirrorName, utc_now
from ..protocol import Audit, AuditPart, Finding, Repair, StartAudit
from .examine import Examined

K = TypeVar("K")

_SERVABLE = {CommitState.OK, CommitState.UNPINNED}


@dataclass(frozen=True, slots=True)
class Judged:
    """One mirror after its audit: what is recorded of it and what was found. `accept` are the
    findings that the configuration accepts.
    """

    name: MirrorName
    rows: Collection[RecordedRow]
    examined: Examined
    accept: Collection[str] = ()
    healed: int = 0
    repair: Repair | None = None
    row: MirrorRow | None = None


def part_of(judged: Judged, stores: Mapping[str, str]) -> AuditPart:
    """What is said of one mirror; `stores` are damaged things that checkouts of it are made from.

    What only persons pinned is told where it is not in order, and counts among what datasets recorded nowhere.
    """
    recorded = {row.commit for row in judged.rows}
    verdicts, reach = judged.examined.verdicts, judged.examined.reach
    damaged = [
        _told(judged, FindingKind.STORE, what, detail=f"{what}: {fate}")
        for what, fate in sorted(stores.items())
    ]
    findings = [*findings_of(judged), *damaged]
    return AuditPart(
        mirror=str(judged.name),
        counts=dict(
            Counter(verdict.state for commit, verdict in verdicts.items() if commit in recorded)
        ),
        reach=dict(Counter(kept_by for commit, kept_by in reach.items() if commit in recorded)),
        findings=findings,
        affected=sorted(set(_affected(judged, findings))),
        healed=judged.healed,
        repair=judged.repair,
    )


def unjudged(name: MirrorName, reason: str, accept: Collection[str]) -> Finding:
    """A mirror that could not be looked at. Its commits are counted nowhere."""
    judged = Judged(name, (), Examined(), accept)
    return _told(judged, FindingKind.UNJUDGED, detail=f"it could not be judged: {reason}")


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
    findings = [*(finding for part in parts for finding in part.findings), *current.failures]
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
        findings=findings,
        open_count=sum(not finding.accepted for finding in findings),
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
    return all(finding.accepted for finding in findings_of(judged))


def findings_of(judged: Judged) -> Iterator[Finding]:
    """One for each commit that is not in order, one for each file or ref of the mirror that is not."""
    verdicts = sorted(judged.examined.verdicts.items())
    bad = [(commit, verdict) for commit, verdict in verdicts if verdict.state is not CommitState.OK]
    instances: dict[str, set[str]] = {commit: set() for commit, _ in bad}
    for row in judged.rows if bad else ():
        instances.get(row.commit, set()).add(row.instance)
    for commit, verdict in bad:
        yield _told(
            judged,
            FindingKind(verdict.state),
            commit,
            commit=commit,
            state=verdict.state,
            reach=judged.examined.reach.get(commit),
            instances=sorted(instances[commit]),
            objects=list(verdict.objects),
            detail=verdict.detail,
        )
    for subject, fault in sorted(judged.examined.faults.items()):
        yield _told(judged, fault.kind, subject, detail=f"{subject}: {fault.reason}")


def _told(judged: Judged, kind: FindingKind, subject: str = "", **more: Any) -> Finding:
    told = {"state": CommitState.CORRUPT} | more
    accepted = any(_accepts(line, kind, judged.name, subject) for line in judged.accept)
    return Finding(mirror=str(judged.name), kind=kind, subject=subject, accepted=accepted, **told)


def _accepts(line: str, kind: FindingKind, name: MirrorName, subject: str) -> bool:
    """A line is `KIND`, `KIND owner/name` or `KIND owner/name SUBJECT`, where `*` stands for anything."""
    accepted, mirror, pattern = (*line.split(), "", "")[:3]
    is_here = not mirror or MirrorName.parse(mirror).key == name.key
    return accepted == kind and is_here and (not pattern or fnmatchcase(subject, pattern))


def _affected(judged: Judged, findings: Collection[Finding]) -> Iterator[str]:
    """Instances that cannot be served, but for what is accepted."""
    broken = {
        finding.commit
        for finding in findings
        if finding.commit and finding.state not in _SERVABLE and not finding.accepted
    }
    return (row.instance for row in judged.rows if row.commit in broken)
