"""Harbor: a trial of a task that is an instance, with its agents `oracle` and `nop`, where there is Python 3.12."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness_daemon import FIX, INSTANCE, TEST, HarnessLab

pytestmark = [pytest.mark.slow, pytest.mark.root]

TASK = "[metadata]\n[verifier]\ntimeout_sec = 60\n[agent]\ntimeout_sec = 60\n[environment]\nallow_internet = false\n"
VERIFY = f"""\
#!/bin/bash
cd /testbed
git apply /tests/test.patch
{TEST} && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
"""


def _task(directory: Path, test_patch: str) -> Path:
    for name, text in {
        "task.toml": TASK,
        "instruction.md": "Fix the area.\n",
        "environment/Dockerfile": "FROM scratch\n",
        "tests/test.sh": VERIFY,
        "tests/test.patch": test_patch,
        "solution/solve.sh": f"#!/bin/bash\ncd /testbed\n{FIX}\ngit diff >/logs/artifacts/patch.diff\n",
    }.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def test_trials_of_an_oracle_and_of_an_agent_that_does_nothing(lab: HarnessLab) -> None:
    """Its logs and artifacts come out, and its tests go in after the agent."""
    task = _task(lab.root / "tasks" / INSTANCE, lab.row["test_patch"])
    rewards = {}
    for agent in ("oracle", "nop"):
        lab.run(
            *("-c", "from harbor.cli.main import app; app()", "trial", "start", "-p", str(task)),
            *("--agent", agent, "--trials-dir", "trials", "--trial-name", agent),
            *("--environment-import-path", "mirrord.integrations.harbor:MirrordEnvironment"),
            *("--environment-kwarg", 'checkout={"environment": "auto"}'),
            within="harbor",
        )
        trial = lab.root / "here" / "trials" / agent
        result = json.loads((trial / "result.json").read_text())
        rewards[agent] = result["verifier_result"]["rewards"]["reward"]
    assert rewards == {"oracle": 1, "nop": 0}
    patch = lab.root / "here" / "trials/oracle/artifacts/logs/artifacts/patch.diff"
    assert lab.reward(patch.read_text())
