"""Datasets, their instances, and what an import made of them."""

from __future__ import annotations

from datetime import datetime

from ..model import CommitRole, Direction
from .messages import Answer


class RowFault(Answer):
    """A row of a dataset file that could not be used. `line` counts rows from 1."""

    file: str
    line: int
    instance: str | None = None
    reason: str


class UnpinnedCommit(Answer):
    """A recorded commit that could not be pinned, and why."""

    mirror: str
    commit: str
    instances: list[str]
    reason: str


class Dataset(Answer):
    """`rules` counts how often each rule of a normaliser fired.

    `unpinned` and `faults` are the first of as many as their counts say.
    """

    name: str
    format: str
    source: str
    sha256: str
    instance_count: int
    commit_count: int
    mirrors: list[str]
    unpinned_count: int = 0
    unpinned: list[UnpinnedCommit] = []
    fault_count: int = 0
    faults: list[RowFault] = []
    rules: dict[str, int] = {}
    imported_at: datetime


class DatasetSummary(Answer):
    name: str
    format: str
    instance_count: int
    commit_count: int
    fault_count: int
    unpinned_count: int
    imported_at: datetime


class DatasetChange(Answer):
    """What an import changed: instance ids."""

    added: list[str] = []
    changed: list[str] = []
    removed: list[str] = []
    unchanged_count: int = 0


class AmbiguousInstance(Answer):
    """An id that `datasets` record with different repositories or base commits."""

    id: str
    datasets: list[str]


class RecordedCommit(Answer):
    commit: str
    role: CommitRole


class Instance(Answer):
    """The patches, the tests and `commits` other than the base are present only in the grader view."""

    id: str
    dataset: str
    mirror: str
    repo: str
    base_commit: str
    direction: Direction | None = None
    commits: list[RecordedCommit] | None = None
    patch: str | None = None
    test_patch: str | None = None
    fail_to_pass: list[str] | None = None
    pass_to_pass: list[str] | None = None


class InstanceName(Answer):
    """One of a list: an instance is asked for by its id."""

    id: str


class FormatInfo(Answer):
    name: str
    title: str
    detected_by: str
