"""Audits as the daemon runs them: each mirror is judged, healed, judged again and recorded.

An audit takes no lock, and changes a mirror only by `repair`. Each judgement is saved at once, so
that an audit which a crash, a stop or a cancel interrupted is resumed with the mirrors that are
left. The mirror whose last judgement is oldest comes first.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import NamedTuple

import anyio

from .. import errors, protocol
from ..catalog import JudgementRow
from ..mirrors.pins import is_sole_record
from ..mirrors.proofs import end_proof
from ..mirrors.repository import PINS
from ..mirrors.service import Mirrors
from ..model import AuditLevel, CommitState, FindingKind, MirrorName, Reach, shown, utc_now
from ..presence import is_dir, lexists
from ..telemetry import log
from .connectivity import CommitVerdict
from .defects import Defect
from .examine import Examined, Reached, examine
from .layout import no_directory
from .report import AuditRun, MirrorJudgement, is_sound, part_of, unjudged

Repairer = Callable[[MirrorJudgement, protocol.ProgressSink | None], Awaitable[protocol.Repair]]
Scrubber = Callable[[MirrorName], Awaitable[Mapping[str, str]]]
SERVABLE = {CommitState.OK, CommitState.UNPINNED}


class Judgement(NamedTuple):
    """The last judgement of all recorded commits of a mirror: time, and how many are unservable."""

    at: datetime
    unservable: int


class Audits:
    """Runs audits and records them in the catalog.

    Without `repair` no audit heals. `scrub` proves the templates of a mirror and returns the
    damaged ones, with their fate.
    """

    def __init__(
        self, mirrors: Mirrors, repair: Repairer | None = None, scrub: Scrubber | None = None
    ) -> None:
        self.mirrors, self.repair, self.scrub = mirrors, repair, scrub
        self.settings, self.catalog, self.events = mirrors.settings, mirrors.catalog, mirrors.events
        # by mirror key, what kept its commits alive, for the next examination
        self._reached: dict[str, Reached] = {}
        self.last: protocol.AuditSummary | None = None
        self.judgements: dict[str, Judgement] = {}
        """By mirror key, of removed mirrors too; kept in memory because metrics read them often."""

    async def open(self) -> None:
        """Read the results of earlier audits."""
        for level in (AuditLevel.CLOSURE, AuditLevel.CONTENT):
            for row in await self.catalog.list_judgements(level, self.catalog.node):
                self._note(row.key, row.judged_at, row.part)
        for audit in await self.catalog.list_audits(1, self.catalog.node or None):
            self.last = _summary(audit)
            if not audit.dataset:  # quick audits save no judgements
                bad = {
                    (finding.mirror, finding.commit)
                    for finding in audit.findings
                    if _is_bad(finding.state)
                }
                unservable = Counter(MirrorName.parse(mirror).key for mirror, _ in bad)
                for name in set(audit.mirrors) - set(audit.left):
                    key = MirrorName.parse(name).key
                    if key not in self.judgements or self.judgements[key].at < audit.started_at:
                        self.judgements[key] = Judgement(audit.finished_at, unservable[key])

    def _note(self, key: str, judged_at: datetime, part: protocol.AuditPart) -> None:
        earlier = self.judgements.get(key)
        if earlier is None or earlier.at <= judged_at:
            bad = sum(count for state, count in part.counts.items() if _is_bad(state))
            self.judgements[key] = Judgement(judged_at, bad)

    async def run(
        self,
        request: protocol.StartAudit,
        progress: protocol.ProgressSink | None = None,
        *,
        resume: bool = False,
    ) -> protocol.Audit:
        """Audit what the request names, by default everything; with `resume`, an interrupted one.

        Raises MirrorNotFoundError, NotFoundError. A cancelled audit is recorded as far as it
        got.
        """
        self.mirrors.room.must_be_here()
        level = request.level or self.settings().audit.level
        recorded = await self._names(request)
        past: list[JudgementRow] = []
        if _is_of_everything(request):
            past = await self.catalog.list_judgements(level, self.catalog.node)
        begun = await self._unfinished(level, past) if resume else []
        run = AuditRun(
            request, level, progress,
            id=begun[0].audit_id if begun else secrets.token_hex(8),
            started_at=begun[0].started_at if begun else utc_now(),
        )  # fmt: skip
        # first the mirrors that were never judged, then those judged longest ago
        position = {row.key: number for number, row in enumerate(past)}
        names = sorted(recorded, key=lambda name: (position.get(name.key, -1), name.key))
        parts = {row.key: row.part for row in begun}
        run.parts = {name.key: parts[name.key] for name in names if name.key in parts}
        run.left = {name.key: name for name in names if name.key not in parts}
        # of the two workers for background work one stays free; a quick audit takes both briefly
        lanes = 2 if level is AuditLevel.QUICK else 1
        pending = iter(list(run.left.values()))
        try:
            await asyncio.gather(*(self._judge_each(pending, run) for _ in range(lanes)))
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                await self._record(run.report())
            raise
        audit = run.report()
        await self._record(audit)
        return audit

    async def find_unfinished(self, level: AuditLevel) -> datetime | None:
        """Return when the audit began that a scheduled one at this level would resume."""
        judgements = await self.catalog.list_judgements(level, self.catalog.node)
        unfinished = await self._unfinished(level, judgements[-1:])
        return unfinished[0].started_at if unfinished else None

    async def get(self, identity: str) -> protocol.Audit:
        """Return an audit; raises NotFoundError."""
        audit = await self.catalog.find_audit(identity)
        if audit is None:
            raise errors.NotFoundError(
                f"cannot find audit {shown(identity)}: none has that id",
                hint="see GET /v1/audits",
                kind="audit",
            )
        return audit

    async def list_audits(self, limit: int = 50) -> list[protocol.Audit]:
        """List audits, the newest first."""
        return await self.catalog.list_audits(limit)

    async def _names(self, request: protocol.StartAudit) -> Collection[MirrorName]:
        """Return the mirrors to audit: those of the request, or those with recorded commits."""
        dataset = await self.catalog.find_dataset(request.dataset) if request.dataset else None
        if request.dataset and dataset is None:
            raise errors.NotFoundError(
                f"cannot audit dataset {shown(request.dataset)}: no dataset has that name",
                hint="see `mirrord dataset list`",
                kind="dataset",
            )
        rows = [await self.mirrors.get(text) for text in request.mirrors]
        if _is_of_everything(request):
            rows = await self.catalog.list_mirrors()
        names = {row.name.key: row.name for row in rows}
        if not request.mirrors:
            for recorded in await self.catalog.list_recorded(dataset=request.dataset):
                names.setdefault(recorded.mirror.key, recorded.mirror)
            for mirror in map(MirrorName.parse, dataset.mirrors if dataset else ()):
                names.setdefault(mirror.key, mirror)  # of which only a branch is recorded
            elsewhere = self.mirrors.sharing.is_kept_elsewhere
            names = {key: name for key, name in names.items() if not elsewhere(key)}
        return names.values()

    async def _unfinished(
        self, level: AuditLevel, past: Sequence[JudgementRow]
    ) -> list[JudgementRow]:
        """Return the judgements of the last audit of everything, if it should be resumed.

        That is if it left mirrors, and the next one is not due yet.
        """
        if not past:
            return []
        newest, settings = past[-1], self.settings().audit
        audit = await self.catalog.find_audit(newest.audit_id)
        interval = settings.content_interval if level is AuditLevel.CONTENT else settings.interval
        if (audit and not audit.left) or newest.started_at + interval < utc_now():
            return []
        return [row for row in past if row.audit_id == newest.audit_id]

    async def _judge_each(self, names: Iterator[MirrorName], run: AuditRun) -> None:
        for name in names:
            _tell(run, name)
            try:
                part = await self._judge(name, run)
            except errors.StoppingError:
                raise
            except Exception as error:  # even a bug does not end the audit of other mirrors
                self.mirrors.room.must_be_here()
                if isinstance(error, errors.MirrordError | OSError):
                    reason = error.message if isinstance(error, errors.MirrordError) else str(error)
                    log.warning("audit.failed", mirror=str(name), detail=reason)
                else:
                    reason = "an unexpected error; the daemon's log has the details"
                    log.exception("audit.crashed", mirror=str(name))
                run.failures.append(unjudged(name, reason, self.settings().audit.accept))
                continue
            run.parts[name.key] = part
            del run.left[name.key]
            if not run.request.dataset:
                self._note(name.key, utc_now(), part)
            # a quick audit is not worth resuming
            if _is_of_everything(run.request) and run.level is not AuditLevel.QUICK:
                row = JudgementRow(
                    name.key, run.level, run.id, run.started_at, utc_now(), part, self.catalog.node
                )
                with _unless_refused("judgement", name.key):
                    await self.catalog.put_judgement(row)
        _tell(run)  # so that a whole audit does not end at `0/1 mirrors`

    async def _record(self, audit: protocol.Audit) -> None:
        with _unless_refused("audit", audit.id):
            await self.catalog.put_audit(audit, self.catalog.node)
        self.last = _summary(audit)
        counts = {str(state): count for state, count in audit.counts.items()}
        self.events.publish(
            "audit.finished", audit=audit.id, level=str(audit.level), counts=counts,
            affected_count=len(audit.affected), open_count=audit.open_count,
            left_count=len(audit.left), healed=audit.healed,
            duration_s=(audit.finished_at - audit.started_at).total_seconds(),
        )  # fmt: skip

    async def _judge(self, name: MirrorName, run: AuditRun) -> protocol.AuditPart:
        """Judge a mirror and its recorded commits, heal it, and judge it again."""
        dataset, heal = run.request.dataset, run.request.heal
        judged = await self._examine(name, dataset, run.level)
        heal = self.settings().audit.heal if heal is None else heal
        if heal and self.repair and not is_sound(judged):
            before = judged.examined.verdicts
            repair = await self.repair(judged, run.progress)
            # a quick look does not see whether everything is there again
            deeper = max(run.level, AuditLevel.CLOSURE, key=list(AuditLevel).index)
            judged = await self._examine(name, dataset, deeper)
            bad = [oid for oid in before if before[oid].state is not CommitState.OK]
            now = judged.examined.verdicts
            healed = sum(oid in now and now[oid].state is CommitState.OK for oid in bad)
            judged = replace(judged, healed=healed, repair=repair)
            if is_sound(judged):
                self.events.publish("mirror.healed", mirror=str(name), commits=healed, of=len(bad))
        await self._mark(judged)
        is_deep = run.level is AuditLevel.CONTENT
        return part_of(judged, await self.scrub(name) if self.scrub and is_deep else {})

    async def _examine(
        self, name: MirrorName, dataset: str | None, level: AuditLevel
    ) -> MirrorJudgement:
        """Examine a mirror in a worker, with what is recorded now, of one dataset or of all.

        Without a dataset, also commits that only pins record, a person's or adopted ones.
        """
        path = self.mirrors.path(name)
        mirror = await self.catalog.find_mirror(name.key)
        rows = await self.catalog.list_recorded(name.key, dataset)
        unresolved = [
            revision for _, revision, _ in await self.catalog.list_unresolved(name.key, dataset)
        ]
        pins = await self.catalog.list_pins(name.key)
        pinned = {pin.commit for pin in pins if is_sole_record(pin) and not dataset}
        commits = sorted({row.commit for row in rows} | pinned)
        record = mirror.history if mirror else None
        if await self.mirrors.sharing.is_behind(self.mirrors.repository(name), ask=True):
            record = None  # of a generation that is not here yet
        accept = tuple(self.settings().audit.accept)
        if not is_dir(path):
            self.mirrors.room.must_be_here()
            absent = f"there is no mirror {name}, or it was never synced"
            verdict = CommitVerdict(CommitState.NOT_MIRRORED, detail=absent)
            reached = Reached("", dict.fromkeys(commits, Reach.NOTHING), {})
            examined = Examined(dict.fromkeys(commits, verdict), reached)
            has_existed = record or pins or lexists(path)
            if has_existed and (wrong := no_directory(path)):
                examined.defects["mirror"] = Defect(FindingKind.LAYOUT, wrong)
            return MirrorJudgement(name, rows, examined, accept, row=mirror, unresolved=unresolved)
        owned = [f"{pin.owner}/{pin.commit}" for pin in pins]
        earlier = self._reached.get(name.key)
        limit = timedelta(hours=12)
        examined = await self.mirrors.workers.run(
            examine, path, commits, level, owned, earlier, record, timeout=limit
        )
        self._reached[name.key] = examined.reached
        await self._judge_pins(name, examined)
        judged = MirrorJudgement(name, rows, examined, accept, row=mirror, unresolved=unresolved)
        if not is_sound(judged):
            end_proof(path)
        return judged

    async def _judge_pins(self, name: MirrorName, examined: Examined) -> None:
        """Compare pins with the catalog again, because the examination may have taken hours.

        A new pin's ref is made before its row, under the mirror's lock. While that is held, a pin
        without a row is no finding.
        """
        defects, verdicts = examined.defects, examined.verdicts
        unkept = {commit for commit in verdicts if verdicts[commit].state is CommitState.UNPINNED}
        lost = {ref for ref, defect in defects.items() if defect.kind is FindingKind.PIN_LOST}
        unknown = set() if self.mirrors.is_busy(name) else examined.unknown
        if not lost and not unknown and not unkept:
            return
        pins = await self.catalog.list_pins(name.key)
        rows = await self.catalog.list_recorded(name.key) if unkept else []
        for commit in unkept - {pin.commit for pin in pins} - {row.commit for row in rows}:
            del verdicts[commit]
        owned = {f"{PINS}{pin.owner}/{pin.commit}" for pin in pins}
        for ref in lost - owned:
            del defects[ref]
        if unknown:
            refs = await self.mirrors.repository(name).all_refs()
            left = sorted(ref for ref in unknown if ref in refs and ref not in owned)
            reason = "the catalog does not have it"
            defects |= dict.fromkeys(left, Defect(FindingKind.PIN_UNKNOWN, reason))

    async def _mark(self, judged: MirrorJudgement) -> None:
        """Record in the mirror's row whether git can open it."""
        if judged.row is None:
            return
        name, stopping = judged.name, {FindingKind.LAYOUT, FindingKind.CONFIG, FindingKind.HEAD}
        defects = sorted(judged.examined.defects.items())
        stops = [f"{what}: {defect.reason}" for what, defect in defects if defect.kind in stopping]
        code = (judged.row.error or {}).get("code")
        if stops:
            error = errors.DamagedMirrorError(
                f"cannot use mirror {name}: {stops[0]}", hint=f"`mirrord heal {name}` repairs it"
            )
            await self.catalog.update_mirror(name.key, error=error.problem())
        elif code in {errors.DamagedMirrorError.code, errors.CorruptObjectError.code}:
            await self.catalog.update_mirror(name.key, error=None)


def _tell(run: AuditRun, about: MirrorName | None = None) -> None:
    if run.progress:
        done = len(run.parts)
        total, note = done + len(run.left), str(about or "")
        run.progress(protocol.Progress(done=done, total=total, unit="mirrors", note=note))


def _is_of_everything(request: protocol.StartAudit) -> bool:
    return not request.mirrors and not request.dataset


@contextmanager
def _unless_refused(what: str, name: str) -> Iterator[None]:
    """Log instead of raising if a full or failing disk cannot record: the answer still counts."""
    try:
        yield
    except (errors.DiskFullError, errors.DiskFailedError) as error:
        log.warning("audit.unrecorded", what=what, name=name, detail=error.message)


def _is_bad(state: CommitState) -> bool:
    return state not in SERVABLE


def _summary(audit: protocol.Audit) -> protocol.AuditSummary:
    return protocol.AuditSummary(
        id=audit.id, level=audit.level, finished_at=audit.finished_at, counts=audit.counts,
        affected_count=len(audit.affected), finding_count=len(audit.findings),
        open_count=audit.open_count, left_count=len(audit.left), mirror_count=len(audit.mirrors),
    )  # fmt: skip
