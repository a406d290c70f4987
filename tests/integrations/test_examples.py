"""The programs of `examples/`, each run against a daemon as a reader would run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness_daemon import FIX, INSTANCE, TEST, HarnessLab

pytestmark = [pytest.mark.slow, pytest.mark.root]

EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(lab: HarnessLab, name: str, *words: str, status: int = 0) -> str:
    here = Path(sys.executable).parent
    program = [sys.executable] if name.endswith(".py") else ["sh"]
    done = subprocess.run(
        [*program, str(EXAMPLES / name), *words],
        env={
            "MIRRORD_SOCKET": str(lab.running.socket),
            "MIRRORD_CONFIG": str(lab.running.config),
            "PATH": f"{here}:{os.environ['PATH']}",
            "HOME": str(lab.root),
        },
        cwd=lab.root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_a_rollout(lab: HarnessLab) -> None:
    assert lab.reward(_run(lab, "rollout.py", INSTANCE, "ls", FIX))


def test_grades_of_predictions(lab: HarnessLab) -> None:
    patches = [lab.row["patch"], lab.row["patch"].replace("/ 2", "/ 3"), "nothing"]
    rows = [{"instance_id": INSTANCE, "model_patch": patch} for patch in patches]
    file = lab.root / "predictions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = _run(lab, "grade_predictions.py", str(file), TEST).splitlines()
    assert [json.loads(line)["passed"] for line in said] == [True, False, False]


def test_a_search_with_forks(lab: HarnessLab) -> None:
    """The best of three, twice; a round that gains nothing ends it."""
    actions = ("echo 1 >>n", "echo 1 >>n; echo 1 >>n", "false")
    patch = _run(lab, "rl_loop.py", INSTANCE, "cat n | wc -l", "2", *actions)
    assert patch.count("+1\n") == 4


def test_a_crowd(lab: HarnessLab) -> None:
    assert _run(lab, "crowd.py", INSTANCE, FIX, "16") == "32 episodes of 16 rollouts\n"


def test_an_agent_of_ones_own(lab: HarnessLab) -> None:
    agent = f"import sys; seen = sys.stdin.read(); print('' if '[0]' in seen else {FIX!r})"
    assert lab.reward(_run(lab, "sandboxed_agent.py", INSTANCE, sys.executable, "-c", agent))


def test_a_dataset_by_a_mapping(lab: HarnessLab) -> None:
    row = {
        "org": "acme",
        "project": "shapes",
        "number": 7,
        "parent": lab.row["base_commit"],
        "fix": "",
    }
    file = lab.root / "own.jsonl"
    file.write_text(json.dumps(row) + "\n")
    said = _run(lab, "own_dataset.py", str(file), "own")
    assert said == f"acme__shapes-7 {lab.row['base_commit']} 4\n"


def test_an_image_that_leaks_and_one_that_does_not(lab: HarnessLab, tmp_path: Path) -> None:
    words = ("acme__shapes", lab.row["base_commit"])
    with lab.client.checkout(INSTANCE) as checkout:
        _run(lab, "measure_image.sh", str(checkout.path), *words)
    clone = ["git", "clone", "--quiet", str(lab.root / "acme/shapes"), str(tmp_path / "clone")]
    subprocess.run(clone, check=True)
    assert "leaks (" in _run(lab, "measure_image.sh", str(tmp_path), *words, status=8)
