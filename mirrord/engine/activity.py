"""The daemon's request counts, its health, and its activity as one report.

`activity`, `mirrord status --watch` and the page show the report, `health` and `status` the health,
metrics the counts. All of it is in memory; the disk is measured with each sample. Belongs to the
event loop's thread, so counting a request takes no lock.
"""

import os
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import anyio.to_thread

from .. import __version__, protocol
from ..checkouts.service import Checkouts
from ..config import Settings
from ..errors import DiskFailedError
from ..host.peers import Access
from ..host.room import Room
from ..host.trash import Trash
from ..jobs.operations import Operations
from ..model import Place, utc_now
from ..templates.builder import StoreBuilder
from ..templates.service import Templates
from ..workers.gate import Gate
from ..workers.pool import Workers
from ..workers.turns import HOUSEKEEPING

# a warm checkout takes 1 to 2 ms, a first one up to some seconds, what packs a mirror minutes
BUCKETS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 120.0),
)
# rates and percentiles are of the last minute, which moves on every five seconds
SNAPSHOT_S = 5.0
WINDOW_S = 60.0


@dataclass(slots=True)
class Answered:
    """Counts of answers by bucket of their time (the last is unbounded), and of 5xx answers."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    failed: int = 0

    @property
    def total(self) -> int:
        return sum(self.buckets)


class Traffic:
    """Counts of requests: `answers` by endpoint and status, `refusals` for now by error code.

    `connections` returns the open ones by user; the server sets it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.answers: Counter[tuple[str, int]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.connections: Callable[[], Mapping[int, int]] = dict
        self.sums_s: defaultdict[str, float] = defaultdict(float)
        self._times: Counter[tuple[str, int]] = Counter()  # by endpoint and bucket
        # twelve intervals have thirteen ends
        keep = round(WINDOW_S / SNAPSHOT_S) + 1
        self._snapshots = deque([(clock(), self._times.copy(), self.answers.copy())], maxlen=keep)

    def observe(self, endpoint: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self._times[endpoint, bisect_left(BUCKETS_S, seconds)] += 1
        self.sums_s[endpoint] += seconds
        self.answers[endpoint, status] += 1

    def snapshot(self) -> None:
        """Store the counts. Must be called every `SNAPSHOT_S`."""
        self._snapshots.append((self._clock(), self._times.copy(), self.answers.copy()))

    def latest(self) -> tuple[float, dict[str, Answered]]:
        """Return the length of the window, up to a minute, and its answers by endpoint."""
        begun, times, answers = self._snapshots[0]
        return self._clock() - begun, _by_endpoint(self._times - times, self.answers - answers)

    def since_start(self) -> dict[str, Answered]:
        return _by_endpoint(self._times, self.answers)


def _by_endpoint(
    times: Counter[tuple[str, int]], answers: Counter[tuple[str, int]]
) -> dict[str, Answered]:
    answered: defaultdict[str, Answered] = defaultdict(Answered)
    for (endpoint, bucket), count in times.items():
        answered[endpoint].buckets[bucket] = count
    for (endpoint, status), count in answers.items():
        answered[endpoint].failed += count if status >= 500 else 0
    return answered


def summed(answered: Iterable[Answered]) -> Answered:
    """Return the sum."""
    terms = [Answered(), *answered]
    columns = zip(*(term.buckets for term in terms), strict=True)
    return Answered([*map(sum, columns)], sum(term.failed for term in terms))


def quantile(buckets: Sequence[int], share: float) -> float | None:
    """Return the time within which this share was answered, as Prometheus' histogram_quantile.

    Interpolates linearly within a bucket. For longer times it is the last bound.
    """
    rank, below = share * sum(buckets), 0
    for number, count in enumerate(buckets[:-1]):
        if count and below + count >= rank:
            low = BUCKETS_S[number - 1] if number else 0.0
            return low + (BUCKETS_S[number] - low) * (rank - below) / count
        below += count
    return BUCKETS_S[-1] if buckets[-1] else None


class HealthReport(NamedTuple):
    """Health, with the JSON of the answer."""

    health: protocol.Health
    body: bytes
    is_degraded: bool


class HealthMonitor:
    """Collects warnings, and reasons why the daemon is degraded.

    Warnings are cached for 1 s: they look up users, which can take long with LDAP. What degrades
    the daemon is asked for each report: a client that was just refused sees the reason at once.
    """

    def __init__(
        self,
        state_dir: Path,
        access: Access,
        room: Room,
        place: Place,
        *,
        is_open: Callable[[], bool],
    ) -> None:
        self._place = place
        self._state_dir = state_dir
        self._room = room
        self._is_open = is_open
        self._notes: dict[str, str] = {}
        self._warn: list[Callable[[], Sequence[str]]] = [lambda: access.warnings]
        self._degrade: list[Callable[[], Sequence[str]]] = []
        self._report: HealthReport | None = None
        self._warnings: list[str] | None = None
        self._warned_at = 0.0

    def note(self, key: str, reason: str) -> None:
        """Degrade the daemon until its next start. A later reason replaces one of the same key."""
        self._notes[key] = reason
        self.refresh()

    def refresh(self) -> None:
        """Drop the cached warnings."""
        self._warnings = None

    def warn_by(self, source: Callable[[], Sequence[str]]) -> None:
        """Add the warnings of `source` to each report."""
        self._warn.append(source)

    def degrade_by(self, source: Callable[[], Sequence[str]]) -> None:
        """Degrade the daemon while `source` returns reasons."""
        self._degrade.append(source)

    def report(self) -> HealthReport:
        reasons = [] if self._is_open() else ["the daemon is still opening its state directory"]
        reasons += [*self._disk_reasons(), *self._notes.values()]
        reasons += [text for source in self._degrade for text in source()]
        lines = reasons + self._cached_warnings()
        # encoded once: load balancers ask often
        if self._report and self._report.health.reasons == lines:
            return self._report
        status: Literal["ok", "degraded"] = "degraded" if reasons else "ok"
        health = protocol.Health(
            status=status, reasons=lines, version=__version__, place=self._place
        )
        self._report = HealthReport(health, protocol.to_bytes(health), bool(reasons))
        return self._report

    def _cached_warnings(self) -> list[str]:
        now = time.monotonic()
        if self._warnings is None or now - self._warned_at >= 1:
            self._warnings = [f"warning: {text}" for source in self._warn for text in source()]
            self._warned_at = now
        return self._warnings

    def _disk_reasons(self) -> list[str]:
        try:
            self._room.must_be_here()
            os.statvfs(self._state_dir)
        except DiskFailedError as error:
            return [error.message]
        except OSError as error:
            return [f"cannot read the state directory {self._state_dir}: {error.strerror}"]
        reasons = []
        if self._room.fault:
            reasons.append(f"the file system of {self._state_dir} {self._room.fault}")
        if shortage := self._room.measure().shortage:
            fact = "is nearly full, new work is refused"
            reasons.append(f"the disk of {self._state_dir} {fact}: {shortage}")
        return reasons


# A snapshot is asked for every few seconds, by the page, `top` and metrics: its lists are bounded,
# the rest is a sum.
_OWNERS = 20
_CALLS = 32
_OPERATIONS = 20
# a day, a point each minute, in memory; it starts anew with the daemon
_POINTS = 24 * 60
_SAMPLES_PER_POINT = round(60 / SNAPSHOT_S)


@dataclass(kw_only=True, eq=False)
class ActivityMonitor:
    """Makes the report of the daemon's activity. Belongs to the event loop's thread."""

    settings: Callable[[], Settings]
    started_at: datetime
    room: Room
    traffic: Traffic
    health: HealthMonitor
    operations: Operations
    gate: Gate
    workers: Workers
    checkouts: Checkouts
    trash: Trash
    templates: Templates
    stores: StoreBuilder
    _samples: int = 0
    _history: deque[protocol.ActivityPoint] = field(default_factory=lambda: deque(maxlen=_POINTS))

    def __post_init__(self) -> None:
        self._space = self.room.measure()

    async def sample(self) -> None:
        """Measure the disk and store the counts; once a minute add a point to the history."""
        self._space = await anyio.to_thread.run_sync(self.room.measure)
        self.traffic.snapshot()
        self._samples += 1
        if self._samples % _SAMPLES_PER_POINT == 0:
            seconds, answered = self.traffic.latest()
            total = _endpoint("all", summed(answered.values()), seconds)
            self._history.append(
                protocol.ActivityPoint(
                    at=utc_now(), per_second=total.per_second, p50_s=total.p50_s,
                    p99_s=total.p99_s, checkouts=len(self.checkouts.leases),
                    disk_free_bytes=self._space.free_bytes,
                )
            )  # fmt: skip

    def report(self, uid: int | None = None, *, history: bool = False) -> protocol.Activity:
        """Return the report as an administrator sees it, or as the user `uid` does."""
        seconds, answered = self.traffic.latest()
        endpoints = [_endpoint(name, counts, seconds) for name, counts in answered.items()]
        endpoints.sort(key=lambda row: (-row.requests, row.endpoint))
        health = self.health.report().health
        connections, calls = self.traffic.connections(), self.workers.calls()
        stores = protocol.CacheActivity(
            name="stores", hits=self.stores.hits, misses=self.stores.misses
        )
        return protocol.Activity(
            at=utc_now(), version=__version__, pid=os.getpid(), started_at=self.started_at,
            status=health.status, reasons=health.reasons,
            window_s=round(seconds, 3),
            requests=_endpoint("all", summed(answered.values()), seconds),
            endpoints=endpoints,
            connections=sum(connections.values()),
            checkouts=len(self.checkouts.leases),
            checkouts_max=self.settings().checkouts.max,
            owners=self._owners(connections, uid),
            workers=self.workers.count, workers_busy=len(calls),
            calls=[
                protocol.WorkerActivity(
                    function=call.function, since=call.since,
                    uid=None if call.uid == HOUSEKEEPING else call.uid,
                )
                for call in calls
                if uid in {None, call.uid}
            ][:_CALLS],
            operations_running=self.operations.running_count,
            operations_queued=self.operations.queued_count,
            operations=self.operations.running(owner_uid=uid)[:_OPERATIONS],
            queues={
                "operations": self.operations.queued_count,
                "removals": self.trash.count,
                "requests": self.gate.waiting,
                "workers": self.workers.waiting().total(),
            },
            caches=[self.templates.activity(), stores],
            refusals=dict(self.traffic.refusals.most_common()),
            disk_bytes=self._space.size_bytes, disk_free_bytes=self._space.free_bytes,
            disk_reserve_bytes=self._space.reserve_bytes,
            history=list(self._history) if history else [],
        )  # fmt: skip

    def _owners(
        self, connections: Mapping[int, int], only: int | None
    ) -> list[protocol.OwnerActivity]:
        """List users by checkouts, then connections. The last row sums up users over the limit."""
        columns: dict[str, Mapping[Any, int]] = {
            "checkouts": Counter(lease.terms.owner_uid for lease in self.checkouts.leases),
            "connections": connections,
            "requests": self.gate.unanswered(),
            "disk_bytes": self.checkouts.quotas.used,
            "running": Counter(call.uid for call in self.workers.calls()),
            "waiting": self.workers.waiting(),
        }
        uids = {uid for column in columns.values() for uid, count in column.items() if count}
        uids -= {None, HOUSEKEEPING}
        rows = [(uid, [column.get(uid, 0) for column in columns.values()]) for uid in uids]
        if only is not None:
            rows = [row for row in rows if row[0] == only]
        rows.sort(key=lambda row: ([-count for count in row[1]], row[0]))
        listed, others = rows[:_OWNERS], [counts for _, counts in rows[_OWNERS:]]
        if others:
            listed.append((None, [sum(column) for column in zip(*others, strict=True)]))
        return [
            protocol.OwnerActivity(uid=uid, **dict(zip(columns, counts, strict=True)))
            for uid, counts in listed
        ]


def _endpoint(name: str, answered: Answered, seconds: float) -> protocol.EndpointActivity:
    return protocol.EndpointActivity(
        endpoint=name, requests=answered.total, failed=answered.failed,
        # a window that has just begun has no length
        per_second=round(answered.total / max(seconds, 1e-3), 3),
        p50_s=quantile(answered.buckets, 0.5), p99_s=quantile(answered.buckets, 0.99),
    )  # fmt: skip
