"""mini-swe-agent: its batch runner for SWE-bench, with its deterministic model."""

from __future__ import annotations

import json

import pytest
import yaml
from harness_daemon import FIX, INSTANCE, HarnessLab

pytestmark = [pytest.mark.slow, pytest.mark.root]

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && git diff"
SPEND = "echo begun; sleep 60"


def _output(command: str) -> dict[str, object]:
    return {
        "role": "assistant",
        "content": command,
        "extra": {"actions": [{"command": command}], "cost": 0.0},
    }


def test_its_batch_runner(lab: HarnessLab) -> None:
    """Which instance an environment is for, the runner says in its startup command alone."""
    commands = [
        "pwd; git status --short; exit 3",
        SPEND,
        f"python -c 'import tiny' && {FIX}",
        SUBMIT,
    ]
    config = {
        "model": {
            "model_class": "minisweagent.models.test_models.DeterministicModel",
            "outputs": [_output(command) for command in commands],
        },
        "environment": {"timeout": 1, "checkout": {"environment": "auto"}},
        "run": {"env_startup_command": "{{instance_id}}"},
    }
    (lab.root / "ours.yaml").write_text(yaml.safe_dump(config))
    rows = lab.root / "rows"
    rows.mkdir(exist_ok=True)
    (rows / "test.jsonl").write_text(json.dumps(lab.row) + "\n")
    lab.run(
        *("-m", "minisweagent.run.benchmarks.swebench", "--subset", str(rows), "--split", "test"),
        *("-c", "swebench.yaml", "-c", str(lab.root / "ours.yaml"), "--output", "mini"),
        *("--environment-class", "mirrord.integrations.mini_swe_agent.MirrordEnvironment"),
    )
    output = lab.root / "here" / "mini"
    prediction = json.loads((output / "preds.json").read_text())[INSTANCE]
    assert lab.reward(prediction["model_patch"]), prediction
    said = json.loads((output / INSTANCE / f"{INSTANCE}.traj.json").read_text())
    seen = [message["content"] for message in said["messages"] if message["role"] == "user"][1:]
    assert "<returncode>3</returncode>\n<output>\n/testbed" in seen[0]
    assert "the command met its limit of time" in seen[1]
    assert "begun" in seen[1]
