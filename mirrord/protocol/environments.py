"""Environments and tests of instances: recipes, builds, rehearsals, reports."""

from datetime import datetime
from typing import Annotated, Any, Literal

from .. import model
from .codec import Answer, Bounds, Problem, Repo, Request, Word


class Recipe(Answer, Request):
    """How an environment is built, and how tests run in it. See docs/environments.md.

    `requirements` are packages and `-r FILE` lines; `packages` are installed after them and take
    precedence. `pre_install` and `install` run in the instance's tree. Packages released after
    `index_date` are ignored. `host_packages` are Debian packages that the host must have. `runner`
    are patterns of the files of the tree that the test command is made of, besides those in it.
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
    runner: list[str] = []


class BuildEnvironments(Request):
    """Builds the environments of `names`, or of all instances of `dataset`.

    A name is an instance, or the key of an imported recipe or an earlier build. Named instances get
    their prepared layer, too; those of a dataset with `prewarm`. `again` retries a failed build
    although nothing has changed. `frozen` ignores packages released after the instance's date. With
    `images` the images that the rows name are imported, `jobs` at a time; `image_name` is a
    template for their names.
    """

    names: list[Word] = []
    dataset: Word | None = None
    prewarm: bool = False
    again: bool = False
    frozen: bool = False
    images: bool = False
    image_name: Word | None = None
    jobs: Annotated[int, Bounds(ge=1, le=256)] = 4


class ImportImage(Request):
    """Imports an image of `source` as the environment `key`, by default named like the source.

    `source` is `docker://…`, or the kind and name of an upload. `tree` is where the image has its
    repository; by default that is found.
    """

    source: Word
    key: Word | None = None
    tree: Word | None = None


class Image(Answer):
    """What commands in an image start with.

    The tree of a checkout is shown at `tree`; `repositories` are the directories with a `.git` that
    the image has.
    """

    layers: int
    user: str
    uid: int
    gid: int
    home: str
    workdir: str
    tree: str
    variables: dict[str, str] = {}
    entrypoint: list[str] = []
    command: list[str] = []
    repositories: list[str] = []


class Missing(Answer):
    """What a host lacks: an `interpreter`, a `package` of Debian that a recipe needs, a `program`
    or header that a build did not find, or what `tests` said that were `skipped` for it.
    """

    kind: Literal["interpreter", "package", "program", "skipped"]
    name: str
    tests: int = 0


class FailedBuild(Answer):
    """A build that failed, and why; `missing` is what the host lacks for it."""

    key: str
    detail: str
    missing: list[Missing] = []


class BuildReport(Answer):
    """The result of a build: `ready` environments, as KEY@DIGEST, and `prepared` commits.

    `tests` is how the tests of the one named instance run, if its environment is an image.
    """

    ready: list[str]
    failed: list[FailedBuild] = []
    prepared: list[str] = []
    tests: Recipe | None = None


class Preparation(Answer):
    """The prepared `layer` for an environment at this commit, or the `error` that prevented it.

    `findings` are those of the scan of the environment, relative to this commit.
    """

    mirror: str
    commit: str
    layer: str | None = None
    error: str | None = None
    findings: list[dict[str, Any]] = []


class EnvironmentScan(Answer):
    """What an environment has of what `mirror` has beyond `commit`.

    `count` is of all findings; `findings` are the first of them, as of `verify-seal --root`.
    """

    mirror: str
    commit: str
    at: datetime
    count: int
    findings: list[dict[str, Any]] = []
    notes: list[str] = []


class Environment(Answer):
    """An environment. `name` is KEY@DIGEST. It was built at `commit` of `mirror`, if it has one.

    `manifest` is the SHA-256 of the list of all files with modes and hashes. `shared_bytes` are
    shared with other environments. `dropped` counts omitted files by reason, `findings` are those
    of the scan. A failed build has an `error` and the last lines of its log (`tail`). `interpreter`
    is the host's, or None if the environment has its own. `holders` counts the checkouts and
    prepared layers that use it. Lists omit `prepared`, `scans` and `recipe`. Of an imported
    `image`, which has a `source` but no `python` and no `recipe`, `size_bytes` are those of its
    layers. `missing` are the packages of Debian that its recipe needs and the host lacks.
    """

    key: str
    name: str
    digest: str
    state: Literal["building", "ready", "failed"]
    python: str | None = None
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
    scans: list[EnvironmentScan] = []
    missing: list[Missing] = []
    recipe: Recipe | None = None
    image: Image | None = None
    source: str | None = None


class RehearsalStep(Answer):
    """One check of a rehearsal. `nothing`: the row has no such patch.

    `strategy` is how its patch applied.
    """

    name: str
    outcome: Literal["ok", "nothing", "failed", "but"]
    detail: str = ""
    duration_s: float = 0.0
    strategy: model.FoundStrategy | None = None


class UnexpectedTest(Answer):
    """A test with another outcome than its row says. `outcome` is None if the log lacks it.

    `lines` are the last ones about it in the log of this `step`.
    """

    step: str
    test: str
    expected: Literal["fail", "pass"]
    outcome: Literal["passed", "failed", "skipped", "error"] | None = None
    lines: list[str] = []

    @property
    def description(self) -> str:
        outcome = self.outcome or "not in the log"
        return f"{self.step}: {self.test}: {outcome}, expected to {self.expected}"


class Tested(Answer):
    """A run of an instance's tests in a grade. `reason` says what does not pass, or is empty.

    The `verdict` is by the runner's report, or by the log where it has none; `contradictions` are
    what the log, the exit status and the runner itself say against it.
    """

    environment: str | None = None
    verdict: Literal["report", "log"]
    reason: str = ""
    unexpected: list[UnexpectedTest] = []
    contradictions: list[str] = []
    log: str | None = None


class Weighed(Answer):
    """An environment of a rehearsal: `leaking` files of later commits, if `leaks` looked, and its
    bytes, `disk_bytes` of them shared with no other environment that was there before.
    """

    leaking: int
    size_bytes: int
    disk_bytes: int


class Rehearsed(Answer):
    """The rehearsal of one instance, with its steps until the first failure.

    `reason` is why it is not ready, `error` the problem that caused it. `state` identifies the row,
    the mirror and the daemon for which the result holds. If its tests ran, it has the
    `environment`, the first of the `unexpected` tests, and the files of the `logs`. The `verdict`
    is by the runner's report, or by the log; `contradictions` are what logs and exit statuses say
    against it. `flaky` tests passed in some of several runs and not in others. `missing` is what
    the host lacks for it, as far as its recipe, its build and its skipped tests say.
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
    weighed: Weighed | None = None
    unexpected: list[UnexpectedTest] = []
    verdict: Literal["report", "log"] | None = None
    contradictions: list[str] = []
    flaky: list[str] = []
    missing: list[Missing] = []
    logs: list[str] = []

    @property
    def ok(self) -> bool:
        """Return whether the instance can be checked out and graded."""
        return self.status in (model.Readiness.READY, model.Readiness.PARTLY)


# -- reports on many instances, for the page -------------------------------------------------------

# instances named in a report; the counts have all of them
FAULTS_MAX = 1000
_Result = Annotated[str, Bounds(pattern="^[a-z@_, -]{1,40}$")]
# numbers of JSON are doubles to other readers, exact below 2**53
_Counts = dict[_Result, Annotated[int, Bounds(ge=0, lt=2**53)]]


class AddReport(Request):
    """A report on a rehearsal, or on a grading of predictions: numbers, and names of instances.

    `results` counts instances by result, `mirrors` by repository and result. `faults` has the
    failed step, or the result, of the first instances without a good result.
    """

    kind: model.ReportKind
    dataset: Word | None = None
    duration_s: Annotated[float, Bounds(ge=0, lt=2**53)] = 0.0
    total: Annotated[int, Bounds(ge=0, lt=2**53)]
    results: Annotated[_Counts, Bounds(max_length=50)] = {}
    mirrors: Annotated[dict[Repo, _Counts], Bounds(max_length=10000)] = {}
    faults: Annotated[dict[Word, _Result], Bounds(max_length=FAULTS_MAX)] = {}


class Report(Answer):
    """A received report. If `total` exceeds the sum of results, the run was interrupted."""

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
