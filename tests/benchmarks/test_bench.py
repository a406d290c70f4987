"""The bench, on a small repository: each case of a rollout ends, and its own comparisons with git hold."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gitrepos import Upstream

BENCH = Path(__file__).parents[2] / "benchmarks/bench.py"

pytestmark = [pytest.mark.root, pytest.mark.slow]


def test_rollouts_are_measured_beside_git(tmp_path: Path) -> None:
    upstream = Upstream(tmp_path / "upstream")
    upstream.commit(
        {f"package{file % 7}/module{file}.py": f"value = {file}\n" for file in range(90)}
    )
    results = tmp_path / "bench.json"
    cases = "diff apply branch grade turn crowd home"
    words = f"--rounds 1 --tasks 2 --seconds 0.5 --cases {cases} --json {results}"
    command = [sys.executable, str(BENCH), "--repo", str(upstream.path), *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [result] = json.loads(results.read_text())
    works = [row["work"].partition(",")[0] for row in result["rows"]]
    branch = ["fork", "snapshot", "roll-back", "8 forks of a snapshot"]
    *works, warm, reset, changed, forked, exec_ = works
    assert works == [*3 * ["diff"], "apply", *branch, "grade", "a turn: checkout"]
    assert all("uid 1500" in each for each in (warm, changed, forked, exec_)), works
    assert reset == "reset"
    failed = [figure["value"] for figure in result["figures"] if "failed" in figure["name"]]
    assert failed == [0, 0, 0, 0]
    listed = [each["what"].partition(", all at once") for each in result["latencies"]]
    assert any(is_first for _, is_first, _ in listed)
    verbs = {what.rpartition(" ")[2] for what, *_ in listed}
    assert verbs == {"checkout", "write", "diff", "grade", "reset", "release", "finish", "turn"}
