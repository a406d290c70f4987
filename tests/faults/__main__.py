"""`make faults`: every fault there is, with a seed, into docs/reliability.md. Ends with 8 when something was lost.

Parts go side by side in processes of their own; each has its own choices from the seed, so what is struck does not depend on what
else is run. With `--resume` the parts that have ended are kept in a file, and a run that was ended goes on after them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from . import calls, crowd, damages, full, kills, power, undamaged, upstreams
from .plan import Part, Plan, what_went_wrong
from .report import NOTHING, Ended, Row, write_document

PARTS: tuple[Part, ...] = (
    *kills.parts(),
    *full.parts(),
    *calls.parts(),
    *damages.parts(),
    *undamaged.parts(),
    Part("upstream", upstreams.rows),
    Part("power cuts", power.rows),
    Part("everything at once", crowd.rows),
)


def main() -> int:
    options = _options()
    plan = Plan(options.seed, options.share, options.crowd_s)
    chosen = [part for part in PARTS if options.only in part.name]
    done = _read(options.resume)
    for ended in _run([part for part in chosen if part.name not in done], plan, options.jobs):
        done[ended.part] = ended
        _show(ended)
        if options.resume:
            _append(options.resume, ended)
    rows = [row for part in chosen for row in done[part.name].rows]
    if options.document:
        write_document(
            options.document, [done[part.name] for part in chosen], plan.seed, plan.share
        )
    return 8 if any(row.lost != NOTHING for row in rows) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="parts whose name holds this")
    parser.add_argument(
        "--share", type=float, default=1.0, help="how much of each part, chosen by the seed"
    )
    parser.add_argument(
        "--crowd-s",
        type=float,
        default=Plan.crowd_s,
        help="seconds that everything at once goes on",
    )
    parser.add_argument(
        "--jobs", type=int, default=min(4, os.cpu_count() or 1), help="parts at the same time"
    )
    parser.add_argument(
        "--resume", type=Path, help="a file of parts that have ended; those are not run again"
    )
    parser.add_argument("--document", type=Path, help="where the table goes")
    return parser.parse_args()


def _run(parts: list[Part], plan: Plan, jobs: int) -> Iterator[Ended]:
    """The parts as they end."""
    with ProcessPoolExecutor(
        jobs, multiprocessing.get_context("fork"), initializer=_end_tidily
    ) as pool:
        running = [pool.submit(_run_part, PARTS.index(part), plan) for part in parts]
        for future in as_completed(running):
            yield future.result()


def _end_tidily() -> None:
    """So that what was mounted is taken away."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def _run_part(number: int, plan: Plan) -> Ended:
    part = PARTS[number]
    commit, began = _commit(), time.monotonic()
    rows: list[Row] = []
    try:
        rows.extend(part.rows(plan))
    except SystemExit:  # everything is taken away by now; the pool would wait for more work
        os._exit(143)
    except Exception as error:  # what is wrong with a part is told, and the others are run
        rows.append(Row("the suite itself", part.name, "", "", what_went_wrong(error)))
    return Ended(part.name, rows, commit, round(time.monotonic() - began, 1))


def _commit() -> str:
    """Which mirrord it is that is struck."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()


def _show(ended: Ended) -> None:
    print(f"{ended.part}: {sum(row.times for row in ended.rows)} faults in {ended.took_s:.0f} s")
    for row in ended.rows:
        print("", row.times, row.fault, row.step, row.did, row.lost, sep="\t", flush=True)


def _read(path: Path | None) -> dict[str, Ended]:
    if path is None or not path.exists():
        return {}
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {
        line["part"]: Ended(**{**line, "rows": [Row(*row) for row in line["rows"]]})
        for line in lines
    }


def _append(path: Path, ended: Ended) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(ended._asdict()) + "\n")


if __name__ == "__main__":
    sys.exit(main())
