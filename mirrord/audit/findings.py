"""From what was examined to findings, parts and the report of an audit. Values only; no I/O."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from ..catalog import MirrorRow, RecordedRow
from ..model import AuditLevel, CommitRole, CommitState, FindingKind, MirrorName, utc_now
from ..protocol import Audit, AuditPart, Finding, ProgressSink, Repair, StartAudit
from .examine import Examined


@dataclass(frozen=True, slots=True)
class Judged:
    """One mirror after its audit: what is recorded of it and what was found.

    `unresolved` are the instances without a base commit, because the mirror lacks their branches;
    `accept` are the findings that the configuration accepts.
    """

    name: MirrorName
    rows: Collection[RecordedRow]
    examined: Examined
    accept: Collection[str] = ()
    healed: int = 0
    repair: Repair | None = None
    row: MirrorRow | None = None
    unresolved: Collection[str] = ()


@dataclass(slots=True)
class AuditRun:
    """An audit under way; `parts` and `left`, the mirrors still to come, by mirror key."""

    request: StartAudit
    level: AuditLevel
    progress: ProgressSink | None
    id: str
    started_at: datetime
    parts: dict[str, AuditPart] = field(default_factory=dict)
    left: dict[str, MirrorName] = field(default_factory=dict)
    failures: list[Finding] = field(default_factory=list)

    def report(self) -> Audit:
        parts = sorted(self.parts.values(), key=lambda part: part.mirror.lower())
        findings = [*(finding for part in parts for finding in part.findings), *self.failures]
        return Audit(
            id=self.id, level=self.level, dataset=self.request.dataset,
            mirrors=[part.mirror for part in parts],
            left=sorted(map(str, self.left.values())),
            started_at=self.started_at, finished_at=utc_now(),
            counts=dict(sum((Counter(part.counts) for part in parts), Counter())),
            reach=dict(sum((Counter(part.reach) for part in parts), Counter())),
            findings=findings,
            open_count=sum(not finding.accepted for finding in findings),
            affected=sorted({instance for part in parts for instance in part.affected}),
            healed=sum(part.healed for part in parts),
            repairs=[part.repair for part in parts if part.repair],
        )  # fmt: skip


def part_of(judged: Judged, stores: Mapping[str, str]) -> AuditPart:
    """The part of one mirror; `stores` are damaged templates and stores, with their fate.

    Commits that only persons pinned have findings, and are not counted.
    """
    recorded = {row.commit for row in judged.rows}
    verdicts, reach = judged.examined.verdicts, judged.examined.reach
    findings = list(findings_of(judged))
    for what, fate in sorted(stores.items()):
        findings.append(_finding(judged, FindingKind.STORE, what, detail=f"{what}: {fate}"))
    servable = {CommitState.OK, CommitState.UNPINNED}
    if judged.unresolved:
        fact = f"the mirror lacks branches that instances start from: {len(judged.unresolved)}"
        ids, state = sorted(judged.unresolved), CommitState.MISSING
        found = _finding(judged, FindingKind.MISSING, detail=fact, state=state, instances=ids)
        findings.append(found)
    open_ = [finding for finding in findings if not finding.accepted]
    broken = {finding.commit for finding in open_ if finding.state not in servable}
    bases = (row for row in judged.rows if row.role is CommitRole.BASE)
    unservable = {row.instance for row in bases if row.commit in broken}
    return AuditPart(
        mirror=str(judged.name),
        counts=dict(Counter(verdicts[oid].state for oid in verdicts if oid in recorded)),
        reach=dict(Counter(reach[oid] for oid in reach if oid in recorded)),
        findings=findings,
        affected=sorted({*judged.unresolved, *unservable}),
        healed=judged.healed,
        repair=judged.repair,
    )


def unjudged(name: MirrorName, reason: str, accept: Collection[str]) -> Finding:
    """The finding of a mirror that could not be examined. Its commits are counted nowhere."""
    judged = Judged(name, (), Examined(), accept)
    return _finding(judged, FindingKind.UNJUDGED, detail=f"it could not be judged: {reason}")


def is_sound(judged: Judged) -> bool:
    """Whether there is nothing to heal."""
    return all(finding.accepted for finding in findings_of(judged))


def findings_of(judged: Judged) -> Iterator[Finding]:
    """One for each commit that is not in order, then one for each defect of the mirror."""
    verdicts = sorted(judged.examined.verdicts.items())
    bad = [(oid, verdict) for oid, verdict in verdicts if verdict.state is not CommitState.OK]
    instances: dict[str, set[str]] = {oid: set() for oid, _ in bad}
    roles: dict[str, set[CommitRole]] = {oid: set() for oid, _ in bad}
    for row in judged.rows if bad else ():
        if row.commit in instances:
            instances[row.commit].add(row.instance)
            roles[row.commit].add(row.role)
    for oid, verdict in bad:
        yield _finding(
            judged, FindingKind(verdict.state), oid, commit=oid, state=verdict.state,
            reach=judged.examined.reach.get(oid), instances=sorted(instances[oid]),
            roles=sorted(roles[oid]),
            objects=list(verdict.objects), detail=verdict.detail,
        )  # fmt: skip
    for subject, defect in sorted(judged.examined.defects.items()):
        yield _finding(judged, defect.kind, subject, detail=f"{subject}: {defect.reason}")


def _finding(judged: Judged, kind: FindingKind, subject: str = "", **more: Any) -> Finding:
    is_accepted = False
    for line in judged.accept:  # `KIND`, `KIND owner/name` or `KIND owner/name SUBJECT`, with `*`
        accepted, mirror, pattern = (*line.split(), "", "")[:3]
        is_here = not mirror or MirrorName.parse(mirror).key == judged.name.key
        is_it = not pattern or fnmatchcase(subject, pattern)
        is_accepted |= accepted == kind and is_here and is_it
    more.setdefault("state", CommitState.CORRUPT)
    return Finding(
        mirror=str(judged.name), kind=kind, subject=subject, accepted=is_accepted, **more
    )
