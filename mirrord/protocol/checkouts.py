"""Checkouts: leases, forks, snapshots, prepared layers, grades, proofs, receipts, seals."""

from datetime import datetime
from typing import Annotated, Literal

from .. import model
from .codec import (
    Answer,
    Bounds,
    EnvironmentName,
    Label,
    LayerName,
    OwnerUid,
    Repo,
    Request,
    SnapshotName,
    Ttl,
    Word,
    canonical,
)


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
    label: Label | None = None


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
    label: str | None = None
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
