"""Datasets, their instances, and what two of them differ in."""

from datetime import datetime

from .. import model
from .codec import Answer


class RowFault(Answer):
    """An invalid row of a dataset file. `line` counts rows from 1."""

    file: str
    line: int
    instance: str | None = None
    reason: str


class UnpinnedCommit(Answer):
    """A recorded commit without a pin, and why.

    `commit` is a branch where the mirror lacks the one that holds a base commit. Instances of which
    only commits of other `roles` than `base` are missing can be checked out.
    """

    mirror: str
    commit: str
    roles: list[model.CommitRole] = []
    instances: list[str]
    reason: str


class Dataset(Answer):
    """`rules` counts how often each rule of a normaliser fired.

    `unpinned` and `faults` are cut; `unpinned_count` and `fault_count` count all. `sha256` is the
    file's; `digest` is the same for two datasets with the same rows. From `digest` to
    `last_created_at` (the dates of the instances) a list of datasets has nothing.
    """

    name: str
    format: str
    source: str
    sha256: str
    digest: str | None = None
    commits_by_role: dict[model.CommitRole, int] = {}
    environment_count: int | None = None
    first_created_at: datetime | None = None
    last_created_at: datetime | None = None
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
    """Instance ids that an import changed."""

    added: list[str] = []
    changed: list[str] = []
    removed: list[str] = []
    unchanged_count: int = 0


class InstanceChange(Answer):
    """`fields` are those that differ; a base commit that does is there before and after."""

    id: str
    fields: list[str]
    base_before: str | None = None
    base_after: str | None = None


class RowsChange(Answer):
    """The rows that one dataset has and another has not, by id."""

    added: list[str] = []
    removed: list[str] = []
    changed: list[InstanceChange] = []
    unchanged_count: int = 0


class DatasetDiff(Answer):
    """From dataset `a`, which may not exist yet, to `b`: a dataset, or a file as an import reads
    it.

    Of a file there are the `format`, its first `faults`, and the `new_mirrors` that it needs.
    """

    a: str
    b: str
    change: RowsChange
    format: str | None = None
    fault_count: int = 0
    faults: list[RowFault] = []
    new_mirrors: list[str] = []


class AmbiguousInstance(Answer):
    """An instance id that `datasets` record with different repositories or base commits."""

    id: str
    datasets: list[str]


class RecordedCommit(Answer):
    commit: str
    role: model.CommitRole


class Instance(Answer):
    """What agents may know of an instance; in the grader view the whole row.

    In the agent view `id` is the public id, which tells no commit of the answer, `commits` has the
    base commit alone, and the members below it are None. Requests accept both ids. `base_commit` is
    None while the mirror lacks the branch that holds it, `revision`. `history` is the most that
    agents see. `environment` names what the code runs in, `rules` how values were interpreted.
    """

    id: str
    dataset: str
    mirror: str
    repo: str
    base_commit: str | None
    commits: list[RecordedCommit] | None = None
    public_id: str | None = None
    direction: model.Direction | None = None
    patch: str | None = None
    test_patch: str | None = None
    fail_to_pass: list[str] | None = None
    pass_to_pass: list[str] | None = None
    environment: str | None = None
    python_version: str | None = None
    version: str | None = None
    created_at: datetime | None = None
    history: model.History | None = None
    revision: str | None = None
    rules: list[str] | None = None


class InstanceName(Answer):
    """One instance of a list."""

    id: str


class FormatInfo(Answer):
    name: str
    title: str
    detected_by: str
