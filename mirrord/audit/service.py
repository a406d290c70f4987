"""Audits as the daemon runs them: what is recorded, judged mirror by mirror in a worker, healed where asked, and put on record.

An audit reads only and takes no lock; a heal fetches through the mirrors and judges again what it touched. What an audit says is
saved before anybody hears of it.
"""

from __future__ import annotations

import builtins
import secrets
from collections.abc import Callable, Collection
from datetime import timedelta

from ..catalog.catalog import Catalog
from ..catalog.rows import RecordedRow
from ..config import Settings
from ..errors import AuditNotFoundError, DatasetNotFoundError
from ..git.workers import Workers
from ..jobs.events import Events
from ..mirrors.service import Mirrors
from ..model import AuditLevel, CommitId, CommitState, MirrorName, Reach, shown, utc_now
from ..protocol import Audit, Progress, StartAudit
from .examine import Examined, Verdict, examine
from .healing import heal
from .report import Judged, report

_TIMEOUT = timedelta(hours=12)

ProgressSink = Callable[[Progress], None]


class Audits:
    """Runs audits and remembers them in the catalog."""

    def __init__(
        self, *, settings: Callable[[], Settings], mirrors: Mirrors, catalog: Catalog, workers: Workers, events: Events
    ) -> None:
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
            judged.append(await self._judge(name, rows, level, healing=healing))
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

    async def _judge(self, name: MirrorName, rows: Collection[RecordedRow], level: AuditLevel, *, healing: bool) -> Judged:
        commits = sorted({row.commit for row in rows})
        examined = await self._examine(name, commits, level)
        bad = {oid for oid, verdict in examined.verdicts.items() if verdict.state is not CommitState.OK}
        if not healing or not bad:
            return Judged(name, rows, examined)
        touched = await heal(self._mirrors, name, rows, {oid: examined.verdicts[oid].state for oid in bad})
        if not touched:
            return Judged(name, rows, examined)
        again = await self._examine(name, commits, level)
        healed = {oid for oid in bad if again.verdicts[oid].state is CommitState.OK}
        self._events.publish("mirror.healed", mirror=str(name), commits=len(healed), of=len(bad))
        return Judged(name, rows, again, healed=len(healed))

    async def _examine(self, name: MirrorName, commits: Collection[CommitId], level: AuditLevel) -> Examined:
        path = self._mirrors.path(name)
        if not path.exists():
            absent = Verdict(CommitState.NOT_MIRRORED, detail=f"there is no mirror {name}, or it was never synced")
            return Examined(verdicts=dict.fromkeys(commits, absent), reach=dict.fromkeys(commits, Reach.NOTHING))
        return await self._workers.call(examine, path, list(commits), level, timeout=_TIMEOUT)


def _new_id() -> str:
    return secrets.token_hex(8)
