"""The scheduled jobs, run by apscheduler on the event loop.

A missed run is made up once, and runs of a job never overlap. Intervals come from the settings;
zero disables a job. They count from recorded times, not from the start: a daemon that is restarted
every hour still syncs every six. `status` shows the last failure.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from zlib import crc32

import anyio.to_thread
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.interval import IntervalTrigger

from ..checkouts.service import Checkouts
from ..errors import (
    MirrordError,
    UpstreamAuthError,
    UpstreamNotFoundError,
    from_problem,
    host_error,
)
from ..host.processes import trim_memory
from ..jobs.clock import WallClock
from ..model import AuditLevel, MirrorName, utc_now
from ..protocol import Audit, JobState, Operation, StartAudit
from ..telemetry import log
from ..units import Backoff
from .activity import SNAPSHOT_S
from .storage import Storage
from .work import BackgroundWork

# what could not be removed is tried again, ever less often
CLEANUP_INTERVAL = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class Job:
    """Runs every `interval` (zero: never), counted from `since` (None: now).

    A failed run is retried after `retry`, then after twice that, and so on; with zero it is not.
    """

    name: str
    interval: timedelta
    run: Callable[[], Awaitable[object]]
    jitter: timedelta = timedelta()
    since: datetime | None = None
    retry: timedelta = timedelta()


@dataclass(slots=True)
class _LastRun:
    job: Job
    backoff: Backoff
    last_at: datetime | None = None
    last_error: str | None = None


class _Scheduler(AsyncIOScheduler):  # type: ignore[misc]
    """apscheduler with its times moved before it reads them, where the wall clock was set.

    Its timers are of the steady clock, so it wakes as often as before, but what it looks for are
    times: after a step back no job would be due for as long as that was, after one of a year
    forward it would list all 16 million runs of a job of each two seconds.
    """

    def __init__(self, look: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self._look = look

    def _process_jobs(self) -> float | None:
        self._look()
        wait_s: float | None = super()._process_jobs()
        return wait_s


# jobs that run more often count from their last run, others from recorded times
_OFTEN = timedelta(hours=1)


class Schedule:
    """Keeps apscheduler's jobs equal to the table that `jobs` returns.

    The first run of a new or overdue job is after `delay`.
    """

    def __init__(
        self,
        jobs: Callable[[], Awaitable[list[Job]]],
        *,
        clock: WallClock,
        delay: timedelta = timedelta(seconds=2),
    ) -> None:
        clock.on_step(self._follow)
        self._jobs = jobs
        self._delay = delay
        self._states: dict[str, _LastRun] = {}
        self._reconciling = asyncio.Lock()
        # timers keep the context in which they are made: a request's would run jobs as its user
        self._context = copy_context()
        self._scheduler = _Scheduler(
            clock.look,
            timezone="UTC",
            # APScheduler 3 drops a run that is more than a second late
            job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1},
        )

    async def open(self) -> None:
        await self.reconcile()
        self._context.run(self._scheduler.start)

    async def close(self) -> None:
        """Start no more jobs. Does not end running operations."""
        self._scheduler.shutdown(wait=False)

    async def reconcile(self) -> None:
        """Add new jobs, reschedule jobs with another interval, remove jobs that are gone."""
        async with self._reconciling:
            table = {job.name: job for job in await self._jobs() if job.interval}
            for name in self._states.keys() - table.keys():
                self._context.run(self._scheduler.remove_job, name)
                del self._states[name]
            for name, job in table.items():
                last = self._states.get(name)
                if last and (last.job.interval, last.job.jitter) == (job.interval, job.jitter):
                    continue
                # the next regular run comes before such a pause
                state = _LastRun(job, Backoff(job.retry, job.retry * 2**16))
                if last:
                    state.last_at, state.last_error = last.last_at, last.last_error
                self._states[name] = state
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
        """Return the state of every job."""
        return [
            JobState(
                name=name, next_at=self._next_at(name), last_at=state.last_at,
                last_error=state.last_error,
            )
            for name, state in sorted(self._states.items())
        ]  # fmt: skip

    async def _run(self, name: str) -> None:
        state = self._states.get(name)
        if state is None:
            return
        state.last_at = utc_now()
        try:
            await _work(state.job)
            state.last_error = None
            state.backoff.reset()
            if state.job.jitter and self._next_at(name):
                self._move(name, _due_at(state.job, state.last_at))
        except MirrordError as error:
            state.last_error = error.message
            # not before upstream's Retry-After, and not after the next regular run
            retry_after = timedelta(seconds=error.facts.get("retry_after_s") or 0)
            retry_at = utc_now() + max(state.backoff.next(), retry_after)
            next_at = self._next_at(name)
            if state.job.retry and next_at and retry_at < next_at:
                self._move(name, retry_at)
        except Exception:
            state.last_error = "an unexpected error; the daemon's log has the details"
            log.exception("job.crashed", job=name)

    def _follow(self, step: timedelta) -> None:
        """Follow a step of the wall clock. After one forward what is overdue is done, once."""
        for name, state in self._states.items():
            if (at := self._next_at(name)) and (step < timedelta() or state.job.interval < _OFTEN):
                self._move(name, at + step)

    def _move(self, name: str, run_at: datetime) -> None:
        self._context.run(self._scheduler.modify_job, name, next_run_time=run_at)

    def _next_at(self, name: str) -> datetime | None:
        job = self._scheduler.get_job(name)
        return job.next_run_time if job else None

    def _first_time(self, job: Job) -> datetime:
        now = utc_now()
        if job.since is None:
            return now + min(job.interval, self._delay)
        # after a long stop every mirror is overdue
        spread = job.jitter / 10 * _phase(job.name)
        # a recorded time of the future is of a clock that was wrong
        return max(_due_at(job, min(job.since, now)), now + self._delay + spread)


async def _work(job: Job) -> None:
    """Run a job; raises a full or failed disk as our error, because that is no bug."""
    try:
        await job.run()
    except OSError as error:
        if problem := host_error(error, f"run {job.name}"):
            raise problem from error
        raise


def _due_at(job: Job, since: datetime) -> datetime:
    """Return the time of a job's next run after one at `since`.

    A job with jitter is one of many, and has a fixed phase in the interval: mirrors that were
    imported together are synced one after the other.
    """
    if not job.jitter:
        return since + job.interval
    earliest = since + min(job.jitter, job.interval / 2)
    phase = timedelta(seconds=earliest.timestamp()) % job.interval
    return earliest + (job.interval * _phase(job.name) - phase) % job.interval


def _is_recent(time: datetime, span: timedelta) -> bool:
    """Return whether a time is less than `span` past; a future one is of a wrong clock."""
    return timedelta() <= utc_now() - time < span


def _phase(name: str) -> float:
    """Return a share of the interval, from 0 up to 1, evenly distributed over names."""
    # hash() differs from process to process, and would move all phases at a restart
    return crc32(name.encode()) / 2**32


class Cleanup:
    """Retries the cleanup after failed operations, with increasing pauses while it fails.

    `parts` are called in order. Each returns whether nothing is left to clean up.
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
        # a list: every part runs, also after one that is not done
        if all([await part() for part in self._parts]):
            self._backoff.reset()
        else:
            self._not_before = self._clock() + self._backoff.next().total_seconds()


# the shortest pause after a failed sync; it doubles up to the interval
_MINUTE = timedelta(minutes=1)
# a repository that was never there is a mistyped name: it is asked for once a week
_NOT_FOUND_INTERVAL = timedelta(days=7)
_WITHDRAWN_INTERVAL = timedelta(days=1)
# the `mirror add` that made the row, or somebody, has just synced it
_JUST_NOW = timedelta(seconds=10)
# forges ask for a password if a repository does not exist
_NOT_FOUND = {UpstreamNotFoundError.code, UpstreamAuthError.code}


@dataclass(slots=True)
class Timetable:
    """Builds the table of jobs from the mirrors and the recorded times."""

    started_at: datetime
    checkouts: Checkouts
    work: BackgroundWork
    cleanup: Cleanup
    storage: Storage
    sample: Callable[[], Awaitable[None]]

    async def table(self) -> list[Job]:
        settings, started = self.work.mirrors.settings(), self.started_at
        sync, audit = settings.sync, settings.audit
        catalog = self.work.mirrors.catalog
        mirrors = await catalog.list_mirrors()
        names = {str(row.name) for row in mirrors}
        audits = await catalog.list_audits(node=catalog.node or None)
        whole = [ended for ended in audits if names <= set(ended.mirrors) and not ended.left]
        content = [ended for ended in whole if ended.level is AuditLevel.CONTENT]

        async def auditing(
            name: str, interval: timedelta, level: AuditLevel | None, past: list[Audit]
        ) -> Job:
            """Count from the last complete audit. An interrupted one continues soon."""
            begun = await self.work.audits.find_unfinished(level or audit.level)
            since = past[0].finished_at if past else started
            since = begun - interval if begun else since
            return Job(name, interval, partial(self._audit, level), since=since)

        def early(interval: timedelta) -> datetime:
            """First run after an eighth of the interval: some daemons restart every day."""
            return started - interval * 7 / 8

        def regular(name: str, interval: timedelta, run: Callable[[], Awaitable[object]]) -> Job:
            return Job(name, interval, run, since=started)

        def if_here(run: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[object]]:
            return partial(self._if_here, run)

        upkeep, scrub = settings.maintenance.interval, audit.content_interval
        maintaining = Job(
            "maintenance", upkeep, self._maintain, since=early(upkeep), retry=timedelta(minutes=10)
        )
        return [
            *(
                Job(f"sync/{row.name}", sync.interval, partial(self._sync, row.name),
                    sync.jitter, row.attempted_at, _MINUTE)
                for row in mirrors
                if not self.work.mirrors.sharing.is_fleet  # whose claims schedule syncs
            ),
            await auditing("audit", audit.interval, None, whole),
            await auditing("audit.content", audit.content_interval, AuditLevel.CONTENT, content),
            maintaining,
            Job("templates.scrub", scrub, self.work.templates.scrub, since=early(scrub)),
            regular("checkouts.expire", timedelta(seconds=2), if_here(self.checkouts.expire)),
            regular("cleanup.retry", CLEANUP_INTERVAL, if_here(self.cleanup.retry)),
            regular("activity.sample", timedelta(seconds=SNAPSHOT_S), self.sample),
            regular("disk.look", timedelta(seconds=2), self.storage.look),
            regular("templates.evict", timedelta(minutes=5), self._evict),
            regular("quotas.weigh", _MINUTE, self.checkouts.quotas.weigh),
            regular("resets.complete", _MINUTE, self.checkouts.complete_resets),
            # glibc keeps what answered requests freed (malloc_trim(3))
            regular("memory.trim", _MINUTE, partial(anyio.to_thread.run_sync, trim_memory)),
            regular("heals.retry", _MINUTE, self._retry_heals),
        ]  # fmt: skip

    async def _if_here(self, run: Callable[[], Awaitable[object]]) -> object:
        """What is not seen while the state directory is gone would be taken for removed."""
        self.work.mirrors.room.must_be_here()
        return await run()

    async def _sync(self, name: MirrorName) -> None:
        """Sync, but rarely while upstream has no such repository or does not show it any more.

        One that never was there may be mistyped, and one that was may be back tomorrow.
        """
        row = await self.work.mirrors.catalog.find_mirror(name.key)
        if row and row.synced_at is None and self.work.mirrors.is_syncing(name):
            return  # for who asked for the mirror, and may cancel that
        if row and row.attempted_at:
            recent = min(_JUST_NOW, self.work.mirrors.settings().sync.interval / 2)
            if _is_recent(row.attempted_at, recent):
                return
        if row and row.error and row.attempted_at and row.error.get("code") in _NOT_FOUND:
            interval = _NOT_FOUND_INTERVAL
            if row.synced_at:  # as long as it has failed for by now, which doubles
                interval = min(row.attempted_at - row.synced_at, _WITHDRAWN_INTERVAL)
            if _is_recent(row.attempted_at, interval):
                return
        await self._finish(self.work.sync(name))

    async def _audit(self, level: AuditLevel | None) -> None:
        await self._finish(await self.work.audit(StartAudit(level=level), resume=True))

    async def _maintain(self) -> None:
        """Maintain all mirrors in turn. Raises the last failure; each is in its operation."""
        failure: MirrordError | None = None
        for row in await self.work.mirrors.catalog.list_mirrors():
            try:
                await self._finish(self.work.maintain(row.name))
            except MirrordError as error:
                failure = error
        if failure:
            raise failure

    async def _retry_heals(self) -> None:
        """Retry heals of objects that no donor had, in the mirrors that are due."""
        names = self.work.heals.due()
        due = [str(name) for name in names if await self.work.mirrors.catalog.find_mirror(name.key)]
        if due and self.work.mirrors.settings().audit.heal:
            request = StartAudit(mirrors=due, level=AuditLevel.CONTENT, heal=True)
            ended = await self._finish(await self.work.audit(request, kind="heal"))
            self.work.heals.settle(Audit.from_json(ended.result))

    async def _evict(self) -> None:
        await self.work.templates.evict()
        await self.work.prewarm.resume()

    async def _finish(self, operation: Operation) -> Operation:
        """Wait for an operation. Raises its error."""
        ended = await self.work.operations.wait(operation.id)
        if ended.error is not None:
            raise from_problem(ended.error.to_json())
        return ended
