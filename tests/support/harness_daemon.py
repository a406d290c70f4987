"""One instance made at run time with its environment, a daemon, and programs run where a harness is installed."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from daemons import Daemon
from gitrepos import Upstream
from python_packages import building, recipe

from mirrord import Client, Sandbox

INSTANCE = "acme__shapes-1"
AGENT = 34541
PROJECT = {
    "shapes/__init__.py": "",
    "shapes/area.py": "def triangle(base, height):\n    return base * height\n",
    # prints what `pytest -rA` does; `tiny` is in the environment alone
    "tests/run.py": "import runpy, sys\nimport tiny\nfailed = 0\nfor name, test in runpy.run_path('tests/test_area.py').items():\n"
    "    if name.startswith('test_'):\n        try:\n            test()\n            word = 'PASSED'\n"
    "        except AssertionError:\n            word, failed = 'FAILED', 1\n"
    "        print(word, f'tests/test_area.py::{name}')\nsys.exit(failed)\n",
    "tests/test_area.py": "import sys\nsys.path.insert(0, '.')\nfrom shapes.area import triangle\n\n\n"
    "def test_none():\n    assert triangle(0, 3) == 0\n",
}  # fmt: skip
HIDDEN = PROJECT["tests/test_area.py"] + "\n\ndef test_half():\n    assert triangle(2, 3) == 3\n"
# First it looks for the key of the harness, in whose sandbox it runs.
FIX = "! grep -aqs key-of-the-h[a]rness /proc/[0-9]*/environ /proc/[0-9]*/cmdline && sed -i 's,base \\* height,base * height / 2,' shapes/area.py"
TEST = "python -B tests/run.py"

PROJECT_ROOT = Path(__file__).parents[2]
ROLLOUTS = PROJECT_ROOT / "tests" / "integrations" / "rollouts"


_IS_RIGHT: dict[str, Callable[[Any], bool]] = {
    "swe_rex": lambda it: "height / 2" in it["patch"],
    "verifiers": lambda it: it["rewards"] == [1.0, 0.0],
    "inspect_ai": lambda it: it["grades"] == {"gold": "C", "nothing": "I"},
}


def roll_out_at(place: str, roll_out: Callable[[str], Any]) -> None:
    """By the harness that MIRRORD_SEED chooses for a place; by each with MIRRORD_HARNESSES=all.

    What they have in common with other places is asserted by the programs themselves.
    """
    names = sorted(_IS_RIGHT)
    if os.environ.get("MIRRORD_HARNESSES") != "all":
        names = [random.Random(f"{os.environ.get('MIRRORD_SEED', '17')} {place}").choice(names)]
    for name in names:
        answer = roll_out(name)
        assert _IS_RIGHT[name](answer), (name, answer)


def environment(name: str = "harnesses") -> Path:
    """The Python of an environment that `make harnesses` makes; skips where there is none."""
    python = PROJECT_ROOT / ".venv" / name / "bin" / "python"
    if not (python.parents[1] / "ready").exists():
        pytest.skip(f"`make harnesses` has not made .venv/{name}")
    if not python.exists():
        pytest.skip(f"no Python here that {name} runs on")
    return python


@dataclass(frozen=True)
class HarnessLab:
    """A daemon with one instance, and its client."""

    root: Path
    running: Daemon
    client: Client
    row: dict[str, Any]

    def roll_out(self, name: str, *arguments: str, within: str = "harnesses") -> Any:
        """Run a program of `rollouts/` where its harness is; answers the last line it prints, as JSON."""
        done = self.run(str(ROLLOUTS / f"{name}.py"), *arguments, within=within)
        return json.loads(done.stdout.splitlines()[-1])

    def run(self, *arguments: str, within: str = "harnesses") -> subprocess.CompletedProcess[str]:
        """Run its Python, in an empty directory, with no network to models."""
        here = self.root / "here"
        here.mkdir(exist_ok=True)
        variables = {
            "HOME": str(here),
            "PATH": os.environ["PATH"],
            "MIRRORD_SOCKET": str(self.running.socket),
            "OPENAI_API_KEY": "key-of-the-harness",
            "MSWEA_SILENT_STARTUP": "1",
            "HF_HUB_OFFLINE": "1",
            "INSTANCE": json.dumps(self.row),
            "TREE": "/testbed",
        }
        command = [str(environment(within)), "-P", *arguments]
        done = subprocess.run(
            command, cwd=here, env=variables, capture_output=True, text=True, check=False
        )
        print(done.stdout, done.stderr, file=sys.stderr)
        assert done.returncode == 0, done.stderr
        return done

    def reward(self, patch: str) -> bool:
        """Whether the hidden tests pass with a patch, in a grade of ours."""
        grade = self.client.grade(INSTANCE, patch=patch, environment="auto", sandbox=True)
        with grade as held, Sandbox(held) as sandbox:
            return sandbox.exec(TEST).exit_code == 0


def make_instance(root: Path, upstream: Upstream) -> dict[str, Any]:
    """An instance whose row is in `shapes.jsonl`, and whose recipe in `recipes.toml`."""
    commit = upstream.commit(dict(PROJECT))
    patches = {}
    for name, files in {
        "patch": {"shapes/area.py": PROJECT["shapes/area.py"].replace("height\n", "height / 2\n")},
        "test_patch": {"tests/test_area.py": HIDDEN},
    }.items():
        upstream.write(dict(files))
        patches[name] = upstream.git("diff", commit) + "\n"
        upstream.git("reset", "--hard", "--quiet", commit)
    upstream.commit(
        {"shapes/area.py": PROJECT["shapes/area.py"].replace("height\n", "height / 2\n")}
    )
    row = {
        "instance_id": INSTANCE,
        "repo": "acme/shapes",
        "version": "1.0",
        "base_commit": commit,
        "problem_statement": "The area of a triangle is twice what it should be.",
        "FAIL_TO_PASS": '["tests/test_area.py::test_half"]',
        "PASS_TO_PASS": '["tests/test_area.py::test_none"]',
        **patches,
    }
    (root / "shapes.jsonl").write_text(json.dumps(row) + "\n")
    facts = {"install": "['echo made > $VIRTUAL_ENV/made.txt']"}
    facts |= {"test_command": f'"{TEST}"', "log_parser": '"pytest"'}
    (root / "recipes.toml").write_text(recipe("acme__shapes-1.0", "tiny==1.0", **facts))
    return row


def mini_swe_agent(root: Path) -> list[str]:
    """Write what it reads below `root`; its arguments, to solve the instance of `shapes.jsonl` there."""
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && git diff"
    outputs = [
        {"role": "assistant", "content": each, "extra": {"actions": [{"command": each}], "cost": 0.0}}
        for each in (f"python -c 'import tiny' && {FIX}", submit)
    ]  # fmt: skip
    model = {"model_class": "minisweagent.models.test_models.DeterministicModel"}
    config = {
        "model": {**model, "outputs": outputs},
        "environment": {"checkout": {"environment": "auto"}},
        "run": {"env_startup_command": "{{instance_id}}"},
    }
    (root / "ours.yaml").write_text(yaml.safe_dump(config))
    (root / "rows").mkdir()
    shutil.copy(root / "shapes.jsonl", root / "rows/test.jsonl")
    return [
        *("-m", "minisweagent.run.benchmarks.swebench", "--subset", "rows", "--split", "test"),
        *("-c", "swebench.yaml", "-c", "ours.yaml", "--output", "mini"),
        *("--environment-class", "mirrord.integrations.mini_swe_agent.MirrordEnvironment"),
    ]


@contextmanager
def harness_lab(root: Path) -> Iterator[HarnessLab]:
    row = make_instance(root, Upstream(root / "acme" / "shapes"))
    text = f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n'
    with building(text) as (running, _), Client(running.socket) as client:
        client.wait(client.import_dataset(root / "shapes.jsonl"))
        client.import_recipes(root / "recipes.toml")
        client.wait(client.build_environments(INSTANCE))
        yield HarnessLab(root, running, client, row)
