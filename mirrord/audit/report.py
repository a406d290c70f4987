"""Findings, parts and the report of an audit."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ..catalog import MirrorRow, RecordedRow
from ..config.values import is_accepted
from ..model import AuditLevel, CommitRole, CommitState, FindingKind, MirrorName, utc_now
from ..protocol import Audit, AuditPart, Finding, ProgressSink, Repair, StartAudit
from ..quoting import quote_name
from .examine import Examined


@dataclass(frozen=True, slots=True)
class MirrorJudgement:
    """The audit of one mirror: its recorded commits and what was found.

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
    """A running audit; `parts` are the judged mirrors, `left` the others, by mirror key."""

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
            pinned=dict(sum((Counter(part.pinned) for part in parts), Counter())),
            reach=dict(sum((Counter(part.reach) for part in parts), Counter())),
            findings=findings,
            open_count=sum(not finding.accepted for finding in findings),
            affected=sorted({instance for part in parts for instance in part.affected}),
            healed=sum(part.healed for part in parts),
            repairs=[part.repair for part in parts if part.repair],
        )  # fmt: skip


def part_of(judged: MirrorJudgement, stores: Mapping[str, str]) -> AuditPart:
    """Make the part of one mirror; `stores` are damaged templates and stores, with their fate.

    Commits that only pins name are counted apart.
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
        finding = _finding(judged, FindingKind.MISSING, detail=fact, state=state, instances=ids)
        findings.append(finding)
    open_ = [finding for finding in findings if not finding.accepted]
    broken = {finding.commit for finding in open_ if finding.state not in servable}
    bases = (row for row in judged.rows if row.role is CommitRole.BASE)
    broken |= {
        commit
        for subject, defect in judged.examined.defects.items()
        if defect.commits and not _is_accepted(judged, defect.kind, subject)
        for commit in defect.commits
    }
    unservable = {row.instance for row in bases if row.commit in broken}
    return AuditPart(
        mirror=str(judged.name),
        counts=dict(Counter(verdicts[oid].state for oid in verdicts if oid in recorded)),
        pinned=dict(Counter(verdicts[oid].state for oid in verdicts if oid not in recorded)),
        reach=dict(Counter(reach[oid] for oid in reach if oid in recorded)),
        findings=findings,
        affected=sorted({*judged.unresolved, *unservable}),
        healed=judged.healed,
        repair=judged.repair,
    )


def unjudged(name: MirrorName, reason: str, accept: Collection[str]) -> Finding:
    """Make the finding of a mirror that could not be examined; its commits are not counted."""
    judged = MirrorJudgement(name, (), Examined(), accept)
    return _finding(judged, FindingKind.UNJUDGED, detail=f"it could not be judged: {reason}")


def is_sound(judged: MirrorJudgement) -> bool:
    """True if a heal has nothing to do: what fsck refuses is whole, as upstream made it."""
    return all(
        finding.accepted or finding.kind is FindingKind.REFUSED for finding in findings_of(judged)
    )


def findings_of(judged: MirrorJudgement) -> Iterator[Finding]:
    """Iterate over a finding for each bad commit, then for each defect of the mirror."""
    verdicts = sorted(judged.examined.verdicts.items())
    bad = [(oid, verdict) for oid, verdict in verdicts if verdict.state is not CommitState.OK]
    blemished = {oid for defect in judged.examined.defects.values() for oid in defect.commits}
    instances: dict[str, set[str]] = {oid: set() for oid in {*blemished, *(oid for oid, _ in bad)}}
    roles: dict[str, set[CommitRole]] = {oid: set() for oid in instances}
    for row in judged.rows if instances else ():
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
        affected = {instance for oid in defect.commits for instance in instances[oid]}
        yield _finding(
            judged, defect.kind, subject, instances=sorted(affected),
            objects=[subject] if defect.kind is FindingKind.REFUSED else [],
            detail=f"{quote_name(subject)}: {defect.reason}",
        )  # fmt: skip


def _is_accepted(judged: MirrorJudgement, kind: FindingKind, subject: str) -> bool:
    return is_accepted(judged.accept, kind, judged.name, quote_name(subject))


def _finding(judged: MirrorJudgement, kind: FindingKind, subject: str = "", **more: Any) -> Finding:
    more.setdefault("state", CommitState.CORRUPT)
    return Finding(
        mirror=str(judged.name), kind=kind, subject=subject,
        accepted=_is_accepted(judged, kind, subject), **more,
    )  # fmt: skip
