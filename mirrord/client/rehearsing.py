"""Candidates and records of a rehearsal, and the verdict on logs of tests. Does no requests."""

import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from .. import errors, protocol, testlogs
from ..model import UNREAD_LIST, FoundStrategy, History, Readiness
from ..sandbox.verdicts import Verdict, VerdictBy
from ..testlogs import Want

FATAL = (errors.NoDaemonError, errors.StoppingError, errors.AccessError)


class Candidate(NamedTuple):
    """An instance to rehearse; `patches` has the names of its patches.

    `state` is a hash that changes with its row, its mirror and the daemon's version. An instance
    that cannot be read has only an `error`.
    """

    instance: str
    dataset: str | None
    mirror: str = ""
    repo: str | None = None
    base_commit: str | None = None
    commits: tuple[protocol.RecordedCommit, ...] = ()
    patches: tuple[str, ...] = ()
    history: History | None = None
    created_at: str = ""
    state: str = ""
    lacking: tuple[str, ...] = ()
    error: errors.MirrordError | None = None


def lacking(row: protocol.Instance) -> tuple[str, ...]:
    """Say what a checkout of the instance lacks that its commit names."""
    lacks = [f"submodule {path} is empty: {why}" for path, why in (row.missing or {}).items()]
    if row.lfs_missing:
        lacks.append(f"{row.lfs_missing} Git LFS pointers stand for files that are not had")
    return tuple(lacks)


PATCHES = ("@test_patch", "@patch")
"""In the order of a grader."""


@dataclass
class Step:
    """What a running step is told about itself."""

    strategy: FoundStrategy | None = None
    notes: Sequence[str] = ()


# errors that say nothing about an instance
_UNRELATED_ERRORS = (
    errors.ResourceError,
    errors.InternalError,
    errors.CheckoutBusyError,
    errors.CancelledError,
    errors.RecipeNotFoundError,
)


class Record:
    """The steps of an instance, and the first error."""

    def __init__(self) -> None:
        self.steps: list[protocol.RehearsalStep] = []
        self.error: errors.MirrordError | None = None
        self.is_known = True
        self.environment: str | None = None
        self.unexpected: list[protocol.UnexpectedTest] = []
        self.logs: list[str] = []
        self.verdict: VerdictBy | None = None
        self.contradictions: list[str] = []
        self.flaky: list[str] = []
        self.weighed: protocol.Weighed | None = None
        self.lacks: list[protocol.Missing] = []

    @contextmanager
    def step(self, name: str, *, needed: bool = False) -> Iterator[Step]:
        """Time and record a step; a failure is raised only if later steps need it."""
        began, step = time.perf_counter(), Step()
        try:
            yield step
        except FATAL:
            raise
        except errors.MirrordError as error:
            self.error = self.error or error
            self.add(name, "failed", error.message, began)
            if needed:
                raise
        else:
            is_noted = step.strategy not in (None, FoundStrategy.EXACT)
            detail = f"applied by strategy {step.strategy}" if is_noted else ""
            detail = "; ".join(filter(None, [detail, *step.notes]))
            self.add(name, "but" if step.notes else "ok", detail, began, step.strategy)

    def add(
        self,
        name: str,
        outcome: Literal["ok", "nothing", "failed", "but"],
        detail: str,
        began: float | None = None,
        strategy: FoundStrategy | None = None,
    ) -> None:
        took = round(time.perf_counter() - began, 6) if began else 0.0
        self.steps.append(
            protocol.RehearsalStep(
                name=name, outcome=outcome, detail=detail, duration_s=took, strategy=strategy
            )
        )

    def add_verdict(self, step: str, verdict: Verdict) -> None:
        """Add the findings of a run of tests; the verdict is by the log if one of them is."""
        self.verdict = "log" if self.verdict == "log" else verdict.by
        self.contradictions += (f"{step}: {finding}" for finding in verdict.findings)

    @property
    def missing(self) -> list[protocol.Missing]:
        """What the host lacks: what the error says, and what the environment and the tests say."""
        said = self.error.facts.get("missing", []) if self.error else []
        return [*map(protocol.Missing.from_json, said), *self.lacks]

    @property
    def problem(self) -> protocol.Problem | None:
        return protocol.Problem.from_json(self.error.problem()) if self.error else None

    @property
    def status(self) -> Readiness:
        if self.error:
            is_unrelated = isinstance(self.error, _UNRELATED_ERRORS) or not self.is_known
            return Readiness.UNTRIED if is_unrelated else Readiness.FAILED
        is_partly = any(step.outcome == "but" for step in self.steps)
        return Readiness.PARTLY if is_partly else Readiness.READY

    @property
    def reason(self) -> str:
        """The details of all steps with problems."""
        bad = [step for step in self.steps if step.outcome in ("failed", "but")]
        if not bad:
            return self.error.message if self.error else ""
        return "; ".join(f"{step.name}: {step.detail}" for step in bad)


def require_equal(noun: str, found: str, expected: str | None) -> None:
    """Raise ProofFailedError unless the values are equal."""
    if found != expected:
        raise errors.ProofFailedError(f"cannot prove {noun}: it is {found}, not {expected}")


# -- tests -----------------------------------------------------------------------------------------

# a broken environment fails every test: the first lines say what broke
_UNEXPECTED_MAX, _EXPLAINED_MAX = 100, 5


class Phase(NamedTuple):
    """A run of an instance's tests: the applied patches, and the wanted result of FAIL_TO_PASS."""

    step: str
    patches: tuple[str, ...]
    want: Want


PHASES = (
    Phase("tests before", PATCHES[:1], Want.FAIL),
    Phase("tests after", PATCHES, Want.PASS),
)
TESTS = Phase("tests", PATCHES[:1], Want.PASS)
"""A run of the tests in a grade."""


def modules_of(row: protocol.Instance) -> list[str]:
    """Return the modules of the test patch, which nothing may change while they run."""
    paths = re.findall(r"^diff --git a/.* b/(.*\.py)$", row.test_patch or "", re.MULTILINE)
    return [path for path in paths if ".." not in path.split("/")]


def command_of(recipe: protocol.Recipe, row: protocol.Instance) -> str:
    """Return the recipe's command with the files of the test patch, else of the listed tests. Only
    runners of Python take files.
    """
    is_scripted = testlogs.is_scripted(recipe.test_command)
    if is_scripted and testlogs.tells_status(recipe.test_command):
        return recipe.test_command  # a parsing_script reads its two streams
    if is_scripted or not testlogs.takes_files(recipe.log_parser):
        return f"exec 2>&1\n{recipe.test_command}"
    arguments = testlogs.arguments_of(row.test_patch or "", row.repo)
    if not arguments:
        listed = [*(row.fail_to_pass or ()), *(row.pass_to_pass or ())]
        arguments = [test.partition("::")[0] for test in listed if "::" in test]
    return f"exec 2>&1\n{recipe.test_command} {shlex.join(dict.fromkeys(arguments))}"


def judge_tests(
    phase: Phase, row: protocol.Instance, outcomes: testlogs.Outcomes, log: str
) -> tuple[list[protocol.UnexpectedTest], str]:
    """Return unexpected results of tests, and a fact about them, empty if there are none."""
    unexpected: list[protocol.UnexpectedTest] = []
    facts = []
    for name, tests, want in (
        ("FAIL_TO_PASS", row.fail_to_pass or [], phase.want),
        ("PASS_TO_PASS", row.pass_to_pass or [], Want.KEEP),
    ):
        verb: Literal["fail", "pass"] = "fail" if want is Want.FAIL else "pass"
        misses = list(testlogs.iter_misses(tests, outcomes, want))
        for test, outcome in misses[: _UNEXPECTED_MAX - len(unexpected)]:
            is_explained = verb == "pass" and len(unexpected) < _EXPLAINED_MAX
            unexpected.append(
                protocol.UnexpectedTest(
                    step=phase.step,
                    test=test,
                    expected=verb,
                    outcome=outcome.value if outcome else None,
                    lines=testlogs.lines_about(log, test) if is_explained else [],
                )
            )
        if misses:
            first = misses[0].test
            facts.append(f"{len(misses)} of {len(tests)} {name} do not {verb}, such as {first}")
    return unexpected, " and ".join(facts)


_SKIPS = (
    re.compile(r"^SKIPPED \[(\d+)\] \S+: (.+)$", re.MULTILINE),  # pytest -rA
    re.compile(r"\.\.\. (skipped) ['\"](.+)['\"]$", re.MULTILINE),  # unittest -v
)
_NEED = re.compile(
    r"could not import|no module named|not (?:installed|available|found|present|on path)"
    r"|isn't (?:installed|available)|unavailable|missing|\b(?:requires?|needs?)\b",
    re.IGNORECASE,
)


def needs_of(log: str) -> list[protocol.Missing]:
    """Return the reasons of skipped tests that name something which is not there."""
    counts = Counter[str]()
    for pattern in _SKIPS:
        for count, reason in pattern.findall(log):
            if _NEED.search(reason):
                counts[reason.strip()[:200]] += int(count) if count.isdigit() else 1
    return [
        protocol.Missing(kind="skipped", name=reason, tests=tests)
        for reason, tests in counts.items()
    ]


def weigh(environment: protocol.Environment, commit: str | None) -> protocol.Weighed:
    """Say what an environment costs, and how much of what came after a commit it has."""
    scans = [scan.count for scan in environment.scans if scan.commit == commit]
    size_bytes = environment.size_bytes or 0
    leaking = len(environment.findings) + sum(scans)
    disk_bytes = size_bytes - (environment.shared_bytes or 0)
    return protocol.Weighed(leaking=leaking, size_bytes=size_bytes, disk_bytes=disk_bytes)


def find_flaky(row: protocol.Instance, runs: Sequence[testlogs.Outcomes]) -> list[str]:
    """Return the tests of a row that pass in some of the runs and not in others."""
    tests = dict.fromkeys([*(row.fail_to_pass or ()), *(row.pass_to_pass or ())])
    good = {testlogs.Outcome.PASSED, testlogs.Outcome.SKIPPED}
    return [
        test for test in tests
        if len({testlogs.outcome_of(test, outcomes) in good for outcomes in runs}) > 1
    ]  # fmt: skip


def require_lists(row: protocol.Instance) -> None:
    """Raise ProofFailedError if a list of the row's tests could not be read at its import."""
    unread = [rule for rule in row.rules or () if rule.endswith(UNREAD_LIST)]
    if unread:
        raise errors.ProofFailedError(
            f"cannot judge {row.id}: {'; '.join(unread)}",
            hint="mend the list in the data set's file and import it again",
        )


def log_path(directory: Path, instance: str, step: str) -> Path:
    """Return the path of a log; ids may contain slashes, or be `..`."""
    name = re.sub(r"[^\w @+.-]|^\.", lambda match: f"%{ord(match[0]):02X}", instance)
    # NAME_MAX is 255 bytes, and a letter has up to four
    name = name.encode()[:200].decode(errors="ignore")
    return directory / name / f"{step.replace(' ', '-')}.log"
