"""`mirrord grade --predictions`: grade the predictions of a file, several at a time, and report.

Predictions are SWE-bench's rows (`instance_id`, `model_patch`, `model_name_or_path`) as JSON lines,
a JSON array, or an object by instance id. The file is read twice: first to find the last row of
each instance and model, which counts as for SWE-bench, then row by row. Grades that are not kept
are bound to this process.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from io import BufferedReader
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from .. import errors
from ..client._async import AsyncClient, AsyncGrade
from ..datasets.readers import Element, iter_elements
from ..errors import MirrordError
from ..model import Bind, ReportKind
from ..protocol import Grade, to_json
from .output import count, table
from .reports import PAGES, RunReport, run
from .session import Session

_BOM = b"\xef\xbb\xbf"
_HEAD_BYTES = 1024**2
_NAMES = {"instance_id", "model_patch"}
_OBJECT_BY_ID = re.compile(rb'\{\s*"(?:[^"\\]|\\.)*"\s*:\s*\{')
_FATAL = (errors.NoDaemonError, errors.StoppingError)
_UNKNOWN = (errors.InstanceNotFoundError, errors.InstanceAmbiguousError)
_CONFLICT = (
    errors.PatchConflictError,
    errors.InvalidPatchError,
    errors.PathOutsideCheckoutError,
)


class Prediction(NamedTuple):
    """A row. `line` counts from 1: lines of JSON lines, else rows."""

    line: int
    instance: str
    model: str
    patch: bytes

    @property
    def key(self) -> tuple[str, str]:
        """The key of which the last row counts."""
        return self.instance, self.model


class Fault(NamedTuple):
    """An invalid row, and the reason."""

    line: int
    reason: str


# -- reading ---------------------------------------------------------------------------------------


def read_predictions(path: Path) -> Iterator[Prediction | Fault]:
    """Yield the rows of a file; raises UsageError if it has none."""
    if path.exists() and not path.is_file():
        raise _unusable(path, "it is not a regular file")
    try:
        with path.open("rb") as file:
            if file.peek(len(_BOM)).startswith(_BOM):
                file.read(len(_BOM))
            is_empty = True
            for line, element in enumerate(_iter_rows(file), 1):
                if element.text.strip() or element.fault:
                    is_empty = False
                    yield _read_row(line, element)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error
    if is_empty:
        raise _unusable(path, "it has no predictions")


def _iter_rows(file: BufferedReader) -> Iterator[Element]:
    """Yield lines, or the elements of one JSON document, which may be a single line."""
    start = file.tell()
    head = file.read(_HEAD_BYTES).lstrip()
    file.seek(start)
    if head.startswith(b"["):
        return iter_elements(file)
    first, _, rest = head.partition(b"\n")
    value = _decoded(first)
    if value is None:
        is_document = _OBJECT_BY_ID.match(head) is not None
    else:
        is_document = value.keys().isdisjoint(_NAMES) and not rest.strip()
    return iter_elements(file) if is_document else map(Element, file)


def _read_row(line: int, element: Element) -> Prediction | Fault:
    if element.fault:
        return Fault(line, element.fault)
    value = _decoded(element.text)
    if value is None:
        return Fault(line, "it is not a JSON object")
    if element.key is not None:
        value.setdefault("instance_id", json.loads(element.key))
    instance, patch = value.get("instance_id"), value.get("model_patch")
    model = value.get("model_name_or_path")
    if not isinstance(instance, str) or not instance:
        return Fault(line, "it has no instance_id")
    if "model_patch" not in value or not isinstance(patch, str | None):
        return Fault(line, "it has no model_patch")
    try:
        content = (patch or "").encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return Fault(line, "its model_patch is not valid Unicode")
    return Prediction(line, instance, model if isinstance(model, str) else "", content)


def _decoded(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _unusable(path: Path, fact: str) -> errors.UsageError:
    hint = "give JSON lines with instance_id, model_patch and model_name_or_path, as SWE-bench does"
    return errors.UsageError(f"cannot read the predictions in {path}: {fact}", hint=hint)


# -- results ---------------------------------------------------------------------------------------


class State(StrEnum):
    """The result of a prediction. The first two have a grade."""

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

    @property
    def touched_tests(self) -> list[str]:
        """Changed paths that are tests, by the rules or the instance's test patch."""
        found = self.grade.steering if self.grade else []
        return sorted({s.path for s in found if s.kind == "tests" or s.action == "restored"})

    @property
    def reason(self) -> str:
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


class GradingReport(RunReport[GradedPrediction]):
    """A report of the predictions in a file, `source`."""

    kind = ReportKind.GRADING
    noun = "prediction"
    template = "predictions.html"
    suffixes = {".jsonl"} | PAGES
    results: ClassVar = {
        State.PREPARED: ("good", "the patch applies; the grade has it and the tests"),
        State.EMPTY: ("other", "the patch changes nothing"),
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
        return next((each.error.exit_status for each in self.rows if each.error), 0)

    def totals(self) -> dict[str, Any]:
        """Return counts of predictions by state, strategy and rule."""
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
        rows = [outcome.to_json() for outcome in self.rows]
        return {"predictions": to_json(rows), "totals": to_json(self.totals())}

    def lines(self) -> Iterator[str]:
        models = len({each.model for each in self.rows if each.model}) > 1
        rows = []
        for each in self.rows:
            grade = each.grade
            rules = ", ".join(sorted({s.rule for s in grade.steering})) if grade else ""
            how = (grade.strategy, grade.changed) if grade else ("", "")
            names = (each.instance, each.model) if models else (each.instance,)
            rows.append((each.line, *names, each.state, *how, rules, each.reason))
        headers = ("INSTANCE", "MODEL") if models else ("INSTANCE",)
        yield from table(
            ("LINE", *headers, "RESULT", "STRATEGY", "PATHS", "STEERING", "REASON"), rows
        )
        states = Counter(each.state for each in self.rows)
        counted = ", ".join(f"{states[state]} {state}" for state in State if states[state])
        yield f"{count(len(self.rows), 'prediction')}: {counted}"


# -- grading ---------------------------------------------------------------------------------------


def grade_all(
    session: Session,
    path: Path,
    reports: list[Path],
    jobs: int,
    *,
    dataset: str | None,
    keep: bool,
    **choices: Any,
) -> None:
    """Grade every prediction of a file. Exits with the status of the first that has no grade.

    An interrupted run leaves a report of the finished predictions, and no lease.
    """
    if dataset is not None:
        session.client.get_dataset(dataset)
    last: dict[tuple[str, str], int] = {}
    total = 0
    for row in read_predictions(path):
        total += 1
        if isinstance(row, Prediction):
            last[row.key] = row.line
    choices |= {"dataset": dataset, "strategy": "tolerant"}
    report = GradingReport(reports, source=path.name, dataset=dataset, total=total)

    async def begin(client: AsyncClient) -> Iterator[Awaitable[GradedPrediction]]:
        return map(_Grader(client, last, keep, choices).grade, read_predictions(path))

    run(session, "grade", report, jobs, begin)
    session.answer(report.answer(), report.lines())
    if status := report.exit_status:
        raise SystemExit(status)


class _Grader:
    """Grades predictions; tasks may share it."""

    def __init__(
        self,
        client: AsyncClient,
        last: dict[tuple[str, str], int],
        keep: bool,
        choices: dict[str, Any],
    ) -> None:
        self._client, self._last = client, last
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
            grade = await self._prepare(row)
        except (*_FATAL, errors.AccessError):  # all other predictions would fail too
            raise
        except errors.MirrordError as error:
            return GradedPrediction(row.line, _state_of(error), *row.key, error=error)
        took = time.perf_counter() - began
        state = State.PREPARED if grade.report.changed else State.EMPTY
        outcome = GradedPrediction(
            row.line, state, *row.key, grade.report, seconds=took, is_kept=self._keep
        )
        if self._keep:
            return outcome
        async with grade:  # releases it, even if this task is cancelled
            return outcome

    async def _prepare(self, row: Prediction) -> AsyncGrade:
        try:
            return await self._client.grade(
                row.instance, row.patch, bind=self._bind, **self._choices
            )
        except errors.ProcessGoneError:  # the daemon cannot see this process
            self._bind = Bind.LEASE
            return await self._client.grade(row.instance, row.patch, **self._choices)


def _state_of(error: errors.MirrordError) -> State:
    if isinstance(error, _UNKNOWN):
        return State.UNKNOWN
    if isinstance(error, errors.SteeringRefusedError):
        return State.REFUSED
    return State.CONFLICT if isinstance(error, _CONFLICT) else State.FAILED
