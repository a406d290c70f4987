"""The daemon: health, status, usage, configuration, events."""

from datetime import datetime
from typing import Any, Literal

from .. import model
from .audits import AuditSummary
from .codec import Answer, Request
from .datasets import DatasetSummary
from .mirrors import Mirror


class Health(Answer):
    status: Literal["ok", "degraded"]
    reasons: list[str] = []
    version: str


class JobState(Answer):
    name: str
    next_at: datetime | None = None
    last_at: datetime | None = None
    last_error: str | None = None


class Status(Answer):
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


UsageKind = Literal[
    "mirrors", "datasets", "catalog", "templates", "environments", "checkouts", "snapshots",
    "layers", "warm-trees", "quarantine", "trash", "other",
]  # fmt: skip


class UsageRow(Answer):
    """What one thing takes on disk. `shared_bytes` of it are in other rows of its kind, too.

    `reclaimable_bytes` is what a gc would free. `checkouts` counts those that need it. Without
    `is_whole` it takes more: not all of it could be seen in time.
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
    """What all things of a kind take, each file counted once; `used` counts those in use."""

    kind: UsageKind
    count: int
    used: int
    size_bytes: int
    reclaimable_bytes: int = 0


class Usage(Answer):
    """What is on disk. `rows` are there in the verbose answer; `partial` counts what of it was not
    wholly seen. Who is no administrator sees the own checkouts alone.
    """

    size_bytes: int
    reclaimable_bytes: int
    disk_bytes: int
    disk_free_bytes: int
    totals: list[UsageTotal]
    rows: list[UsageRow] = []
    partial: int = 0


class CollectGarbage(Request):
    """With `dry_run` nothing is dropped."""

    dry_run: bool = False


class Dropped(Answer):
    """What a gc dropped, or would drop; `name` is the mirror of templates."""

    kind: UsageKind
    name: str
    count: int = 1
    size_bytes: int


class Garbage(Answer):
    """The answer of a gc. `freed_bytes` is the sum of what was `dropped`."""

    dry_run: bool
    freed_bytes: int
    dropped: list[Dropped]


class Configuration(Answer):
    """The settings in force, with secrets in URLs masked; without `path` they are the defaults."""

    path: str | None
    settings: dict[str, Any]


class ReloadAnswer(Answer):
    """`applied` and `refused` are configuration keys."""

    applied: list[str]
    refused: list[str]


class Event(Answer):
    """`id` grows by one; it restarts with the daemon, under another `boot`."""

    id: int
    boot: str
    at: datetime
    name: str
    fields: dict[str, Any]
