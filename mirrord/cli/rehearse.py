"""`mirrord rehearse`: does every instance work, here and now?"""

from __future__ import annotations

import asyncio
import importlib
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import UsageError
from ..protocol import Progress
from .operations import watching
from .parameters import Argument, Option, read_duration
from .rehearse_report import Results
from .session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..protocol import Rehearsed

_JOBS_MAX = 256
_REPORT_HELP = "Write what is ready, and why the rest is not, as a page (.html); repeatable."
_RUN_HELP = "Run the tests of each, in its environment, without and with the gold patch."
_LOGS_HELP = "Keep what tests print in this directory (with --run). Default: beside the report."
_RESUME_HELP = "Note each result in this file, and leave out those in it that still hold."


def rehearse(
    session: Session,
    instances: Annotated[
        list[str] | None, Argument(metavar="[INSTANCE]...", help="Default: all.")
    ] = None,
    dataset: Annotated[str | None, Option(help="All instances of this dataset.")] = None,
    jobs: Annotated[str, Option(metavar="N", help="How many instances at a time.")] = "8",
    report: Annotated[list[Path] | None, Option(metavar="FILE", help=_REPORT_HELP)] = None,
    resume: Annotated[Path | None, Option(metavar="FILE", help=_RESUME_HELP)] = None,
    run: Annotated[bool, Option(help=_RUN_HELP)] = False,
    logs: Annotated[Path | None, Option(metavar="DIR", help=_LOGS_HELP)] = None,
    timeout: Annotated[str, Option(help="For one run of an instance's tests.")] = "30m",
) -> None:
    """Each is checked out and compared with its base commit, its seal is judged, its test patch and
    gold patch are applied and taken back, and it is reset. Recorded commits are audited. With
    --run its environment is built or found, and its tests have to fail and pass as the row says.

    Status 8 when an instance fails. One that works while another commit of its row cannot be served
    is "ready, but". Ctrl-C releases every checkout and leaves a report of what was done.
    """
    if not jobs.isdecimal() or not 0 < int(jobs) <= _JOBS_MAX:
        hint = f"give a number from 1 to {_JOBS_MAX}"
        raise UsageError(f"cannot read --jobs {jobs}", hint=hint)
    tests: dict[str, Any] = {"run": run, "test_timeout": read_duration(timeout, "--timeout")}
    tests["logs"] = _logs_of(logs, [*(report or ()), *([resume] if resume else [])])
    with closing(Results(report or (), resume)) as results, watching(session, "rehearse") as watch:

        def note(row: Rehearsed) -> None:
            results.add(row)
            done, total = len(results.rows), results.total
            watch(Progress(done=done, total=total, unit="instances", note=row.instance))

        try:
            asyncio.run(
                _rehearse_all(session, instances or [], dataset, int(jobs), results, note, tests)
            )
        except KeyboardInterrupt:
            session.note(f"interrupted after {len(results.rows)} of {results.total} instances")
            raise
        finally:
            session.report(results.report())
    session.answer(results.answer(), results.lines())
    if status := results.exit_status:
        raise SystemExit(status)


def _logs_of(asked: Path | None, files: list[Path]) -> Path | None:
    """The directory for logs; that of the first report, or of what was done, by its name."""
    if asked or not files:
        return asked
    return files[0].with_name(f"{files[0].stem}-logs")


async def _rehearse_all(
    session: Session,
    instances: list[str],
    dataset: str | None,
    jobs: int,
    results: Results,
    note: Callable[[Rehearsed], None],
    tests: dict[str, Any],
) -> None:
    clients = importlib.import_module("mirrord.client._async")
    async with clients.AsyncClient(session.socket, config=session.config) as client:
        rehearsal = await client.rehearsal(*instances, dataset=dataset, **tests)
        if not rehearsal.candidates:
            hint = "import a dataset first, or name instances"
            raise UsageError("cannot rehearse: there are no instances", hint=hint)
        left = iter(results.choose(rehearsal.candidates))  # shared: each job takes the next

        async def work() -> None:
            for candidate in left:
                note(await rehearsal.rehearse(candidate))

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(jobs):
                    tasks.create_task(work())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
