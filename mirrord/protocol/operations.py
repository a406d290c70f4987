"""Background work: how far it is, and how it ended."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from .messages import Answer, Problem


class Progress(Answer):
    """Units of work, in the unit named; `total` is None where nobody knows it."""

    done: int = 0
    total: int | None = None
    unit: str = ""
    note: str = ""


class Operation(Answer):
    id: str
    kind: str
    subject: str
    state: Literal["running", "done", "failed", "cancelled"]
    progress: Progress
    result: dict[str, Any] | None = None
    error: Problem | None = None
    started_at: datetime
    finished_at: datetime | None = None
