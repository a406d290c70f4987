"""Ray: a cluster of several nodes, each with a daemon of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream
from harness_daemon import ROLLOUTS, environment
from waiting import until

from mirrord import Client

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(400)]

INSTANCE = "acme__shapes-1"
COMMAND, TEST = "echo done >area", "grep -q done area"
EACH = 4
"""So many checkouts has a daemon: of two rollouts and their grades."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Daemon]]:
    """Two daemons with one instance; it is warm with the first."""
    environment("ray")
    root = tmp_path_factory.mktemp("ray")
    base = Upstream(root / "acme" / "shapes").commit({"area": "to do\n"})
    row = {"instance_id": INSTANCE, "repo": "acme/shapes", "base_commit": base}
    (root / "shapes.jsonl").write_text(json.dumps(row) + "\n")
    text = f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n'
    text += f"[checkouts]\nprewarm = false\nmax = {EACH}\n"
    with ExitStack() as held:
        made = [held.enter_context(daemon(text)) for _ in range(2)]
        for each in made:
            with Client(each.socket) as client:
                client.wait(client.import_dataset(root / "shapes.jsonl"))
                if each is made[0]:
                    client.wait(client.prepare_dataset("shapes"))
        yield made


def test_a_node_is_described_as_ray_start_takes_it(nodes: list[Daemon]) -> None:
    described = [
        subprocess.check_output(
            [environment("ray"), "-m", "mirrord.integrations.ray", "--socket", each.socket],
            cwd=each.root,
            text=True,
        )
        for each in nodes
    ]
    left = f'--resources={{"mirrord_checkouts":{EACH}.0}}'
    assert described == [f"{left} --labels=mirrord/acme__shapes=warm\n", f"{left}\n"]


def test_rollouts_on_a_cluster(nodes: list[Daemon]) -> None:
    """The example spreads by what each daemon has left; leases are renewed, and end with actors."""
    first = nodes[0].root
    (first / "ray").mkdir()
    program = [environment("ray"), "-P", ROLLOUTS / "ray_cluster.py", first / "ray"]
    done = subprocess.run(
        [*map(str, program), *(str(each.socket) for each in nodes)],
        env={
            "HOME": str(first),
            "PATH": os.environ["PATH"],
            "INSTANCE": json.dumps([INSTANCE, COMMAND, TEST]),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(first),  # its own, in /tmp, is only there after a first `ray start`
            "RAY_memory_monitor_refresh_ms": "0",  # a busy machine ends no actor of ours
        },
        cwd=first,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr, file=sys.stderr)
    assert done.returncode == 0
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["resources"] == 2 * EACH
    rows = told["rows"]
    assert [(row["status"], row["passed"]) for row in rows] == [(0, True)] * 4
    assert all("\n-to do\n+done\n" in row["patch"] for row in rows)
    for each in nodes:
        assert sum(Path(row["tree"]).is_relative_to(each.root) for row in rows) == 2
    assert (told["held"], told["left"]) == (True, True)
    assert [bool(patch) for patch in told["patches"]] == [True, False]
    for each in nodes:
        with Client(each.socket) as client:
            until(lambda: client.list_checkouts() == [])
