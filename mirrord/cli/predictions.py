"""`mirrord grade --predictions`: a grade of each prediction of a file, many at once, with a report.

Predictions are rows as SWE-bench writes them: `instance_id`, `model_patch`, `model_name_or_path`,
as JSON lines, a JSON array, or an object by instance id. The file is read twice: first for the last
row of each instance, which counts as it does for SWE-bench, then row by row. A grade that is not
kept ends with this process, whatever happens to it.
"""

import json
import re
import time
from collections.abc import Awaitable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from .. import errors
from ..client._async import AsyncClient, AsyncGrade
from ..datasets.readers import Element, iter_elements
from ..model import Bind
from .predictions_report import GradedPrediction, GradingReport, State
from .reports import run
from .session import Session

_BOM = b"\xef\xbb\xbf"
_HEAD_BYTES = 1024**2
_NAMES = {"instance_id", "model_patch"}
_OBJECT_OF_OBJECTS = re.compile(rb'\{\s*"(?:[^"\\]|\\.)*"\s*:\s*\{')
_FATAL = (errors.NoDaemonError, errors.StoppingError)
_UNKNOWN = (errors.InstanceNotFoundError, errors.InstanceAmbiguousError)
_CONFLICT = (
    errors.PatchConflictError,
    errors.InvalidPatchError,
    errors.PathOutsideCheckoutError,
)


class Prediction(NamedTuple):
    """A row; `line` counts lines of JSON lines, rows of everything else, from 1."""

    line: int
    instance: str
    model: str
    patch: bytes

    @property
    def key(self) -> tuple[str, str]:
        """What can be predicted once in a file."""
        return self.instance, self.model


class Fault(NamedTuple):
    """A row that is no prediction, and why."""

    line: int
    reason: str


# -- reading ---------------------------------------------------------------------------------------


def read_predictions(path: Path) -> Iterator[Prediction | Fault]:
    """The rows of a file, one at a time; raises UsageError for a file that has none."""
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
    """Lines, or the elements of one document, which may be a single long line."""
    start = file.tell()
    head = file.read(_HEAD_BYTES).lstrip()
    file.seek(start)
    if head.startswith(b"["):
        return iter_elements(file)
    first, _, rest = head.partition(b"\n")
    value = _decoded(first)
    if value is None:
        is_document = _OBJECT_OF_OBJECTS.match(head) is not None
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
        return Fault(line, "its model_patch has half of a character")
    return Prediction(line, instance, model if isinstance(model, str) else "", content)


def _decoded(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _unusable(path: Path, fact: str) -> errors.UsageError:
    hint = "give JSON lines with instance_id, model_patch and model_name_or_path, as for SWE-bench"
    return errors.UsageError(f"cannot read the predictions in {path}: {fact}", hint=hint)


# -- grading ---------------------------------------------------------------------------------------


def grade_all(
    session: Session,
    path: Path,
    reports: list[Path],
    at_once: int,
    *,
    dataset: str | None,
    keep: bool,
    **choices: Any,
) -> None:
    """Grade every prediction of a file; status 0 when each has a grade, else that of the first
    that has none. An interruption leaves a report of what was done, and no lease.
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

    run(session, "grade", report, at_once, begin)
    session.answer(report.answer(), report.lines())
    if status := report.exit_status:
        raise SystemExit(status)


class _Grader:
    """Grades one prediction at a time, any number of times at once."""

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
        """Grade a prediction, and release the grade unless it is kept."""
        if isinstance(row, Fault):
            fault = errors.UsageError(f"cannot read line {row.line}: {row.reason}")
            return GradedPrediction(row.line, State.INVALID, error=fault)
        names = row.instance, row.model
        if (line := self._last.get(row.key, row.line)) != row.line:
            return GradedPrediction(row.line, State.DUPLICATE, *names, counts=line)
        began = time.perf_counter()
        try:
            grade = await self._prepare(row)
        except (*_FATAL, errors.AccessError):  # as for all others
            raise
        except errors.MirrordError as error:
            return GradedPrediction(row.line, _state_of(error), *names, error=error)
        took = time.perf_counter() - began
        state = State.PREPARED if grade.report.changed else State.EMPTY
        outcome = GradedPrediction(
            row.line, state, *names, grade.report, seconds=took, is_kept=self._keep
        )
        if self._keep:
            return outcome
        async with grade:  # releases it, also when this task is cancelled
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
