"""What the fault suite found, and the one page made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

NOTHING = "nothing"
_HEAD = """# Reliability

The result of one run of the fault suite. Written by `make faults`; do not edit. {end}

| | |
|---|---|
| faults | {count} |
| something was lost | {lost} |
| seed, share of each part | {seed}, {share:g} |
| ended | {ended} UTC |
| mirrord | {commits} |

## Method

Each fault strikes a real daemon, with its workers and gits, during a real operation. Then the daemon is judged: after
a kill, once it is started again; after a full or failing disk, or a killed child, while it lives on (for which it has
30 s), and once more after a kill and a start. Nothing is left behind, `git fsck` is content with every mirror, every
pin and tip that was ever answered is there whole, catalog and refs agree, every lease that was answered stands with
its owner's work, the audit is clean, and the same operation works again. The steps struck are those that a run
without a fault showed.

- **kill -9** strikes at a named change in the state directory, seen by inotify; or a child of the daemon, by its kind.
- **disk full** is a tmpfs with so much room left.
- **EIO and ENOSPC at a system call** are given by `strace -e inject` at one call of a run, chosen by the seed. A read error of a
  file is also tried on a disk that lost its end.
- **power cut** ends an ext4 at once, without its journal being flushed; it is mounted again from what had reached the disk, with
  another boot id. Leases of the last seconds may be gone after one.
- **damage** to one thing in a mirror, and which donors are there to heal it, are chosen by the seed. Objects, refs and evidence
  are judged against what was written down before.
- **none** is an audit of a mirror that nothing is wrong with, after its past (repacks, heals, bundles) is chosen by the seed; a
  finding counts as a loss.

Not tried: single blocks that cannot be written (it takes a device-mapper, which not every kernel has).

## Totals

{summary}

## Losses

{losses}
"""


class Row(NamedTuple):
    """One fault and its end, or `times` of them with the same one. `lost` says `nothing`, or what."""

    fault: str
    operation: str
    step: str
    did: str
    lost: str = NOTHING
    times: int = 1


class Ended(NamedTuple):
    """A part that was run, at which commit of mirrord, and how long it took."""

    part: str
    rows: list[Row]
    commit: str
    took_s: float


def write_document(path: Path, parts: Sequence[Ended], seed: int, share: float) -> None:
    """One page: method, totals, losses. Every single row is in the file that `--resume` names."""
    rows = [row for part in parts for row in part.rows]
    lost = [row for row in rows if row.lost != NOTHING]
    document = _HEAD.format(
        end="**Something was lost: see below.**" if lost else "Nothing was lost.",
        count=sum(row.times for row in rows),
        lost=sum(row.times for row in lost),
        seed=seed,
        share=share,
        ended=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        commits=_named_commits(parts),
        summary="\n".join(_summary(rows)),
        losses="\n".join(
            f"- {row.fault}, {row.operation}, {row.step}: {row.did}; {row.lost}" for row in lost
        )
        or "None.",
    )
    path.write_text(document, encoding="utf-8")


def _named_commits(parts: Sequence[Ended]) -> str:
    """A run that was gone on with may have struck several."""
    counts = Counter(part.commit for part in parts)
    if len(counts) == 1:
        return f"`{parts[0].commit}`"
    return ", ".join(
        f"`{commit}` ({count} parts of {len(parts)})" for commit, count in counts.items()
    )


def _summary(rows: Sequence[Row]) -> list[str]:
    """How many of each fault, in how many operations."""
    lines = ["| fault | times | operations |", "|---|---|---|"]
    for fault in dict.fromkeys(row.fault for row in rows):
        struck = [row for row in rows if row.fault == fault]
        lines.append(
            f"| {fault} | {sum(row.times for row in struck)} | {len({row.operation for row in struck})} |"
        )
    return lines
