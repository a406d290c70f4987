"""What the fault suite found, and the section of a page made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

NOTHING = "nothing"
_SECTION = "## The fault suite\n"
_TEXT = """
The result of one run of the fault suite. Written by `make faults`; do not edit. {end}

| | |
|---|---|
| faults | {count} |
| something was lost | {lost} |
| seed, share of each part | {seed}, {share:g} |
| finished | {ended} UTC |
| mirrord | {commits} |

### Method

Each fault is injected into a real daemon, with its workers and git processes, during a real operation, at a step that a run
without a fault recorded. Then the daemon is checked: after a kill, when it has restarted; after a full or failing disk or a
killed child, while it runs on (within 30 s), and again after a kill and a restart. The checks: nothing is left behind; `git
fsck` accepts every mirror; every acknowledged pin and tip is complete; catalog and refs agree; every acknowledged lease
exists with its owner's work; the audit is clean; and the same operation succeeds again.

- **kill -9** hits the daemon at a given change in the state directory, observed by inotify, or a child of the daemon, by kind.
- **disk full** is a tmpfs with a given amount of free space.
- **EIO and ENOSPC at a system call** are injected by `strace -e inject` at one call of a run, chosen by the seed. A read error of
  a file is also tried on a truncated disk.
- **power cut** stops an ext4 immediately, without flushing its journal. It is mounted again from what had reached the disk, with
  another boot id. Leases of the last seconds may be missing after one.
- **damage** to one thing in a mirror, and the donors that can heal it, are chosen by the seed. Objects, refs and evidence are
  compared with records made before.
- **none** is an audit of an undamaged mirror whose past (repacks, heals, bundles) is chosen by the seed; a finding counts as a
  loss.

Not tried: single blocks that cannot be written, which needs a device-mapper that not every kernel has.

### Totals

{summary}

### Losses

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
    """The last section of a page: method, totals, losses. Every single row is in the file that `--resume` names."""
    rows = [row for part in parts for row in part.rows]
    lost = [row for row in rows if row.lost != NOTHING]
    document = _TEXT.format(
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
    before = path.read_text(encoding="utf-8").partition(_SECTION)[0]
    path.write_text(before + _SECTION + document, encoding="utf-8")


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
    lines = ["| fault | count | operations |", "|---|---|---|"]
    for fault in dict.fromkeys(row.fault for row in rows):
        struck = [row for row in rows if row.fault == fault]
        lines.append(
            f"| {fault} | {sum(row.times for row in struck)} | {len({row.operation for row in struck})} |"
        )
    return lines
