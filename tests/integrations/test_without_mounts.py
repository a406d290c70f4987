"""Harnesses in a container as docker and Kubernetes make one: trees, environments and sandboxes without a mount."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from container_engines import why_no_podman
from gitrepos import Upstream
from harness_daemon import (
    INSTANCE,
    PROJECT_ROOT,
    ROLLOUTS,
    environment,
    make_instance,
    mini_swe_agent,
    roll_out_at,
)
from pods import Pod, pod
from python_packages import wheel

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_podman()), reason=why_no_podman()),
]


class Lab:
    """A pod with a daemon of root, an instance with its environment, and the harnesses."""

    def __init__(self, made: Pod, row: dict[str, Any], python: Path) -> None:
        self.pod, self.root, self._python = made, made.root, python
        self._variables = {
            "HOME": str(made.root), "PYTHONPATH": str(PROJECT_ROOT), "INSTANCE": json.dumps(row),
            "OPENAI_API_KEY": "key-of-the-harness", "MSWEA_SILENT_STARTUP": "1",
            "HF_HUB_OFFLINE": "1",
            "CHECKS": "read_file_is_directory",  # Landlock's error is another; the whole suite takes a minute
        }  # fmt: skip

    def run(self, *arguments: str) -> str:
        variables = [f"{name}={value}" for name, value in self._variables.items()]
        command = ("env", "-C", str(self.root), *variables, str(self._python), "-P", *arguments)
        done = self.pod.run(*command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def roll_out(self, name: str) -> Any:
        return json.loads(self.run(str(ROLLOUTS / f"{name}.py")).splitlines()[-1])


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    python = environment()
    root = Path(tempfile.mkdtemp(prefix="pod-"))
    root.chmod(0o755)
    try:
        row = make_instance(root, Upstream(root / "acme/shapes"))
        wheel(root / "packages", "tiny", "1.0", {"tiny/__init__.py": "x = 1\n"})
        (root / "config.toml").write_text(
            f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n'
            f'[environments]\nindex = "{root}/packages"\nnetwork = false\n'
        )
        with pod(root, PROJECT_ROOT, python.parents[1].resolve()) as made:
            made.serve()
            made.must("dataset", "import", f"{root}/shapes.jsonl", "--name", "shapes")
            made.must("environment", "import", f"{root}/recipes.toml")
            made.must("environment", "build", INSTANCE)
            yield Lab(made, row, python)
    finally:
        shutil.rmtree(root)


def test_rollouts(lab: Lab) -> None:
    roll_out_at("pod", lab.roll_out)


def test_predictions_of_mini_swe_agent_are_graded(lab: Lab) -> None:
    lab.run(*mini_swe_agent(lab.root))
    graded = lab.pod.json("grade", "--predictions", f"{lab.root}/mini/preds.json", "--run")
    assert [each["state"] for each in graded["predictions"]] == ["resolved"], graded
