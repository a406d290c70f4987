"""`make faults`: every fault there is, with a seed, into docs/reliability.md. Ends with 8 when something was lost."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .crowd import everything_at_once
from .full import fill_up, read_errors
from .kills import children_of, kill_after, kill_at, kill_child, steps_of
from .lab import Lab, laboratory
from .operations import OPERATIONS, Operation
from .power import cut_power
from .report import Row, write_document

_FREE_BYTES = [8 << 10, 64 << 10, 256 << 10, 1 << 20]


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was mounted is taken away
    rows = []
    for row in _all(options, random.Random(options.seed)):
        rows.append(row)
        print(f"{len(rows)}\t{row.fault}\t{row.where}\t{row.did}\t{row.lost}", flush=True)
        write_document(options.document, rows, options.seed)
    return 8 if any(row.lost != "nothing" for row in rows) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="operations whose name holds this")
    parser.add_argument("--share", type=float, default=1.0, help="how much of the steps to strike, chosen by the seed")
    parser.add_argument("--cuts", type=int, default=20, help="power cuts")
    parser.add_argument("--crowd", type=float, default=180.0, help="seconds of everything at once")
    parser.add_argument("--document", type=Path, default=Path("docs/reliability.md"))
    return parser.parse_args()


def _all(options: argparse.Namespace, seed: random.Random) -> Iterator[Row]:
    for kind in (kind for kind in OPERATIONS if options.only in kind.name):
        yield from _kills(kind, seed, options.share)
    if options.cuts:
        with tempfile.TemporaryDirectory() as scratch:
            yield from _told("power cut", "any", lambda: cut_power(Path(scratch), seed, options.cuts))
    if options.share:
        for kind in (kind for kind in OPERATIONS if options.only in kind.name and kind.name != "heal"):
            yield from _told("disk full", kind.name, lambda kind=kind: fill_up([kind], _FREE_BYTES))  # type: ignore[misc]
        with tempfile.TemporaryDirectory() as scratch, laboratory() as lab:
            yield from _told("read error (EIO)", "any", lambda: read_errors(lab, Path(scratch)))
    if options.crowd:
        with laboratory() as lab:
            yield from _told("everything at once", "one mirror", lambda: everything_at_once(lab, options.seed, options.crowd))


def _kills(kind: type[Operation], seed: random.Random, share: float) -> Iterator[Row]:
    """The same lab goes from fault to fault; after one that it did not survive there is a new one."""
    with laboratory() as lab:
        began = time.monotonic()
        steps = steps_of(lab, kind)
        took_s = time.monotonic() - began
        children = children_of(lab, kind)
    faults: list[tuple[str, str, Callable[[Lab], Row]]] = [
        ("kill -9 of the daemon", step, lambda lab, step=step, count=count: kill_at(lab, kind, step, count))
        for step, count in steps
    ]  # fmt: skip
    faults += [(f"kill -9 of `{child}`", "", lambda lab, child=child: kill_child(lab, kind, child, seed)) for child in children]
    delays = [seed.uniform(0, took_s / 2) for _ in range(4)]
    faults += [("kill -9 of the daemon", "any moment", lambda lab, delay=delay: kill_after(lab, kind, delay)) for delay in delays]
    chosen = [fault for fault in faults if seed.random() < share]
    while chosen:
        with laboratory() as lab:
            is_sound = True
            while chosen and is_sound:
                fault, where, strike = chosen.pop(0)
                row = next(_told(fault, f"{kind.name}: {where}", lambda strike=strike, lab=lab: [strike(lab)]))  # type: ignore[misc]
                is_sound = row.lost == "nothing"
                yield row


def _told(fault: str, where: str, strike: Callable[[], list[Row]]) -> Iterator[Row]:
    """What went wrong becomes a row too."""
    try:
        rows = strike()
    except Exception as error:
        rows = [Row(fault, where, "", " ".join(f"{type(error).__name__}: {error}".split())[-300:].replace("|", "/"))]
    yield from rows


if __name__ == "__main__":
    sys.exit(main())
