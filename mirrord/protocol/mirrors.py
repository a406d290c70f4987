"""Mirrors with their refs, pins and bundles; datasets; audits and heals."""

from datetime import datetime
from typing import Annotated, Literal

from .. import model
from .codec import Answer, Bounds, GitName, Problem, Repo, Request, Text, Word


class AddMirror(Request):
    repo: Repo
    url: Annotated[str, Bounds(max_length=4000)] | None = None


class CheckCredential(Request):
    """Asks an upstream, of a mirror or not, whether it accepts what is configured for its URL."""

    url: Annotated[str, Bounds(min_length=1, max_length=4000)]


class CredentialCheck(Answer):
    """`credential` is the URL of the entry that applies, `secret` the key that it has one from."""

    url: str
    accepted: bool
    credential: str | None = None
    secret: str | None = None
    error: Problem | None = None


class SyncMirror(Request):
    """Starts a sync. `accept_loss` follows an upstream that lost most refs or its whole history.

    `retry_faults` asks at once for refs that it could not give lately.
    """

    accept_loss: bool = False
    retry_faults: bool = False


class SetUrl(Request):
    """Another upstream. `accept_loss` takes one that lacks recorded commits."""

    url: Annotated[str, Bounds(min_length=1, max_length=4000)]
    accept_loss: bool = False


class RestoreRefs(Request):
    at: Annotated[
        str,
        Bounds(min_length=1, max_length=100, description="id of a ref record, or ISO 8601 time"),
    ]


class AddPin(Request):
    mirror: Repo
    commit: str
    reason: Text = ""


class RefFault(Answer):
    """A ref of upstream that the mirror could not fetch. `code` is that of the error, if any.

    `asked_at` is when it was asked for last. `parentless` is what the mirror has in place of a
    commit whose parents upstream lacks: one that squashed checkouts can be made from.
    """

    ref: GitName
    commit: str
    reason: str
    code: str = ""
    asked_at: datetime | None = None
    parentless: str | None = None


class Mirror(Answer):
    """A mirror. `url` has no secrets; `host` is its host with a port, `local` for a path.

    `state` is `empty` until the first sync has finished.
    """

    name: str
    repo: str
    url: str
    host: str
    state: Literal["empty", "ready", "failed"]
    default_branch: GitName | None = None
    ref_count: int | None = None
    pin_count: int = 0
    kept_count: int | None = None
    size_bytes: int | None = None
    synced_at: datetime | None = None
    attempted_at: datetime | None = None
    error: Problem | None = None
    ref_faults: list[RefFault] = []


class RefChange(Answer):
    """A ref that upstream changed. `kept` is true if a kept ref has the old tip."""

    ref: GitName
    kind: Literal["created", "forwarded", "forced", "deleted"]
    old: str | None = None
    new: str | None = None
    kept: bool = False


class RefRecord(Answer):
    """One entry of a mirror's ref history."""

    id: str
    at: datetime
    ref_count: int
    summary: str


class RefDiff(Answer):
    """What changed between two records of the ref history, `a` and `b`."""

    mirror: str
    a: str
    b: str
    changes: list[RefChange]


class Pin(Answer):
    """A pin. `owner` is `dataset/NAME` or `person/UID`."""

    mirror: str
    commit: str
    owner: str
    reason: str = ""
    created_at: datetime | None = None


class BundleFile(Answer):
    """A finished bundle. `record` is its newest ref record, the `since` of a next bundle."""

    mirror: str
    file: str
    size_bytes: int
    record: str | None = None
    since: str | None = None


class RowFault(Answer):
    """An invalid row of a dataset file. `line` counts rows from 1."""

    file: str
    line: int
    instance: str | None = None
    reason: str


class UnpinnedCommit(Answer):
    """A recorded commit without a pin, with the reason.

    If the mirror lacks the branch of a base commit, `commit` is that branch. Without `base` in its
    `roles`, its instances can still be checked out.
    """

    mirror: str
    commit: str
    roles: list[model.CommitRole] = []
    instances: list[str]
    reason: str


class NotReady(Answer):
    """Instances of a dataset that cannot be checked out: of which mirror, and why."""

    mirror: str
    reason: str
    count: int


class DatasetSummary(Answer):
    """A dataset in short. Without `ready_count` it is not known how many instances are ready."""

    name: str
    format: str
    instance_count: int
    commit_count: int
    fault_count: int = 0
    unpinned_count: int = 0
    imported_at: datetime
    ready_count: int | None = None
    not_ready: list[NotReady] = []


class Dataset(DatasetSummary):
    """A dataset. `rules` counts how often each rule of the reader applied.

    `unpinned` and `faults` have the first entries; `unpinned_count` and `fault_count` count all.
    `sha256` is the file's; datasets with equal rows have equal `digest`s. Lists of datasets omit
    the members from `digest` to `last_created_at`, which are facts of the instances.
    """

    source: str
    sha256: str
    digest: str | None = None
    commits_by_role: dict[model.CommitRole, int] = {}
    environment_count: int | None = None
    first_created_at: datetime | None = None
    last_created_at: datetime | None = None
    mirrors: list[str]
    unpinned: list[UnpinnedCommit] = []
    faults: list[RowFault] = []
    rules: dict[str, int] = {}


class PrepareDataset(Request):
    """Prepares first checkouts of `instances`, by default all of the dataset."""

    instances: list[Word] = []


class DatasetChange(Answer):
    """The instance ids that an import changed."""

    added: list[str] = []
    changed: list[str] = []
    removed: list[str] = []
    unchanged_count: int = 0


class InstanceChange(Answer):
    """An instance whose `fields` differ, with the old and new base commit if that differs."""

    id: str
    fields: list[str]
    base_before: str | None = None
    base_after: str | None = None


class RowsChange(Answer):
    """The difference between the rows of two datasets, by id."""

    added: list[str] = []
    removed: list[str] = []
    changed: list[InstanceChange] = []
    unchanged_count: int = 0


class DatasetDiff(Answer):
    """The difference from dataset `a`, which may not exist yet, to `b`, a dataset or a file.

    For a file it has the `format`, the first `faults`, and the `new_mirrors` to add.
    """

    a: str
    b: str
    change: RowsChange
    format: str | None = None
    fault_count: int = 0
    faults: list[RowFault] = []
    new_mirrors: list[str] = []


class AmbiguousInstance(Answer):
    """An instance id that `datasets` record differently, so that one of them has to be named.

    With another `commit` (or repository) by a checkout, with other `tests` by a grade alone.
    """

    id: str
    datasets: list[str]
    differs: Literal["commit", "tests"] = "commit"


class RecordedCommit(Answer):
    """A commit that an instance records, and what for."""

    commit: str
    role: model.CommitRole


class Instance(Answer):
    """An instance: what agents may know of it, or in the grader view the whole row.

    In the agent view `id` is the public id, which reveals no gold commit, `commits` has only the
    base commit, and the members after it are None. Requests accept both ids. `base_commit` is None
    while the mirror lacks its branch, `revision`. `history` limits what agents see. `environment`
    names what the code runs in, `scripts` run its tests, `rules` say how values were interpreted.
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
    scripts: dict[str, str] | None = None
    python_version: str | None = None
    version: str | None = None
    workdir: str | None = None
    created_at: datetime | None = None
    history: model.History | None = None
    revision: str | None = None
    rules: list[str] | None = None
    submodules: list[str] | None = None
    missing: dict[str, str] | None = None
    lfs_pointers: int | None = None
    lfs_missing: int | None = None


class InstanceName(Answer):
    """One instance of a list."""

    id: str


class FormatInfo(Answer):
    """A format of datasets, and the columns by which it is detected."""

    name: str
    title: str
    detected_by: str


class StartAudit(Request):
    """Starts an audit of `mirrors`, of `dataset`, or by default of everything recorded."""

    mirrors: list[Repo] = []
    dataset: str | None = None
    level: model.AuditLevel | None = None
    heal: bool | None = None


class StartHeal(Request):
    mirrors: list[Repo] = []


class StartRestore(Request):
    """Restores `mirrors` from the store, by default all."""

    mirrors: list[Repo] = []


class Finding(Answer):
    """A recorded commit that cannot be served, or a fault of its mirror (`commit` is then empty).

    `subject` is the commit, file or ref; `accepted` is true if the configuration accepts it.
    Without `base` in the commit's `roles`, its instances can still be checked out.
    """

    mirror: str
    kind: model.FindingKind
    subject: GitName = ""
    accepted: bool = False
    commit: str = ""
    roles: list[model.CommitRole] = []
    state: model.CommitState
    reach: model.Reach | None = None
    instances: list[str] = []
    objects: list[str] = []
    detail: str = ""


class Repair(Answer):
    """The repair of one mirror by a heal.

    `objects` counts received objects by donor. `files` are the damaged files, moved to `kept_in`.
    `refs` are the restored refs. `unhealed` has the first needed objects that no donor had,
    `refusals` the donors that failed, with the reason. `history` describes the repair of a lost ref
    history. `error` is why the heal ended early.
    """

    mirror: str
    objects: dict[str, int] = {}
    files: list[GitName] = []
    kept_in: str | None = None
    refs: list[GitName] = []
    unhealed: list[str] = []
    unhealed_count: int = 0
    refusals: dict[str, str] = {}
    history: str = ""
    error: str | None = None


class AuditPart(Answer):
    """One mirror in an audit."""

    mirror: str
    counts: dict[model.CommitState, int]
    pinned: dict[model.CommitState, int] = {}
    reach: dict[model.Reach, int] = {}
    findings: list[Finding]
    affected: list[str] = []
    healed: int = 0
    repair: Repair | None = None


class Audit(Answer):
    """An audit. `counts` and `reach` count recorded commits, `pinned` those that only pins name.

    `affected` are instances that cannot be served, without accepted findings. `healed` counts
    commits that a heal made servable again. `left` are mirrors that the audit could not judge, or
    did not reach before an interruption; its other members do not cover them. `open_count` counts
    findings that are neither healed nor accepted.
    """

    id: str
    level: model.AuditLevel
    mirrors: list[str]
    left: list[str] = []
    dataset: str | None = None
    started_at: datetime
    finished_at: datetime
    counts: dict[model.CommitState, int]
    pinned: dict[model.CommitState, int] = {}
    reach: dict[model.Reach, int] = {}
    findings: list[Finding]
    open_count: int
    affected: list[str] = []
    healed: int = 0
    repairs: list[Repair] = []


class AuditSummary(Answer):
    """The last audit as the status has it: counts, without findings."""

    id: str
    level: model.AuditLevel
    finished_at: datetime
    counts: dict[model.CommitState, int]
    affected_count: int
    finding_count: int
    open_count: int
    left_count: int = 0
    mirror_count: int = 0
