"""Which jobs there are, how often they run, and what each does: the table that the schedule keeps to.

Intervals come from the settings in force each time the table is read; an interval of nothing switches its job off.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from functools import partial

import anyio.to_thread

from .catalog import Catalog, MirrorRow
from .checkouts.service import Checkouts
from .checkouts.templates.store import Templates
from .config import Settings
from .errors import MirrordError, UpstreamAuthError, UpstreamNotFoundError, from_problem
from .heal import Heals
from .host.processes import trim_memory
from .jobs.operations import Operations
from .jobs.schedule import Job
from .jobs.watch import Watch
from .model import AuditLevel, MirrorName, utc_now
from .protocol import Audit, Operation, StartAudit
from .units import Backoff
from .work import BackgroundWork, Prewarm

EXPIRE_INTERVAL = timedelta(seconds=2)
CLEANUP_INTERVAL = timedelta(seconds=5)
_LONGEST_CLEANUP_PAUSE = timedelta(minutes=3)
EVICT_INTERVAL = timedelta(minutes=5)
LOOK_INTERVAL = timedelta(minutes=1)
TRIM_INTERVAL = timedelta(minutes=1)
RETRY_INTERVAL = timedelta(minutes=1)
SYNC_RETRY = timedelta(minutes=1)
MAINTENANCE_RETRY = timedelta(minutes=10)


NEVER_FOUND_INTERVAL = timedelta(days=7)
_NEVER_FOUND = {
    UpstreamNotFoundError.code,
    UpstreamAuthError.code,
}  # forges ask for a password where there is nothing


def _is_given_up(row: MirrorRow, now: datetime) -> bool:
    """Whether a mirror was never synced, and upstream said that there is nothing: a name that was mistyped, most likely. It is
    asked for again once a week, by an import, and whenever a person does.
    """
    if row.synced_at is not None or row.error is None or row.attempted_at is None:
        return False
    return row.error.get("code") in _NEVER_FOUND and now < row.attempted_at + NEVER_FOUND_INTERVAL


class Cleanup:
    """Retries what failed operations left, less and less often while that is in vain, as on a full disk.

    `parts` are called in order; each answers whether nothing is left. A start does the same for all.
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


class Timetable:
    """Builds the table from the mirrors there are and from when things last happened."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        started_at: datetime,
        catalog: Catalog,
        templates: Templates,
        checkouts: Checkouts,
        operations: Operations,
        work: BackgroundWork,
        heals: Heals,
        prewarm: Prewarm,
        cleanup: Cleanup,
        find_unfinished: Callable[[AuditLevel], Awaitable[datetime | None]],
        watches: list[Watch],
    ) -> None:
        self._settings = settings
        self._started_at = started_at
        self._catalog = catalog
        self._templates = templates
        self._checkouts = checkouts
        self._operations = operations
        self._work = work
        self._heals = heals
        self._prewarm = prewarm
        self._cleanup = cleanup
        self._find_unfinished = find_unfinished
        self._watches = watches

    async def table(self) -> list[Job]:
        syncs = [self._sync(row) for row in await self._catalog.list_mirrors()]
        return [
            *syncs,
            *await self._audits(),
            self._maintenance(),
            self._scrubbing(),
            *self._housekeeping(),
        ]

    def _sync(self, row: MirrorRow) -> Job:
        sync = self._settings().sync
        return Job(
            f"sync/{row.name}",
            sync.interval,
            partial(self._run_sync, row.name),
            sync.jitter,
            row.attempted_at,
            SYNC_RETRY,
        )

    async def _audits(self) -> list[Job]:
        """Counted from the last whole audit of everything, of that level, whoever asked for it; the first one an interval after
        the start. One that was interrupted goes on soon.
        """
        settings = self._settings().audit
        names = {str(row.name) for row in await self._catalog.list_mirrors()}
        past = [
            audit
            for audit in await self._catalog.list_audits()
            if names <= set(audit.mirrors) and not audit.left
        ]
        content = (audit for audit in past if audit.level is AuditLevel.CONTENT)
        last, last_content = next(iter(past), None), next(content, None)
        return [
            await self._auditing("audit", settings.interval, settings.level, last),
            await self._auditing(
                "audit.content", settings.content_interval, AuditLevel.CONTENT, last_content
            ),
        ]

    async def _auditing(
        self, name: str, interval: timedelta, level: AuditLevel, last: Audit | None
    ) -> Job:
        begun = await self._find_unfinished(level)
        since = last.finished_at if last else self._started_at
        run = self._audit if name == "audit" else partial(self._audit, level)
        return Job(name, interval, run, since=begun - interval if begun else since)

    def _maintenance(self) -> Job:
        interval = self._settings().maintenance.interval
        return Job(
            "maintenance",
            interval,
            self._maintain_all,
            since=self._early(interval),
            retry=MAINTENANCE_RETRY,
        )

    def _scrubbing(self) -> Job:
        """Templates are proven by content as often as mirrors are."""
        interval = self._settings().audit.content_interval
        return Job("templates.scrub", interval, self._scrub, since=self._early(interval))

    def _early(self, interval: timedelta) -> datetime:
        """First an eighth of the interval after the start, so that a daemon that is restarted every day does it too."""
        return self._started_at - interval * 7 / 8

    def _housekeeping(self) -> list[Job]:
        return [
            Job("checkouts.expire", EXPIRE_INTERVAL, self._expire, since=self._started_at),
            Job("cleanup.retry", CLEANUP_INTERVAL, self._cleanup.retry, since=self._started_at),
            Job("templates.evict", EVICT_INTERVAL, self._evict, since=self._started_at),
            Job("watch.look", LOOK_INTERVAL, self._look, since=self._started_at),
            Job("memory.trim", TRIM_INTERVAL, self._trim, since=self._started_at),
            Job("heals.retry", RETRY_INTERVAL, self._retry_heals, since=self._started_at),
        ]

    # -- what they do -------------------------------------------------------------------------------------------------

    async def _run_sync(self, name: MirrorName) -> None:
        row = await self._catalog.find_mirror(name.key)
        if row is None or not _is_given_up(row, utc_now()):
            await self._finish(self._work.sync(name))

    async def _maintain_all(self) -> None:
        """One mirror after the other; a failure is told by its operation, and the last one here."""
        failure: MirrordError | None = None
        for row in await self._catalog.list_mirrors():
            try:
                await self._finish(self._work.maintain(row.name))
            except MirrordError as error:
                failure = error
        if failure:
            raise failure

    async def _audit(self, level: AuditLevel | None = None) -> None:
        await self._finish(await self._work.audit(StartAudit(level=level), resume=True))

    async def _retry_heals(self) -> None:
        """What nobody had the last time, for the mirrors whose time has come."""
        due = [str(name) for name in self._heals.due() if await self._catalog.find_mirror(name.key)]
        if due and self._settings().audit.heal:
            request = StartAudit(mirrors=due, level=AuditLevel.CONTENT, heal=True)
            ended = await self._finish(await self._work.audit(request, kind="heal"))
            self._heals.settle(Audit.from_json(ended.result))

    async def _expire(self) -> None:
        await self._checkouts.expire()

    async def _evict(self) -> None:
        await self._templates.evict()
        await self._prewarm.resume()

    async def _scrub(self) -> None:
        await self._templates.scrub()

    async def _look(self) -> None:
        for watch in self._watches:
            watch.touch()

    async def _trim(self) -> None:
        await anyio.to_thread.run_sync(trim_memory)

    async def _finish(self, operation: Operation) -> Operation:
        """Wait for an operation; raises what it failed with."""
        ended = await self._operations.wait(operation.id)
        if ended.error is not None:
            raise from_problem(ended.error.to_json())
        return ended
