"""What instances need to run, and whether they do: recipes, builds, rehearsals, reports."""

from datetime import datetime
from typing import Annotated, Any, Literal

from .. import model
from .codec import Answer, Bounds, Problem, Repo, Request, Word


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


# -- reports on many instances, as the page shows them ---------------------------------------------

FAULTS_MAX = 1000
_Result = Annotated[str, Bounds(pattern="^[a-z@_, -]{1,40}$")]
_Counts = dict[_Result, Annotated[int, Bounds(ge=0, lt=2**53)]]


class AddReport(Request):
    """What a rehearsal, or a grading of predictions, found: numbers, and names of instances.

    `results` counts instances by result, `mirrors` does so for each repository. `faults` has, for
    the first of those without a good result, the step that failed, or the result.
    """

    kind: model.ReportKind
    dataset: Word | None = None
    duration_s: Annotated[float, Bounds(ge=0, lt=2**53)] = 0.0
    total: Annotated[int, Bounds(ge=0, lt=2**53)]
    results: Annotated[_Counts, Bounds(max_length=50)] = {}
    mirrors: Annotated[dict[Repo, _Counts], Bounds(max_length=10000)] = {}
    faults: Annotated[dict[Word, _Result], Bounds(max_length=FAULTS_MAX)] = {}


class Report(Answer):
    """A report as it was received. It was interrupted where `total` is more than the results."""

    id: str
    at: datetime
    kind: model.ReportKind
    dataset: str | None = None
    duration_s: float = 0.0
    total: int
    results: dict[str, int] = {}
    mirrors: dict[str, dict[str, int]] = {}
    faults: dict[str, str] = {}

    @property
    def done(self) -> int:
        return sum(self.results.values())
