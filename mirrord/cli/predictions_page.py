"""The report on predictions as one HTML page. Every text in it may be a model's."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import page
from .outcomes import MEANINGS, GradedPrediction, State
from .output import count, when
from .page import escape

_SHOWN_MAX = 100


def render(totals: Mapping[str, Any], outcomes: Sequence[GradedPrediction]) -> str:
    """The page of a report, in the order of the predictions."""
    return "".join(_sections(totals, outcomes))


def _sections(totals: Mapping[str, Any], outcomes: Sequence[GradedPrediction]) -> Iterator[str]:
    yield page.head(f"Predictions in {totals['predictions']}")
    dataset = f"dataset {totals['dataset']}, " if totals["dataset"] else ""
    ended = f"{when(totals['ended_at'])}, mirrord {totals['mirrord']}"
    yield f"<p>{escape(f'{dataset}{ended}')}</p>\n"
    if totals["done"] < totals["total"]:
        done = f"{totals['done']:,} of {count(totals['total'], 'prediction')}"
        yield f'<p class="note">Interrupted: this covers {done}.</p>\n'
    yield _states(totals)
    yield _counts("How the patches applied", "strategy", totals["strategies"])
    yield _counts("What could steer the tests", "rule", totals["steering"])
    if totals["touched_tests"] or totals["dropped"]:
        touched = f"{count(totals['touched_tests'], 'prediction')} touch tests"
        yield f"<p>{touched}; in {totals['dropped']:,} some paths were left out.</p>\n"
    without = [each for each in outcomes if each.grade is None]
    if without:
        yield f"<h2>Not graded</h2>\n{_table(('line', 'instance', 'result', 'why'), without)}"
    columns = ("line", "instance", "model", "result", "how", "paths", "notable")
    yield f"<h2>All predictions</h2>\n{_table(columns, outcomes)}{page.FOOT}"


_TONES = {State.PREPARED: "good", State.EMPTY: "other", State.UNKNOWN: "other"}
_TONES[State.DUPLICATE] = "other"


def _result(state: State) -> str:
    return f'<td><b class="{_TONES.get(state, "bad")}">{state}</b></td>'


def _states(totals: Mapping[str, Any]) -> str:
    counted = [(state, totals["states"].get(state, 0)) for state in State]
    rows = [
        [
            *(_result(state), page.number(found)),
            page.share_bar(found, totals["done"], _TONES.get(state, "bad")),
            f"<td>{escape(MEANINGS[state])}</td>",
        ]
        for state, found in counted
        if found
    ]
    return page.table((), rows)


def _counts(title: str, noun: str, counts: Mapping[str, int]) -> str:
    if not counts:
        return ""
    rows = [
        (f"<td><code>{escape(name)}</code></td>", page.number(found))
        for name, found in sorted(counts.items(), key=lambda each: -each[1])
    ]
    return f"<h2>{title}</h2>\n{page.table((noun, 'predictions'), rows)}"


def _table(columns: Sequence[str], outcomes: Iterable[GradedPrediction]) -> str:
    return page.table(columns, ([_cell(name, each) for name in columns] for each in outcomes))


def _cell(column: str, each: GradedPrediction) -> str:
    grade = each.grade
    match column:
        case "line":
            return page.number(each.line)
        case "instance":
            return f"<td>{escape(each.instance or '')}</td>"
        case "model":
            return f"<td>{escape(each.model or '')}</td>"
        case "result":
            return _result(each.state)
        case "how":
            return f"<td>{escape((grade and grade.strategy) or '')}</td>"
        case "paths":
            return f'<td class="n">{grade.changed if grade else ""}</td>'
        case "why":
            hint = each.error.hint if each.error else None
            return f"<td>{escape(each.why)}{f'<br>{escape(hint)}' if hint else ''}</td>"
        case _:
            return f"<td>{_notable(each)}</td>"


def _notable(each: GradedPrediction) -> str:
    """What could steer the tests, folded; why there is no grade; where it is kept."""
    if each.grade is None:
        return escape(each.why)
    kept = f"<code>{escape(each.grade.path)}</code>" if each.is_kept else ""
    steering = each.grade.steering
    if not steering:
        return kept
    items = "".join(
        f"<li>{s.action}: <code>{escape(s.path)}</code> ({escape(s.rule)}) {escape(s.detail)}</li>"
        for s in steering[:_SHOWN_MAX]
    )
    if len(steering) > _SHOWN_MAX:
        items += f"<li>and {len(steering) - _SHOWN_MAX:,} more</li>"
    rules = escape(", ".join(sorted({s.rule for s in steering})))
    return f"{kept}<details><summary>{rules}</summary><ul>{items}</ul></details>"
