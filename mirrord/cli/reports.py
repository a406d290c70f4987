"""Runs over many instances: several at a time, and reports of them in files.

A page is one file without scripts and without anything to load; a content security policy lets
nothing in but the style that is there. Every text in it may be a model's, and is escaped.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from enum import StrEnum
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Generic, Protocol, TypeVar

from .. import __version__
from ..client._async import AsyncClient
from ..errors import UsageError
from ..model import ReportKind, printable, utc_now
from ..protocol import FAULTS_MAX, AddReport, Progress, to_bytes
from .operations import watching
from .output import count, when
from .session import Session

PAGES = {".html", ".htm"}


class Row(Protocol):
    """What became of one instance."""

    @property
    def instance(self) -> str | None: ...

    def to_json(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=Row)


class Report(ABC, Generic[R]):
    """The rows of one run, and the files about them; `close` completes those.

    Lines are written when their row is added, so an interrupted report is whole as far as it goes.
    """

    kind: ClassVar[ReportKind]
    noun: ClassVar[str]
    template: ClassVar[str]
    suffixes: ClassVar[set[str]] = PAGES
    results: ClassVar[Mapping[StrEnum, tuple[str, str]]]
    """Of each result the tone (good, bad or other) and the meaning."""

    def __init__(
        self, paths: Iterable[Path], dataset: str | None, total: int, lines: BinaryIO | None = None
    ) -> None:
        self.rows: list[R] = []
        self.dataset, self.total = dataset, total
        self._began_at = utc_now()
        self._lines = [lines] if lines else []
        self._pages: list[BinaryIO] = []
        with ExitStack() as opened:  # now: better than after hours of work
            for file in self._lines:
                opened.enter_context(file)
            for path in paths:
                file = opened.enter_context(_create(path, self.suffixes))
                (self._pages if path.suffix.lower() in PAGES else self._lines).append(file)
            self._files = opened.pop_all()

    @abstractmethod
    def title(self) -> str: ...

    @abstractmethod
    def order(self, row: R) -> Any:
        """What rows are sorted by in the end."""

    @abstractmethod
    def result_of(self, row: R) -> StrEnum: ...

    @abstractmethod
    def mirror_of(self, row: R) -> str | None: ...

    @abstractmethod
    def faults(self) -> Iterator[tuple[str, str]]:
        """Instances without a good result, and what that was."""

    def add(self, row: R) -> None:
        self.rows.append(row)
        self.write_line(row.to_json())

    def write_line(self, value: Any) -> None:
        for file in self._lines:
            file.write(to_bytes(value) + b"\n")
            file.flush()

    def close(self) -> None:
        """Write the pages, of as many instances as were done."""
        with self._files:
            self.rows.sort(key=self.order)
            for file in self._pages:
                file.write(self.render().encode("utf-8", "backslashreplace"))

    def totals(self) -> dict[str, Any]:
        """Counts of rows, in all and by result."""
        return {
            "total": self.total,
            "done": len(self.rows),
            "states": dict(Counter(str(self.result_of(row)) for row in self.rows)),
            "mirrord": __version__,
            "began_at": self._began_at,
            "ended_at": utc_now(),
        }

    def report(self) -> AddReport:
        """What the daemon's page shows of it."""
        totals, mirrors = self.totals(), dict[str, Counter[str]]()
        for row in self.rows:
            if mirror := self.mirror_of(row):
                mirrors.setdefault(mirror, Counter())[self.result_of(row)] += 1
        return AddReport(
            kind=self.kind,
            dataset=self.dataset,
            duration_s=(totals["ended_at"] - self._began_at).total_seconds(),
            total=self.total,
            results=totals["states"],
            mirrors={name: dict(counts) for name, counts in mirrors.items()},
            faults=dict(islice(self.faults(), FAULTS_MAX)),
        )

    def render(self) -> str:
        """The page; loads jinja2, which other answers do not need."""
        jinja = import_module("jinja2")
        templates = jinja.Environment(
            loader=jinja.PackageLoader(__package__),
            autoescape=True,
            undefined=jinja.StrictUndefined,
            trim_blocks=True,
            finalize=lambda value: printable(value) if type(value) is str else value,
        )
        templates.filters |= {"number": "{:,}".format, "count": count, "when": when}
        page: str = templates.get_template(self.template).render(
            title=self.title(), noun=self.noun, results=self.results, **self.facts()
        )
        return page

    def facts(self) -> dict[str, Any]:
        """What the template is given."""
        return {"totals": self.totals(), "rows": self.rows}


def run(
    session: Session,
    title: str,
    report: Report[R],
    at_once: int,
    begin: Callable[[AsyncClient], Awaitable[Iterator[Awaitable[R]]]],
) -> None:
    """Wait for rows, so many at once, and report on them, also after an interruption.

    What stops one with an error stops all.
    """

    def note(row: R) -> None:
        report.add(row)
        done, noun = len(report.rows), f"{report.noun}s"
        watch(Progress(done=done, total=report.total, unit=noun, note=row.instance or ""))

    async def work(left: Iterator[Awaitable[R]]) -> None:
        for each in left:  # shared: each worker takes the next one
            note(await each)

    async def run_all() -> None:
        async with AsyncClient(session.socket, config=session.config) as client:
            left = await begin(client)
            try:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(at_once):
                        tasks.create_task(work(left))
            except ExceptionGroup as group:
                raise group.exceptions[0] from None

    with closing(report), watching(session, title) as watch:
        try:
            asyncio.run(run_all())
        except KeyboardInterrupt:
            done = f"{len(report.rows)} of {report.total} {report.noun}s"
            session.note(f"interrupted after {done}")
            raise
        finally:
            session.report(report.report())


def _create(path: Path, suffixes: set[str]) -> BinaryIO:
    """Open a report for writing, before the work that it is about. Raises UsageError."""
    if path.suffix.lower() not in suffixes:
        hint = f"end its name in {' or '.join(sorted(suffixes - {'.htm'}, reverse=True))}"
        raise UsageError(f"cannot write a report to {path}: unknown suffix", hint=hint)
    try:
        return path.open("wb")
    except OSError as error:
        hint = "name another file with --report"
        raise UsageError(f"cannot write {path}: {error.strerror}", hint=hint) from error
