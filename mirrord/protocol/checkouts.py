"""Checkouts: leases, forks, snapshots, prepared layers, grades, proofs, receipts, seals."""

from datetime import datetime
from typing import Annotated, Literal

from .. import model
from .codec import (
    Answer,
    Bounds,
    EnvironmentName,
    GitName,
    GitPath,
    Label,
    LayerName,
    OwnerUid,
    Problem,
    Repo,
    Request,
    Revision,
    SnapshotName,
    Ttl,
    Word,
    canonical,
)
from .environments import Image


class StartCheckout(Request):
    """Asks for a checkout of `instance` (an id, or NAME@COMMITISH), or of `mirror` with `commit`.

    `dataset` chooses if datasets record the id differently. With `bind` "process" the lease ends
    with the process that made the connection, not with the connection. `attach` asks for a checkout
    that can be attached, even if the peer's mount namespace does not show it; `sandbox` for one
    whose path need not be shown, because sandboxes attach it themselves. `layer` names a
    prepared layer of the same commit; the default is the layer `environment-<digest>` of the
    `environment`, if that was saved. `objects` "private" is for a pool tree whose `.git` will be
    read where the daemon's sealed stores cannot be seen, as in another container.
    """

    instance: Revision | None = None
    mirror: Repo | None = None
    commit: Revision | None = None
    dataset: Word | None = None
    history: model.History | None = None
    view: model.View = model.View.AGENT
    backend: model.Backend | None = None
    objects: model.ObjectSource | None = None
    ttl: Ttl | None = None
    owner: OwnerUid | None = None
    bind: model.Bind = model.Bind.LEASE
    attach: bool = False
    sandbox: bool = False
    layer: LayerName | None = None
    environment: EnvironmentName | None = None
    label: Label | None = None


class ResetCheckout(Request):
    """Resets to the same commit, an `instance` or `commit` of the same mirror, or `to` a snapshot.

    The environment stays unless another is named; at the same commit the layer does, too.
    """

    instance: Revision | None = None
    commit: Revision | None = None
    dataset: Word | None = None
    to: Word | None = None
    layer: LayerName | None = None
    environment: EnvironmentName | None = None


class ForkCheckout(Request):
    """Forks the current state, or the `snapshot` of this name."""

    snapshot: Word | None = None
    ttl: Ttl | None = None
    bind: model.Bind = model.Bind.LEASE


class MakeSnapshot(Request):
    """Makes a snapshot. The default name is s1, s2 and so on."""

    name: SnapshotName | None = None


class AttachCheckout(Request):
    """Asks for a mount of a checkout's directory, for the peer's own mount namespace."""

    target: model.Target = model.Target.TREE


class SaveLayer(Request):
    """Saves the changes of tree and environment as a prepared layer."""

    name: LayerName


class RenewCheckout(Request):
    ttl: Ttl | None = None


class RestorePaths(Request):
    commit: str
    paths: Annotated[
        list[GitPath],
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
    """Asks for a grade of a checkout: its changes at the same commit, with the tests.

    The grade has the checkout's layer and environment, as they were before any changes. `dataset`
    chooses if datasets record other tests for its instance.
    """

    dataset: Word | None = None
    policy: PolicyText | None = None
    backend: model.Backend | None = None
    ttl: Ttl | None = None
    owner: OwnerUid | None = None
    bind: model.Bind = model.Bind.LEASE
    attach: bool = False
    sandbox: bool = False


class Turn(Request):
    """Ends a turn in `checkout`: its `diff`, a `grade`, a `snapshot`, a `reset` and its `release`.

    They are done in this order, up to the first that fails. A reset with a release makes no tree.
    """

    checkout: Word
    diff: model.DiffFormat | None = None
    grade: StartGrade | None = None
    snapshot: MakeSnapshot | None = None
    reset: ResetCheckout | None = None
    release: bool = False


class TakeTurns(Request):
    """Ends turns, all at once, and after them makes `checkouts`, all at once."""

    turns: Annotated[list[Turn], Bounds(max_length=64)] = []
    checkouts: Annotated[list[StartCheckout], Bounds(max_length=64)] = []


class Checkout(Answer):
    """A checkout of the base `commit`, with its verified `tree`. `timings` are seconds per step.

    `path` is `directory/tree`. With an `environment` (KEY@DIGEST) its prefix is
    `directory/environment`. `directory` contains nothing else; mounted elsewhere with `rslave`, it
    follows every reset. Resets and diffs are relative to the prepared `layer`. `taken_by` is the
    uid that asked for the checkout; it and `owner_uid` may use and release it. `parent` is the
    checkout that this one was forked from or grades. `volumes` are its names in docker or podman.
    `workdir` is where the instance's row wants the tree in a sandbox. The `image` is the
    environment's, if that is one.
    `.git` of a pool tree may borrow the objects of the directory `borrows`, which has to be shown
    at the same path, read-only, wherever the tree is. `is_resetting` after a reset that failed
    half-way: only another reset or a release works then.
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
    borrows: str | None = None
    resets: int = 0
    is_resetting: bool = False
    layer: str | None = None
    environment: str | None = None
    image: Image | None = None
    workdir: str | None = None
    label: str | None = None
    timings: dict[str, float] = {}


class Attachment(Answer):
    """The answer after the mount, which is a descriptor with an interim response (SCM_RIGHTS).

    `move_mount` attaches it. Until then it shows the checkout after its `resets`-th reset.
    """

    checkout: str
    target: model.Target
    resets: int


class Copied(Answer):
    """A copy of a checkout's state at `taken_at`.

    `files` counts changed, new and removed ones. `left_out` counts by kind what is not in the copy:
    pipes, sockets, devices, git_files (configuration, hooks and the like in `.git`). Without `git`,
    `.git` is the base commit's, because the checkout's was not a plain repository.
    """

    taken_at: datetime
    files: int
    size_bytes: int
    left_out: dict[str, int] = {}
    git: bool = True


class Fork(Checkout):
    """A forked checkout, with the `snapshot` that it was made from."""

    snapshot: str | None = None
    copied: Copied


class Snapshot(Answer):
    """A saved state of a checkout, relative to its base commit at that time."""

    name: str
    checkout: str
    commit: str
    instance: str | None = None
    copied: Copied


class PreparedLayer(Answer):
    """Saved changes of a checkout, for checkouts of the same commit and history.

    `saved_by` is the uid that asked; a layer saved by an administrator is `shared` with all users.
    `written_by` is the uid that the checkout belonged to. `environment_copied` are its changes of
    `environment`. `checkouts` counts the ones that use it.
    """

    id: str
    name: str
    mirror: str
    commit: str
    history: model.History
    instance: str | None = None
    saved_by: int
    written_by: int
    shared: bool
    copied: Copied
    environment: str | None = None
    environment_copied: Copied | None = None
    checkouts: int = 0


class Steering(Answer):
    """A path of the agent's change that could steer the tests, and the rule that matched.

    `applied`: it is in the grade. `dropped`: it is not, by policy. `restored`: the test patch
    overwrites it. `left`: it is not part of a change, such as an ignored file. `refused`: it is the
    reason why there is no grade.
    """

    rule: str
    kind: model.SteeringKind
    path: GitName
    action: Literal["applied", "dropped", "restored", "left", "refused"]
    detail: str = ""


class Grade(Checkout):
    """A checkout for the grader. `strategy` is how a patch applied, None for a checkout's change.

    `tests_strategy` is how the instance's test patch applied, None if it has none. `changed` counts
    the paths of the agent's change, `dropped` lists those missing in the grade. `tests` are the
    paths of the instance's test patch, None if it has none. It was `judged_by` what its environment
    loads, or without an environment by `names` of paths and modules. `notes` say which submodules
    the patches move without their files.
    """

    strategy: model.FoundStrategy | None = None
    tests_strategy: model.FoundStrategy | None = None
    changed: int
    dropped: list[GitName] = []
    steering: list[Steering] = []
    judged_by: Literal["loading", "names"] = "names"
    tests: list[GitName] | None = None
    notes: list[str] = []


class Proof(Answer):
    """The checks of a reset, with the hashes it read.

    The counts are null if the reset did not check single files: an overlay reset drops the client's
    layer unread and shows a template, which was verified when it was built. After a reset to a
    `snapshot`, `head` is the snapshot's HEAD.
    """

    head: str
    tree: str
    index: str
    control_files: int
    files_checked: int | None
    files_restored: int | None
    files_removed: int | None
    refs: list[GitName] = []
    packs: list[str] = []
    snapshot: str | None = None
    method: str


class ResetAnswer(Checkout):
    """A checkout after a reset, with its proof."""

    proof: Proof


class TurnAnswer(Answer):
    """What was done of a turn, and the `problem` of the step that failed.

    `diff` is in base64; `diff_by` and `notes` are those of a diff's headers.
    """

    checkout: str
    diff: str | None = None
    diff_by: str | None = None
    notes: list[str] = []
    grade: Grade | None = None
    snapshot: Snapshot | None = None
    reset: ResetAnswer | None = None
    released: bool = False
    problem: Problem | None = None


class CheckoutAnswer(Answer):
    """One checkout of several, or the `problem` that it met."""

    checkout: Checkout | None = None
    problem: Problem | None = None


class TurnsAnswer(Answer):
    """The answers to all turns and checkouts, in the order of the request."""

    turns: list[TurnAnswer]
    checkouts: list[CheckoutAnswer]


class ApplyAnswer(Checkout):
    """`strategy` is how the patch applied: `exact`, unless the apply was tolerant.

    `notes` say which submodules it moves without their files.
    """

    strategy: model.FoundStrategy
    notes: list[str] = []


class RestoreAnswer(Answer):
    """The paths that were restored."""

    paths: list[GitName]


RECEIPT_FORMAT: Literal["mirrord-receipt/1"] = "mirrord-receipt/1"


class Closure(Answer):
    """The objects of a sealed store. `sha256` is of their ids, sorted, each with a line feed."""

    objects: int
    sha256: str


class Proven(Answer):
    """The method and time of a proof."""

    method: str
    at: datetime


class Digest(Answer):
    """Size and hash of content that is not sent along."""

    bytes: int
    sha256: str


class LayerFacts(Answer):
    """The prepared layer of a checkout. `tree` is the git tree of the commit with the layer."""

    id: str
    name: str
    saved_by: int
    tree: str


class GradeFacts(Answer):
    """How a grade was made. `dropped` has the first thousand, `dropped_count` counts all."""

    policy: str
    strategy: str | None = None
    dropped: list[GitName] = []
    dropped_count: int


class Receipt(Answer, Request):
    """The content of a checkout and its proofs. docs/seals.md defines every member.

    It is also a request for verification, so the daemon refuses unknown members.
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
        """Return the receipt as a file: canonical JSON (RFC 8785) without members that are None."""
        return canonical(self)

    def signed_bytes(self) -> bytes:
        """Return the signed bytes: the canonical form of all members but `signature`."""
        return canonical({**self.to_json(), "signature": None})


class Mismatch(Answer):
    """A member of a receipt that does not hold. `found` is None if there is no such thing."""

    member: str
    stated: str | None
    found: str | None


class ReceiptReport(Answer):
    """The answer of `receipt --verify`. `checked` lists the compared members.

    The mirror cannot tell whether a receipt was issued: `proven_by` lists what does, the daemon's
    `record` of it or its `signature`. Without either nothing is proven, even if it `holds`.
    """

    holds: bool
    mismatches: list[Mismatch] = []
    checked: list[str] = []
    proven_by: list[Literal["record", "signature"]] = []


class SealLeak(Answer):
    """Something beyond the history, and where it was found."""

    kind: str
    detail: str


class SealReport(Answer):
    """The answer of `verify-seal`, and of the daemon on a checkout's store.

    `sealed` is true if there are no leaks.
    """

    path: GitName
    base: str
    sealed: bool
    head: GitName | None = None
    objects_present: int = 0
    objects_in_closure: int = 0
    leaks: list[SealLeak] = []
    checked: list[str] = []


class RootLeak(SealLeak):
    """Content of a directory or an image that is newer than the base commit, or leads to such.

    `path` is from the top, with `!` between an archive and its member. A `future-file` has the
    content that `name` first got in `commit`. `hidden`: a later layer of the image covers it, so a
    container does not show it.
    """

    path: GitName
    commit: str | None = None
    name: GitName | None = None
    hidden: bool = False


class RootReport(Answer):
    """The answer of `verify-seal --root`. `sealed` is true if all leaks are hidden.

    `notes` list what was not scanned, and repositories of other projects.
    """

    root: GitName
    base: str
    sealed: bool
    file_count: int
    size_bytes: int
    repositories: list[GitName]
    leaks: list[RootLeak]
    notes: list[str]
