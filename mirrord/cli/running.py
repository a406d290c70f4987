"""A run over many instances, watched and reported."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from typing import TypeVar

from ..client._async import AsyncClient
from ..protocol import Progress
from ..runs.reports import Row, RunReport, run_all
from .session import Session
from .waiting import watching

R = TypeVar("R", bound=Row)


def run(
    session: Session,
    title: str,
    report: RunReport[R],
    jobs: int,
    begin: Callable[[AsyncClient], Awaitable[Iterator[Awaitable[R]]]],
) -> None:
    """Await the rows that `begin` returns, `jobs` at a time, and report them, even if interrupted.

    An error of one row ends the run.
    """

    def note(row: R) -> None:
        report.add(row)
        done, noun = len(report.rows), f"{report.noun}s"
        watch(Progress(done=done, total=report.total, unit=noun, note=row.instance or ""))

    async def run_here() -> None:
        async with AsyncClient(session.socket, config=session.config) as client:
            await run_all(client, jobs, begin, note)

    with closing(report), watching(session, title) as watch:
        try:
            asyncio.run(run_here())
        except KeyboardInterrupt:
            done = f"{len(report.rows)} of {report.total} {report.noun}s"
            session.note(f"interrupted after {done}")
            raise
        finally:
            session.report(report.report())
