"""The table of faults: rows as they are found out, folded, and the document made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

NOTHING = "nothing"
_SHOWN = 3
_HEAD = """# Reliability

What was done to mirrord while it worked, and what it lost. Written by `make faults`; do not edit. {end}

| | |
|---|---|
| faults | {count} |
| something was lost | {lost} |
| seed | {seed} |
| share of each part that was tried, at least | {share:g} |
| ended | {ended} UTC |
| mirrord | {commits} |

After every fault the daemon is judged: after a kill at once when it was started again; where the disk was full or failed at a
call, or a child was killed, while it lives on, for which it has 30 s, and after a disk's fault once more when it was killed and
started again. Nothing is left behind, `git fsck` is content with every mirror, every pin and tip that was ever answered is there
whole, catalog and refs agree, every lease that was answered stands with its owner's work, the audit is clean, and the same
operation works again. The steps are those that a run without a fault showed.

- **kill -9** strikes at a named change in the state directory, seen by inotify; or a child of the daemon, by its kind.
- **disk full** is a tmpfs with so much room left.
- **EIO and ENOSPC at a system call** are given by `strace -e inject` to a real daemon with its gits and workers, at one call of a
  run, chosen by the seed. A read error of a file is also tried on a disk that lost its end.
- **power cut** ends an ext4 at once, without its journal being flushed; it is mounted again from what had reached the disk, with
  another boot id. Leases of the last seconds may be gone after one.
- **damage** to one thing in a mirror, and which donors are there to heal it, are chosen by the seed; "where" names the donors,
  the operation is what was damaged. The objects, refs and evidence are judged against what was written down before.
- **none** is an audit of a mirror that nothing is wrong with, after "where" had happened to it; a finding counts as a loss.
- What a device-mapper would add (single blocks that cannot be written) is not tried: not every kernel has one.

## How often

{summary}

## What was tried, and what became of it

The same end of the same fault in the same operation is one row; of many places three are named.

"""


class Row(NamedTuple):
    """One fault and its end, or `count` of them with the same one. `lost` says `nothing`, or what."""

    fault: str
    operation: str
    step: str
    did: str
    lost: str = NOTHING
    count: int = 1


class Ended(NamedTuple):
    """A part that was run, at which commit of mirrord, and how long it took."""

    part: str
    rows: list[Row]
    commit: str
    took_s: float


def write_document(path: Path, parts: Sequence[Ended], seed: int, share: float) -> None:
    """Summary, then one table."""
    rows = [row for part in parts for row in part.rows]
    lost = sum(row.count for row in rows if row.lost != NOTHING)
    head = _HEAD.format(
        end="Nothing was lost." if not lost else "**Something was lost: see below.**",
        count=sum(row.count for row in rows),
        lost=lost,
        seed=seed,
        share=share,
        ended=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        commits=_named_commits(parts),
        summary="\n".join(_summary(rows)),
    )
    path.write_text(head + "\n".join(_table(rows)) + "\n", encoding="utf-8")


def _named_commits(parts: Sequence[Ended]) -> str:
    """A run that was gone on with may have struck several."""
    counts = Counter(part.commit for part in parts)
    if len(counts) == 1:
        return f"`{parts[0].commit}`"
    return ", ".join(f"`{commit}` ({count} parts of {len(parts)})" for commit, count in counts.items())


def _summary(rows: Iterable[Row]) -> list[str]:
    """How many of each fault struck each operation."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in rows:
        counts[row.operation, row.fault] += row.count
    faults = list(dict.fromkeys(fault for _, fault in counts))
    lines = [f"| | {' | '.join(faults)} |", "|---|" + "---|" * len(faults)]
    for operation in dict.fromkeys(operation for operation, _ in counts):
        cells = (str(counts[operation, fault] or "") for fault in faults)
        lines.append(f"| {operation} | {' | '.join(cells)} |")
    return lines


def _table(rows: Iterable[Row]) -> list[str]:
    lines = ["| fault | operation | times | where | what mirrord did | what was lost |", "|---|---|---|---|---|---|"]
    for row, steps in fold(rows):
        lines.append(f"| {row.fault} | {row.operation} | {row.count} | {_named(steps)} | {row.did} | {row.lost} |")
    return lines


def fold(rows: Iterable[Row]) -> list[tuple[Row, list[str]]]:
    """Rows that differ in their step alone as one, with their steps."""
    steps: dict[Row, list[str]] = {}
    counts: Counter[Row] = Counter()
    for row in rows:
        key = row._replace(step="", count=0)
        steps.setdefault(key, []).append(row.step)
        counts[key] += row.count
    return [(key._replace(count=counts[key]), list(dict.fromkeys(filter(None, named)))) for key, named in steps.items()]


def _named(steps: Sequence[str]) -> str:
    more = len(steps) - _SHOWN
    return ", ".join(steps[:_SHOWN]) + (f", and {more} more" if more > 0 else "")
