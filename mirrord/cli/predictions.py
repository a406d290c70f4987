"""`mirrord grade --predictions`: grade the predictions of a file, several at a time, and report."""

from collections import Counter
from collections.abc import Awaitable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..client._async import AsyncClient
from ..runs.prediction_file import Prediction, read_predictions
from ..runs.predictions import GradedPrediction, Grader, GradingReport, State, SuiteRunner
from .output import count, table
from .running import run
from .session import Session


def grade_all(
    session: Session,
    path: Path,
    reports: list[Path],
    jobs: int,
    *,
    dataset: str | None,
    keep: bool,
    run_for: timedelta | None = None,
    logs: Path | None = None,
    parsers: Path | None = None,
    **choices: Any,
) -> None:
    """Grade every prediction of a file. Exits with the status of the first that has no grade.

    `run_for` is the limit of a run of the tests; without it they do not run.
    An interrupted run leaves a report of the finished predictions, and no lease.
    """
    if dataset is not None:
        session.client.get_dataset(dataset)
    # a first reading: of several rows for an instance the last one counts
    last: dict[tuple[str, str], int] = {}
    total = 0
    for row in read_predictions(path):
        total += 1
        if isinstance(row, Prediction):
            last[row.key] = row.line
    choices |= {"dataset": dataset, "strategy": "tolerant"}
    report = GradingReport(reports, source=path.name, dataset=dataset, total=total)

    async def begin(client: AsyncClient) -> Iterator[Awaitable[GradedPrediction]]:
        tests = None if run_for is None else SuiteRunner(client, dataset, run_for, logs, parsers)
        return map(Grader(client, last, keep, choices, tests).grade, read_predictions(path))

    run(session, "grade", report, jobs, begin)
    session.answer(report.answer(), _lines(report))
    if status := report.exit_status:
        raise SystemExit(status)


def _lines(report: GradingReport) -> Iterator[str]:
    models = len({row.model for row in report.rows if row.model}) > 1
    rows = []
    for row in report.rows:
        grade = row.grade
        rules = ", ".join(sorted({s.rule for s in grade.steering})) if grade else ""
        how = (grade.strategy, grade.changed) if grade else ("", "")
        names = (row.instance, row.model) if models else (row.instance,)
        rows.append((row.line, *names, row.state, *how, rules, row.reason))
    headers = ("INSTANCE", "MODEL") if models else ("INSTANCE",)
    yield from table(("LINE", *headers, "RESULT", "STRATEGY", "PATHS", "STEERING", "REASON"), rows)
    states = Counter(row.state for row in report.rows)
    counted = ", ".join(f"{states[state]} {state}" for state in State if states[state])
    yield f"{count(len(report.rows), 'prediction')}: {counted}"
    logged = sum(bool(row.tested and row.tested.verdict == "log") for row in report.rows)
    if logged:
        yield f"{count(logged, 'prediction')} judged by the log of the tests alone"
