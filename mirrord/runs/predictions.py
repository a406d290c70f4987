"""The predictions of a file, graded, and the report on them.

The file is read twice: first to find the last row of each instance and model, which counts as for
SWE-bench, then row by row. Grades that are not kept are bound to this process.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from .. import errors
from ..client._async import AsyncClient, AsyncGrade
from ..client._async.testrun import build_environment, run_tests
from ..client.rehearsing import TESTS, judge_tests, log_path, require_lists
from ..errors import MirrordError
from ..model import Bind, ReportKind, View
from ..protocol import Grade, Recipe, Tested, to_json
from ..quoting import quote_name
from ..testlogs import read_parsers
from .prediction_file import Fault, Prediction
from .reports import PAGES, RunReport

# -- results ---------------------------------------------------------------------------------------


class State(StrEnum):
    """The result of a prediction. The first four have a grade, the last two of them were run."""

    PREPARED = "prepared"
    EMPTY = "empty"
    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    CONFLICT = "conflict"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    FAILED = "failed"
    INVALID = "invalid"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True)
class GradedPrediction:
    """A row and its result. `counts` is the line that counts instead of a duplicate."""

    line: int
    state: State
    instance: str | None = None
    model: str | None = None
    grade: Grade | None = None
    error: MirrordError | None = None
    counts: int | None = None
    seconds: float | None = None
    is_kept: bool = False
    tested: Tested | None = None

    @property
    def touched_tests(self) -> list[str]:
        """Changed paths that are tests, by the rules or the instance's test patch."""
        steering = self.grade.steering if self.grade else []
        return sorted(
            {quote_name(s.path) for s in steering if s.kind == "tests" or s.action == "restored"}
        )

    @property
    def reason(self) -> str:
        if self.counts:
            return f"line {self.counts} counts"
        if self.tested:
            return "; ".join(filter(None, [self.tested.reason, *self.tested.contradictions]))
        if self.error:
            return self.error.message
        return "; ".join(self.grade.notes) if self.grade else ""

    def to_json(self) -> dict[str, Any]:
        grade = self.grade
        return {
            "line": self.line,
            "instance": self.instance,
            "model": self.model,
            "state": self.state,
            "strategy": grade.strategy if grade else None,
            "tests_strategy": grade.tests_strategy if grade else None,
            "changed": grade.changed if grade else None,
            "touched_tests": self.touched_tests,
            "steering": grade.steering if grade else [],
            "judged_by": grade.judged_by if grade else None,
            "dropped": list(map(quote_name, grade.dropped)) if grade else [],
            "notes": grade.notes if grade else [],
            "checkout": grade.id if grade and self.is_kept else None,
            "path": grade.path if grade and self.is_kept else None,
            "seconds": None if self.seconds is None else round(self.seconds, 6),
            "counts": self.counts,
            "tests": self.tested.to_json() if self.tested else None,
            "error": self.error.problem() if self.error else None,
        }


class GradingReport(RunReport[GradedPrediction]):
    """A report of the predictions in a file, `source`."""

    kind = ReportKind.GRADING
    noun = "prediction"
    template = "predictions.html"
    suffixes = {".jsonl"} | PAGES
    results: ClassVar = {
        State.PREPARED: ("good", "the patch applies; the grade has it and the tests"),
        State.EMPTY: ("other", "the patch changes nothing"),
        State.RESOLVED: ("good", "the tests pass that should"),
        State.UNRESOLVED: ("bad", "a test does not pass that should"),
        State.CONFLICT: ("bad", "the patch does not apply"),
        State.REFUSED: ("bad", "the policy refuses a change that could steer the tests"),
        State.UNKNOWN: ("other", "no dataset has the instance, or datasets differ in it"),
        State.FAILED: ("bad", "another error"),
        State.INVALID: ("bad", "the row is not a prediction"),
        State.DUPLICATE: ("other", "a later row of the same instance and model counts"),
    }

    def __init__(
        self, paths: Iterable[Path], *, source: str, dataset: str | None, total: int
    ) -> None:
        super().__init__(paths, dataset, total)
        self._source = source

    def order(self, row: GradedPrediction) -> int:
        return row.line

    def result_of(self, row: GradedPrediction) -> State:
        return row.state

    def mirror_of(self, row: GradedPrediction) -> str | None:
        return row.grade.mirror if row.grade else None

    def faults(self) -> Iterator[tuple[str, str]]:
        return ((e.instance, str(e.state)) for e in self.rows if e.error and e.instance)

    def title(self) -> str:
        return f"Predictions in {self._source}"

    def close(self) -> None:
        """Write the totals and the pages."""
        self.write_line({"totals": self.totals()})
        super().close()

    @property
    def exit_status(self) -> int:
        """The exit status of the first prediction without a grade, else 0."""
        return next((row.error.exit_status for row in self.rows if row.error), 0)

    def totals(self) -> dict[str, Any]:
        """Return counts of predictions by state, strategy and rule."""
        graded = [(row, row.grade) for row in self.rows if row.grade]
        rules = Counter(rule for _, grade in graded for rule in {s.rule for s in grade.steering})
        return {
            "predictions": self._source,
            "dataset": self.dataset,
            **super().totals(),
            "strategies": dict(Counter(grade.strategy for _, grade in graded if grade.strategy)),
            "tests_strategies": dict(
                Counter(grade.tests_strategy for _, grade in graded if grade.tests_strategy)
            ),
            "touched_tests": sum(bool(row.touched_tests) for row, _ in graded),
            "steering": dict(rules.most_common()),
            "dropped": sum(bool(grade.dropped) for _, grade in graded),
        }

    def answer(self) -> dict[str, Any]:
        rows = [outcome.to_json() for outcome in self.rows]
        return {"predictions": to_json(rows), "totals": to_json(self.totals())}


# -- grading ---------------------------------------------------------------------------------------


_FATAL = (errors.NoDaemonError, errors.StoppingError)


class Grader:
    """Grades predictions; tasks may share it."""

    def __init__(
        self,
        client: AsyncClient,
        last: dict[tuple[str, str], int],
        keep: bool,
        choices: dict[str, Any],
        tests: "SuiteRunner | None",
    ) -> None:
        self._client, self._last, self._tests = client, last, tests
        self._keep, self._choices = keep, choices
        self._bind = Bind.LEASE if keep else Bind.PROCESS

    async def grade(self, row: Prediction | Fault) -> GradedPrediction:
        """Grade a prediction and release the grade, unless it is kept."""
        if isinstance(row, Fault):
            fault = errors.UsageError(f"cannot read line {row.line}: {row.reason}")
            return GradedPrediction(row.line, State.INVALID, error=fault)
        if (line := self._last.get(row.key, row.line)) != row.line:
            return GradedPrediction(row.line, State.DUPLICATE, *row.key, counts=line)
        began = time.perf_counter()
        try:
            recipe, choices = None, self._choices
            if self._tests:
                environment, recipe = await self._tests.prepare(row)
                choices = {**choices, "environment": environment}
            grade = await self._prepare(row, choices)
        except (*_FATAL, errors.AccessError):  # all other predictions would fail too
            raise
        except errors.MirrordError as error:
            return GradedPrediction(row.line, _state_of(error), *row.key, error=error)
        took = time.perf_counter() - began
        state = State.PREPARED if grade.report.changed else State.EMPTY
        outcome = GradedPrediction(
            row.line, state, *row.key, grade.report, seconds=took, is_kept=self._keep
        )
        # leaving the block of a grade would release it
        if self._keep:
            return await self._tested(grade, recipe, outcome)
        async with grade:  # releases it, even if this task is cancelled
            return await self._tested(grade, recipe, outcome)

    async def _tested(
        self, grade: AsyncGrade, recipe: Recipe | None, outcome: GradedPrediction
    ) -> GradedPrediction:
        if not self._tests or not recipe or outcome.state is State.EMPTY:
            return outcome
        try:
            tested = await self._tests.run(grade, recipe, outcome)
        except (*_FATAL, errors.AccessError):
            raise
        except errors.MirrordError as error:
            return replace(outcome, state=State.FAILED, error=error)
        state = State.UNRESOLVED if tested.reason else State.RESOLVED
        return replace(outcome, state=state, tested=tested)

    async def _prepare(self, row: Prediction, choices: dict[str, Any]) -> AsyncGrade:
        choices = {**choices, "sandbox": not self._keep}  # its path is printed only if it is kept
        try:
            return await self._client.grade(row.instance, row.patch, bind=self._bind, **choices)
        except errors.ProcessGoneError:  # the daemon cannot see this process
            self._bind = Bind.LEASE
            return await self._client.grade(row.instance, row.patch, **choices)


class SuiteRunner:
    """Runs the tests of graded predictions, each in its grade, with the instance's environment."""

    def __init__(
        self,
        client: AsyncClient,
        dataset: str | None,
        timeout: timedelta,
        logs: Path | None,
        parsers: Path | None,
    ) -> None:
        self._client, self._dataset = client, dataset
        self._timeout, self._logs = timeout, logs
        self._parsers = read_parsers(parsers) if parsers else None

    async def prepare(self, row: Prediction) -> tuple[str, Recipe]:
        """Return the name of a row's environment, built if missing, and its recipe."""
        return await build_environment(self._client, row.instance, self._dataset, self._parsers)

    async def run(self, grade: AsyncGrade, recipe: Recipe, outcome: GradedPrediction) -> Tested:
        identity = outcome.instance or ""
        row = await self._client.get_instance(identity, view=View.GRADER, dataset=self._dataset)
        require_lists(row)
        if not (row.fail_to_pass or row.pass_to_pass):
            fact = f"cannot judge {identity}: its row lists no tests"
            raise errors.ProofFailedError(fact, hint="add FAIL_TO_PASS and PASS_TO_PASS")
        file = None
        if self._logs:
            file = log_path(self._logs, identity, f"{TESTS.step} {outcome.line}")
        log, verdict = await run_tests(
            self._client, grade, row, recipe, self._timeout, file, self._parsers
        )
        unexpected, reason = judge_tests(TESTS, row, verdict.outcomes, log)
        return Tested(
            environment=grade.environment,
            verdict=verdict.by,
            reason=reason,
            unexpected=unexpected,
            contradictions=verdict.findings,
            log=str(file) if file else None,
        )


_UNKNOWN = (errors.InstanceNotFoundError, errors.InstanceAmbiguousError)
_CONFLICT = (errors.PatchConflictError, errors.InvalidPatchError)


def _state_of(error: errors.MirrordError) -> State:
    if isinstance(error, _UNKNOWN):
        return State.UNKNOWN
    if isinstance(error, errors.SteeringRefusedError):
        return State.REFUSED
    return State.CONFLICT if isinstance(error, _CONFLICT) else State.FAILED
