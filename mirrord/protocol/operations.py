"""Operations: background work, its progress and its results."""

from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal

from .audits import Audit
from .codec import Answer, Problem
from .datasets import AmbiguousInstance, Dataset, DatasetChange, DatasetDiff
from .mirrors import RefChange, RefDiff, RefFault

QUEUED = "waiting for its turn"
"""The note of work that has not begun."""


class Progress(Answer):
    """Units of work, in the unit named; `total` is None where it is unknown."""

    done: int = 0
    total: int | None = None
    unit: str = ""
    note: str = ""


ProgressSink = Callable[[Progress], None]


class Synced(Answer):
    """The result of a sync. `changes` is cut at a thousand; `summary` counts all.

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


class DatasetImported(Answer):
    """`ambiguous` are the first ids that other datasets record differently; the count is of all."""

    dataset: Dataset
    change: DatasetChange
    ambiguous: list[AmbiguousInstance] = []
    ambiguous_count: int = 0


class BundleImported(Answer):
    """`pins_taken_over` are pins of datasets that could not be restored; the importer owns them."""

    mirror: str
    created: bool
    summary: str
    kept: list[str]
    pins: int = 0
    pins_taken_over: int = 0
    datasets: dict[str, int] = {}
    datasets_refused: list[str] = []


class Prewarmed(Answer):
    """Counts of commits. `left` had no room."""

    prepared: int
    failed: int
    left: int = 0


RESULTS: dict[str, type[Answer]] = {
    "mirror.add": Synced,
    "mirror.sync": Synced,
    "refs.restore": RefDiff,
    "bundle.import": BundleImported,
    "dataset.import": DatasetImported,
    "dataset.compare": DatasetDiff,
    "audit": Audit,
    "heal": Audit,
    "prewarm": Prewarmed,
}
"""The result of each kind of operation; a `mirror.maintain` has none."""


class Operation(Answer):
    """`result` is the message that RESULTS names for its `kind`."""

    id: str
    kind: str
    subject: str
    state: Literal["running", "done", "failed", "cancelled"]
    progress: Progress
    result: dict[str, Any] | None = None
    error: Problem | None = None
    started_at: datetime
    finished_at: datetime | None = None
