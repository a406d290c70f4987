"""Runs over many instances, several at a time, and their reports as files.

A page is a single file without scripts. Its content security policy allows its own style and
nothing else. All text in it may come from a model, and is escaped.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from enum import StrEnum
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Generic, Protocol, TypeVar

from .. import __version__
from ..client._async import AsyncClient
from ..errors import UsageError
from ..model import ReportKind, utc_now
from ..protocol import FAULTS_MAX, AddReport, to_bytes
from ..quoting import as_utf8, legible, quote_name
from ..units import counted, when

PAGES = {".html", ".htm"}


class Row(Protocol):
    """The result of an instance."""

    @property
    def instance(self) -> str | None: ...

    def to_json(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=Row)


class RunReport(ABC, Generic[R]):
    """The rows of a run, and its report files, which `close` completes.

    JSON lines are written when their row is added, so an interrupted run leaves them complete.
    """

    kind: ClassVar[ReportKind]
    noun: ClassVar[str]
    template: ClassVar[str]
    suffixes: ClassVar[set[str]] = PAGES
    # the tone (good, bad or other) and the meaning of each result
    results: ClassVar[Mapping[StrEnum, tuple[str, str]]]

    def __init__(
        self, paths: Iterable[Path], dataset: str | None, total: int, lines: BinaryIO | None = None
    ) -> None:
        self.rows: list[R] = []
        self.dataset, self.total = dataset, total
        self._began_at = utc_now()
        self._lines = [lines] if lines else []
        self._pages: list[BinaryIO] = []
        with ExitStack() as opened:  # fail before the work, which may take hours
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
        """Return the key that rows are sorted by."""

    @abstractmethod
    def result_of(self, row: R) -> StrEnum: ...

    @abstractmethod
    def mirror_of(self, row: R) -> str | None: ...

    @abstractmethod
    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield instances without a good result, and that result."""

    def add(self, row: R) -> None:
        self.rows.append(row)
        self.write_line(row.to_json())

    def write_line(self, value: Any) -> None:
        for file in self._lines:
            file.write(to_bytes(value) + b"\n")
            file.flush()

    def close(self) -> None:
        """Write the pages and close all files."""
        with self._files:
            self.rows.sort(key=self.order)
            for file in self._pages:
                file.write(as_utf8(self.render()).encode())

    def totals(self) -> dict[str, Any]:
        """Return counts of rows, in total and by result."""
        return {
            "total": self.total,
            "done": len(self.rows),
            "states": dict(Counter(str(self.result_of(row)) for row in self.rows)),
            "mirrord": __version__,
            "began_at": self._began_at,
            "ended_at": utc_now(),
        }

    def report(self) -> AddReport:
        """Return the summary for the daemon's page."""
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
        """Render the page; loads jinja2."""
        jinja = import_module("jinja2")
        templates = jinja.Environment(
            loader=jinja.PackageLoader(__package__),
            autoescape=True,
            undefined=jinja.StrictUndefined,
            trim_blocks=True,
            # not isinstance: a Markup is escaped already
            finalize=lambda value: legible(value) if type(value) is str else value,
        )
        templates.filters |= {
            "name": quote_name,
            "number": "{:,}".format,
            "count": counted,
            "when": when,
        }
        page: str = templates.get_template(self.template).render(
            title=self.title(), noun=self.noun, results=self.results, **self.facts()
        )
        return page

    def facts(self) -> dict[str, Any]:
        return {"totals": self.totals(), "rows": self.rows}


async def run_all(
    client: AsyncClient,
    jobs: int,
    begin: Callable[[AsyncClient], Awaitable[Iterator[Awaitable[R]]]],
    note: Callable[[R], None],
) -> None:
    """Await the rows that `begin` returns, `jobs` at a time. An error of one ends the run."""

    async def work(pending: Iterator[Awaitable[R]]) -> None:
        for coming in pending:  # shared by all tasks
            note(await coming)

    pending = await begin(client)
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(jobs):
                tasks.create_task(work(pending))
    except ExceptionGroup as group:
        # the first error cancels the other tasks
        raise group.exceptions[0] from None


def _create(path: Path, suffixes: set[str]) -> BinaryIO:
    """Open a report for writing; raises UsageError."""
    if path.suffix.lower() not in suffixes:
        hint = f"use a name that ends in {' or '.join(sorted(suffixes - {'.htm'}, reverse=True))}"
        raise UsageError(f"cannot write a report to {path}: unknown suffix", hint=hint)
    try:
        return path.open("wb")
    except OSError as error:
        hint = "name a writable file with --report"
        raise UsageError(f"cannot write {path}: {error.strerror}", hint=hint) from error
