"""What an audit found, as the message that everybody reads. Values only; no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from ..catalog.rows import RecordedRow
from ..model import AuditLevel, CommitState, MirrorName, utc_now
from ..protocol import Audit, Finding, Repair, StartAudit
from .examine import Examined

_SERVABLE = {CommitState.OK, CommitState.UNPINNED}


@dataclass(frozen=True, slots=True)
class Judged:
    """One mirror after its audit: what is recorded of it and what was found."""

    name: MirrorName
    rows: Collection[RecordedRow]
    examined: Examined
    healed: int = 0
    repair: Repair | None = None


def report(identity: str, request: StartAudit, level: AuditLevel, judged: Sequence[Judged], started_at: datetime) -> Audit:
    verdicts = [verdict for one in judged for verdict in one.examined.verdicts.values()]
    return Audit(
        id=identity,
        level=level,
        mirrors=[str(one.name) for one in judged],
        dataset=request.dataset,
        started_at=started_at,
        finished_at=utc_now(),
        counts=dict(Counter(verdict.state for verdict in verdicts)),
        reach=dict(Counter(reach for one in judged for reach in one.examined.reach.values())),
        findings=[finding for one in judged for finding in findings_of(one)],
        affected=sorted(set(_affected(judged))),
        healed=sum(one.healed for one in judged),
        repairs=[one.repair for one in judged if one.repair],
    )


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
                instances=sorted(instances[commit]),
                objects=list(verdict.objects),
                detail=verdict.detail,
            )
    for file, fault in sorted(judged.examined.faults.items()):
        yield Finding(mirror=str(judged.name), state=CommitState.CORRUPT, detail=f"{file}: {fault}")


def _affected(judged: Iterable[Judged]) -> Iterator[str]:
    """Instances that cannot be served."""
    for one in judged:
        broken = {commit for commit, verdict in one.examined.verdicts.items() if verdict.state not in _SERVABLE}
        yield from (row.instance for row in one.rows if row.commit in broken)
