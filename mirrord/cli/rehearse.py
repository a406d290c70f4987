"""`mirrord rehearse`: does every instance work, here and now? The run, its results, and their page.

With --resume a line is written when its instance is done, so whatever ends a run, the next one with
the same file goes on behind it. A torn last line is cut off. What was untried is no result.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from .. import __version__, protocol
from ..client.rehearsing import Candidate
from ..errors import UsageError, from_problem
from ..model import Readiness, ReportKind, utc_now
from . import page
from .operations import watching
from .output import count, table, when
from .page import PAGES, create, escape
from .session import Argument, Option, Session, read_duration, read_jobs

_REPORT_HELP = "Write what is ready, and why the rest is not, as a page (.html); repeatable."
_RUN_HELP = "Run the tests of each, in its environment, without and with the gold patch."
_LOGS_HELP = "Keep what tests print in this directory (with --run). Default: beside the report."
_RESUME_HELP = "Note each result in this file, and leave out those in it that still hold."


def rehearse(
    session: Session,
    instances: Annotated[list[str] | None, Argument("Default: all.", "[INSTANCE]...")] = None,
    dataset: Annotated[str | None, Option("All instances of this dataset.")] = None,
    jobs: Annotated[str, Option("How many instances at a time.", "N")] = "8",
    report: Annotated[list[Path] | None, Option(_REPORT_HELP, "FILE")] = None,
    resume: Annotated[Path | None, Option(_RESUME_HELP, "FILE")] = None,
    run: Annotated[bool, Option(_RUN_HELP)] = False,
    logs: Annotated[Path | None, Option(_LOGS_HELP, "DIR")] = None,
    timeout: Annotated[str, Option("For one run of an instance's tests.")] = "30m",
) -> None:
    """Each is checked out and compared with its base commit, its seal is judged, its test patch and
    gold patch are applied and taken back, and it is reset. Recorded commits are audited. With
    --run its environment is built or found, and its tests have to fail and pass as the row says.

    Status 8 when an instance fails. One that works while another commit of its row cannot be served
    is "ready, but". Ctrl-C releases every checkout and leaves a report of what was done.
    """
    at_once = read_jobs(jobs, "--jobs")
    tests: dict[str, Any] = {"run": run, "test_timeout": read_duration(timeout, "--timeout")}
    tests["logs"] = _logs_of(logs, [*(report or ()), *([resume] if resume else [])])
    with closing(Results(report or (), resume)) as results, watching(session, "rehearse") as watch:

        def note(row: protocol.Rehearsed) -> None:
            results.add(row)
            done, total = len(results.rows), results.total
            watch(protocol.Progress(done=done, total=total, unit="instances", note=row.instance))

        try:
            asyncio.run(
                _rehearse_all(session, instances or [], dataset, at_once, results, note, tests)
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
    note: Callable[[protocol.Rehearsed], None],
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


_Key = tuple[str | None, str]


class Results:
    """The results of one run, with those of earlier runs that still hold; `close` writes pages."""

    def __init__(self, pages: Iterable[Path], resume: Path | None) -> None:
        self.rows: list[protocol.Rehearsed] = []
        self.kept = self.total = 0
        self._began_at = utc_now()
        with ExitStack() as opened:  # now: better than after hours of work
            self._pages = [opened.enter_context(create(path, PAGES)) for path in pages]
            self._lines: BinaryIO | None = None
            self._earlier: dict[_Key, protocol.Rehearsed] = {}
            if resume:
                self._lines, self._earlier = _open_lines(resume)
                opened.enter_context(self._lines)
            self._files = opened.pop_all()

    def choose(self, candidates: list[Candidate]) -> list[Candidate]:
        """Those without a result that still holds; keeps the results of the others."""
        self.total = len(candidates)
        left = []
        for each in candidates:
            known = self._earlier.get((each.dataset, each.instance))
            holds = known is not None and known.state == each.state
            if known is not None and holds and known.status is not Readiness.UNTRIED:
                self.rows.append(known)
            else:
                left.append(each)
        self.kept = len(self.rows)
        return left

    def add(self, row: protocol.Rehearsed) -> None:
        self.rows.append(row)
        if self._lines:
            self._lines.write(protocol.to_bytes(row.to_json()) + b"\n")
            self._lines.flush()

    def close(self) -> None:
        """Write the pages, of as many instances as were done."""
        self.rows.sort(key=lambda row: (row.dataset or "", row.repo or "", row.instance))
        with self._files:
            for file in self._pages:
                file.write(render(self.totals(), self.rows).encode("utf-8", "backslashreplace"))

    @property
    def exit_status(self) -> int:
        """8 where an instance failed, else the least of those that could not be tried."""
        if any(row.status is Readiness.FAILED for row in self.rows):
            return 8
        untried = (row.error for row in self.rows if row.status is Readiness.UNTRIED)
        statuses = (from_problem(e.to_json()).exit_status if e else 1 for e in untried)
        return min(statuses, default=0)

    def totals(self) -> dict[str, Any]:
        """Counts of instances, in all and by dataset and repository."""
        groups: dict[tuple[str, str], Counter[str]] = {}
        for row in self.rows:
            counts = groups.setdefault((row.dataset or "-", row.repo or "-"), Counter())
            counts[row.status] += 1
            counts.update(step.name for step in row.steps if step.outcome == "nothing")
        repositories = [
            {
                "dataset": dataset,
                "repo": repo,
                "states": {str(state): counts[state] for state in Readiness if counts[state]},
                "nothing_to_apply": {
                    name: counts[name] for name in ("@test_patch", "@patch") if counts[name]
                },
            }
            for (dataset, repo), counts in sorted(groups.items())
        ]
        return {
            "total": self.total,
            "done": len(self.rows),
            "kept": self.kept,
            "states": dict(Counter(str(row.status) for row in self.rows)),
            "repositories": repositories,
            "mirrord": __version__,
            "began_at": self._began_at,
            "ended_at": utc_now(),
        }

    def report(self) -> protocol.AddReport:
        """What the daemon's page shows of it."""
        mirrors: dict[str, dict[str, int]] = {}
        for row in self.rows:
            counts = mirrors.setdefault(row.repo or "-", {})
            counts[row.status] = counts.get(row.status, 0) + 1
        bad = [row for row in self.rows if row.status is not Readiness.READY]
        datasets = {row.dataset for row in self.rows}
        return protocol.AddReport(
            kind=ReportKind.REHEARSAL,
            dataset=datasets.pop() if len(datasets) == 1 else None,
            duration_s=(utc_now() - self._began_at).total_seconds(),
            total=self.total,
            results=self.totals()["states"],
            mirrors=mirrors,
            faults={row.instance: _failed_step(row) for row in bad[: protocol.FAULTS_MAX]},
        )

    def answer(self) -> dict[str, Any]:
        """The answer with --json."""
        rows = [{**row.to_json(), "ok": row.ok} for row in self.rows]
        return {"instances": rows, "totals": protocol.to_json(self.totals())}

    def lines(self) -> Iterator[str]:
        """The answer for people: counts by repository, then each instance that is not ready."""
        totals = self.totals()
        header = ("DATASET", "REPOSITORY", "INSTANCES", *(state.upper() for state in Readiness))
        rows = []
        for group in totals["repositories"]:
            counts = [group["states"].get(state, 0) for state in Readiness]
            rows.append((group["dataset"], group["repo"], sum(counts), *counts))
        yield from table(header, rows)
        for name in ("@test_patch", "@patch"):
            if without := sum(g["nothing_to_apply"].get(name, 0) for g in totals["repositories"]):
                yield f"{count(without, 'instance')} without {name}: nothing to apply"
        bad = [row for row in self.rows if row.status is not Readiness.READY]
        if bad:
            yield ""
            yield from table(
                ("INSTANCE", "RESULT", "WHY"), [(r.instance, r.status, r.reason) for r in bad]
            )
            yield from _unexpected(bad)
        counted = [
            f"{found:,} {state}"
            for state in Readiness
            if (found := totals["states"].get(state)) and state is not Readiness.FAILED
        ]
        failed = totals["states"].get(Readiness.FAILED) or "none"
        kept = f" ({self.kept:,} by an earlier run)" if self.kept else ""
        counts_text = "; ".join([*counted, f"{failed} failed"])
        yield f"{count(len(self.rows), 'instance')} rehearsed{kept}: {counts_text}"


def _failed_step(row: protocol.Rehearsed) -> str:
    outcomes = {"failed", "but"}
    return next((step.name for step in row.steps if step.outcome in outcomes), str(row.status))


def _unexpected(rows: list[protocol.Rehearsed]) -> Iterator[str]:
    """The tests that came out otherwise than their rows say, with the last lines about them."""
    for row in rows:
        for each in row.unexpected:
            yield ""
            yield f"{row.instance}: {each.told}"
            yield from (f"    {line}" for line in each.lines)
        yield from (f"{row.instance}: log: {path}" for path in row.logs if row.unexpected)


def _open_lines(path: Path) -> tuple[BinaryIO, dict[_Key, protocol.Rehearsed]]:
    """The file to write on to, and the last result of each instance in it."""
    hint = "name a file that --resume wrote, or a new one"
    try:
        file = path.open("a+b")
        file.seek(0)
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        found = [protocol.Rehearsed.from_json(json.loads(line)) for line in whole.splitlines()]
        file.truncate(len(whole))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint=hint) from error
    except ValueError as error:
        file.close()
        message = f"cannot resume from {path}: it has lines that are no results of a rehearsal"
        raise UsageError(message, hint=hint) from error
    return file, {(row.dataset, row.instance): row for row in found}


_MEANINGS = {
    Readiness.READY: "checked out, sealed, patched, reset, all as it should be",
    Readiness.BUT: "can be checked out and graded; another commit of the row cannot be served",
    Readiness.FAILED: "does not work",
    Readiness.UNTRIED: "could not be tried, for another reason than the row",
}
_TONES = {Readiness.READY: "good", Readiness.BUT: "good", Readiness.FAILED: "bad"}
_NOTHING = {"@test_patch": "a test patch", "@patch": "a gold patch"}


def render(totals: Mapping[str, Any], rows: Sequence[protocol.Rehearsed]) -> str:
    """The page of a report; `rows` are sorted by dataset and repository."""
    return "".join(_sections(totals, rows))


def _sections(totals: Mapping[str, Any], rows: Sequence[protocol.Rehearsed]) -> Iterator[str]:
    yield page.head(f"Rehearsal of {count(totals['total'], 'instance')}")
    kept = f", {totals['kept']:,} by an earlier run" if totals["kept"] else ""
    yield f"<p>{escape(when(totals['ended_at']))}, mirrord {escape(totals['mirrord'])}{kept}</p>\n"
    if totals["done"] < totals["total"]:
        done = f"{totals['done']:,} of {count(totals['total'], 'instance')}"
        yield f'<p class="note">Interrupted: this covers {done}.</p>\n'
    counted = ((state, totals["states"].get(state, 0)) for state in Readiness)
    shares = [
        (
            _result(state),
            page.number(found),
            page.share_bar(found, totals["done"], _TONES.get(state, "other")),
            f"<td>{_MEANINGS[state]}</td>",
        )
        for state, found in counted
        if found
    ]
    yield page.table((), shares)
    for dataset, found in groupby(rows, key=lambda row: row.dataset):
        yield from _dataset(dataset, list(found), totals["repositories"])
    yield page.FOOT


def _dataset(
    dataset: str | None, rows: Sequence[protocol.Rehearsed], groups: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    yield f"<h2>{escape(f'Dataset {dataset}' if dataset else 'No dataset')}</h2>\n"
    mine = [group for group in groups if group["dataset"] == (dataset or "-")]
    states = [state for state in Readiness if any(state in group["states"] for group in mine)]
    cells = [
        (
            f"<td>{escape(group['repo'])}</td>",
            *(page.number(group["states"].get(state, 0)) for state in states),
        )
        for group in mine
    ]
    yield page.table(("repository", *states), cells)
    for name, what in _NOTHING.items():
        if without := sum(group["nothing_to_apply"].get(name, 0) for group in mine):
            yield f"<p>{count(without, 'instance')} without {what}: nothing to apply.</p>\n"
    bad = [row for row in rows if row.status is not Readiness.READY]
    if bad:
        listed = (
            (f"<td>{escape(row.instance)}</td>", _result(row.status), _why(row)) for row in bad
        )
        yield page.table(("instance", "result", "why"), listed, "rows")
    for repo, found in groupby(rows, key=lambda row: row.repo):
        ready = [row for row in found if row.status is Readiness.READY]
        if ready:
            title = f"{count(len(ready), 'instance')} of {repo} ready"
            names = ", ".join(escape(row.instance) for row in ready)
            yield f"<details><summary>{escape(title)}</summary><p>{names}</p></details>\n"


def _result(state: Readiness) -> str:
    return f'<td><b class="{_TONES.get(state, "other")}">{state}</b></td>'


def _why(row: protocol.Rehearsed) -> str:
    hint = row.error.hint if row.error else None
    more = f"<br>{escape(hint)}" if hint else ""
    tests = "".join(map(_test, row.unexpected))
    return f"<td>{escape(row.reason)}{more}{tests}{_logs(row)}</td>"


def _test(test: protocol.UnexpectedTest) -> str:
    if not test.lines:
        return f"<br>{escape(test.told)}"
    lines = "<br>".join(f"<code>{escape(line)}</code>" for line in test.lines)
    return f"<details><summary>{escape(test.told)}</summary>{lines}</details>"


def _logs(row: protocol.Rehearsed) -> str:
    named = ", ".join(f"<code>{escape(path)}</code>" for path in row.logs)
    return f"<br>logs: {named}" if named else ""
