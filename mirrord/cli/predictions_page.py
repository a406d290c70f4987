"""The report on predictions as one HTML page, without scripts and without anything to load.

Every text in it may be a model's: all of it is escaped, and a content security policy lets nothing
but its own style in.
"""

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .outcomes import MEANINGS, Outcome, State
from .output import count, printable, when

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #2a8a4a; --bad: #c0392b; --other: #888 }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
td.bar { width: 35% } td.bar div { height: .8rem; border-radius: .2rem; background: var(--other) }
b { font-weight: 600; white-space: nowrap }
b.prepared { color: var(--good) } b.conflict, b.refused, b.failed, b.invalid { color: var(--bad) }
td.prepared div { background: var(--good) }
td.conflict div, td.refused div, td.failed div, td.invalid div { background: var(--bad) }
code { font-size: .9em } p.note { color: var(--bad) } summary { cursor: pointer }
ul { margin: .2rem 0; padding-left: 1.2rem }
"""
_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title><style>{style}</style></head><body>
<h1>{title}</h1>
"""
_SHOWN_MAX = 100


def render(totals: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """The page of a report, in the order of the predictions."""
    return "".join(_sections(totals, outcomes))


def _sections(totals: Mapping[str, Any], outcomes: Sequence[Outcome]) -> Iterator[str]:
    title = escape(f"Predictions in {totals['predictions']}")
    yield _HEAD.format(title=title, style=_STYLE)
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
    yield f"<h2>All predictions</h2>\n{_table(columns, outcomes)}</body></html>\n"


def escape(text: str) -> str:
    return html.escape(printable(text))


def _states(totals: Mapping[str, Any]) -> str:
    rows = []
    for state in State:
        if number := totals["states"].get(state):
            share = round(100 * number / totals["done"], 1)
            bar = f'<td class="bar {state}"><div style="width:{share}%"></div></td>'
            rows.append(
                f'<tr><td><b class="{state}">{state}</b></td><td class="n">{number:,}</td>'
                f'<td class="n">{share} %</td>{bar}<td>{escape(MEANINGS[state])}</td></tr>\n'
            )
    return f"<table>{''.join(rows)}</table>\n"


def _counts(title: str, noun: str, counts: Mapping[str, int]) -> str:
    if not counts:
        return ""
    rows = "".join(
        f'<tr><td><code>{escape(name)}</code></td><td class="n">{number:,}</td></tr>\n'
        for name, number in sorted(counts.items(), key=lambda each: -each[1])
    )
    head = f"<tr><th>{noun}</th><th>predictions</th></tr>\n"
    return f"<h2>{title}</h2>\n<table>{head}{rows}</table>\n"


def _table(columns: Sequence[str], outcomes: Iterable[Outcome]) -> str:
    head = "".join(f"<th>{column}</th>" for column in columns)
    rows = [f"<tr>{''.join(_cell(name, each) for name in columns)}</tr>\n" for each in outcomes]
    return f"<table><tr>{head}</tr>\n{''.join(rows)}</table>\n"


def _cell(column: str, each: Outcome) -> str:
    grade = each.grade
    match column:
        case "line":
            return f'<td class="n">{each.line}</td>'
        case "instance":
            return f"<td>{escape(each.instance or '')}</td>"
        case "model":
            return f"<td>{escape(each.model or '')}</td>"
        case "result":
            return f'<td><b class="{each.state}">{each.state}</b></td>'
        case "how":
            return f"<td>{escape((grade and grade.strategy) or '')}</td>"
        case "paths":
            return f'<td class="n">{grade.changed if grade else ""}</td>'
        case "why":
            hint = each.error.hint if each.error else None
            return f"<td>{escape(each.why)}{f'<br>{escape(hint)}' if hint else ''}</td>"
        case _:
            return f"<td>{_notable(each)}</td>"


def _notable(each: Outcome) -> str:
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
