"""The report on a rehearsal as one HTML page: what is ready, what is not, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from ..model import Readiness
from ..protocol import Rehearsed, UnexpectedTest
from . import page
from .output import count, when
from .page import escape

_MEANINGS = {
    Readiness.READY: "checked out, sealed, patched, reset, all as it should be",
    Readiness.BUT: "can be checked out and graded; another commit of the row cannot be served",
    Readiness.FAILED: "does not work",
    Readiness.UNTRIED: "could not be tried, for another reason than the row",
}
_TONES = {Readiness.READY: "good", Readiness.BUT: "good", Readiness.FAILED: "bad"}
_NOTHING = {"@test_patch": "a test patch", "@patch": "a gold patch"}


def render(totals: Mapping[str, Any], rows: Sequence[Rehearsed]) -> str:
    """The page of a report; `rows` are sorted by dataset and repository."""
    return "".join(_sections(totals, rows))


def _sections(totals: Mapping[str, Any], rows: Sequence[Rehearsed]) -> Iterator[str]:
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
    dataset: str | None, rows: Sequence[Rehearsed], groups: Sequence[Mapping[str, Any]]
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
        listed = ([_name(row), _result(row.status), _why(row)] for row in bad)
        yield page.table(("instance", "result", "why"), listed, "rows")
    for repo, found in groupby(rows, key=lambda row: row.repo):
        ready = [row for row in found if row.status is Readiness.READY]
        if ready:
            title = f"{count(len(ready), 'instance')} of {repo} ready"
            names = ", ".join(escape(row.instance) for row in ready)
            yield f"<details><summary>{escape(title)}</summary><p>{names}</p></details>\n"


def _result(state: Readiness) -> str:
    return f'<td><b class="{_TONES.get(state, "other")}">{state}</b></td>'


def _name(row: Rehearsed) -> str:
    return f"<td>{escape(row.instance)}</td>"


def _why(row: Rehearsed) -> str:
    hint = row.error.hint if row.error else None
    more = f"<br>{escape(hint)}" if hint else ""
    tests = "".join(map(_test, row.unexpected))
    return f"<td>{escape(row.reason)}{more}{tests}{_logs(row)}</td>"


def _test(test: UnexpectedTest) -> str:
    if not test.lines:
        return f"<br>{escape(test.told)}"
    lines = "<br>".join(f"<code>{escape(line)}</code>" for line in test.lines)
    return f"<details><summary>{escape(test.told)}</summary>{lines}</details>"


def _logs(row: Rehearsed) -> str:
    named = ", ".join(f"<code>{escape(path)}</code>" for path in row.logs)
    return f"<br>logs: {named}" if named else ""
