"""The results of a rehearsal, which a later one can go on from.

The result of an instance is written as soon as it is known. A later run with the same file
truncates a torn last line and skips instances whose result still holds; untried ones are tried.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from .. import protocol
from ..client.rehearsing import PATCHES, Candidate
from ..errors import UsageError, from_problem
from ..jsontext import loads
from ..model import FoundStrategy, Readiness, ReportKind
from ..units import counted
from .reports import RunReport

STEPS = (
    *("mirrored", "checkout", "seal", "@test_patch", "@patch", "tree", "reset", "recorded"),
    *("environment", "tests before", "tests after"),
)
_PASSED = {"ok", "but"}
_REMEDIES = {
    "interpreter": "install it in /usr/bin or /usr/local/bin, or let uv fetch it",
    "package": "install it by apt-get",
    "program": "install the package that has it; host_packages of a recipe of your own names it",
    "skipped": "install it on the host, or add it to packages of a recipe of your own",
}
_Key = tuple[str | None, str]


class Results(RunReport[protocol.Rehearsed]):
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
        return f"Rehearsal of {counted(self.total, 'instance')}"

    def choose(self, candidates: list[Candidate]) -> list[Candidate]:
        """Return the candidates without a valid earlier result; keep the valid results."""
        self.total = len(candidates)
        chosen = []
        for candidate in candidates:
            earlier = self._earlier.get((candidate.dataset, candidate.instance))
            if (
                earlier
                and earlier.state == candidate.state
                and earlier.status is not Readiness.UNTRIED
            ):
                self.rows.append(earlier)
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
            counts.update(f"{step.name} passed" for step in row.steps if step.outcome in _PASSED)
            counts["seconds"] += round(row.duration_s * 1000)
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
                "passed": {name: n for name in STEPS if (n := counts[f"{name} passed"])},
                "duration_s": counts["seconds"] / 1000,
                "environments": self._environments(dataset, repo),
            }
            for (dataset, repo), counts in sorted(groups.items())
        ]
        totals = {"kept": self.kept_count, "repositories": repositories}
        return {**super().totals(), **totals, "missing": self.missing()}

    def missing(self) -> list[dict[str, Any]]:
        """Return what the host lacks, with the rows that it costs and the remedy; costly first."""
        groups: dict[tuple[str, str], Counter[str]] = {}
        for row in self.rows:
            for kind, name in {(lack.kind, lack.name) for lack in row.missing}:
                counts = groups.setdefault((kind, name), Counter())
                counts.update(["rows", *(["untried"] if row.status is Readiness.UNTRIED else [])])
            for lack in row.missing:
                groups[lack.kind, lack.name]["tests"] += lack.tests
        costly = sorted(
            groups.items(), key=lambda each: (-each[1]["untried"], -each[1]["rows"], each[0])
        )
        return [
            {
                "kind": kind, "name": name, "rows": counts["rows"], "tests": counts["tests"],
                "untried": counts["untried"], "text": _cost(kind, name, counts),
                "remedy": _REMEDIES[kind],
            }
            for (kind, name), counts in costly
        ]  # fmt: skip

    def _environments(self, dataset: str, repo: str) -> dict[str, int]:
        """Return how many environments these rows have, how many leak, and their bytes before and
        after they share files.
        """
        rows = [
            row for row in self.rows if (row.dataset or "-", row.repo or "-") == (dataset, repo)
        ]
        of = {row.environment: row.weighed for row in rows if row.environment and row.weighed}
        names = ("leaking", "size_bytes", "disk_bytes")
        every = {name: sum(getattr(each, name) for each in of.values()) for name in names}
        return {"count": len(of), **every} if of else {}

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


def _cost(kind: str, name: str, counts: Counter[str]) -> str:
    """Say what something that the host lacks costs."""
    rows, untried = counted(counts["rows"], "row"), counts["untried"]
    if kind == "skipped":
        return f"{name}: {counted(counts['tests'], 'test')} SKIPPED in {rows}"
    of_them = f", {untried} of them untried" if untried else ""
    return f"{name}: not on this host: {rows}" + (
        " untried" if untried == counts["rows"] else of_them
    )


def _failed_step(row: protocol.Rehearsed) -> str:
    outcomes = {"failed", "but"}
    return next((step.name for step in row.steps if step.outcome in outcomes), str(row.status))


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
