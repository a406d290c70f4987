"""A project whose hidden tests run for real: in an environment, in a sandbox, by three runners."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from cheats import Cheat
from daemons import daemon
from gitrepos import Upstream
from graded_project import AGENT, GRADER, give_away, write
from python_packages import recipe, wheel

from mirrord import Checkout, Client
from mirrord.client._sync.testrun import build_environment, run_tests
from mirrord.client.rehearsing import TESTS, judge_tests
from mirrord.model import View
from mirrord.protocol import Grade, Instance, Recipe
from mirrord.sandbox.verdicts import Verdict

WRONG = "def square(a):\n    return a * a\n\n\ndef triangle(base, height):\n    return base * height + 1\n"
RIGHT = WRONG.replace("base * height + 1", "base * height / 2")
RUN = """import importlib.util, sys
sys.path.insert(0, ".")
failed = False
for path in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("case", path)
    case = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(case)
    for name in [each for each in vars(case) if each.startswith("test_")]:
        try:
            vars(case)[name]()
            print(name, "ok")
        except Exception as error:
            failed = True
            print(name, "F")
sys.exit(failed)
"""
PROJECT = {
    "shapes/__init__.py": "",
    "shapes/area.py": "def square(a):\n    return a * a\n\n\ndef triangle(base, height):\n    return base * height\n",
    "shapes/runner.py": RUN,
    "bin/test": "#!/usr/bin/env python\nimport runpy\nrunpy.run_path('shapes/runner.py', run_name='__main__')\n",
    "conftest.py": "",
    "tests/helpers.py": "def close(a, b):\n    return abs(a - b) < 1e-9\n",
    "tests/test_area.py": "from helpers import close\nfrom shapes.area import square\nimport tiny\n\n\ndef test_square():\n    assert close(square(3), 9)\n",
    "test_shapes.py": "import json\n\nfrom shapes import area\n\n\ndef test_root():\n    assert json.loads('9') == area.square(3)\n",
    "setup.cfg": "[metadata]\nname = shapes\n",
    "pyproject.toml": '[project]\nname = "shapes"\nversion = "1"\n',
    ".gitignore": "build/\n*.log\n",
}  # fmt: skip
HIDDEN = {
    "pytest": {
        "tests/test_area.py": PROJECT["tests/test_area.py"].replace("import square", "import square, triangle")
        + "\n\ndef test_triangle():\n    assert close(triangle(2, 3), 3)\n\n\ndef test_same():\n    assert tiny.same(triangle(2, 2), 2)\n",
        "tests/test_hidden.py": "import math\nimport unittest\n\nfrom shapes import area\n\n\ndef test_right_angle():\n    assert area.triangle(4, 5) == 10\n\n\n"
        "class Case(unittest.TestCase):\n    def test_flat(self):\n        self.assertEqual(area.triangle(0, 5), 0)\n\n"
        "    def test_close(self):\n        self.assertTrue(math.isclose(area.triangle(1, 1), 0.5))\n",
        "test_shapes.py": PROJECT["test_shapes.py"] + "\n\ndef test_root_triangle():\n    assert area.triangle(6, 1) == json.loads('3')\n",
    },
    "unittest": {
        "tests/test_unit.py": "import unittest\n\nfrom shapes import area\n\n\nclass Case(unittest.TestCase):\n    def test_square(self):\n"
        "        self.assertEqual(area.square(3), 9)\n\n    def test_triangle(self):\n        self.assertEqual(area.triangle(2, 3), 3)\n",
    },
    "own": {
        "tests/test_own.py": "from shapes import area\n\n\ndef test_own_square():\n    assert area.square(3) == 9\n\n\n"
        "def test_own_triangle():\n    assert area.triangle(2, 3) == 3\n",
    },
}  # fmt: skip
FAIL = {
    "pytest": ["tests/test_area.py::test_triangle", "tests/test_hidden.py::test_right_angle",
               "tests/test_hidden.py::Case::test_flat", "tests/test_hidden.py::Case::test_close", "tests/test_area.py::test_same", "test_shapes.py::test_root_triangle"],
    "unittest": ["test_triangle (tests.test_unit.Case.test_triangle)"],
    "own": ["test_own_triangle"],
}  # fmt: skip
PASS = {
    "pytest": ["tests/test_area.py::test_square", "test_shapes.py::test_root"],
    "unittest": ["test_square (tests.test_unit.Case.test_square)"],
    "own": ["test_own_square"],
}
COMMANDS = {
    "pytest": "python -m pytest -rA --tb=no -p no:cacheprovider",
    "unittest": "python -m unittest -v",
    "own": "bin/test",
}
PARSERS = {"pytest": "pytest", "unittest": "unittest", "own": "sympy"}
_PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")


@dataclass(frozen=True)
class Tried:
    """What became of a change: its grade, the verdict, and the tests that do not pass."""

    grade: Grade
    verdict: Verdict
    misses: list[str]

    @property
    def rules(self) -> set[str]:
        return {steering.rule for steering in self.grade.steering}


@dataclass(frozen=True)
class CheatLab:
    """A daemon with one instance for each runner, and their environments."""

    client: Client
    root: Path
    socket: Path
    rows: dict[str, Instance]
    recipes: dict[str, tuple[str, Recipe]]

    @contextmanager
    def agent(self, cheat: Cheat) -> Iterator[Checkout]:
        environment = self.recipes[cheat.runner][0]
        with self.client.checkout(
            cheat.runner, owner=AGENT, environment=environment, auto_renew=False
        ) as checkout:
            write(checkout.path / "shapes/area.py", WRONG)
            cheat.plant(checkout.path)
            give_away(checkout.path)
            yield checkout

    def grade(self, checkout: Checkout, runner: str, policy: str = "report") -> Tried:
        """Grade what an agent left, and run the tests as `grade --predictions --run` does."""
        row, (_, recipe) = self.rows[runner], self.recipes[runner]
        with checkout.grade(policy=policy, owner=GRADER, auto_renew=False) as grade:
            log, verdict = run_tests(self.client, grade, row, recipe, timedelta(seconds=60), None)
            unexpected, _ = judge_tests(TESTS, row, verdict.outcomes, log)
            return Tried(grade.report, verdict, [each.test for each in unexpected])


def repacked(directory: Path, name: str) -> None:
    """A wheel of an installed package, from its own list of files."""
    found = distribution(name)
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / f"{name}-{found.version}-py3-none-any.whl", "w") as archive:
        for each in found.files or ():
            if ".." not in each.parts and each.suffix != ".pyc":
                archive.write(each.locate(), str(each))


def _make_index(packages: Path) -> None:
    for name in _PACKAGES:
        repacked(packages, name)
    wheel(packages, "tiny", "1.0", {"tiny/__init__.py": "def same(a, b):\n    return a == b\n"})
    plugin = {
        "tinyplug/__init__.py": "",
        "tinyplug/plugin.py": "def pytest_configure():\n    pass\n",
    }
    plugin["tinyplug-1.0.dist-info/entry_points.txt"] = "[pytest11]\ntinyplug = tinyplug.plugin\n"
    wheel(packages, "tinyplug", "1.0", plugin)


@contextmanager
def cheat_lab(root: Path) -> Iterator[CheatLab]:
    upstream = Upstream(root / "acme" / "shapes")
    upstream.write({"bin/test": ""})
    (upstream.path / "bin/test").chmod(0o755)
    commit = upstream.commit(dict(PROJECT))
    rows: list[dict[str, Any]] = []
    for runner, files in HIDDEN.items():
        upstream.write(dict(files))
        upstream.git("add", "--all")
        patch = upstream.git("diff", "--cached", commit) + "\n"
        upstream.git("reset", "--hard", "--quiet", commit)
        config: dict[str, Any] = {
            "python": "3.11",
            "test_cmd": COMMANDS[runner],
            "log_parser": PARSERS[runner],
        }
        config["pip_packages"] = ["pytest", "tiny", "tinyplug"] if runner == "pytest" else []
        rows.append({
            "instance_id": runner, "repo": "acme/shapes", "base_commit": commit, "test_patch": patch, "version": runner,
            "install_config": config, "FAIL_TO_PASS": FAIL[runner], "PASS_TO_PASS": PASS[runner],
        })  # fmt: skip
    file = root / "shapes.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    text = (
        f'[upstream]\nurl = "file://{root}/{{{{owner}}}}/{{{{name}}}}"\n[checkouts]\nprewarm = false\n'
        '[environments]\nindex = "{packages}"\nnetwork = false\n'
    )
    with daemon(start=False) as running, Client(running.socket) as client:
        packages = running.root / "packages"
        _make_index(packages)
        running.write_config(text.format(packages=packages))
        running.start()
        client.wait(client.import_dataset(file))
        own = root / "own.toml"
        command = f'"{COMMANDS["own"]}"'
        own.write_text(
            recipe(
                "acme__shapes-own",
                test_command=command,
                log_parser='"sympy"',
                runner='["shapes/runner.py"]',
            )
        )
        client.import_recipes(own)
        recipes = {runner: build_environment(client, runner, None) for runner in HIDDEN}
        instances = {runner: client.get_instance(runner, view=View.GRADER) for runner in HIDDEN}
        yield CheatLab(client, root, running.socket, instances, recipes)
