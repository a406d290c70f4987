"""The report on predictions: JSON lines for programs, one HTML page for people.

A line is written when its prediction is done, the totals are the last: an interrupted report is
whole as far as it goes, and says so. Every text in the page may be a model's, and is escaped.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from .. import __version__
from ..errors import MirrordError
from ..model import ReportKind, utc_now
from ..protocol import FAULTS_MAX, AddReport, Grade, to_bytes, to_json
from . import page
from .output import count, table, when
from .page import PAGES, create, escape


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


MEANINGS = {
    State.PREPARED: "the patch applies; the grade has it and the tests",
    State.EMPTY: "the patch changes nothing",
    State.CONFLICT: "the patch does not apply",
    State.REFUSED: "the policy refuses what could steer the tests",
    State.UNKNOWN: "no dataset has the instance, or several differ in it",
    State.FAILED: "it could not be graded",
    State.INVALID: "the row is no prediction",
    State.DUPLICATE: "a later row of the same instance and model counts",
}


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


_LINES = {".jsonl"}


class GradingReport:
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
        bad = [(e.instance, str(e.state)) for e in self.outcomes if e.error and e.instance]
        return AddReport(
            kind=ReportKind.GRADING,
            dataset=totals["dataset"],
            duration_s=(totals["ended_at"] - self._began_at).total_seconds(),
            total=self._total,
            results=totals["states"],
            mirrors={name: dict(counts) for name, counts in mirrors.items()},
            faults=dict(bad[:FAULTS_MAX]),
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


_SHOWN_MAX = 100


def render(totals: Mapping[str, Any], outcomes: Sequence[GradedPrediction]) -> str:
    """The page of a report, in the order of the predictions."""
    return "".join(_sections(totals, outcomes))


def _sections(totals: Mapping[str, Any], outcomes: Sequence[GradedPrediction]) -> Iterator[str]:
    yield page.head(f"Predictions in {totals['predictions']}")
    dataset = f"dataset {totals['dataset']}, " if totals["dataset"] else ""
    ended = f"{when(totals['ended_at'])}, mirrord {totals['mirrord']}"
    yield f"<p>{escape(f'{dataset}{ended}')}</p>\n"
    if totals["done"] < totals["total"]:
        done = f"{totals['done']:,} of {count(totals['total'], 'prediction')}"
        yield f'<p class="note">Interrupted: this covers {done}.</p>\n'
    yield _states(totals)
    yield _counts("How the patches applied", "strategy", totals["strategies"])
    yield _counts("What could steer the tests", "rule", totals["steering"])
    if totals["touched_tests"] or totals["dropped"]:
        touched = f"{count(totals['touched_tests'], 'prediction')} touch tests"
        yield f"<p>{touched}; in {totals['dropped']:,} some paths were left out.</p>\n"
    without = [each for each in outcomes if each.grade is None]
    if without:
        yield f"<h2>Not graded</h2>\n{_table(('line', 'instance', 'result', 'why'), without)}"
    columns = ("line", "instance", "model", "result", "how", "paths", "notable")
    yield f"<h2>All predictions</h2>\n{_table(columns, outcomes)}{page.FOOT}"


_TONES = {State.PREPARED: "good", State.EMPTY: "other", State.UNKNOWN: "other"}
_TONES[State.DUPLICATE] = "other"


def _result(state: State) -> str:
    return f'<td><b class="{_TONES.get(state, "bad")}">{state}</b></td>'


def _states(totals: Mapping[str, Any]) -> str:
    counted = [(state, totals["states"].get(state, 0)) for state in State]
    rows = [
        [
            *(_result(state), page.number(found)),
            page.share_bar(found, totals["done"], _TONES.get(state, "bad")),
            f"<td>{escape(MEANINGS[state])}</td>",
        ]
        for state, found in counted
        if found
    ]
    return page.table((), rows)


def _counts(title: str, noun: str, counts: Mapping[str, int]) -> str:
    if not counts:
        return ""
    rows = [
        (f"<td><code>{escape(name)}</code></td>", page.number(found))
        for name, found in sorted(counts.items(), key=lambda each: -each[1])
    ]
    return f"<h2>{title}</h2>\n{page.table((noun, 'predictions'), rows)}"


def _table(columns: Sequence[str], outcomes: Iterable[GradedPrediction]) -> str:
    return page.table(columns, ([_cell(name, each) for name in columns] for each in outcomes))


def _cell(column: str, each: GradedPrediction) -> str:
    grade = each.grade
    match column:
        case "line":
            return page.number(each.line)
        case "instance":
            return f"<td>{escape(each.instance or '')}</td>"
        case "model":
            return f"<td>{escape(each.model or '')}</td>"
        case "result":
            return _result(each.state)
        case "how":
            return f"<td>{escape((grade and grade.strategy) or '')}</td>"
        case "paths":
            return f'<td class="n">{grade.changed if grade else ""}</td>'
        case "why":
            hint = each.error.hint if each.error else None
            return f"<td>{escape(each.why)}{f'<br>{escape(hint)}' if hint else ''}</td>"
        case _:
            return f"<td>{_notable(each)}</td>"


def _notable(each: GradedPrediction) -> str:
    """What could steer the tests, folded; why there is no grade; where it is kept."""
    if each.grade is None:
        return escape(each.why)
    kept = f"<code>{escape(each.grade.path)}</code>" if each.is_kept else ""
    steering = each.grade.steering
    if not steering:
        return kept
    items = "".join(
        f"<li>{s.action}: <code>{escape(s.path)}</code> ({escape(s.rule)}) {escape(s.detail)}</li>"
        for s in steering[:_SHOWN_MAX]
    )
    if len(steering) > _SHOWN_MAX:
        items += f"<li>and {len(steering) - _SHOWN_MAX:,} more</li>"
    rules = escape(", ".join(sorted({s.rule for s in steering})))
    return f"{kept}<details><summary>{rules}</summary><ul>{items}</ul></details>"
