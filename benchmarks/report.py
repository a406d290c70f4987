"""What a run of the bench looks like: a table for the terminal, and two pages of docs/ with a plot."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

METHOD = """# Benchmarks

Written by `make bench DOCS=1 REPO=…`; do not edit. [Another page](limits.md) explains the goals that were missed;
[load, scale and disk](benchmarks-load.md) has the figures without a counterpart of git.

**One operation.** Each row measures both sides alternately in one run on one machine. The figures are medians, with the
fastest and slowest round, and the ratio of the medians. mirrord's figure includes everything: a Python client, the socket, the
daemon and the answer. The other is the git command without a client. Cleaning up (removing the worktree, releasing the
checkout) is not measured.

**A rollout** (`make bench REPO=… BENCH_ARGS='--ext4 --cases rollouts'`) is measured on an ext4 with a journal in a file. Both
sides start each round clean, with nothing left to remove, and write the change again; each patch is compared with git's. A
turn is: checkout, write, diff, grade, release of the grade, reset, release. In the crowd all tasks share one `AsyncClient`,
which also writes the files, on the same processors; where `finish` ends a turn it is three requests: checkout, diff with grade
and release, release of the grade. Every few seconds git gets the machine instead, with a process for each processor. There,
removal counts for both sides. After that all tasks begin a turn at the same moment: its verbs are listed apart, as "all at once".
`--cases cold` measures each verb after a second without a request, as agents pause to think, and git's after the same pause.
"""

LOAD = """# Load, scale and disk

Written with [the benchmarks against git](benchmarks.md); do not edit.

**Many mirrors** (`make bench BENCH_ARGS='--cases scale'`): a dataset of the shape of SWE-rebench over generated repositories, 20
commits and 10 rows each, first a tenth of them and then all, each time in a new daemon. The time is that of the whole command on
the command line; a start ends when the daemon serves. "Times" is the growth of the cost: 10 is linear.

**A soak** (`make bench BENCH_ARGS='--ext4 --cases soak --seconds 600'`, with `--restart` through an orderly restart and a SIGKILL)
simulates a busy day: three members and an administrator use every command on both backends, `--rate` turns a second in all. At the
same time there are slow clients, clients that hang up, garbage, crowds of connections, huge requests and unread answers, and
syncs, force pushes, imports, audits and gcs. The idle daemon is compared before and after: memory, descriptors, threads, mounts,
directories. A leak, an answer that is not in [errors.md](errors.md), or a lost request ends the soak with status 1.
"""


_GROWTH = ("a tenth", "the whole", "times", "goal")
_SPREAD = ("times", "p50, ms", "p99, ms", "longest, ms", "p99 / p50")


def _span(seconds: list[float]) -> str:
    low, middle, high = (
        f"{value * 1000:,.2f}" for value in (min(seconds), statistics.median(seconds), max(seconds))
    )
    return f"{middle} ({low} to {high})"


def _verdict(row: dict[str, Any]) -> str:
    goals = []
    if row["goal"] is not None:
        goals.append((f"{row['goal']:g}", row["ratio"] >= row["goal"]))
    if row.get("most_ms") is not None:
        median_ms = statistics.median(row["ours"]) * 1000
        goals.append((f"{row['most_ms']:g} ms", median_ms <= row["most_ms"]))
    return "; ".join(f"{goal}, {'reached' if met else 'MISSED'}" for goal, met in goals)


def _rows(result: dict[str, Any]) -> list[list[str]]:
    return [
        [
            row["work"],
            row["against"],
            _span(row["ours"]),
            _span(row["theirs"]),
            f"{row['ratio']:.2f}",
            _verdict(row),
        ]
        for row in result["rows"]
    ]


def _latencies(result: dict[str, Any]) -> list[list[str]]:
    return [
        [each["what"], f"{each['count']:,}"]
        + [f"{each[f'{part}_ms']:,.1f}" for part in ("p50", "p99", "longest")]
        + [f"{each['p99_ms'] / each['p50_ms']:.1f}"]
        for each in result.get("latencies", ())
    ]


def _growths(result: dict[str, Any]) -> list[list[str]]:
    return [
        [
            each["what"],
            f"{each['tenth']:,.2f} {each['unit']}",
            f"{each['whole']:,.2f} {each['unit']}",
            f"{each['whole'] / each['tenth']:.1f}" if each["tenth"] else "",
            ""
            if each["most"] is None
            else f"under {each['most']:g}, {'reached' if each['whole'] < each['most'] else 'MISSED'}",
        ]
        for each in result.get("growths", ())
    ]


def _title(result: dict[str, Any]) -> str:
    repository = result["repository"]
    files = f": {repository['files']:,} files" if "files" in repository else ""
    return f"{repository['name']}{files}"


def print_table(result: dict[str, Any]) -> None:
    heads = ["work", "against", "mirrord, ms", "theirs, ms", "ratio", "goal"]
    rows = [heads, *_rows(result)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    print(
        f"\n{_title(result)} ({result['machine']['git']}, Linux {result['machine']['kernel']}, {result['machine']['cpus']} CPUs)"
    )
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    for name, *cells in _latencies(result):
        print(f"{name}: " + ", ".join(map(" ".join, zip(_SPREAD, cells, strict=True))))
    for what, *cells in _growths(result):
        print(f"{what}: " + ", ".join(map(" ".join, zip(_GROWTH, cells, strict=True))))
    for figure in result["figures"]:
        print(
            f"{figure['name']}: {figure['value']:,.2f} {figure['unit']}"
            + (f" (goal: {figure['goal']})" if figure["goal"] else "")
        )


def write_docs(ran: list[dict[str, Any]], docs: Path) -> None:
    """Both pages and the plot, whole, from docs/benchmarks.json with what ran now."""
    stored = docs / "benchmarks.json"
    results = json.loads(stored.read_text())
    for result in ran:
        results = [*filter(_has_any, (_without(old, result) for old in results)), result]
    stored.write_text(json.dumps(results, indent=1) + "\n")
    compared = [_section(result, _comparisons(result)) for result in results]
    plot = (
        "\n![How many times faster than the alternative, on a logarithmic scale](benchmarks.svg)\n"
    )
    (docs / "benchmarks.md").write_text(METHOD + "".join(compared) + plot)
    loaded = [_section(result, _loads(result)) for result in results]
    (docs / "benchmarks-load.md").write_text(LOAD + "".join(loaded))
    (docs / "benchmarks.svg").write_text(_plot(results))


# what names an entry of each kind
_NAMED_BY = {
    "rows": ("work", "against"),
    "figures": ("name",),
    "growths": ("what",),
    "latencies": ("what",),
}


def _without(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """An older result without what a newer one of the same repository has measured again."""
    if old["repository"]["name"] != new["repository"]["name"]:
        return old

    def named(entry: dict[str, Any], kind: str) -> list[str]:
        return [entry[member] for member in _NAMED_BY[kind]]

    left = {}
    for kind in _NAMED_BY:
        again = [named(entry, kind) for entry in new.get(kind, ())]
        left[kind] = [entry for entry in old.get(kind, ()) if named(entry, kind) not in again]
    return {**old, **left}


def _has_any(result: dict[str, Any]) -> bool:
    return any(result.get(kind) for kind in _NAMED_BY)


def _section(result: dict[str, Any], tables: str) -> str:
    if not tables:
        return ""
    machine = result["machine"]
    load = f", load {machine['load']:.1f} before it" if "load" in machine else ""
    return (
        f"\n## {_title(result)}\n\n{machine['at']}, Linux {machine['kernel']}, {machine['cpus']} CPUs,"
        f" {machine['git']}, on {machine['disk']}{load}\n{tables}"
    )


def _comparisons(result: dict[str, Any]) -> str:
    heads = ("work", "against", "mirrord, ms", "theirs, ms", "theirs / ours", "goal")
    return _table(heads, _rows(result))


def _loads(result: dict[str, Any]) -> str:
    figures = [
        [f["name"], f"{f['value']:,.2f} {f['unit']}", f["goal"] or ""] for f in result["figures"]
    ]
    return (
        _table(("what", *_SPREAD), _latencies(result))
        + _table(("what", *_GROWTH), _growths(result))
        + _table(("figure", "value", "goal"), figures)
    )


def _table(heads: tuple[str, ...], rows: list[list[str]]) -> str:
    if not rows:
        return ""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _plot(results: list[dict[str, Any]]) -> str:
    """Bars of theirs/ours, logarithmic: 1 is the middle line, right of it mirrord is faster."""
    bars = [
        (f"{_title(result)}: {row['work']} / {row['against']}", row["ratio"])
        for result in results
        for row in result["rows"]
    ]
    height, left, unit = 22, 620, 110
    bottom = height * len(bars)
    scale = "".join(_label(left + n * unit, bottom + 18, "middle", f"{10**n}x") for n in range(4))
    axis = f'<line x1="{left}" x2="{left}" y1="0" y2="{bottom}" stroke="black"/>'
    drawn = "\n".join(
        _bar(left, number * height + 4, unit, *bar) for number, bar in enumerate(bars)
    )
    size = f'width="{left + 4 * unit}" height="{bottom + 30}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    )
    return f'{head}\n<rect width="100%" height="100%" fill="white"/>\n{axis}\n{drawn}\n{scale}\n</svg>\n'


def _bar(left: int, y: int, unit: int, label: str, ratio: float) -> str:
    length = math.log10(ratio) * unit
    start, colour = (left, "#2a7") if length >= 0 else (left + length, "#c55")
    rect = f'<rect x="{start:.1f}" y="{y}" width="{abs(length):.1f}" height="14" fill="{colour}"/>'
    value = _label(max(left, left + length) + 4, y + 11, "start", f"{ratio:.1f}")
    return _label(min(left, start) - 6, y + 11, "end", label) + rect + value


def _label(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{_escaped(text)}</text>'


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
