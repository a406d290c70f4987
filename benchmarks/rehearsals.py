"""A rehearsal of many instances, as the command does it: first with nothing prepared, then again.

The instances are commits spread over the line; the gold patch of each is git's diff to the commit
after it. It takes a user's seconds, and the processor's of the daemon with everything below it.
"""

import json
import subprocess
import sys
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

from measured_daemon import REPO, Daemon, instance_row
from results import Figure
from rivals import git_bytes

_DATASET = "bench-rehearsal"


def rehearse(daemon: Daemon, mirror: Path, line: list[str], count: int = 100) -> list[Figure]:
    """Figures of a rehearsal that must find every instance ready."""
    steps = list(pairwise(line))
    rows = []
    for after, before in steps[:: max(1, len(steps) // count)][:count]:
        patch = git_bytes("diff", "--binary", "--full-index", before, after, cwd=mirror)
        rows.append(instance_row(REPO, before) | {"patch": patch.decode("utf-8", "replace")})
    file = daemon.area / f"{_DATASET}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with daemon.client() as client:
        client.wait(client.import_dataset(file), timeout=timedelta(minutes=20))
    daemon.forget_templates()
    figures = []
    for name, goal in (("nothing prepared", "25"), ("again, warm", "3")):
        began, used = time.perf_counter(), daemon.cpu_s()
        states = _run(daemon)
        took, used = time.perf_counter() - began, daemon.cpu_s() - used
        what = f"rehearsal of {len(rows)} instances, {name}"
        figures += [
            Figure(what, took, "s", f"at most {goal} of three repositories"),
            Figure(f"{what}: ready", states.get("ready", 0), "instances", f"{len(rows)}"),
            Figure(f"{what}: processor", used, "s"),
        ]
    return figures


def _run(daemon: Daemon) -> dict[str, int]:
    command = [str(Path(sys.executable).with_name("mirrord")), "--socket", str(daemon.socket)]
    command += ["rehearse", "--json", "--dataset", _DATASET]
    done = subprocess.run(command, capture_output=True, check=False)
    states: dict[str, int] = json.loads(done.stdout)["totals"]["states"]
    return states
