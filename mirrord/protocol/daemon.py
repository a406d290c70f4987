"""The daemon: operations, health, status, usage, configuration, events, activity."""

from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal

from .. import model
from .codec import Answer, Problem, Request
from .environments import BuildReport
from .mirrors import (
    AmbiguousInstance,
    Audit,
    AuditSummary,
    Dataset,
    DatasetChange,
    DatasetDiff,
    DatasetSummary,
    Mirror,
    Pin,
    RefChange,
    RefDiff,
    RefFault,
)

# the note of an operation that has not started
QUEUED = "waiting for its turn"


class Progress(Answer):
    """Progress in units of work. `total` is None if it is unknown."""

    done: int = 0
    total: int | None = None
    unit: str = ""
    note: str = ""


ProgressSink = Callable[[Progress], None]


class Synced(Answer):
    """The result of a sync. `changes` has the first thousand, `summary` counts all.

    `pinned` counts commits that earlier imports could not pin.
    """

    mirror: str
    changed: bool
    summary: str
    ref_count: int
    kept_count: int
    default_branch: str | None = None
    changes: list[RefChange] = []
    faults: list[RefFault] = []
    redirected_to: str | None = None
    pinned: int = 0


class MissingSubmodule(Answer):
    """A submodule that could not be had, and in how many base commits."""

    path: str
    reason: str
    commits: int


class DatasetNeeds(Answer):
    """What the base commits of an import need from elsewhere.

    `missing` has the first submodules that could not be had, `missing_count` counts all.
    `lfs_pointers` in `lfs_commits` commits stand for files that are not in the repository, of which
    `lfs_missing` are not had; `lfs_reasons` say why.
    """

    submodules: int = 0
    missing: list[MissingSubmodule] = []
    missing_count: int = 0
    lfs_pointers: int = 0
    lfs_commits: int = 0
    lfs_missing: int = 0
    lfs_reasons: list[str] = []


class DatasetImported(Answer):
    """The result of an import.

    `ambiguous` has the first ids that other datasets record differently, `ambiguous_count` counts
    all. `needs` is about all base commits.
    """

    dataset: Dataset
    change: DatasetChange
    needs: DatasetNeeds
    ambiguous: list[AmbiguousInstance] = []
    ambiguous_count: int = 0


class BundleImported(Answer):
    """The result of a bundle's import.

    `pins_taken_over` counts pins of datasets that could not be restored; the importer owns them.
    `submodules` are the mirrors that came with it, `needs` is about the base commits of `datasets`.
    """

    mirror: str
    created: bool
    summary: str
    kept: list[str]
    pins: int = 0
    pins_taken_over: int = 0
    datasets: dict[str, int] = {}
    datasets_refused: list[str] = []
    submodules: list[str] = []
    lfs_objects: int = 0
    needs: DatasetNeeds | None = None


class NotRestored(Answer):
    """A mirror of the store that could not be restored. The same request retries it."""

    mirror: str
    error: Problem


class Restored(Answer):
    """The result of a restore. `audit`, at level `closure`, is of the restored mirrors."""

    mirrors: list[BundleImported]
    failed: list[NotRestored] = []
    audit: Audit | None = None


class Prewarmed(Answer):
    """Counts of commits. For `left` there was no room."""

    prepared: int
    failed: int
    left: int = 0


class ReloadAnswer(Answer):
    """The configuration keys that a reload `applied`, and those that need a restart (`refused`)."""

    applied: list[str]
    refused: list[str]


# The result of each kind of operation. `mirror.maintain` has none.
RESULTS: dict[str, type[Answer]] = {
    "mirror.add": Synced,
    "mirror.sync": Synced,
    "mirror.set-url": Synced,
    "pin.add": Pin,
    "config.reload": ReloadAnswer,
    "refs.restore": RefDiff,
    "bundle.import": BundleImported,
    "restore": Restored,
    "dataset.import": DatasetImported,
    "dataset.compare": DatasetDiff,
    "audit": Audit,
    "heal": Audit,
    "prewarm": Prewarmed,
    "dataset.prepare": Prewarmed,
    "environment.build": BuildReport,
    "environment.import": BuildReport,
}


class Operation(Answer):
    """Background work. `result` is the message that RESULTS has for its `kind`."""

    id: str
    kind: str
    subject: str
    state: Literal["running", "done", "failed", "cancelled"]
    progress: Progress
    result: dict[str, Any] | None = None
    error: Problem | None = None
    started_at: datetime
    finished_at: datetime | None = None


class Health(Answer):
    """Whether the daemon can serve, and the reasons if it is degraded."""

    status: Literal["ok", "degraded"]
    reasons: list[str] = []
    version: str
    place: model.Place | None = None  # of a daemon before an upgrade


class JobState(Answer):
    """Scheduled work: when it ran and runs next, and the error of the last run."""

    name: str
    next_at: datetime | None = None
    last_at: datetime | None = None
    last_error: str | None = None


class FleetNode(Answer):
    """A daemon of a fleet. `holder` is its name in claims, `fault` why it cannot use the store."""

    id: str
    name: str
    version: str
    age_s: float
    mirrors: int
    behind: int
    holder: str
    fault: str | None = None


class FleetClaim(Answer):
    """Work claimed by one daemon, for another `left_s` seconds unless it renews the claim."""

    work: str
    holder: str
    epoch: int
    left_s: float


class FleetStatus(Answer):
    """A fleet, as this node sees it. `generations` counts published mirrors.

    `behind` are mirrors that are not up to date on this node. `nodes` are the daemons seen within a
    month, the most recent first.
    """

    node: str
    store: str
    generations: int
    behind: list[str]
    nodes: list[FleetNode]
    claims: list[FleetClaim]
    fault: str | None = None


class Status(Answer):
    """The state of the daemon at a glance."""

    version: str
    pid: int
    uid: int
    started_at: datetime
    state_dir: str
    config_path: str | None
    backend: model.Backend
    health: Health
    mirrors: list[Mirror]
    datasets: list[DatasetSummary]
    checkout_count: int
    checkout_max: int
    operations_running: int
    last_audit: AuditSummary | None = None
    jobs: list[JobState] = []
    operations_queued: int = 0
    fleet: FleetStatus | None = None


UsageKind = Literal[
    "mirrors", "datasets", "catalog", "templates", "environments", "checkouts", "snapshots",
    "layers", "warm-trees", "quarantine", "trash", "other",
]  # fmt: skip


class UsageRow(Answer):
    """Disk usage of one thing. `shared_bytes` are also in other rows of its kind.

    A gc would free `reclaimable_bytes`. `checkouts` counts the ones that need it. Without
    `is_whole` it is larger: not all of it could be measured in time.
    """

    kind: UsageKind
    name: str
    size_bytes: int
    shared_bytes: int = 0
    reclaimable_bytes: int = 0
    checkouts: int = 0
    used_at: datetime | None = None
    is_whole: bool = True


class UsageTotal(Answer):
    """Disk usage of all things of a kind, each file counted once. `used` counts those in use."""

    kind: UsageKind
    count: int
    used: int
    size_bytes: int
    reclaimable_bytes: int = 0


class Usage(Answer):
    """Disk usage. `rows` are in the verbose answer; `partial` counts the incomplete ones.

    A user who is not an administrator sees only their own checkouts.
    """

    size_bytes: int
    reclaimable_bytes: int
    disk_bytes: int
    disk_free_bytes: int
    totals: list[UsageTotal]
    rows: list[UsageRow] = []
    partial: int = 0


class CollectGarbage(Request):
    """Starts a gc. With `dry_run` nothing is dropped."""

    dry_run: bool = False


class Dropped(Answer):
    """A thing that a gc dropped, or would drop. For templates `name` is their mirror."""

    kind: UsageKind
    name: str
    count: int = 1
    size_bytes: int


class Garbage(Answer):
    """The answer of a gc. `freed_bytes` is the sum over `dropped`."""

    dry_run: bool
    freed_bytes: int
    dropped: list[Dropped]


class Configuration(Answer):
    """The settings in force, with secrets in URLs masked. Without `path` they are the defaults."""

    path: str | None
    settings: dict[str, Any]


class Event(Answer):
    """An event. `id` grows by one, and starts again with the daemon, under another `boot`."""

    id: int
    boot: str
    at: datetime
    name: str
    fields: dict[str, Any]


class EndpointActivity(Answer):
    """Requests to one endpoint within the window. `failed` were answered with 5xx.

    Times are interpolated in the buckets of the histogram of `/metrics`.
    """

    endpoint: str
    requests: int
    per_second: float
    failed: int = 0
    p50_s: float | None = None
    p99_s: float | None = None


class OwnerActivity(Answer):
    """The activity of one user. Without `uid`: of all users that do not fit into the list.

    `requests` counts unanswered ones. `disk_bytes` is the amount that `bytes_per_user` limits.
    `running` and `waiting` count calls of workers.
    """

    uid: int | None
    checkouts: int = 0
    connections: int = 0
    requests: int = 0
    disk_bytes: int = 0
    running: int = 0
    waiting: int = 0


class WorkerActivity(Answer):
    """A call of a worker. Background calls have no `uid`."""

    function: str
    uid: int | None
    since: datetime


class CacheActivity(Answer):
    """A cache, with counts since the daemon's start.

    Bytes and evictions of the stores are included in those of the templates. `size_bytes` is None
    until it is measured.
    """

    name: Literal["templates", "stores"]
    size_bytes: int | None = None
    limit_bytes: int | None = None
    hits: int = 0
    misses: int = 0
    evictions: int = 0


class ActivityPoint(Answer):
    """One minute. Without requests it has no times."""

    at: datetime
    per_second: float
    p50_s: float | None
    p99_s: float | None
    checkouts: int
    disk_free_bytes: int


class Activity(Answer):
    """The activity of the daemon.

    `requests` is the sum of `endpoints`, busiest first, over the last `window_s` seconds. `owners`,
    `calls` and `operations` have the first entries, counts are of all. `queues` has lengths,
    `refusals` counts by error code since the start. `history`, if asked for, is a point per minute
    of the last day. A user who is not an administrator sees their own checkouts, calls and
    operations, and all sums. New work is refused while less disk than the reserve is free.
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
