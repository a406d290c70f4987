"""The messages of the socket, one class each, shared by the daemon and the client. No I/O, nothing of either end.

Requests refuse unknown members; answers ignore them, so that an older client reads a newer daemon. Times are aware UTC, durations
are seconds, sizes are bytes.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .model import AuditLevel, Backend, CommitRole, CommitState, Direction, History, Reach, View

API = "/v1"


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


Repo = Annotated[str, Field(min_length=1, max_length=400)]
Text = Annotated[str, Field(max_length=2000)]
Ttl = Annotated[float, Field(gt=0, le=366 * 86400, description="seconds until the lease ends unless renewed")]


# -- requests ---------------------------------------------------------------------------------------------------------


class AddMirror(Request):
    repo: Repo
    url: Annotated[str, Field(max_length=4000)] | None = None


class AddPin(Request):
    mirror: Repo
    commit: str
    reason: Text = ""


class StartAudit(Request):
    """No mirrors and no dataset: everything that is recorded."""

    mirrors: list[Repo] = []
    dataset: str | None = None
    level: AuditLevel | None = None
    heal: bool | None = None


class StartHeal(Request):
    mirrors: list[Repo] = []


class SyncMirror(Request):
    """`accept_loss` follows an upstream that lost most of its refs, or its whole history; what it had is kept."""

    accept_loss: bool = False


class RestoreRefs(Request):
    at: Annotated[str, Field(min_length=1, max_length=100, description="a ref record: its id, or a time in ISO 8601")]


class StartCheckout(Request):
    """What to check out: `instance` (an instance id, or NAME@COMMITISH), or `mirror` with `commit`."""

    instance: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    mirror: Repo | None = None
    commit: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    history: History | None = None
    view: View = View.AGENT
    backend: Backend | None = None
    ttl: Ttl | None = None


class ResetCheckout(Request):
    """Neither: clean, at the commit it is at. `instance` or `commit`: on to that one, of the same mirror."""

    instance: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    commit: Annotated[str, Field(min_length=1, max_length=500)] | None = None


class RenewCheckout(Request):
    ttl: Ttl | None = None


class RestorePaths(Request):
    commit: str
    paths: Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=10000)]


# -- answers ----------------------------------------------------------------------------------------------------------


class Problem(BaseModel):
    """RFC 9457. `code` is stable; further members are the facts of the error."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str
    title: str
    status: int
    code: str
    detail: str
    hint: str | None = None


class Health(Answer):
    status: Literal["ok", "degraded"]
    reasons: list[str] = []
    version: str


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


class RefFault(Answer):
    """A ref that upstream offers and we could not take."""

    ref: str
    commit: str
    reason: str


class Mirror(Answer):
    """`url` has no secrets. `state` is `empty` until the first sync ended."""

    name: str
    repo: str
    url: str
    state: Literal["empty", "ready", "failed"]
    default_branch: str | None = None
    ref_count: int | None = None
    pin_count: int = 0
    kept_count: int | None = None
    size_bytes: int | None = None
    synced_at: datetime | None = None
    attempted_at: datetime | None = None
    error: Problem | None = None
    ref_faults: list[RefFault] = []


class RefChange(Answer):
    """`kind` says what upstream did; `kept` is true where the old tip is held by a kept ref."""

    ref: str
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
    mirror: str
    a: str
    b: str
    changes: list[RefChange]


class BundleFile(Answer):
    """A bundle that was written. `record` is its newest ref record: what a later one may be made `since`."""

    mirror: str
    file: str
    size_bytes: int
    record: str | None = None
    since: str | None = None


class Pin(Answer):
    """`owner` is `dataset/NAME` or `person/UID`."""

    mirror: str
    commit: str
    owner: str
    reason: str = ""
    created_at: datetime | None = None


class RowFault(Answer):
    """A row of a dataset file that could not be used. `line` counts rows from 1."""

    file: str
    line: int
    instance: str | None = None
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


class UnpinnedCommit(Answer):
    """A recorded commit that could not be pinned, and why."""

    mirror: str
    commit: str
    instances: list[str]
    reason: str


class DatasetChange(Answer):
    """What an import changed: instance ids."""

    added: list[str] = []
    changed: list[str] = []
    removed: list[str] = []
    unchanged_count: int = 0


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


class Finding(Answer):
    """One recorded commit that cannot be served, or something wrong with its mirror (`commit` is then empty)."""

    mirror: str
    commit: str = ""
    state: CommitState
    reach: Reach | None = None
    instances: list[str] = []
    objects: list[str] = []
    detail: str = ""


class Repair(Answer):
    """What a heal did to one mirror.

    `objects` counts what came by donor, `files` are the bad files that it took out, which are kept below `kept_in`, `refs` those
    it restored. `unhealed` are the first of the needed objects that no donor had; `error` says why it ended early.
    """

    mirror: str
    objects: dict[str, int] = {}
    files: list[str] = []
    kept_in: str | None = None
    refs: list[str] = []
    unhealed: list[str] = []
    unhealed_count: int = 0
    error: str | None = None


class Audit(Answer):
    """`counts` and `reach` count recorded commits; `affected` are the instances that cannot be served.

    `healed` counts the commits that were not in order before, and are now.
    """

    id: str
    level: AuditLevel
    mirrors: list[str]
    dataset: str | None = None
    started_at: datetime
    finished_at: datetime
    counts: dict[CommitState, int]
    reach: dict[Reach, int] = {}
    findings: list[Finding]
    affected: list[str] = []
    healed: int = 0
    repairs: list[Repair] = []


class Checkout(Answer):
    """`commit` is the base commit, `tree` its verified tree; `timings` are seconds per step."""

    id: str
    path: str
    mirror: str
    commit: str
    tree: str
    instance: str | None = None
    history: History
    view: View
    backend: Backend
    owner_uid: int
    created_at: datetime
    expires_at: datetime
    timings: dict[str, float] = {}


class Proof(Answer):
    """What a reset checked, and the hashes it saw."""

    head: str
    tree: str
    index: str
    control_files: int
    files_checked: int
    files_restored: int
    files_removed: int
    refs: list[str] = []
    packs: list[str] = []
    method: str


class ResetAnswer(Checkout):
    proof: Proof


class RestoreAnswer(Answer):
    paths: list[str]


class SealLeak(Answer):
    kind: str
    detail: str


class SealReport(Answer):
    """What `verify-seal` says of a repository. `sealed` is true when there are no leaks."""

    path: str
    base: str
    sealed: bool
    head: str | None = None
    objects_present: int = 0
    objects_in_closure: int = 0
    leaks: list[SealLeak] = []
    checked: list[str] = []


class Event(Answer):
    """`id` grows by one; it starts again when the daemon does, under another `boot`."""

    id: int
    boot: str
    at: datetime
    name: str
    fields: dict[str, Any]


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


class DatasetSummary(Answer):
    name: str
    format: str
    instance_count: int
    commit_count: int
    fault_count: int
    unpinned_count: int
    imported_at: datetime


class AuditSummary(Answer):
    id: str
    level: AuditLevel
    finished_at: datetime
    counts: dict[CommitState, int]
    affected_count: int
    finding_count: int


class ReloadAnswer(Answer):
    """`applied` and `refused` are configuration keys."""

    applied: list[str]
    refused: list[str]


class FormatInfo(Answer):
    name: str
    title: str
    detected_by: str


for _model in (Dataset, Status):
    _model.model_rebuild()
