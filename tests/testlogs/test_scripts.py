"""The command of a row's scripts: what its before_script did, the code under test cannot deny."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mirrord.testlogs import after_before, command_of_scripts, is_scripted


@pytest.mark.parametrize(
    ("before", "run", "stderr", "has_begun"),
    [
        ("echo ready", "echo tested >&2; exit 1", "ready\ntested\n", True),
        ("echo ready", "echo '>>>>> before_script failed' >&2", "ready\n>>>>> before_script failed\n", True),
        ("echo ready; false; echo on", "echo tested", "ready\n", False),
        ("echo ready; exit 0", "echo tested", "ready\n", False),
    ],
)  # fmt: skip
def test_whether_the_tests_began_is_told_by_what_came_before_them(
    tmp_path: Path, before: str, run: str, stderr: str, has_begun: bool
) -> None:
    command = command_of_scripts({"before_script": before, "run_script": run})
    assert command
    assert is_scripted(command)
    (tmp_path / "before_script").write_text(before)
    (tmp_path / "run_script").write_text(run)
    environment = {**os.environ, "MIRRORD_FILES": f"{tmp_path}"}
    ended = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, check=False
    )
    assert after_before(command, ended.stderr) == (stderr.encode(), has_begun)


def test_the_command_of_others_has_always_begun() -> None:
    assert after_before("pytest", b"stderr") == (b"stderr", True)
