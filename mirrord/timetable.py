"""The jobs that run by the clock, how often, and what each does: the table the schedule keeps to.

Intervals come from the settings in force whenever the table is read; zero switches a job off.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

import anyio.to_thread

from .catalog import Catalog
from .checkouts.service import Checkouts
from .config import Settings
from .errors import MirrordError, UpstreamAuthError, UpstreamNotFoundError, from_problem
from .host.processes import trim_memory
from .jobs.schedule import Job
from .jobs.watch import Watch
from .model import AuditLevel, MirrorName, utc_now
from .protocol import Audit, Operation, StartAudit
from .units import Backoff
from .work import BackgroundWork

_EXPIRE = timedelta(seconds=2)
CLEANUP_INTERVAL = timedelta(seconds=5)
_LONGEST_CLEANUP_PAUSE = timedelta(minutes=3)
_EVICT = timedelta(minutes=5)
_MINUTE = timedelta(minutes=1)
_MAINTENANCE_RETRY = timedelta(minutes=10)
_NEVER_FOUND_INTERVAL = timedelta(days=7)
_NEVER_FOUND = {UpstreamNotFoundError.code, UpstreamAuthError.code}
"""Forges ask for a password where a repository does not exist."""


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
        self._backoff = Backoff(CLEANUP_INTERVAL, _LONGEST_CLEANUP_PAUSE)
        self._not_before = 0.0

    async def retry(self) -> None:
        if self._clock() < self._not_before:
            return
        if all([await part() for part in self._parts]):
            self._backoff.reset()
        else:
            self._not_before = self._clock() + self._backoff.next().total_seconds()


@dataclass(kw_only=True, slots=True)
class Timetable:
    """Builds the table from the mirrors there are and from when things last happened."""

    settings: Callable[[], Settings]
    started_at: datetime
    catalog: Catalog
    checkouts: Checkouts
    work: BackgroundWork
    cleanup: Cleanup
    watches: list[Watch]

    async def table(self) -> list[Job]:
        settings, started = self.settings(), self.started_at
        sync, audit = settings.sync, settings.audit
        mirrors = await self.catalog.list_mirrors()
        names = {str(row.name) for row in mirrors}
        whole = [
            each
            for each in await self.catalog.list_audits()
            if names <= set(each.mirrors) and not each.left
        ]
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

        upkeep, scrub = settings.maintenance.interval, audit.content_interval
        return [
            *(
                Job(
                    f"sync/{row.name}",
                    sync.interval,
                    partial(self._sync, row.name),
                    sync.jitter,
                    row.attempted_at,
                    _MINUTE,
                )
                for row in mirrors
            ),
            await auditing("audit", audit.interval, None, whole),
            await auditing("audit.content", audit.content_interval, AuditLevel.CONTENT, content),
            Job(
                "maintenance",
                upkeep,
                self._maintain,
                since=early(upkeep),
                retry=_MAINTENANCE_RETRY,
            ),
            Job("templates.scrub", scrub, self.work.templates.scrub, since=early(scrub)),
            Job("checkouts.expire", _EXPIRE, self.checkouts.expire, since=started),
            Job("cleanup.retry", CLEANUP_INTERVAL, self.cleanup.retry, since=started),
            Job("templates.evict", _EVICT, self._evict, since=started),
            Job("watch.look", _MINUTE, self._look, since=started),
            Job(
                "memory.trim",
                _MINUTE,
                partial(anyio.to_thread.run_sync, trim_memory),
                since=started,
            ),
            Job("heals.retry", _MINUTE, self._retry_heals, since=started),
        ]

    async def _sync(self, name: MirrorName) -> None:
        """Sync. A mirror never synced and unknown upstream is probably a mistyped name: it is tried
        once a week, by imports, and when a person asks.
        """
        row = await self.catalog.find_mirror(name.key)
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
        for row in await self.catalog.list_mirrors():
            try:
                await self._finish(self.work.maintain(row.name))
            except MirrordError as error:
                failure = error
        if failure:
            raise failure

    async def _retry_heals(self) -> None:
        """Heal what no donor had the last time, in the mirrors that are due."""
        due = [
            str(name) for name in self.work.heals.due() if await self.catalog.find_mirror(name.key)
        ]
        if due and self.settings().audit.heal:
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
