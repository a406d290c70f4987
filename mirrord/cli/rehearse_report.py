"""The results of a rehearsal: kept from an earlier run in a file of JSON lines, counted, shown.

A line is written when its instance is done, so whatever ends a run, the next one with the same file
goes on behind it. A torn last line is cut off. What was untried is no result.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from .. import __version__
from ..client.rehearsing import Candidate
from ..errors import UsageError, from_problem
from ..model import Readiness, ReportKind, utc_now
from ..protocol import FAULTS_MAX, AddReport, Rehearsed, to_bytes, to_json
from .output import count, table
from .page import PAGES, create
from .rehearse_page import render

_Key = tuple[str | None, str]


class Results:
    """The results of one run, with those of earlier runs that still hold; `close` writes pages."""

    def __init__(self, pages: Iterable[Path], resume: Path | None) -> None:
        self.rows: list[Rehearsed] = []
        self.kept = self.total = 0
        self._began_at = utc_now()
        with ExitStack() as opened:  # now: better than after hours of work
            self._pages = [opened.enter_context(create(path, PAGES)) for path in pages]
            self._lines: BinaryIO | None = None
            self._earlier: dict[_Key, Rehearsed] = {}
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

    def add(self, row: Rehearsed) -> None:
        self.rows.append(row)
        if self._lines:
            self._lines.write(to_bytes(row.to_json()) + b"\n")
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
        untried = (row for row in self.rows if row.status is Readiness.UNTRIED)
        return min((_status_of(row) for row in untried), default=0)

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

    def report(self) -> AddReport:
        """What the daemon's page shows of it."""
        mirrors: dict[str, dict[str, int]] = {}
        for row in self.rows:
            counts = mirrors.setdefault(row.repo or "-", {})
            counts[row.status] = counts.get(row.status, 0) + 1
        bad = [row for row in self.rows if row.status is not Readiness.READY]
        datasets = {row.dataset for row in self.rows}
        return AddReport(
            kind=ReportKind.REHEARSAL,
            dataset=datasets.pop() if len(datasets) == 1 else None,
            duration_s=(utc_now() - self._began_at).total_seconds(),
            total=self.total,
            results=self.totals()["states"],
            mirrors=mirrors,
            faults={row.instance: _failed_step(row) for row in bad[:FAULTS_MAX]},
        )

    def answer(self) -> dict[str, Any]:
        """The answer with --json."""
        rows = [{**row.to_json(), "ok": row.ok} for row in self.rows]
        return {"instances": rows, "totals": to_json(self.totals())}

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


def _failed_step(row: Rehearsed) -> str:
    outcomes = {"failed", "but"}
    return next((step.name for step in row.steps if step.outcome in outcomes), str(row.status))


def _unexpected(rows: list[Rehearsed]) -> Iterator[str]:
    """The tests that came out otherwise than their rows say, with the last lines about them."""
    for row in rows:
        for each in row.unexpected:
            yield ""
            yield f"{row.instance}: {each.told}"
            yield from (f"    {line}" for line in each.lines)
        yield from (f"{row.instance}: log: {path}" for path in row.logs if row.unexpected)


def _status_of(row: Rehearsed) -> int:
    return from_problem(row.error.to_json()).exit_status if row.error else 1


def _open_lines(path: Path) -> tuple[BinaryIO, dict[_Key, Rehearsed]]:
    """The file to write on to, and the last result of each instance in it."""
    hint = "name a file that --resume wrote, or a new one"
    try:
        file = path.open("a+b")
        file.seek(0)
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        found = [Rehearsed.from_json(json.loads(line)) for line in whole.splitlines()]
        file.truncate(len(whole))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint=hint) from error
    except ValueError as error:
        file.close()
        message = f"cannot resume from {path}: it has lines that are no results of a rehearsal"
        raise UsageError(message, hint=hint) from error
    return file, {(row.dataset, row.instance): row for row in found}
