"""The jobs that run by the clock: what each does and how often, run by apscheduler on the loop.

A late job runs once, not dropped and not doubled, and never beside itself. Intervals come from the
settings in force, zero switches a job off. They count from what was recorded, not from the start: a
daemon restarted every hour still syncs every six. A failure is kept for `status`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from zlib import crc32

import anyio.to_thread
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.interval import IntervalTrigger

from .activity import SNAPSHOT_S
from .checkouts.service import Checkouts
from .errors import MirrordError, UpstreamAuthError, UpstreamNotFoundError, from_problem
from .host.processes import trim_memory
from .jobs.watch import Watch
from .model import AuditLevel, MirrorName, utc_now
from .protocol import Audit, JobState, Operation, StartAudit
from .storage import Storage
from .telemetry import log
from .units import Backoff
from .work import BackgroundWork

CLEANUP_INTERVAL = timedelta(seconds=5)
_MINUTE = timedelta(minutes=1)
_NEVER_FOUND_INTERVAL = timedelta(days=7)
# forges ask for a password where a repository does not exist
_NEVER_FOUND = {UpstreamNotFoundError.code, UpstreamAuthError.code}


@dataclass(frozen=True, slots=True)
class Job:
    """`run` every `interval` (zero: never) from `since` on; None is now.

    After a failure it runs again after `retry` (zero: at its next turn), twice that, and so on.
    """

    name: str
    interval: timedelta
    run: Callable[[], Awaitable[object]]
    jitter: timedelta = timedelta()
    since: datetime | None = None
    retry: timedelta = timedelta()


@dataclass(slots=True)
class _Planned:
    job: Job
    backoff: Backoff
    last_at: datetime | None = None
    last_error: str | None = None


class Schedule:
    """Keeps apscheduler's jobs equal to the table that `jobs` answers."""

    def __init__(
        self, jobs: Callable[[], Awaitable[list[Job]]], *, soon: timedelta = timedelta(seconds=2)
    ) -> None:
        self._jobs = jobs
        self._soon = soon
        self._planned: dict[str, _Planned] = {}
        self._reconciling = asyncio.Lock()
        # a timer keeps the context that it is made in: of no request, or all jobs would run as it
        self._context = copy_context()
        self._scheduler = AsyncIOScheduler(
            timezone="UTC",
            job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1},
        )

    async def open(self) -> None:
        await self.reconcile()
        self._context.run(self._scheduler.start)

    async def close(self) -> None:
        """Start nothing more. Running work belongs to the operations."""
        self._scheduler.shutdown(wait=False)

    async def reconcile(self) -> None:
        """Add new jobs, plan those with another interval again, drop those that are gone."""
        async with self._reconciling:
            table = {job.name: job for job in await self._jobs() if job.interval}
            for name in self._planned.keys() - table.keys():
                self._context.run(self._scheduler.remove_job, name)
                del self._planned[name]
            for name, job in table.items():
                known = self._planned.get(name)
                if known and (known.job.interval, known.job.jitter) == (job.interval, job.jitter):
                    continue
                planned = _Planned(job, Backoff(job.retry, job.retry * 2**16))
                if known:
                    planned.last_at, planned.last_error = known.last_at, known.last_error
                self._planned[name] = planned
                jitter = min(job.jitter, job.interval / 2).total_seconds()
                self._context.run(
                    self._scheduler.add_job,
                    self._run,
                    IntervalTrigger(seconds=job.interval.total_seconds(), jitter=jitter or None),
                    args=[name],
                    id=name,
                    next_run_time=self._first_time(job),
                    replace_existing=True,
                )

    def states(self) -> list[JobState]:
        """Every job, with its next time."""
        return [
            JobState(
                name=name, next_at=self._next_at(name), last_at=each.last_at,
                last_error=each.last_error,
            )
            for name, each in sorted(self._planned.items())
        ]  # fmt: skip

    async def _run(self, name: str) -> None:
        planned = self._planned.get(name)
        if planned is None:
            return
        planned.last_at = utc_now()
        try:
            await planned.job.run()
            planned.last_error = None
            planned.backoff.reset()
            if planned.job.jitter and self._next_at(name):
                place = self._place(replace(planned.job, since=planned.last_at))
                self._move(name, place)
        except MirrordError as error:
            planned.last_error = error.message
            # No earlier than upstream asks for, and no later than the next turn.
            asked = timedelta(seconds=error.facts.get("retry_after_s") or 0)
            retry_at = utc_now() + max(planned.backoff.next(), asked)
            next_at = self._next_at(name)
            if planned.job.retry and next_at and retry_at < next_at:
                self._move(name, retry_at)
        except Exception:
            planned.last_error = "an unexpected error; the daemon's log has the details"
            log.exception("job.crashed", job=name)

    def _move(self, name: str, at: datetime) -> None:
        self._context.run(self._scheduler.modify_job, name, next_run_time=at)

    def _next_at(self, name: str) -> datetime | None:
        found = self._scheduler.get_job(name)
        return found.next_run_time if found else None

    def _first_time(self, job: Job) -> datetime:
        """An interval after `since`, or its place in it. An overdue job runs soon."""
        now = utc_now()
        if job.since is None:
            return now + min(job.interval, self._soon)
        spread = job.jitter / 10 * _share(job.name)
        return max(self._place(job), now + self._soon + spread)

    def _place(self, job: Job) -> datetime:
        """When a job is due. One with jitter is one of many: each has a place in the interval.

        So mirrors that were imported together are synced one after the other from then on.
        """
        assert job.since is not None
        if not job.jitter:
            return job.since + job.interval
        earliest = job.since + min(job.jitter, job.interval / 2)
        begun = timedelta(seconds=earliest.timestamp()) % job.interval
        return earliest + (job.interval * _share(job.name) - begun) % job.interval


def _share(name: str) -> float:
    """From 0 up to 1, evenly over names."""
    return crc32(name.encode()) / 2**32


class Cleanup:
    """Retries what failed operations left, ever less often while it fails, as on a full disk.

    `parts` are called in order; each answers whether nothing is left. A start retries all.
    """

    def __init__(
        self,
        parts: Sequence[Callable[[], Awaitable[bool]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts = parts
        self._clock = clock
        self._backoff = Backoff(CLEANUP_INTERVAL, timedelta(minutes=3))
        self._not_before = 0.0

    async def retry(self) -> None:
        if self._clock() < self._not_before:
            return
        if all([await part() for part in self._parts]):
            self._backoff.reset()
        else:
            self._not_before = self._clock() + self._backoff.next().total_seconds()


@dataclass(slots=True)
class Timetable:
    """Builds the table from the mirrors there are and from when things last happened."""

    started_at: datetime
    checkouts: Checkouts
    work: BackgroundWork
    cleanup: Cleanup
    storage: Storage
    watches: list[Watch]
    sample: Callable[[], Awaitable[None]]

    async def table(self) -> list[Job]:
        settings, started = self.work.mirrors.settings(), self.started_at
        sync, audit = settings.sync, settings.audit
        catalog = self.work.mirrors.catalog
        mirrors = await catalog.list_mirrors()
        names = {str(row.name) for row in mirrors}
        audits = await catalog.list_audits(node=catalog.node or None)
        whole = [each for each in audits if names <= set(each.mirrors) and not each.left]
        content = [each for each in whole if each.level is AuditLevel.CONTENT]

        async def auditing(
            name: str, interval: timedelta, level: AuditLevel | None, past: list[Audit]
        ) -> Job:
            """Counts from the last whole audit; an interrupted one continues soon."""
            begun = await self.work.audits.find_unfinished(level or audit.level)
            since = past[0].finished_at if past else started
            since = begun - interval if begun else since
            return Job(name, interval, partial(self._audit, level), since=since)

        def early(interval: timedelta) -> datetime:
            """First an eighth of the interval after the start: some daemons restart every day."""
            return started - interval * 7 / 8

        def regular(name: str, interval: timedelta, run: Callable[[], Awaitable[object]]) -> Job:
            return Job(name, interval, run, since=started)

        upkeep, scrub = settings.maintenance.interval, audit.content_interval
        maintaining = Job(
            "maintenance", upkeep, self._maintain, since=early(upkeep), retry=timedelta(minutes=10)
        )
        return [
            *(
                Job(f"sync/{row.name}", sync.interval, partial(self._sync, row.name),
                    sync.jitter, row.attempted_at, _MINUTE)
                for row in mirrors
                if not self.work.mirrors.sharing.is_fleet  # one daemon of which syncs what is due
            ),
            await auditing("audit", audit.interval, None, whole),
            await auditing("audit.content", audit.content_interval, AuditLevel.CONTENT, content),
            maintaining,
            Job("templates.scrub", scrub, self.work.templates.scrub, since=early(scrub)),
            regular("checkouts.expire", timedelta(seconds=2), self.checkouts.expire),
            regular("cleanup.retry", CLEANUP_INTERVAL, self.cleanup.retry),
            regular("activity.sample", timedelta(seconds=SNAPSHOT_S), self.sample),
            regular("disk.look", timedelta(seconds=2), self.storage.look),
            regular("templates.evict", timedelta(minutes=5), self._evict),
            regular("watch.look", _MINUTE, self._look),
            regular("quotas.weigh", _MINUTE, self.checkouts.quotas.weigh),
            regular("memory.trim", _MINUTE, partial(anyio.to_thread.run_sync, trim_memory)),
            regular("heals.retry", _MINUTE, self._retry_heals),
        ]  # fmt: skip

    async def _sync(self, name: MirrorName) -> None:
        """Sync. A mirror never synced and unknown upstream is probably a mistyped name: it is tried
        once a week, by imports, and when a person asks.
        """
        row = await self.work.mirrors.catalog.find_mirror(name.key)
        if row and not row.synced_at and row.error and row.attempted_at:
            is_due = utc_now() >= row.attempted_at + _NEVER_FOUND_INTERVAL
            if row.error.get("code") in _NEVER_FOUND and not is_due:
                return
        await self._finish(self.work.sync(name))

    async def _audit(self, level: AuditLevel | None) -> None:
        await self._finish(await self.work.audit(StartAudit(level=level), resume=True))

    async def _maintain(self) -> None:
        """One mirror after the other. Raises the last failure; each is in its operation."""
        failure: MirrordError | None = None
        for row in await self.work.mirrors.catalog.list_mirrors():
            try:
                await self._finish(self.work.maintain(row.name))
            except MirrordError as error:
                failure = error
        if failure:
            raise failure

    async def _retry_heals(self) -> None:
        """Heal what no donor had the last time, in the mirrors that are due."""
        names = self.work.heals.due()
        due = [str(name) for name in names if await self.work.mirrors.catalog.find_mirror(name.key)]
        if due and self.work.mirrors.settings().audit.heal:
            request = StartAudit(mirrors=due, level=AuditLevel.CONTENT, heal=True)
            ended = await self._finish(await self.work.audit(request, kind="heal"))
            self.work.heals.settle(Audit.from_json(ended.result))

    async def _evict(self) -> None:
        await self.work.templates.evict()
        await self.work.prewarm.resume()

    async def _look(self) -> None:
        for watch in self.watches:
            watch.touch()

    async def _finish(self, operation: Operation) -> Operation:
        """Wait for an operation; raises its error."""
        ended = await self.work.operations.wait(operation.id)
        if ended.error is not None:
            raise from_problem(ended.error.to_json())
        return ended
