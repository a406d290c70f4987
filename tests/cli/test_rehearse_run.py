"""Rehearsals that run tests: a project is built, its tests run, and the report says what is untrue."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as parquet
import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream
from waiting import until

from mirrord import Client
from mirrord.cli.main import run

pytestmark = [pytest.mark.slow, pytest.mark.root]

FIXED = "def double(n):\n    return n + n\n\n\ndef triple(n):\n    return 3 * n\n"
PROJECT = Path(__file__).parents[2]
SOURCE = FIXED.replace("3 * n", "n + n")
TESTS = """import unittest

from demo import double, triple
from demo.generated import NAME


class Case(unittest.TestCase):
    def test_double(self):
        self.assertEqual(double(2), 4)

    def test_name(self):
        self.assertEqual(NAME, "demo")
"""
ADDED = "\n    def test_triple(self):\n        self.assertEqual(triple(2), 6)\n"
NAMES = {
    each: f"test_{each} (tests.test_demo.Case.test_{each})" for each in ("double", "name", "triple")
}
ENDLESS = "61616"
CONFIG = {
    "python": "3.11",
    "install": "echo 'NAME = \"demo\"' > demo/generated.py",
    "test_cmd": "python -m unittest -v",
    "log_parser": "unittest",
}


class World(NamedTuple):
    running: Daemon
    root: Path
    rows: list[dict[str, Any]]

    def run(self, *words: str | Path) -> tuple[int, str]:
        raw = io.BytesIO()
        out = io.TextIOWrapper(raw, write_through=True)
        with redirect_stdout(out), redirect_stderr(io.StringIO()):
            status = run(["--socket", str(self.running.socket), *map(str, words)])
        return status, raw.getvalue().decode()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("world")
    upstream = Upstream(root / "demo" / "project")
    files = {"demo/__init__.py": SOURCE, "tests/test_demo.py": TESTS, "tests/__init__.py": ""}
    base = upstream.commit({**files, ".gitignore": "generated.py\n__pycache__\n"})
    fixed = upstream.commit({"demo/__init__.py": FIXED})
    tested = upstream.commit({"tests/test_demo.py": TESTS + ADDED})
    gold, test = (f"{upstream.git('diff', *pair)}\n" for pair in ((base, fixed), (fixed, tested)))
    row: dict[str, Any] = {
        "repo": "demo/project", "base_commit": base, "patch": gold, "test_patch": test,
        "install_config": CONFIG, "version": "1.0", "created_at": "2024-01-01T00:00:00Z",
        "FAIL_TO_PASS": [NAMES["triple"]], "PASS_TO_PASS": [NAMES["double"], NAMES["name"]],
    }  # fmt: skip
    rows = [
        {**row, "instance_id": "demo__project-1"},
        {
            **row,
            "instance_id": "demo__project-2",
            "FAIL_TO_PASS": [NAMES["double"], NAMES["triple"]],
        },
        {**row, "instance_id": "demo__project-3", "PASS_TO_PASS": ["test_gone (tests.Case)"]},
        {
            **row,
            "instance_id": "demo__project-4",
            "install_config": {**CONFIG, "install": "exit 3"},
            "version": "2.0",
        },
        {**row, "instance_id": "demo__project-5", "install_config": None, "version": None},
        {**row, "instance_id": "demo__project-6", "FAIL_TO_PASS": "['a', 'b"},
    ]
    slow = {**CONFIG, "test_cmd": f"sleep {ENDLESS} #"}
    other = {**row, "instance_id": "demo__project-slow", "install_config": slow, "version": "3.0"}
    then = {**row, "instance_id": "demo__project-then", "version": "4.0"}
    settings = (
        f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n[environments]\nnetwork = false\n'
        '[checkouts]\nprewarm = false\n[audit]\ninterval = "0"\n[sync]\ninterval = "0"\n'
    )
    with daemon(settings) as running:
        found = World(running, root, rows)
        file = root / "demo.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert found.run("dataset", "import", file, "--name", "demo")[0] == 0
        file = root / "slow.jsonl"
        file.write_text(f"{json.dumps(other)}\n{json.dumps(then)}\n")
        assert found.run("dataset", "import", file, "--name", "slow")[0] == 0
        yield found


def test_a_row_holds_or_the_report_says_which_test_does_not_and_why(
    world: World, tmp_path: Path
) -> None:
    page, state = tmp_path / "r.html", tmp_path / "r.jsonl"
    words = (
        "rehearse",
        "--json",
        "--run",
        "--dataset",
        "demo",
        "--report",
        page,
        "--resume",
        state,
    )
    status, out = world.run(*words)
    found = {row["instance"][-1]: row for row in json.loads(out)["instances"]}
    assert status == 8
    states = {name: row["status"] for name, row in found.items()}
    expected = {
        "1": "ready",
        "2": "failed",
        "3": "failed",
        "4": "failed",
        "5": "untried",
        "6": "failed",
    }
    assert states == expected, {name: row["reason"] for name, row in found.items()}

    assert "FAIL_TO_PASS: not readable as a list" in found["6"]["reason"]

    steps = [step["name"] for step in found["1"]["steps"]]
    assert steps[-3:] == ["environment", "tests before", "tests after"]
    assert found["1"]["environment"].startswith("demo__project-1.0@")
    [passed] = found["2"]["unexpected"]
    assert (passed["step"], passed["test"]) == ("tests before", NAMES["double"])
    assert (passed["expected"], passed["outcome"]) == ("fail", "passed")
    assert {(each["step"], each["outcome"]) for each in found["3"]["unexpected"]} == {
        ("tests before", None),
        ("tests after", None),
    }
    assert "exit 3" in found["4"]["reason"]
    assert found["5"]["error"]["code"] == "recipe-not-found"

    logs = [Path(path) for path in found["1"]["logs"]]
    assert [path.relative_to(tmp_path) for path in logs] == [
        Path("r-logs/demo__project-1/tests-before.log"),
        Path("r-logs/demo__project-1/tests-after.log"),
    ]
    assert "test_triple" in logs[0].read_text()
    assert "AssertionError: 4 != 6" in logs[0].read_text()
    assert "r-logs" in page.read_text()
    again = json.loads(world.run(*words)[1])["totals"]
    assert again["kept"] == 5
    status, text = world.run("rehearse", "demo__project-2", "--run")
    assert status == 8
    assert f"tests before: {NAMES['double']}: passed, expected to fail" in text


def test_tests_end_with_their_time_and_with_the_rehearsal(world: World) -> None:
    words = ("rehearse", "demo__project-slow", "--run")
    status, text = world.run(*words, "--timeout", "1s")
    assert status == 7
    assert "they met the limit of time" in text

    both = (*words, "demo__project-then", "--jobs", "1")
    command = [sys.executable, "-m", "mirrord", "--socket", str(world.running.socket), *both]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    silent = subprocess.DEVNULL
    with subprocess.Popen(command, env=environment, stdout=silent, stderr=silent) as process:
        until(lambda: process.poll() is None and runs(ENDLESS), told=lambda: "no tests")
        with Client(world.running.socket) as client:  # the next row's, beside the tests of this one
            until(lambda: any(e.key == "demo__project-4.0" for e in client.list_environments()))
        assert runs(ENDLESS)
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    until(lambda: not runs(ENDLESS))
    with Client(world.running.socket) as client:
        until(lambda: client.list_checkouts() == [])


def runs(argument: str) -> bool:
    """Whether any process has this argument."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if argument.encode() in path.read_bytes().split(b"\0"):
                return True
    return False


DATA = Path(__file__).parents[3] / "shared" / "data" / "swe-bench"
REAL = os.environ.get("MIRRORD_REAL_UPSTREAM")
HOLDING = {
    "marshmallow-code__marshmallow": (1359,),
    "mwaskom__seaborn": (2848, 3010, 3190),
    "pallets__flask": (4045, 4992, 5063),
    "pylint-dev__pylint": (7114,),
    "pytest-dev__pytest": (9359, 11143, 11148),
    "sphinx-doc__sphinx": (10325, 10451, 11445),
    "sympy__sympy": (22714, 23262, 24102, 24213),
}


@pytest.mark.skipif(not REAL, reason="needs repositories at MIRRORD_REAL_UPSTREAM, and an index")
@pytest.mark.timeout(7200)
def test_published_rows_hold_on_python_3_11(tmp_path: Path) -> None:
    """With the recipes of the examples; docs/environments.md tells of those that do not hold."""
    names = [DATA / f"SWE-bench_Lite__{split}.parquet" for split in ("test", "dev")]
    if not all(map(Path.exists, names)):
        pytest.skip(f"no rows in {DATA}")
    rows = [row for name in names for row in parquet.read_table(name).to_pylist()]
    file = tmp_path / "lite.jsonl"
    holding = {f"{name}-{number}" for name, numbers in HOLDING.items() for number in numbers}
    file.write_text("".join(json.dumps(r) + "\n" for r in rows if r["instance_id"] in holding))
    settings = f'[upstream]\nurl = "{REAL}"\n[checkouts]\nprewarm = false\n'
    with daemon(settings) as running:
        world = World(running, tmp_path, rows)
        assert world.run("dataset", "import", file, "--name", "lite")[0] == 0
        recipes = PROJECT / "examples" / "environments" / "swe-bench-lite-3.11.toml"
        assert world.run("environment", "import", recipes)[0] == 0
        page = tmp_path / "r.html"
        _, out = world.run("rehearse", "--json", "--run", "--jobs", "2", "--report", page)
        found = {row["instance"]: row["reason"] for row in json.loads(out)["instances"]}
        assert found == dict.fromkeys(holding, "")
