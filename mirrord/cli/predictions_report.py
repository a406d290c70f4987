"""The report on predictions: JSON lines for programs, one HTML page for people.

A line is written when its prediction is done, the totals are the last: an interrupted report is
whole as far as it goes, and says so. The page has no script and loads nothing; everything in it
that a model wrote is escaped.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from .. import __version__
from ..model import ReportKind, utc_now
from ..protocol import FAULTS_MAX, AddReport, to_bytes, to_json
from .outcomes import GradedPrediction, State
from .output import count, table
from .page import PAGES, create
from .predictions_page import render

_LINES = {".jsonl"}


class Report:
    """Collects outcomes and writes them to files by their suffix; `close` completes the files."""

    def __init__(
        self, paths: Iterable[Path], *, source: str, dataset: str | None, total: int
    ) -> None:
        self.outcomes: list[GradedPrediction] = []
        self._facts = {"predictions": source, "dataset": dataset, "mirrord": __version__}
        self._total = total
        self._began_at = utc_now()
        self._lines: list[BinaryIO] = []
        self._pages: list[BinaryIO] = []
        with ExitStack() as opened:  # now: better than after hours of work
            for path in paths:
                file = opened.enter_context(create(path, _LINES | PAGES))
                (self._lines if path.suffix.lower() in _LINES else self._pages).append(file)
            self._files = opened.pop_all()

    def add(self, outcome: GradedPrediction) -> None:
        self.outcomes.append(outcome)
        for file in self._lines:
            file.write(to_bytes(outcome.to_json()) + b"\n")
            file.flush()

    def close(self) -> None:
        """Write the totals and the pages."""
        self.outcomes.sort(key=lambda outcome: outcome.line)
        with self._files:
            for file in self._lines:
                file.write(to_bytes({"totals": self.totals()}) + b"\n")
            for file in self._pages:
                page = render(self.totals(), self.outcomes)
                file.write(page.encode("utf-8", "backslashreplace"))

    @property
    def exit_status(self) -> int:
        """That of the first prediction that has no grade."""
        ordered = sorted(self.outcomes, key=lambda outcome: outcome.line)
        return next((each.error.exit_status for each in ordered if each.error), 0)

    def totals(self) -> dict[str, Any]:
        """Counts of predictions: by state, by strategy, by rule."""
        graded = [(each, each.grade) for each in self.outcomes if each.grade]
        rules = Counter(rule for _, grade in graded for rule in {s.rule for s in grade.steering})
        return {
            **self._facts,
            "total": self._total,
            "done": len(self.outcomes),
            "states": dict(Counter(each.state for each in self.outcomes)),
            "strategies": dict(Counter(grade.strategy for _, grade in graded if grade.strategy)),
            "touched_tests": sum(bool(each.touched_tests) for each, _ in graded),
            "steering": dict(rules.most_common()),
            "dropped": sum(bool(grade.dropped) for _, grade in graded),
            "began_at": self._began_at,
            "ended_at": utc_now(),
        }

    def report(self) -> AddReport:
        """What the daemon's page shows of it."""
        totals, mirrors = self.totals(), dict[str, Counter[str]]()
        for each in self.outcomes:
            if each.grade:
                mirrors.setdefault(each.grade.mirror, Counter())[each.state] += 1
        bad = {each.instance: str(each.state) for each in self.outcomes if each.error}
        named = [(name, state) for name, state in bad.items() if name and len(name) <= 500]
        return AddReport(
            kind=ReportKind.GRADING,
            dataset=totals["dataset"],
            duration_s=(totals["ended_at"] - self._began_at).total_seconds(),
            total=self._total,
            results=totals["states"],
            mirrors={name: dict(counts) for name, counts in mirrors.items()},
            faults=dict(named[:FAULTS_MAX]),
        )

    def answer(self) -> dict[str, Any]:
        """The answer with --json."""
        rows = [outcome.to_json() for outcome in self.outcomes]
        return {"predictions": to_json(rows), "totals": to_json(self.totals())}

    def lines(self) -> Iterator[str]:
        """The answer for people."""
        models = len({each.model for each in self.outcomes if each.model}) > 1
        rows = []
        for each in sorted(self.outcomes, key=lambda outcome: outcome.line):
            grade = each.grade
            rules = ", ".join(sorted({s.rule for s in grade.steering})) if grade else ""
            how = (grade.strategy, grade.changed) if grade else ("", "")
            named = (each.instance, each.model) if models else (each.instance,)
            rows.append((each.line, *named, each.state, *how, rules, each.why))
        named = ("INSTANCE", "MODEL") if models else ("INSTANCE",)
        yield from table(("LINE", *named, "RESULT", "HOW", "PATHS", "STEERING", "WHY"), rows)
        states = Counter(each.state for each in self.outcomes)
        counted = ", ".join(f"{states[state]} {state}" for state in State if states[state])
        yield f"{count(len(self.outcomes), 'prediction')}: {counted}"
