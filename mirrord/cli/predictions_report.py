"""The report on predictions: JSON lines, with the totals last, and a page."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from ..errors import MirrordError
from ..model import ReportKind
from ..protocol import Grade, to_json
from .output import count, table
from .reports import PAGES, Report


class State(StrEnum):
    """What became of a prediction. The first two have a grade."""

    PREPARED = "prepared"
    EMPTY = "empty"
    CONFLICT = "conflict"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    FAILED = "failed"
    INVALID = "invalid"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True)
class GradedPrediction:
    """One row of a file of predictions. `counts` is the line of the duplicate that counts."""

    line: int
    state: State
    instance: str | None = None
    model: str | None = None
    grade: Grade | None = None
    error: MirrordError | None = None
    counts: int | None = None
    seconds: float | None = None
    is_kept: bool = False

    @property
    def touched_tests(self) -> list[str]:
        """Paths of the change that are tests, by the rules or by the instance's test patch."""
        found = self.grade.steering if self.grade else []
        return sorted({s.path for s in found if s.kind == "tests" or s.action == "restored"})

    @property
    def why(self) -> str:
        """Why there is no grade."""
        if self.counts:
            return f"line {self.counts} counts"
        return self.error.message if self.error else ""

    def to_json(self) -> dict[str, Any]:
        grade = self.grade
        return {
            "line": self.line,
            "instance": self.instance,
            "model": self.model,
            "state": self.state,
            "strategy": grade.strategy if grade else None,
            "changed": grade.changed if grade else None,
            "touched_tests": self.touched_tests,
            "steering": grade.steering if grade else [],
            "dropped": grade.dropped if grade else [],
            "checkout": grade.id if grade and self.is_kept else None,
            "path": grade.path if grade and self.is_kept else None,
            "seconds": None if self.seconds is None else round(self.seconds, 6),
            "counts": self.counts,
            "error": self.error.problem() if self.error else None,
        }


class GradingReport(Report[GradedPrediction]):
    """Of the predictions in a file, `source`."""

    kind = ReportKind.GRADING
    noun = "prediction"
    template = "predictions.html"
    suffixes = {".jsonl"} | PAGES
    results: ClassVar = {
        State.PREPARED: ("good", "the patch applies; the grade has it and the tests"),
        State.EMPTY: ("other", "the patch changes nothing"),
        State.CONFLICT: ("bad", "the patch does not apply"),
        State.REFUSED: ("bad", "the policy refuses what could steer the tests"),
        State.UNKNOWN: ("other", "no dataset has the instance, or several differ in it"),
        State.FAILED: ("bad", "it could not be graded"),
        State.INVALID: ("bad", "the row is no prediction"),
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
        """That of the first prediction that has no grade."""
        return next((each.error.exit_status for each in self.rows if each.error), 0)

    def totals(self) -> dict[str, Any]:
        """Counts of predictions: by state, by strategy, by rule."""
        graded = [(each, each.grade) for each in self.rows if each.grade]
        rules = Counter(rule for _, grade in graded for rule in {s.rule for s in grade.steering})
        return {
            "predictions": self._source,
            "dataset": self.dataset,
            **super().totals(),
            "strategies": dict(Counter(grade.strategy for _, grade in graded if grade.strategy)),
            "touched_tests": sum(bool(each.touched_tests) for each, _ in graded),
            "steering": dict(rules.most_common()),
            "dropped": sum(bool(grade.dropped) for _, grade in graded),
        }

    def answer(self) -> dict[str, Any]:
        """The answer with --json."""
        rows = [outcome.to_json() for outcome in self.rows]
        return {"predictions": to_json(rows), "totals": to_json(self.totals())}

    def lines(self) -> Iterator[str]:
        """The answer for people."""
        models = len({each.model for each in self.rows if each.model}) > 1
        rows = []
        for each in self.rows:
            grade = each.grade
            rules = ", ".join(sorted({s.rule for s in grade.steering})) if grade else ""
            how = (grade.strategy, grade.changed) if grade else ("", "")
            named = (each.instance, each.model) if models else (each.instance,)
            rows.append((each.line, *named, each.state, *how, rules, each.why))
        named = ("INSTANCE", "MODEL") if models else ("INSTANCE",)
        yield from table(("LINE", *named, "RESULT", "HOW", "PATHS", "STEERING", "WHY"), rows)
        states = Counter(each.state for each in self.rows)
        counted = ", ".join(f"{states[state]} {state}" for state in State if states[state])
        yield f"{count(len(self.rows), 'prediction')}: {counted}"
