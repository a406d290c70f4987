"""The table of faults: rows as they are found out, and the document made of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_HEAD = """# Reliability

What was done to mirrord while it worked, and what it lost. Written by `make faults`; do not edit.

After every fault the daemon is started again, at once, and judged: nothing is left behind, `git fsck` is content with every
mirror, every pin and tip that was ever answered is there whole, catalog and refs agree, every lease that was answered stands with
its owner's work, the audit is clean, and the same operation works again. The steps are those that a run without a fault showed.

A power cut ends an ext4 at once, without its journal being flushed, and it is mounted again from what had reached the disk, with
another boot id. Leases of the last seconds may be gone after one, and are said to be. Read errors are those of a disk that lost
its end. What a device-mapper would add (write errors of single blocks) is not tried where the kernel has none.

"""


class Row(NamedTuple):
    """One fault and its end. `lost` says `nothing`, or what."""

    fault: str
    where: str
    did: str
    lost: str


def write_document(path: Path, rows: Iterable[Row], seed: int) -> None:
    """The one table; the same end of the same fault in the same operation is one row."""
    lines = [f"Seed {seed}.", "", "| fault | where | what mirrord did | what was lost |", "|---|---|---|---|"]
    lines += [f"| {row.fault} | {row.where} | {row.did} | {row.lost} |" for row in rows]
    path.write_text(_HEAD + "\n".join(lines) + "\n", encoding="utf-8")
