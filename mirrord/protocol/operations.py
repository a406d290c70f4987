"""Background work: how far it is, and how it ended."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from .audits import Audit
from .datasets import AmbiguousInstance, Dataset, DatasetChange
from .messages import Answer, Problem
from .mirrors import RefChange, RefDiff, RefFault

QUEUED = "waiting for its turn"
"""The note of work that has not begun."""


class Progress(Answer):
    """Units of work, in the unit named; `total` is None where nobody knows it."""

    done: int = 0
    total: int | None = None
    unit: str = ""
    note: str = ""


class Synced(Answer):
    """What a sync did. `changes` is cut at a thousand; `summary` counts all. `pinned` were refused before, and are not now."""

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


class DatasetImported(Answer):
    """`ambiguous` are the first of the ids that other datasets record differently."""

    dataset: Dataset
    change: DatasetChange
    ambiguous: list[AmbiguousInstance] = []
    ambiguous_count: int = 0


class BundleImported(Answer):
    """`pins_taken_over` are pins of datasets that could not be restored: they belong to the importer now."""

    mirror: str
    created: bool
    summary: str
    kept: list[str]
    pins: int = 0
    pins_taken_over: int = 0
    datasets: dict[str, int] = {}
    datasets_refused: list[str] = []


class Prewarmed(Answer):
    """Commits. `left` had no room."""

    prepared: int
    failed: int
    left: int = 0


RESULTS: dict[str, type[Answer]] = {
    "mirror.add": Synced,
    "mirror.sync": Synced,
    "refs.restore": RefDiff,
    "bundle.import": BundleImported,
    "dataset.import": DatasetImported,
    "audit": Audit,
    "heal": Audit,
    "prewarm": Prewarmed,
}
"""What an operation of each kind ends with; a `mirror.maintain` ends with nothing."""


class Operation(Answer):
    """`result` is of the message that RESULTS has for its `kind`."""

    id: str
    kind: str
    subject: str
    state: Literal["running", "done", "failed", "cancelled"]
    progress: Progress
    result: dict[str, Any] | None = None
    error: Problem | None = None
    started_at: datetime
    finished_at: datetime | None = None
