"""Reports as HTML pages: one file without scripts and without anything to load.

All text is escaped, and a content security policy lets nothing in but the style that is here. On a
narrow screen the rows of a table of class `rows` stand as paragraphs.
"""

import html
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from ..errors import UsageError
from ..model import printable

PAGES = {".html", ".htm"}

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #2a8a4a; --bad: #c0392b; --other: #888 }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere }
th { overflow-wrap: normal }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
td.bar { width: 35% } td.bar div { height: .8rem; border-radius: .2rem; background: var(--other) }
b { font-weight: 600; white-space: nowrap }
b.good { color: var(--good) } b.bad { color: var(--bad) }
td.good div { background: var(--good) } td.bad div { background: var(--bad) }
code { font-size: .9em } p.note { color: var(--bad) } summary { cursor: pointer }
p, li { overflow-wrap: anywhere }
ul { margin: .2rem 0; padding-left: 1.2rem }
@media (max-width: 40rem) {
  body { margin: 1rem auto } th, td { padding: .25rem .3rem } td.bar { display: none }
  table.rows tr { display: block; padding: .4rem 0; border-bottom: 1px solid var(--line) }
  table.rows th { display: none }
  table.rows td { display: block; border: 0; padding: 0 .3rem; text-align: left }
}
"""
_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head><body>
<h1>{title}</h1>
"""
FOOT = "</body></html>\n"


def head(title: str) -> str:
    return _HEAD.format(title=escape(title), style=_STYLE)


def escape(text: str) -> str:
    return html.escape(printable(text))


def table(columns: Sequence[str], rows: Iterable[Iterable[str]], kind: str = "") -> str:
    """A table of cells, each a whole `<td>`. A table of the kind `rows` is for long texts."""
    first = f"<tr>{''.join(f'<th>{column}</th>' for column in columns)}</tr>\n" if columns else ""
    body = "".join(f"<tr>{''.join(cells)}</tr>\n" for cells in rows)
    return f"<table{f' class={kind}' if kind else ''}>{first}{body}</table>\n"


def number(value: int) -> str:
    return f'<td class="n">{value:,}</td>'


def share_bar(part: int, whole: int, tone: str) -> str:
    """Two cells: the share in per cent, and as a bar in the colour of `tone`: good, bad, other."""
    share = round(100 * part / whole, 1) if whole else 0.0
    bar = f'<td class="bar {tone}"><div style="width:{share}%"></div></td>'
    return f'<td class="n">{share} %</td>{bar}'


def create(path: Path, suffixes: Collection[str]) -> BinaryIO:
    """Open a report for writing, before the work that it is about. Raises UsageError."""
    if path.suffix.lower() not in suffixes:
        hint = f"end its name in {' or '.join(sorted(set(suffixes) - {'.htm'}, reverse=True))}"
        raise UsageError(f"cannot write a report to {path}: unknown suffix", hint=hint)
    try:
        return path.open("wb")
    except OSError as error:
        hint = "name another file with --report"
        raise UsageError(f"cannot write {path}: {error.strerror}", hint=hint) from error
