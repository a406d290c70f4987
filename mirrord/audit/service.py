"""Audits as the daemon runs them: what is recorded, judged mirror by mirror, and put on record.

An audit reads only and takes no lock. What it says is saved before anybody hears of it, what it said of each mirror at once: an
audit that a crash, a stop of the daemon or a cancel interrupted goes on with the mirrors that are left. Mirrors that were not
looked at for longest come first.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial

import anyio
import structlog

from ..catalog import JudgementRow
from ..catalog.catalog import Catalog
from ..config import Settings
from ..errors import (
    AuditNotFoundError,
    CorruptObjectError,
    DamagedMirrorError,
    DatasetNotFoundError,
    DiskFailedError,
    DiskFullError,
    MirrordError,
    StoppingError,
)
from ..git.workers import Workers
from ..jobs.events import Events
from ..mirrors.pins import stands_alone
from ..mirrors.repository import PINS
from ..mirrors.service import Mirrors
from ..model import (
    AuditLevel,
    CommitId,
    CommitState,
    FindingKind,
    MirrorName,
    Reach,
    shown,
    utc_now,
)
from ..protocol import Audit, AuditPart, Progress, ProgressSink, Repair, StartAudit
from .connectivity import Verdict
from .examine import Examined, Reached, examine
from .findings import Judged, Round, is_sound, part_of, report, unjudged
from .object_files import Fault, no_directory

_LANES = {AuditLevel.QUICK: 2, AuditLevel.CLOSURE: 1, AuditLevel.CONTENT: 1}

log = structlog.get_logger()


class Audits:
    """Runs audits and remembers them in the catalog. Without `repair` no audit heals, without `scrub` none looks at templates."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        mirrors: Mirrors,
        catalog: Catalog,
        workers: Workers,
        events: Events,
        repair: Repairer | None = None,
        scrub: Scrubber | None = None,
    ) -> None:
        self._settings = settings
        self._mirrors = mirrors
        self._catalog = catalog
        self._events = events
        self._judge = Judge(
            mirrors=mirrors,
            catalog=catalog,
            workers=workers,
            events=events,
            repair=repair,
            scrub=scrub,
            accept=lambda: settings().audit.accept,
        )

    async def run(
        self, request: StartAudit, progress: ProgressSink | None = None, *, resume: bool = False
    ) -> Audit:
        """Judge what the request names, everything recorded by default; with `resume`, go on where an audit was interrupted.

        Raises MirrorNotFoundError, DatasetNotFoundError. One that is cancelled is on record with what it came to.
        """
        level = request.level or self._settings().audit.level
        recorded = await self._names(request)
        past = await self._catalog.list_judgements(level) if _is_of_everything(request) else []
        current = (await self._unfinished(level, past) if resume else None) or Round(
            _new_id(), utc_now()
        )
        names = _in_order(recorded, past)
        current.parts = {
            name.key: current.parts[name.key] for name in names if name.key in current.parts
        }
        current.left = {name.key: name for name in names if name.key not in current.parts}
        try:
            await self._judge_all(current, request, level, progress)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                await self._put_on_record(report(current, request, level))
            raise
        audit = report(current, request, level)
        await self._put_on_record(audit)
        return audit

    async def find_unfinished(self, level: AuditLevel) -> datetime | None:
        """When the audit of everything began that a scheduled one at this level would go on with."""
        found = await self._unfinished(level, await self._catalog.list_judgements(level))
        return found.started_at if found else None

    async def get(self, identity: str) -> Audit:
        """Raises AuditNotFoundError."""
        audit = await self._catalog.find_audit(identity)
        if audit is None:
            raise AuditNotFoundError(
                f"cannot find audit {shown(identity)}: none has that id", hint="see GET /v1/audits"
            )
        return audit

    async def list(self, limit: int = 50) -> builtins.list[Audit]:
        """The newest first."""
        return await self._catalog.list_audits(limit)

    async def _names(self, request: StartAudit) -> Collection[MirrorName]:
        """Mirrors that something is recorded of; one that is named, or where everything is asked of, is there without too."""
        if request.dataset and await self._catalog.find_dataset(request.dataset) is None:
            raise DatasetNotFoundError(
                f"cannot audit dataset {shown(request.dataset)}: there is none",
                hint="see `mirrord dataset list`",
            )
        wanted = {
            row.name.key: row.name
            for row in [await self._mirrors.get(text) for text in request.mirrors]
        }
        names = dict(wanted)
        if not wanted and not request.dataset:
            names = {row.name.key: row.name for row in await self._catalog.list_mirrors()}
        if not wanted:
            for row in await self._catalog.list_recorded(dataset=request.dataset):
                names.setdefault(row.mirror.key, row.mirror)
        return names.values()

    # -- one audit ----------------------------------------------------------------------------------------------------

    async def _unfinished(self, level: AuditLevel, past: Sequence[JudgementRow]) -> Round | None:
        """The last audit of everything, where it left mirrors and a new one is not due anyhow."""
        newest = past[-1] if past else None
        audit = await self._catalog.find_audit(newest.audit_id) if newest else None
        if newest is None or (audit is not None and not audit.left):
            return None
        settings = self._settings().audit
        interval = settings.content_interval if level is AuditLevel.CONTENT else settings.interval
        if newest.started_at + interval < utc_now():
            return None
        return Round(
            newest.audit_id,
            newest.started_at,
            {row.key: row.part for row in past if row.audit_id == newest.audit_id},
        )

    async def _judge_all(
        self, current: Round, request: StartAudit, level: AuditLevel, progress: ProgressSink | None
    ) -> None:
        """One mirror after the other, because one of the two workers is left to whoever wants a checkout; a quick one, which
        holds a worker for a moment, two at a time.
        """
        heal = self._settings().audit.heal if request.heal is None else request.heal
        names = iter(list(current.left.values()))
        lanes = [
            self._judge_each(names, current, request, level, heal, progress)
            for _ in range(_LANES[level])
        ]
        await asyncio.gather(*lanes)

    async def _judge_each(
        self,
        names: Iterator[MirrorName],
        current: Round,
        request: StartAudit,
        level: AuditLevel,
        heal: bool,
        progress: ProgressSink | None,
    ) -> None:
        for name in names:
            if progress:
                done, left = len(current.parts), len(current.left)
                progress(Progress(done=done, total=done + left, unit="mirrors", note=str(name)))
            try:
                part = await self._judge.judge(
                    name, request.dataset, level, heal=heal, progress=progress
                )
            except StoppingError:
                raise
            except (MirrordError, OSError) as error:
                reason = error.message if isinstance(error, MirrordError) else str(error)
                log.warning("audit.failed", mirror=str(name), detail=reason)
                current.failures.append(unjudged(name, reason, self._settings().audit.accept))
                continue
            except Exception:  # a bug costs the one mirror
                log.exception("audit.crashed", mirror=str(name))
                reason = "an unexpected error; the daemon's log has the details"
                current.failures.append(unjudged(name, reason, self._settings().audit.accept))
                continue
            current.parts[name.key] = part
            del current.left[name.key]
            # a quick one has nothing to go on with
            if _is_of_everything(request) and level is not AuditLevel.QUICK:
                row = JudgementRow(name.key, level, current.id, current.started_at, utc_now(), part)
                with _unless_refused("judgement", name.key):
                    await self._catalog.put_judgement(row)

    async def _put_on_record(self, audit: Audit) -> None:
        with _unless_refused("audit", audit.id):
            await self._catalog.put_audit(audit)
        self._events.publish(
            "audit.finished",
            audit=audit.id,
            level=str(audit.level),
            counts={str(state): count for state, count in audit.counts.items()},
            affected_count=len(audit.affected),
            open_count=audit.open_count,
            left_count=len(audit.left),
            healed=audit.healed,
            duration_s=(audit.finished_at - audit.started_at).total_seconds(),
        )


@contextmanager
def _unless_refused(what: str, name: str) -> Iterator[None]:
    """What an audit saw is said also where no disk takes it down: then of all times somebody wants to know."""
    try:
        yield
    except (DiskFullError, DiskFailedError) as error:
        log.warning("audit.unrecorded", what=what, name=name, detail=error.message)


def _is_of_everything(request: StartAudit) -> bool:
    return not request.mirrors and not request.dataset


def _in_order(recorded: Collection[MirrorName], past: Sequence[JudgementRow]) -> list[MirrorName]:
    """Mirrors that were never judged first, then those judged longest ago."""
    position = {row.key: number for number, row in enumerate(past)}
    return sorted(recorded, key=lambda name: (position.get(name.key, -1), name.key))


def _new_id() -> str:
    return secrets.token_hex(8)


_TIMEOUT = timedelta(hours=12)
_STOPS_GIT = {FindingKind.LAYOUT, FindingKind.CONFIG, FindingKind.HEAD}

Repairer = Callable[[Judged, ProgressSink | None], Awaitable[Repair]]
Scrubber = Callable[[MirrorName], Awaitable[Mapping[str, str]]]


class Judge:
    """`scrub` proves what checkouts of a mirror are made from; it answers what was damaged, with what becomes of it."""

    def __init__(
        self,
        *,
        mirrors: Mirrors,
        catalog: Catalog,
        workers: Workers,
        events: Events,
        repair: Repairer | None = None,
        scrub: Scrubber | None = None,
        accept: Callable[[], Collection[str]],
    ) -> None:
        self._accept = accept
        self._mirrors = mirrors
        self._catalog = catalog
        self._workers = workers
        self._events = events
        self._repair = repair
        self._scrub = scrub
        self._reached: dict[str, Reached] = {}

    async def judge(
        self,
        name: MirrorName,
        dataset: str | None,
        level: AuditLevel,
        *,
        heal: bool,
        progress: ProgressSink | None,
    ) -> AuditPart:
        """The mirror itself, and the commits that one dataset records, or all do; then also those that persons pinned or that
        outlived a catalog.
        """
        look = partial(self._look, name, dataset)
        judged = await self._judged(look, level, self._repair if heal else None, progress)
        await self._mark(judged)
        stores = await self._scrub(name) if self._scrub and level is AuditLevel.CONTENT else {}
        return part_of(judged, stores)

    async def _judged(
        self,
        look: Callable[[AuditLevel], Awaitable[Judged]],
        level: AuditLevel,
        repair: Repairer | None,
        progress: ProgressSink | None,
    ) -> Judged:
        first = await look(level)
        if repair is None or is_sound(first):
            return first
        repaired = await repair(first, progress)
        again = await look(max(level, AuditLevel.CLOSURE, key=list(AuditLevel).index))
        bad = [
            oid
            for oid, verdict in first.examined.verdicts.items()
            if verdict.state is not CommitState.OK
        ]
        now = again.examined.verdicts
        healed = {oid for oid in bad if oid in now and now[oid].state is CommitState.OK}
        judged = replace(again, healed=len(healed), repair=repaired)
        if is_sound(judged):
            self._events.publish(
                "mirror.healed", mirror=str(first.name), commits=len(healed), of=len(bad)
            )
        return judged

    async def _look(self, name: MirrorName, dataset: str | None, level: AuditLevel) -> Judged:
        """What is recorded is read at each look: an audit may take hours, and datasets come and go meanwhile."""
        path = self._mirrors.path(name)
        mirror = await self._catalog.find_mirror(name.key)
        rows = await self._catalog.list_recorded(name.key, dataset)
        pins = await self._catalog.list_pins(name.key)
        alone = {pin.commit for pin in pins if stands_alone(pin) and not dataset}
        commits = sorted({row.commit for row in rows} | alone)
        record = mirror.history if mirror else None
        accept = tuple(self._accept())
        if not path.is_dir():
            was_there = record or pins or os.path.lexists(path)
            wrong = no_directory(path) if was_there else None
            return Judged(name, rows, _not_mirrored(name, commits, wrong), accept, row=mirror)
        owned = [f"{pin.owner}/{pin.commit}" for pin in pins]
        known = self._reached.get(name.key)
        examined = await self._workers.run(
            examine, path, commits, level, owned, known, record, timeout=_TIMEOUT
        )
        self._reached[name.key] = examined.reached
        examined.faults |= await self._unknown_pins(name, examined.unknown)
        await self._drop_given_up(name, examined.faults)
        return Judged(name, rows, examined, accept, row=mirror)

    async def _mark(self, judged: Judged) -> None:
        """Have the mirror's row say whether git can open it, for who asks without an audit."""
        if judged.row is None:
            return
        faults = sorted(judged.examined.faults.items())
        stops = [
            f"{subject}: {fault.reason}" for subject, fault in faults if fault.kind in _STOPS_GIT
        ]
        if stops:
            fact, hint = (
                f"cannot use mirror {judged.name}: {stops[0]}",
                f"`mirrord heal {judged.name}` repairs it",
            )
            problem = DamagedMirrorError(fact, hint=hint).problem()
            await self._catalog.update_mirror(judged.name.key, error=problem)
        elif (judged.row.error or {}).get("code") in {
            DamagedMirrorError.code,
            CorruptObjectError.code,
        }:
            await self._catalog.update_mirror(judged.name.key, error=None)

    async def _drop_given_up(self, name: MirrorName, faults: dict[str, Fault]) -> None:
        """Pins that were given up since the look began are not lost."""
        lost = {ref for ref, fault in faults.items() if fault.kind is FindingKind.PIN_LOST}
        for ref in lost - (await self._pins(name) if lost else lost):
            del faults[ref]

    async def _pins(self, name: MirrorName) -> set[str]:
        return {
            f"{PINS}{pin.owner}/{pin.commit}" for pin in await self._catalog.list_pins(name.key)
        }

    async def _unknown_pins(self, name: MirrorName, unknown: Collection[str]) -> dict[str, Fault]:
        """Pins without a row in the catalog: their refs are made first, under the mirror's lock, so
        while somebody holds that there is nothing to say.
        """
        if not unknown or self._mirrors.is_busy(name):
            return {}
        said = await self._pins(name)
        there = await self._mirrors.repository(name).all_refs()
        left = sorted(ref for ref in unknown if ref in there and ref not in said)
        return dict.fromkeys(left, Fault(FindingKind.PIN_UNKNOWN, "the catalog does not have it"))


def _not_mirrored(name: MirrorName, commits: Collection[CommitId], wrong: str | None) -> Examined:
    """Nothing can be served; `wrong` says what is where the mirror was."""
    absent = Verdict(
        CommitState.NOT_MIRRORED, detail=f"there is no mirror {name}, or it was never synced"
    )
    reached = Reached("", dict.fromkeys(commits, Reach.NOTHING))
    faults = {"mirror": Fault(FindingKind.LAYOUT, wrong)} if wrong else {}
    return Examined(dict.fromkeys(commits, absent), reached, faults)
