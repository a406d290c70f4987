"""What the daemon does now, as one picture: what `activity`, `mirrord top` and the page show.

Everything is read from memory; the disk is looked at in a thread, with each sample.
"""

import os
from collections import Counter, deque
from collections.abc import Callable, Mapping
from datetime import datetime

import anyio.to_thread

from . import __version__
from .checkouts.service import Checkouts
from .checkouts.stores.builder import StoreBuilder
from .checkouts.templates.store import Templates
from .config import Settings
from .git.turns import HOUSEKEEPING, Gate
from .git.workers import Workers
from .health import HealthMonitor
from .host.room import Room
from .host.trash import Trash
from .jobs.operations import Operations
from .model import utc_now
from .protocol import (
    Activity,
    ActivityPoint,
    CacheActivity,
    EndpointActivity,
    OwnerActivity,
    WorkerActivity,
)
from .traffic import SNAPSHOT_S, Answered, Traffic, quantile, summed

_OWNERS = 20
_CALLS = 32
_OPERATIONS = 20
_POINTS = 24 * 60
_SAMPLES = round(60 / SNAPSHOT_S)  # of a point


class ActivityMonitor:
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        started_at: datetime,
        room: Room,
        traffic: Traffic,
        health: HealthMonitor,
        operations: Operations,
        gate: Gate,
        workers: Workers,
        checkouts: Checkouts,
        trash: Trash,
        templates: Templates,
        stores: StoreBuilder,
    ) -> None:
        self._settings = settings
        self._started_at = started_at
        self._room = room
        self._traffic = traffic
        self._health = health
        self._operations = operations
        self._gate = gate
        self._workers = workers
        self._checkouts = checkouts
        self._trash = trash
        self._templates = templates
        self._stores = stores
        self._space = room.measure()
        self._samples = 0
        self._history: deque[ActivityPoint] = deque(maxlen=_POINTS)

    async def sample(self) -> None:
        """Look at the disk, and remember the counts; every twelfth time as a point of the day."""
        self._space = await anyio.to_thread.run_sync(self._room.measure)
        self._traffic.snapshot()
        self._samples += 1
        if self._samples % _SAMPLES == 0:
            seconds, answered = self._traffic.latest()
            all_of_them = _endpoint("all", summed(answered.values()), seconds)
            self._history.append(
                ActivityPoint(
                    at=utc_now(), per_second=all_of_them.per_second, p50_s=all_of_them.p50_s,
                    p99_s=all_of_them.p99_s, checkouts=self._checkouts.count,
                    disk_free_bytes=self._space.free_bytes,
                )
            )  # fmt: skip

    def report(self, uid: int | None = None, *, history: bool = False) -> Activity:
        """The picture as an administrator sees it, or with `uid` as that user does."""
        seconds, answered = self._traffic.latest()
        endpoints = [_endpoint(name, each, seconds) for name, each in answered.items()]
        endpoints.sort(key=lambda each: (-each.requests, each.endpoint))
        health = self._health.report().health
        connections, calls = self._traffic.connections(), self._workers.calls()
        return Activity(
            at=utc_now(), version=__version__, pid=os.getpid(), started_at=self._started_at,
            status=health.status, reasons=health.reasons,
            window_s=round(seconds, 3),
            requests=_endpoint("all", summed(answered.values()), seconds),
            endpoints=endpoints,
            connections=sum(connections.values()),
            checkouts=self._checkouts.count,
            checkouts_max=self._settings().checkouts.max,
            owners=self._owners(connections, uid),
            workers=self._workers.count, workers_busy=len(calls),
            calls=[
                WorkerActivity(function=each.function, uid=_shown(each.uid), since=each.since)
                for each in calls
                if uid in {None, each.uid}
            ][:_CALLS],
            operations_running=self._operations.running_count,
            operations_queued=self._operations.queued_count,
            operations=self._operations.running(owner_uid=uid)[:_OPERATIONS],
            queues={
                "operations": self._operations.queued_count,
                "removals": self._trash.count,
                "requests": self._gate.waiting,
                "workers": self._workers.waiting().total(),
            },
            caches=[self._templates.activity(), self._stores_activity()],
            refusals=dict(self._traffic.refusals.most_common()),
            disk_bytes=self._space.size_bytes, disk_free_bytes=self._space.free_bytes,
            disk_reserve_bytes=self._space.reserve_bytes,
            history=list(self._history) if history else [],
        )  # fmt: skip

    def _stores_activity(self) -> CacheActivity:
        return CacheActivity(name="stores", hits=self._stores.hits, misses=self._stores.misses)

    def _owners(self, connections: Mapping[int, int], only: int | None) -> list[OwnerActivity]:
        """By checkouts, then connections; what is over the bound is one row without a uid."""
        checkouts = self._checkouts.by_owner()
        running = Counter(each.uid for each in self._workers.calls())
        waiting = self._workers.waiting()
        columns: list[Mapping[int, int]] = [checkouts, connections, self._gate.unanswered()]
        columns.append(self._checkouts.quotas.used)
        columns += [{uid: n for uid, n in each.items() if uid is not None and uid != HOUSEKEEPING}
                    for each in (running, waiting)]  # fmt: skip
        uids = {uid for column in columns for uid, count in column.items() if count}
        rows = [(uid, [column.get(uid, 0) for column in columns]) for uid in uids]
        if only is not None:
            rows = [row for row in rows if row[0] == only]
        rows.sort(key=lambda row: ([-count for count in row[1]], row[0]))
        shown = [_owner(uid, counts) for uid, counts in rows[:_OWNERS]]
        if rest := [counts for _, counts in rows[_OWNERS:]]:
            shown.append(_owner(None, [sum(column) for column in zip(*rest, strict=True)]))
        return shown


def _owner(uid: int | None, counts: list[int]) -> OwnerActivity:
    names = ("checkouts", "connections", "requests", "disk_bytes", "running", "waiting")
    return OwnerActivity(uid=uid, **dict(zip(names, counts, strict=True)))


def _endpoint(name: str, answered: Answered, seconds: float) -> EndpointActivity:
    return EndpointActivity(
        endpoint=name, requests=answered.total, failed=answered.failed,
        per_second=round(answered.total / max(seconds, 1e-3), 3),
        p50_s=quantile(answered.buckets, 0.5), p99_s=quantile(answered.buckets, 0.99),
    )  # fmt: skip


def _shown(uid: int | None) -> int | None:
    return None if uid == HOUSEKEEPING else uid
