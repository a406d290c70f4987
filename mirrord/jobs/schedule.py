"""What happens by the clock: one table of jobs, run by apscheduler on the daemon's own loop.

A job that is late is run once, not dropped and not doubled, and never runs beside itself. Jobs that matter across restarts count
from what was recorded, not from the start: a daemon that is restarted every hour still syncs every six. Failures are kept for
`status` and told as events by whoever failed; the next turn comes regardless, and earlier where the job asks for a retry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from zlib import crc32

import structlog
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.interval import IntervalTrigger

from ..errors import MirrordError
from ..model import utc_now
from ..protocol import JobState

log = structlog.get_logger()

_SOON = timedelta(seconds=2)
_MOST_DOUBLINGS = 16


@dataclass(frozen=True, slots=True)
class Job:
    """Something to do every `interval` (none: never) from `since` on; None is now.

    After a failure it is tried again in `retry` (none: not before its next turn), a time that doubles with each further failure.
    """

    name: str
    interval: timedelta
    run: Callable[[], Awaitable[None]]
    jitter: timedelta = timedelta()
    since: datetime | None = None
    retry: timedelta = timedelta()


@dataclass(slots=True)
class _Past:
    last_at: datetime | None = None
    last_error: str | None = None
    failures: int = 0


@dataclass(slots=True)
class _Planned:
    job: Job
    past: _Past = field(default_factory=_Past)


class Schedule:
    """Keeps apscheduler's jobs equal to the table that `jobs` answers."""

    def __init__(
        self, jobs: Callable[[], Awaitable[list[Job]]], *, soon: timedelta = _SOON
    ) -> None:
        self._jobs = jobs
        self._soon = soon
        self._planned: dict[str, _Planned] = {}
        self._reconciling = asyncio.Lock()
        self._scheduler = AsyncIOScheduler(
            timezone="UTC",
            job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1},
        )

    async def open(self) -> None:
        self._scheduler.start()
        await self.reconcile()

    async def close(self) -> None:
        """Start nothing more. What runs belongs to the operations."""
        self._scheduler.shutdown(wait=False)

    async def reconcile(self) -> None:
        """Plan what is new, replan what changed its interval, drop what is gone."""
        async with self._reconciling:
            wanted = {job.name: job for job in await self._jobs() if job.interval}
            for name in self._planned.keys() - wanted.keys():
                self._scheduler.remove_job(name)
                del self._planned[name]
            for job in wanted.values():
                self._plan(job)

    def states(self) -> list[JobState]:
        """Every job, with when it runs next."""
        return [
            JobState(
                name=name,
                next_at=self._next_at(name),
                last_at=planned.past.last_at,
                last_error=planned.past.last_error,
            )
            for name, planned in sorted(self._planned.items())
        ]

    def _plan(self, job: Job) -> None:
        known = self._planned.get(job.name)
        if known and (known.job.interval, known.job.jitter) == (job.interval, job.jitter):
            return
        past = known.past if known else _Past()
        self._planned[job.name] = _Planned(job, past)
        jitter = min(job.jitter, job.interval / 2).total_seconds()
        self._scheduler.add_job(
            self._run,
            IntervalTrigger(seconds=job.interval.total_seconds(), jitter=jitter or None),
            args=[job.name],
            id=job.name,
            next_run_time=_first_time(job, self._soon),
            replace_existing=True,
        )

    async def _run(self, name: str) -> None:
        planned = self._planned.get(name)
        if planned is None:
            return
        planned.past.last_at = utc_now()
        try:
            await planned.job.run()
            planned.past.last_error, planned.past.failures = None, 0
        except MirrordError as error:
            planned.past.last_error = error.message
            self._retry(planned, error.facts.get("retry_after_s"))
        except Exception:
            planned.past.last_error = "an unexpected error; the daemon's log has the details"
            log.exception("job.crashed", job=name)

    def _retry(self, planned: _Planned, asked_s: float | None) -> None:
        """Bring the next turn forward, to no earlier than whoever refused asked for."""
        job, past = planned.job, planned.past
        past.failures += 1
        planned_at = self._next_at(job.name)
        if not job.retry or planned_at is None:
            return
        wait = max(
            job.retry * 2 ** min(past.failures - 1, _MOST_DOUBLINGS),
            timedelta(seconds=asked_s or 0),
        )
        if utc_now() + wait < planned_at:
            self._scheduler.modify_job(job.name, next_run_time=utc_now() + wait)

    def _next_at(self, name: str) -> datetime | None:
        found = self._scheduler.get_job(name)
        return found.next_run_time if found else None


def _first_time(job: Job, soon: timedelta) -> datetime:
    """An interval after it last happened; what is overdue is soon, spread over the jitter."""
    now = utc_now()
    if job.since is None:
        return now + min(job.interval, soon)
    due = job.since + job.interval
    spread = job.jitter / 10 * (crc32(job.name.encode()) % 100 / 100)
    return max(due, now + soon + spread)
