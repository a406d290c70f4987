"""swebench: its own evaluation over sandboxes, where no docker is asked."""

from __future__ import annotations

import json

import pytest
from harness_daemon import INSTANCE, TEST, HarnessLab

pytestmark = [pytest.mark.slow, pytest.mark.root]

EVAL = """\
#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
git config --global --add safe.directory /testbed
git status
git checkout {commit} tests/test_area.py
git apply -v - <<'EOF_1'
{test_patch}EOF_1
: '>>>>> Start Test Output'
{test}
: '>>>>> End Test Output'
git checkout {commit} tests/test_area.py
"""


def test_gold_resolves_and_another_or_no_patch_does_not(lab: HarnessLab) -> None:
    row = lab.row | {
        "image": f"swebench/sweb.eval.x86_64.{INSTANCE.replace('__', '_1776_')}:latest",
        "eval_script": EVAL.format(
            commit=lab.row["base_commit"], test=TEST, test_patch=lab.row["test_patch"]
        ),
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
    }
    (lab.root / "rows.jsonl").write_text(json.dumps(row) + "\n")
    resolved = {}
    for name, patch in {
        "gold": row["patch"],
        "wrong": row["patch"].replace("/ 2", "/ 3"),
        "empty": "",
    }.items():
        prediction = {"instance_id": INSTANCE, "model_name_or_path": name, "model_patch": patch}
        (lab.root / f"{name}.jsonl").write_text(json.dumps(prediction) + "\n")
        lab.run(
            *("-m", "mirrord.integrations.swebench", "-d", str(lab.root / "rows.jsonl")),
            *("-p", str(lab.root / f"{name}.jsonl"), "-id", name, "--max_workers", "1"),
        )
        report = json.loads((lab.root / "here" / f"{name}.{name}.json").read_text())
        logs = [log.read_text() for log in (lab.root / "here/logs").rglob("run_instance.log")]
        assert report["completed_ids" if patch else "empty_patch_ids"] == [INSTANCE], logs
        resolved[name] = report["resolved_ids"]
    assert resolved == {"gold": [INSTANCE], "wrong": [], "empty": []}
