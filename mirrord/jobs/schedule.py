"""Jobs by the clock: one table, run by apscheduler on the daemon's own loop.

A late job runs once, not dropped and not doubled, and never beside itself. Intervals count from
what was recorded, not from the start: a daemon restarted every hour still syncs every six. A
failure is kept for `status`; the next turn comes regardless, and earlier where the job has `retry`.
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
from ..units import Backoff

log = structlog.get_logger()

_SOON = timedelta(seconds=2)
_MOST_RETRY_FACTOR = 2**16


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
    last_at: datetime | None = None
    last_error: str | None = None
    backoff: Backoff = field(init=False)

    def __post_init__(self) -> None:
        self.backoff = Backoff(self.job.retry, self.job.retry * _MOST_RETRY_FACTOR)


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
        """Start nothing more. Running work belongs to the operations."""
        self._scheduler.shutdown(wait=False)

    async def reconcile(self) -> None:
        """Add new jobs, plan those with another interval again, drop those that are gone."""
        async with self._reconciling:
            table = {job.name: job for job in await self._jobs() if job.interval}
            for name in self._planned.keys() - table.keys():
                self._scheduler.remove_job(name)
                del self._planned[name]
            for name, job in table.items():
                known = self._planned.get(name)
                if known and (known.job.interval, known.job.jitter) == (job.interval, job.jitter):
                    continue
                self._planned[name] = _Planned(job)
                if known:
                    self._planned[name].last_at = known.last_at
                    self._planned[name].last_error = known.last_error
                jitter = min(job.jitter, job.interval / 2).total_seconds()
                self._scheduler.add_job(
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
                name=name,
                next_at=self._next_at(name),
                last_at=planned.last_at,
                last_error=planned.last_error,
            )
            for name, planned in sorted(self._planned.items())
        ]

    async def _run(self, name: str) -> None:
        planned = self._planned.get(name)
        if planned is None:
            return
        planned.last_at = utc_now()
        try:
            await planned.job.run()
            planned.last_error = None
            planned.backoff.reset()
        except MirrordError as error:
            planned.last_error = error.message
            # No earlier than upstream asks for, and no later than the next turn.
            asked = timedelta(seconds=error.facts.get("retry_after_s") or 0)
            retry_at = utc_now() + max(planned.backoff.next(), asked)
            next_at = self._next_at(name)
            if planned.job.retry and next_at and retry_at < next_at:
                self._scheduler.modify_job(name, next_run_time=retry_at)
        except Exception:
            planned.last_error = "an unexpected error; the daemon's log has the details"
            log.exception("job.crashed", job=name)

    def _next_at(self, name: str) -> datetime | None:
        found = self._scheduler.get_job(name)
        return found.next_run_time if found else None

    def _first_time(self, job: Job) -> datetime:
        """An interval after `since`. An overdue job runs soon, spread over the jitter."""
        now = utc_now()
        if job.since is None:
            return now + min(job.interval, self._soon)
        spread = job.jitter / 10 * (crc32(job.name.encode()) % 100 / 100)
        return max(job.since + job.interval, now + self._soon + spread)
