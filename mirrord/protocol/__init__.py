"""The messages of the socket, one class each, shared by the daemon and the client. No I/O.

Times are aware UTC, durations are seconds, sizes are bytes.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Literal

from .. import model
from .codec import API as API
from .codec import Answer as Answer
from .codec import Bounds as Bounds
from .codec import EnvironmentName, LayerName, OwnerUid, SnapshotName, Text, Ttl, Word
from .codec import MalformedError as MalformedError
from .codec import Message as Message
from .codec import Problem as Problem
from .codec import Repo as Repo
from .codec import Request as Request
from .codec import canonical as canonical
from .codec import to_bytes as to_bytes
from .codec import to_json as to_json

# -- mirrors, their refs and pins -----------------------------------------------------------------


class AddMirror(Request):
    repo: Repo
    url: Annotated[str, Bounds(max_length=4000)] | None = None


class SyncMirror(Request):
    """`accept_loss` follows an upstream that lost most of its refs, or its whole history."""

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
    """A ref that upstream offers and the mirror could not take."""

    ref: str
    commit: str
    reason: str


class Mirror(Answer):
    """`url` has no secrets. `state` is `empty` until the first sync has ended."""

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
    """`kind` says what upstream did; `kept` is true where a kept ref holds the old tip."""

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


class Pin(Answer):
    """`owner` is `dataset/NAME` or `person/UID`."""

    mirror: str
    commit: str
    owner: str
    reason: str = ""
    created_at: datetime | None = None


class BundleFile(Answer):
    """A finished bundle. `record` is its newest ref record; a later bundle can start `since` it."""

    mirror: str
    file: str
    size_bytes: int
    record: str | None = None
    since: str | None = None


# -- datasets and instances -----------------------------------------------------------------------


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


# -- audits and repairs ---------------------------------------------------------------------------


class StartAudit(Request):
    """Without mirrors and dataset it audits everything recorded."""

    mirrors: list[Repo] = []
    dataset: str | None = None
    level: model.AuditLevel | None = None
    heal: bool | None = None


class StartHeal(Request):
    mirrors: list[Repo] = []


class Finding(Answer):
    """A recorded commit that cannot be served, or a fault of its mirror (`commit` is then empty).

    `subject` is the commit, file or ref; `accepted` says that the configuration accepts it. Where
    the commit's `roles` lack `base`, its instances can be checked out all the same.
    """

    mirror: str
    kind: model.FindingKind
    subject: str = ""
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

    `objects` counts received objects by donor; `files` are the bad files that it moved to
    `kept_in`; `refs` are the restored refs. `unhealed` are the first of the needed objects that no
    donor had; `refusals` are the donors that failed, with the reason; `history` says what became of
    a lost ref history; `error` says why the heal ended early.
    """

    mirror: str
    objects: dict[str, int] = {}
    files: list[str] = []
    kept_in: str | None = None
    refs: list[str] = []
    unhealed: list[str] = []
    unhealed_count: int = 0
    refusals: dict[str, str] = {}
    history: str = ""
    error: str | None = None


class AuditPart(Answer):
    """One mirror in an audit."""

    mirror: str
    counts: dict[model.CommitState, int]
    reach: dict[model.Reach, int] = {}
    findings: list[Finding]
    affected: list[str] = []
    healed: int = 0
    repair: Repair | None = None


class Audit(Answer):
    """`counts` and `reach` count recorded commits; `affected` are instances that cannot be served.

    `healed` counts commits that a heal made servable again. `left` are mirrors that the audit did
    not reach before an interruption, or could not judge; nothing else in it covers them.
    `open_count` counts the findings that are neither healed nor accepted; `affected` leaves out
    accepted ones.
    """

    id: str
    level: model.AuditLevel
    mirrors: list[str]
    left: list[str] = []
    dataset: str | None = None
    started_at: datetime
    finished_at: datetime
    counts: dict[model.CommitState, int]
    reach: dict[model.Reach, int] = {}
    findings: list[Finding]
    open_count: int
    affected: list[str] = []
    healed: int = 0
    repairs: list[Repair] = []


class AuditSummary(Answer):
    id: str
    level: model.AuditLevel
    finished_at: datetime
    counts: dict[model.CommitState, int]
    affected_count: int
    finding_count: int
    open_count: int
    left_count: int = 0


# -- checkouts and seals ---------------------------------------------------------------------------


class StartCheckout(Request):
    """Names `instance` (an instance id, or NAME@COMMITISH), or `mirror` with `commit`.

    `dataset` chooses among datasets that record the id differently. With `bind` "process" the lease
    ends with the process that made the connection, not with the connection. With `attach` it is one
    that can be attached, though the peer's mount namespace may not show it. `layer` is a prepared
    layer of the same commit, by its name; without one the checkout has the layer
    `environment-<digest>` of its `environment`, where that was saved.
    """

    instance: Word | None = None
    mirror: Repo | None = None
    commit: Word | None = None
    dataset: Word | None = None
    history: model.History | None = None
    view: model.View = model.View.AGENT
    backend: model.Backend | None = None
    ttl: Ttl | None = None
    owner: OwnerUid | None = None
    bind: model.Bind = model.Bind.LEASE
    attach: bool = False
    layer: LayerName | None = None
    environment: EnvironmentName | None = None


class ResetCheckout(Request):
    """Resets to the same commit, moves to an `instance` or `commit` of the same mirror, or goes
    back `to` a snapshot, by its name.

    The environment stays unless another is named, and so does the layer at the same commit.
    """

    instance: Word | None = None
    commit: Word | None = None
    dataset: Word | None = None
    to: Word | None = None
    layer: LayerName | None = None
    environment: EnvironmentName | None = None


class ForkCheckout(Request):
    """Forks the tree as it is, or as `snapshot` has it, by name."""

    snapshot: Word | None = None
    ttl: Ttl | None = None
    bind: model.Bind = model.Bind.LEASE


class MakeSnapshot(Request):
    """Without a name it gets one: s1, s2 and so on."""

    name: SnapshotName | None = None


class AttachCheckout(Request):
    """Asks for a mount of a checkout's directory, for the peer's own mount namespace."""

    target: model.Target = model.Target.TREE


class SaveLayer(Request):
    """Keeps what was changed, in the tree and in the environment, as a prepared layer."""

    name: LayerName


class RenewCheckout(Request):
    ttl: Ttl | None = None


class RestorePaths(Request):
    commit: str
    paths: Annotated[
        list[Annotated[str, Bounds(min_length=1, max_length=4096)]],
        Bounds(min_length=1, max_length=10000),
    ]


PolicyText = Annotated[
    str,
    Bounds(
        min_length=1,
        max_length=500,
        description="report, drop or refuse; by kind: `drop,tests=report`; default: as configured",
    ),
]


class StartGrade(Request):
    """The grade of a checkout: what its owner changed, at the same commit, with the tests.

    It has the checkout's layer and environment, as they were before they were worked on.
    """

    policy: PolicyText | None = None
    backend: model.Backend | None = None
    ttl: Ttl | None = None
    owner: OwnerUid | None = None
    bind: model.Bind = model.Bind.LEASE


class Checkout(Answer):
    """`commit` is the base commit, `tree` its verified tree; `timings` are seconds per step.

    `path` is `directory/tree`; with an `environment` (KEY@DIGEST) its prefix is
    `directory/environment`. `directory` holds nothing else; mounted elsewhere with `rslave`, it
    follows every reset. `layer` names the prepared layer that resets and diffs are relative to.
    `taken_by` is the uid that asked for the checkout. It and `owner_uid` may use and release it.
    `parent` is the checkout that this one was forked from, or grades. `volumes` are the
    names that docker or podman know it by.
    """

    id: str
    path: str
    directory: str
    mirror: str
    commit: str
    tree: str
    instance: str | None = None
    history: model.History
    view: model.View
    backend: model.Backend
    owner_uid: int
    owner_gid: int
    taken_by: int
    bind: model.Bind = model.Bind.LEASE
    created_at: datetime
    expires_at: datetime
    parent: str | None = None
    volumes: list[str] = []
    resets: int = 0
    layer: str | None = None
    environment: str | None = None
    timings: dict[str, float] = {}


class Attachment(Answer):
    """The mount came before this answer, as a descriptor with an interim response (SCM_RIGHTS).

    `move_mount` attaches it. Until then it shows the checkout as of its `resets`-th reset.
    """

    checkout: str
    target: model.Target
    resets: int


class Copied(Answer):
    """What was copied of a checkout, which was so at `taken_at`.

    `files` counts changed, new and removed ones. `left_out` counts what is not in the copy, by
    kind: pipes, sockets, devices, git_files (configuration, hooks and the like in `.git`). Where
    `git` is false, `.git` is the base commit's own, as the checkout's was no plain repository.
    """

    taken_at: datetime
    files: int
    size_bytes: int
    left_out: dict[str, int] = {}
    git: bool = True


class Fork(Checkout):
    """`snapshot` names the one it was made from."""

    snapshot: str | None = None
    copied: Copied


class Snapshot(Answer):
    """A kept state of a checkout, over its base commit at that time."""

    name: str
    checkout: str
    commit: str
    instance: str | None = None
    copied: Copied


class PreparedLayer(Answer):
    """What was saved of a checkout, for others at the same commit with the same history.

    `saved_by` is the uid that asked; what an administrator saved (`shared`) everybody may use.
    `environment` is the one whose changes it has, `environment_copied` what those were.
    `checkouts` counts those that hold it.
    """

    id: str
    name: str
    mirror: str
    commit: str
    history: model.History
    instance: str | None = None
    saved_by: int
    shared: bool
    copied: Copied
    environment: str | None = None
    environment_copied: Copied | None = None
    checkouts: int = 0


class Steering(Answer):
    """A path of the agent's that could steer the tests, and the rule that says so.

    `applied`: the grade has it. `dropped`: by policy it does not. `restored`: the test patch writes
    there. `left`: it is no part of a change, such as an ignored file. `refused`: why there is no
    grade.
    """

    rule: str
    kind: model.SteeringKind
    path: str
    action: Literal["applied", "dropped", "restored", "left", "refused"]
    detail: str = ""


class Grade(Checkout):
    """A checkout for the grader. `strategy` says how a patch applied, None for a checkout's change.

    `changed` counts the paths of the agent's change, `dropped` lists those that the grade does not
    have. `tests` are the paths of the instance's test patch, None where there is none.
    """

    strategy: model.FoundStrategy | None = None
    changed: int
    dropped: list[str] = []
    steering: list[Steering] = []
    tests: list[str] | None = None


class Proof(Answer):
    """The checks of a reset, with the hashes it saw.

    The counts are null where the reset did not check single files: an overlay reset drops the
    client's layer unread and shows a template, which was verified when it was built. `snapshot`
    names the one whose layer is shown over the tree; `head` is then its HEAD.
    """

    head: str
    tree: str
    index: str
    control_files: int
    files_checked: int | None
    files_restored: int | None
    files_removed: int | None
    refs: list[str] = []
    packs: list[str] = []
    snapshot: str | None = None
    method: str


class ResetAnswer(Checkout):
    proof: Proof


class ApplyAnswer(Checkout):
    """`strategy` is what made the patch fit: `exact` unless a tolerant one was asked for."""

    strategy: model.FoundStrategy


class RestoreAnswer(Answer):
    paths: list[str]


class SealLeak(Answer):
    kind: str
    detail: str


class SealReport(Answer):
    """The answer of `verify-seal`, and of the daemon on the store below a checkout. `sealed` is
    true when there are no leaks.
    """

    path: str
    base: str
    sealed: bool
    head: str | None = None
    objects_present: int = 0
    objects_in_closure: int = 0
    leaks: list[SealLeak] = []
    checked: list[str] = []


class RootLeak(SealLeak):
    """Something in a directory or an image that was not there at the base commit, or leads there.

    `path` is from the top, with `!` between an archive and its member. A `future-file` has the
    content that `name` got in `commit`, the first with it. `hidden`: a later layer of the image
    covers it, so that a container does not show it.
    """

    path: str
    commit: str | None = None
    name: str | None = None
    hidden: bool = False


class RootReport(Answer):
    """The answer of `verify-seal --root`; `sealed` is true when no leak is but hidden.

    `notes` tell what was left out, and repositories of other projects.
    """

    root: str
    base: str
    sealed: bool
    file_count: int
    size_bytes: int
    repositories: list[str]
    leaks: list[RootLeak]
    notes: list[str]


# -- environments ----------------------------------------------------------------------------------


class Recipe(Answer, Request):
    """How an environment is built, and how tests are run in it; docs/environments.md has it whole.

    `requirements` are packages and `-r FILE` lines; `packages` are installed after them, and win.
    `pre_install` and `install` run in the instance's tree. `index_date`: no package released later
    is taken. `host_packages` are Debian packages that the host has to have.
    """

    key: str
    python: str
    index_date: str | None = None
    pre_install: list[str] = []
    requirements: list[str] = []
    packages: list[str] = []
    install: list[str] = []
    test_command: str = ""
    variables: dict[str, str] = {}
    log_parser: str = "pytest"
    host_packages: list[str] = []


class BuildEnvironments(Request):
    """`names` are instances, or keys of imported recipes and of earlier builds; without any, all
    instances of `dataset` are meant.

    With `prewarm` every instance of the dataset gets its prepared layer, too, as named ones do. A
    build that failed is tried `again`, though nothing has changed. With `frozen` no package is
    taken that was released after the instance's date.
    """

    names: list[Word] = []
    dataset: Word | None = None
    prewarm: bool = False
    again: bool = False
    frozen: bool = False


class FailedBuild(Answer):
    key: str
    detail: str


class BuildReport(Answer):
    """The result of a build: the environments that are `ready`, as KEY@DIGEST, and the commits for
    which one was `prepared`.
    """

    ready: list[str]
    failed: list[FailedBuild] = []
    prepared: list[str] = []


class Preparation(Answer):
    """The `layer` that a checkout of this commit has with the environment, or why there is none.

    `findings` is what the scan found in the environment, as seen from this commit.
    """

    mirror: str
    commit: str
    layer: str | None = None
    error: str | None = None
    findings: list[dict[str, Any]] = []


class Environment(Answer):
    """`name` is KEY@DIGEST. It was built at `commit` of `mirror`, where the recipe has one.

    `manifest` is the SHA-256 of the list of all files with their modes and hashes. `shared_bytes`
    of it other environments had already. `dropped` counts what was left out, by the reason;
    `findings` is what the scan found. `error` and the last lines of the log (`tail`) are those of
    a failed build. `interpreter` is the host's; None for one that came with the environment.
    `holders` counts the checkouts and prepared layers that use it. A list leaves out `prepared` and
    `recipe`.
    """

    key: str
    name: str
    digest: str
    state: Literal["building", "ready", "failed"]
    python: str
    built_at: datetime
    interpreter: str | None = None
    mirror: str | None = None
    commit: str | None = None
    duration_s: float | None = None
    used_at: datetime | None = None
    holders: int = 0
    manifest: str | None = None
    files: int = 0
    size_bytes: int = 0
    shared_bytes: int = 0
    dropped: dict[str, int] = {}
    findings: list[dict[str, Any]] = []
    error: str | None = None
    tail: list[str] = []
    prepared: list[Preparation] = []
    recipe: Recipe | None = None


# -- rehearsals ------------------------------------------------------------------------------------


class RehearsalStep(Answer):
    """One check. `nothing`: the row has no such patch, so there was nothing to apply."""

    name: str
    outcome: Literal["ok", "nothing", "failed", "but"]
    detail: str = ""
    duration_s: float = 0.0


class UnexpectedTest(Answer):
    """A test that came out otherwise than its row says; `outcome` None: it is not in the log.

    `lines` are the last that the log of this `step` says of it.
    """

    step: str
    test: str
    expected: Literal["fail", "pass"]
    outcome: Literal["passed", "failed", "skipped", "error"] | None = None
    lines: list[str] = []

    @property
    def told(self) -> str:
        outcome = self.outcome or "not in the log"
        return f"{self.step}: {self.test}: {outcome}, expected to {self.expected}"


class Rehearsed(Answer):
    """What a rehearsal found of one instance, step by step as far as it came.

    `reason` says what keeps it from being ready; `error` is the problem behind that. `state` tells
    the row, the mirror and the daemon that it holds for. Where its tests were run there are the
    `environment`, the first of the `unexpected` tests, and the files with the `logs`.
    """

    instance: str
    dataset: str | None = None
    repo: str | None = None
    commit: str | None = None
    status: model.Readiness
    reason: str = ""
    steps: list[RehearsalStep] = []
    error: Problem | None = None
    state: str = ""
    duration_s: float = 0.0
    environment: str | None = None
    unexpected: list[UnexpectedTest] = []
    logs: list[str] = []

    @property
    def ok(self) -> bool:
        """Whether it can be checked out and graded."""
        return self.status in (model.Readiness.READY, model.Readiness.BUT)


# -- receipts --------------------------------------------------------------------------------------

RECEIPT_FORMAT: Literal["mirrord-receipt/1"] = "mirrord-receipt/1"


class Closure(Answer):
    """The objects of a sealed store. `sha256` is of their ids, sorted, each with a line feed."""

    objects: int
    sha256: str


class Proven(Answer):
    """How something was proven, and when."""

    method: str
    at: datetime


class Digest(Answer):
    bytes: int
    sha256: str


class LayerFacts(Answer):
    """The prepared layer of a checkout: `tree` is git's of the commit with what it changed."""

    id: str
    name: str
    saved_by: int
    tree: str


class GradeFacts(Answer):
    """How a grade was made. `dropped` is cut at a thousand; `dropped_count` counts all."""

    policy: str
    strategy: str | None = None
    dropped: list[str] = []
    dropped_count: int


class Receipt(Answer, Request):
    """What a checkout is, and how that was proven. docs/receipts.md defines every member.

    A receipt is also a request, to be verified: the daemon refuses members that it does not know.
    """

    format: Literal["mirrord-receipt/1"]
    version: str
    issued_at: datetime
    checkout: str
    parent: str | None = None
    instance: str | None = None
    dataset: str | None = None
    mirror: str
    upstream: str | None = None
    commit: str
    tree: str
    head: str
    history: model.History
    view: model.View
    backend: model.Backend
    created_at: datetime
    expires_at: datetime
    resets: int
    closure: Closure | None = None
    seal: Proven | None = None
    template: Proven | None = None
    clean: Proven | None = None
    layer: LayerFacts | None = None
    environment: str | None = None
    grade: GradeFacts | None = None
    diff: Digest
    signature: str | None = None

    def canonical(self) -> bytes:
        """The file to keep: canonical JSON (RFC 8785), without members that are None."""
        return canonical(self)

    def signed_bytes(self) -> bytes:
        """What a signature is of: the canonical form of all members but `signature`."""
        return canonical({**self.to_json(), "signature": None})


class Mismatch(Answer):
    """A member of a receipt that does not hold; `found` is None where nothing was found."""

    member: str
    stated: str | None
    found: str | None


class ReceiptReport(Answer):
    """The answer of `receipt --verify`; `checked` are the members that were compared."""

    holds: bool
    mismatches: list[Mismatch] = []
    checked: list[str] = []


# -- operations -----------------------------------------------------------------------------------

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


# -- the daemon -----------------------------------------------------------------------------------


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
