"""The daemon itself: its health, its state, its events."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from ..model import Backend
from .audits import AuditSummary
from .datasets import DatasetSummary
from .messages import Answer
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
    backend: Backend
    health: Health
    mirrors: list[Mirror]
    datasets: list[DatasetSummary]
    checkout_count: int
    checkout_max: int
    operations_running: int
    last_audit: AuditSummary | None = None
    jobs: list[JobState] = []
    operations_queued: int = 0


class Configuration(Answer):
    """The settings in force, secrets in URLs masked; `path` is the file they were read from, none where they are the defaults."""

    path: str | None
    settings: dict[str, Any]


class ReloadAnswer(Answer):
    """`applied` and `refused` are configuration keys."""

    applied: list[str]
    refused: list[str]


class Event(Answer):
    """`id` grows by one; it starts again when the daemon does, under another `boot`."""

    id: int
    boot: str
    at: datetime
    name: str
    fields: dict[str, Any]
