"""What the daemon does now: requests, users, workers, background work, queues, caches, disk."""

from datetime import datetime
from typing import Literal

from .codec import Answer
from .operations import Operation


class EndpointActivity(Answer):
    """The requests to one endpoint within the window; `failed` were answered with 5xx.

    Times are estimated within the buckets of the histogram that `/metrics` shows.
    """

    endpoint: str
    requests: int
    per_second: float
    failed: int = 0
    p50_s: float | None = None
    p99_s: float | None = None


class OwnerActivity(Answer):
    """What one user has now; without `uid` all whom the list has no room for.

    `requests` are not answered yet; `disk_bytes` are as `bytes_per_user` counts them;
    `running` and `waiting` are calls of workers.
    """

    uid: int | None
    checkouts: int = 0
    connections: int = 0
    requests: int = 0
    disk_bytes: int = 0
    running: int = 0
    waiting: int = 0


class WorkerActivity(Answer):
    """What one worker does; without `uid` in the background."""

    function: str
    uid: int | None
    since: datetime


class CacheActivity(Answer):
    """A cache, with what happened since the daemon's start. The bytes of the stores, and what of
    them was evicted, are in those of the templates. None is not measured yet.
    """

    name: Literal["templates", "stores"]
    size_bytes: int | None = None
    limit_bytes: int | None = None
    hits: int = 0
    misses: int = 0
    evictions: int = 0


class ActivityPoint(Answer):
    """One minute; without requests it has no times."""

    at: datetime
    per_second: float
    p50_s: float | None
    p99_s: float | None
    checkouts: int
    disk_free_bytes: int


class Activity(Answer):
    """One picture of the daemon. `requests` is the sum of `endpoints`, busiest first, over the last
    `window_s` seconds; `owners`, `calls` and `operations` are cut, counts are of all.

    `queues` has lengths, `refusals` counts by error code since the start, `history` is there
    on request: a point a minute of the last day. Who is no administrator sees the own checkouts,
    calls and operations, and the sums. New work is refused while less than the reserve is free.
    """

    at: datetime
    version: str
    pid: int
    started_at: datetime
    status: Literal["ok", "degraded"]
    reasons: list[str]
    window_s: float
    requests: EndpointActivity
    endpoints: list[EndpointActivity]
    connections: int
    checkouts: int
    checkouts_max: int
    owners: list[OwnerActivity]
    workers: int
    workers_busy: int
    calls: list[WorkerActivity]
    operations_running: int
    operations_queued: int
    operations: list[Operation]
    queues: dict[str, int]
    caches: list[CacheActivity]
    refusals: dict[str, int]
    disk_bytes: int
    disk_free_bytes: int
    disk_reserve_bytes: int
    history: list[ActivityPoint] = []
