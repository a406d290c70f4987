"""`mirrord rehearse`: test instances with this daemon, and report the results.

With --resume the result of an instance is written as soon as it is known. A later run with the same
file truncates a torn last line and skips instances whose result still holds; untried ones are
tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar

from ... import protocol
from ...client._async import AsyncClient
from ...client.rehearsing import PATCHES, Candidate
from ...errors import UsageError, from_problem
from ...jsontext import loads
from ...model import FoundStrategy, Readiness, ReportKind
from ...quoting import legible
from .. import reports
from ..output import cell, count, listing, table
from ..session import (
    Argument,
    Option,
    OwnerOption,
    Session,
    read_duration,
    read_jobs,
    read_owner,
)

_REPORT_HELP = "Write the results as a page (.html); repeatable."
_RUN_HELP = "Run the tests in the environment, before and after the gold patch."
_LOGS_HELP = "Directory for the logs of tests (with --run); default: beside the report."
_RESUME_HELP = "Write each result to this file, and skip instances whose result still holds."


def rehearse(
    session: Session,
    instances: Annotated[
        list[str] | None, Argument("Instances; default: all.", "[INSTANCE]...")
    ] = None,
    dataset: Annotated[str | None, Option("All instances of this dataset.", "NAME")] = None,
    jobs: Annotated[str, Option("Instances to test at a time.", "N")] = "8",
    report: Annotated[list[Path] | None, Option(_REPORT_HELP, "FILE")] = None,
    resume: Annotated[Path | None, Option(_RESUME_HELP, "FILE")] = None,
    run: Annotated[bool, Option(_RUN_HELP)] = False,
    logs: Annotated[Path | None, Option(_LOGS_HELP, "DIR")] = None,
    timeout: Annotated[str, Option("Limit of a run of the tests.", "DURATION")] = "30m",
    owner: OwnerOption = None,
) -> None:
    """Each instance is checked out and compared with its base commit, its seal is verified, its
    test patch and gold patch are applied and reversed, and it is reset. Recorded commits are
    audited. With --run its environment is built, and its tests must fail and pass as its row says.

    Status 8 if an instance fails. An instance is "ready, but" if it works and another commit of its
    row cannot be served. Ctrl-C releases all checkouts and leaves a report of finished instances.
    """
    parallel = read_jobs(jobs)
    tests: dict[str, Any] = {"run": run, "test_timeout": read_duration(timeout, "--timeout")}
    tests["owner"] = read_owner(owner)
    tests["logs"] = _log_directory(logs, [*(report or ()), *([resume] if resume else [])])
    results = Results(report or (), resume)

    async def begin(client: AsyncClient) -> Iterator[Awaitable[protocol.Rehearsed]]:
        rehearsal = await client.rehearsal(*instances or (), dataset=dataset, **tests)
        if not rehearsal.candidates:
            hint = "import a dataset first, or name instances"
            raise UsageError("cannot rehearse: there are no instances", hint=hint)
        return map(rehearsal.rehearse, results.choose(rehearsal.candidates))

    reports.run(session, "rehearse", results, parallel, begin)
    session.answer(results.answer(), results.lines())
    if status := results.exit_status:
        raise SystemExit(status)


def _log_directory(logs: Path | None, files: list[Path]) -> Path | None:
    """Return the directory for logs; by default it is named after the first of `files`."""
    if logs or not files:
        return logs
    return files[0].with_name(f"{files[0].stem}-logs")


_Key = tuple[str | None, str]


class Results(reports.RunReport[protocol.Rehearsed]):
    """The results of a run, and those of earlier runs that still hold."""

    kind = ReportKind.REHEARSAL
    noun = "instance"
    template = "rehearsal.html"
    results: ClassVar = {
        Readiness.READY: ("good", "checkout, seal, patches and reset work"),
        Readiness.PARTLY: ("good", "ready; another commit of the row cannot be served"),
        Readiness.FAILED: ("bad", "does not work"),
        Readiness.UNTRIED: ("other", "not tried, for a reason outside the row"),
    }

    def __init__(self, pages: Iterable[Path], resume: Path | None) -> None:
        self.kept_count = 0
        lines, self._earlier = _open_lines(resume) if resume else (None, {})
        super().__init__(pages, None, 0, lines)

    def order(self, row: protocol.Rehearsed) -> tuple[str, ...]:
        return row.dataset or "", row.repo or "", row.instance

    def result_of(self, row: protocol.Rehearsed) -> Readiness:
        return row.status

    def mirror_of(self, row: protocol.Rehearsed) -> str:
        return row.repo or "-"

    def faults(self) -> Iterator[tuple[str, str]]:
        return ((row.instance, _failed_step(row)) for row in self.bad())

    def bad(self) -> list[protocol.Rehearsed]:
        return [row for row in self.rows if row.status is not Readiness.READY]

    def title(self) -> str:
        return f"Rehearsal of {count(self.total, 'instance')}"

    def choose(self, candidates: list[Candidate]) -> list[Candidate]:
        """Return the candidates without a valid earlier result; keep the valid results."""
        self.total = len(candidates)
        chosen = []
        for candidate in candidates:
            known = self._earlier.get((candidate.dataset, candidate.instance))
            if known and known.state == candidate.state and known.status is not Readiness.UNTRIED:
                self.rows.append(known)
            else:
                chosen.append(candidate)
        self.kept_count = len(self.rows)
        return chosen

    @property
    def exit_status(self) -> int:
        """8 if an instance failed, else the smallest status of an untried one, else 0."""
        if any(row.status is Readiness.FAILED for row in self.rows):
            return 8
        untried = (row.error for row in self.rows if row.status is Readiness.UNTRIED)
        statuses = (from_problem(e.to_json()).exit_status if e else 1 for e in untried)
        return min(statuses, default=0)

    def totals(self) -> dict[str, Any]:
        """Return counts of instances, in total and by dataset and repository."""
        groups: dict[tuple[str, str], Counter[str]] = {}
        for row in self.rows:
            counts = groups.setdefault((row.dataset or "-", row.repo or "-"), Counter())
            counts[row.status] += 1
            counts.update(step.name for step in row.steps if step.outcome == "nothing")
            counts.update(f"{step.name} {step.strategy}" for step in row.steps if step.strategy)
        repositories = [
            {
                "dataset": dataset,
                "repo": repo,
                "states": {str(state): counts[state] for state in Readiness if counts[state]},
                "nothing_to_apply": {name: counts[name] for name in PATCHES if counts[name]},
                "strategies": {
                    name: {str(how): n for how in FoundStrategy if (n := counts[f"{name} {how}"])}
                    for name in PATCHES
                },
            }
            for (dataset, repo), counts in sorted(groups.items())
        ]
        return {**super().totals(), "kept": self.kept_count, "repositories": repositories}

    def report(self) -> protocol.AddReport:
        datasets = {row.dataset for row in self.rows}
        self.dataset = datasets.pop() if len(datasets) == 1 else None
        return super().report()

    def facts(self) -> dict[str, Any]:
        datasets = groupby(self.rows, key=lambda row: row.dataset)
        return {**super().facts(), "datasets": [(name, [*rows]) for name, rows in datasets]}

    def answer(self) -> dict[str, Any]:
        rows = [{**row.to_json(), "ok": row.ok} for row in self.rows]
        return {"instances": rows, "totals": protocol.to_json(self.totals())}

    def lines(self) -> Iterator[str]:
        """Yield the answer as text: counts by repository, then instances that are not ready."""
        totals = self.totals()
        header = ("DATASET", "REPOSITORY", "INSTANCES", *(state.upper() for state in Readiness))
        rows = []
        for group in totals["repositories"]:
            counts = [group["states"].get(state, 0) for state in Readiness]
            rows.append((group["dataset"], group["repo"], sum(counts), *counts))
        yield from table(header, rows)
        for name in PATCHES:
            if without := sum(g["nothing_to_apply"].get(name, 0) for g in totals["repositories"]):
                yield f"{count(without, 'instance')} without {name}: nothing to apply"
            hows = Counter[str]()
            for group in totals["repositories"]:
                hows.update(group["strategies"][name])
            if hows.keys() - {FoundStrategy.EXACT}:
                by_name = ", ".join(f"{hows[how]:,} {how}" for how in FoundStrategy if hows[how])
                yield f"{name} applied by strategy: {by_name}"
        if bad := self.bad():
            yield ""
            yield from listing(bad, "INSTANCE RESULT=status REASON")
            yield from _unexpected_lines(bad)
        yield from (
            f"{row.instance}: {cell(contradiction)}"
            for row in self.rows
            for contradiction in row.contradictions
        )
        if logged := sum(row.verdict == "log" for row in self.rows):
            yield f"{count(logged, 'instance')} judged by the log of its tests alone"
        counted = [
            f"{found:,} {state}"
            for state in Readiness
            if (found := totals["states"].get(state)) and state is not Readiness.FAILED
        ]
        failed = totals["states"].get(Readiness.FAILED) or "none"
        kept = f" ({self.kept_count:,} by an earlier run)" if self.kept_count else ""
        counts_text = "; ".join([*counted, f"{failed} failed"])
        yield f"{count(len(self.rows), 'instance')} rehearsed{kept}: {counts_text}"


def _failed_step(row: protocol.Rehearsed) -> str:
    outcomes = {"failed", "but"}
    return next((step.name for step in row.steps if step.outcome in outcomes), str(row.status))


def _unexpected_lines(rows: list[protocol.Rehearsed]) -> Iterator[str]:
    """Yield unexpected results of tests, with the last lines of their log."""
    for row in rows:
        for each in row.unexpected:
            yield ""
            yield f"{row.instance}: {cell(each.description)}"
            yield from (f"    {legible(line)}" for line in each.lines)
        yield from (f"{row.instance}: log: {path}" for path in row.logs if row.unexpected)


def _open_lines(path: Path) -> tuple[BinaryIO, dict[_Key, protocol.Rehearsed]]:
    """Open a file to append to; returns it, and the last result of each instance in it."""
    hint = "name a new file, or one that --resume wrote"
    try:
        file = path.open("a+b")
        file.seek(0)
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        rehearsed = [protocol.Rehearsed.from_json(loads(line)) for line in whole.splitlines()]
        file.truncate(len(whole))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint=hint) from error
    except ValueError as error:
        file.close()
        message = f"cannot resume from {path}: it has lines that are not results of a rehearsal"
        raise UsageError(message, hint=hint) from error
    return file, {(row.dataset, row.instance): row for row in rehearsed}
