"""Audits as the daemon runs them: what is recorded, judged mirror by mirror in a worker, healed where asked, and put on record.

An audit reads only and takes no lock. Where it heals, it hands what it found to the repairer it was given, and judges the mirror
again before it says that anything is in order. What an audit says is saved before anybody hears of it.
"""

from __future__ import annotations

import builtins
import secrets
from collections.abc import Awaitable, Callable, Collection
from datetime import timedelta

from ..catalog.catalog import Catalog
from ..catalog.rows import RecordedRow
from ..config import Settings
from ..errors import AuditNotFoundError, DatasetNotFoundError
from ..git.workers import Workers
from ..jobs.events import Events
from ..mirrors.pins import PERSON
from ..mirrors.service import Mirrors
from ..model import AuditLevel, CommitId, CommitState, MirrorName, Reach, shown, utc_now
from ..protocol import Audit, Progress, Repair, StartAudit
from .examine import Examined, Verdict, examine
from .report import Judged, is_sound, report

_TIMEOUT = timedelta(hours=12)

ProgressSink = Callable[[Progress], None]
Repairer = Callable[[Judged, ProgressSink | None], Awaitable[Repair]]


class Audits:
    """Runs audits and remembers them in the catalog. Without `repair` no audit heals."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        mirrors: Mirrors,
        catalog: Catalog,
        workers: Workers,
        events: Events,
        repair: Repairer | None = None,
    ) -> None:
        self._repair = repair
        self._settings = settings
        self._mirrors = mirrors
        self._catalog = catalog
        self._workers = workers
        self._events = events

    async def run(self, request: StartAudit, progress: ProgressSink | None = None) -> Audit:
        """Judge what the request names, everything recorded by default. Raises MirrorNotFoundError, DatasetNotFoundError."""
        started_at = utc_now()
        settings = self._settings().audit
        level = request.level or settings.level
        healing = settings.heal if request.heal is None else request.heal
        recorded = await self._recorded(request)
        judged = []
        for number, (name, rows) in enumerate(sorted(recorded.items(), key=lambda item: item[0].key)):
            if progress:
                progress(Progress(done=number, total=len(recorded), unit="mirrors", note=str(name)))
            judged.append(await self._judge(name, rows, level, self._repair if healing else None, progress))
        audit = report(_new_id(), request, level, judged, started_at)
        await self._catalog.put_audit(audit)
        self._events.publish(
            "audit.finished",
            audit=audit.id,
            level=str(level),
            counts={str(state): count for state, count in audit.counts.items()},
            affected_count=len(audit.affected),
            healed=audit.healed,
            duration_s=(audit.finished_at - started_at).total_seconds(),
        )
        return audit

    async def get(self, identity: str) -> Audit:
        """Raises AuditNotFoundError."""
        audit = await self._catalog.find_audit(identity)
        if audit is None:
            raise AuditNotFoundError(f"cannot find audit {shown(identity)}: none has that id", hint="see GET /v1/audits")
        return audit

    async def list(self, limit: int = 50) -> builtins.list[Audit]:
        """The newest first."""
        return await self._catalog.list_audits(limit)

    async def _recorded(self, request: StartAudit) -> dict[MirrorName, builtins.list[RecordedRow]]:
        """Recorded commits by mirror; a mirror that is named, or that everything is asked of, is there without any too."""
        if request.dataset and await self._catalog.find_dataset(request.dataset) is None:
            raise DatasetNotFoundError(
                f"cannot audit dataset {shown(request.dataset)}: there is none", hint="see `mirrord dataset list`"
            )
        wanted = {row.name.key: row.name for row in [await self._mirrors.get(text) for text in request.mirrors]}
        names = dict(wanted)
        if not wanted and not request.dataset:
            names = {row.name.key: row.name for row in await self._catalog.list_mirrors()}
        grouped: dict[str, builtins.list[RecordedRow]] = {key: [] for key in names}
        for row in await self._catalog.list_recorded(dataset=request.dataset):
            if not wanted or row.mirror.key in wanted:
                names.setdefault(row.mirror.key, row.mirror)
                grouped.setdefault(row.mirror.key, []).append(row)
        return {names[key]: rows for key, rows in grouped.items()}

    async def _judge(
        self,
        name: MirrorName,
        rows: Collection[RecordedRow],
        level: AuditLevel,
        repair: Repairer | None,
        progress: ProgressSink | None,
    ) -> Judged:
        commits = sorted({row.commit for row in rows})
        first = Judged(name, rows, await self._examine(name, commits, level))
        if repair is None or is_sound(first):
            return first
        repaired = await repair(first, progress)
        again = await self._examine(name, commits, max(level, AuditLevel.CLOSURE, key=list(AuditLevel).index))
        bad = [oid for oid, verdict in first.examined.verdicts.items() if verdict.state is not CommitState.OK]
        healed = {oid for oid in bad if again.verdicts[oid].state is CommitState.OK}
        judged = Judged(name, rows, again, healed=len(healed), repair=repaired)
        if is_sound(judged):
            self._events.publish("mirror.healed", mirror=str(name), commits=len(healed), of=len(bad))
        return judged

    async def _examine(self, name: MirrorName, commits: Collection[CommitId], level: AuditLevel) -> Examined:
        path = self._mirrors.path(name)
        if not path.exists():
            absent = Verdict(CommitState.NOT_MIRRORED, detail=f"there is no mirror {name}, or it was never synced")
            return Examined(verdicts=dict.fromkeys(commits, absent), reach=dict.fromkeys(commits, Reach.NOTHING))
        pins = [f"{pin.owner}/{pin.commit}" for pin in await self._catalog.list_pins(name.key) if pin.owner.startswith(PERSON)]
        return await self._workers.call(examine, path, list(commits), level, pins, timeout=_TIMEOUT)


def _new_id() -> str:
    return secrets.token_hex(8)
