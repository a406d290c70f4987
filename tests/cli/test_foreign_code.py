"""No verb runs code of the directory that it is started in: a checkout is one, and root may stand in it.

The directory holds modules named like ours, the standard library's and those of every library that is installed, and programs
named like those that mirrord starts, with the directory in PATH. Each leaves a mark when it is imported or run.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import anyone
import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream
from verbs import ARGUMENTS, NEEDS_NO_DAEMON

from mirrord.cli.table import VERBS, Verb

pytestmark = pytest.mark.slow

SCRIPT = str(Path(sys.executable).parent / "mirrord")
STARTS = {"script": [SCRIPT], "module": [sys.executable, "-P", "-m", "mirrord"]}
OF_CHECKOUTS = (
    "diff",
    "fork",
    "grade",
    "receipt",
    "renew",
    "reset",
    "snapshot create",
    "snapshot list",
)
PROGRAMS = (
    "git",
    "setpriv",
    "python",
    "python3",
    Path(sys.executable).name,
    "ssh",
    "sh",
    "nice",
    "ionice",
    "mount",
    "uname",
    "ldconfig",
)
LAST = ("release", "dataset remove", "mirror remove")
FIRST = ("environment import",)


def _turn(verb: Verb) -> int:
    """What others need comes first, and what takes it away last."""
    return LAST.index(verb.name) + 1 if verb.name in LAST else -(verb.name in FIRST)


IN_ORDER = sorted(VERBS, key=_turn)
SHA = "c" * 40
FIND = "from mirrord.places import find_config_path; print(find_config_path())"


class Trap:
    """A directory full of code that nobody asked for."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "trap"
        self.mark = root / "mark"
        self.directory.mkdir()
        mine = f"open({str(self.mark)!r}, 'a').write(__name__ + chr(10))\n"
        libraries = {
            name for name in importlib.metadata.packages_distributions() if name.isidentifier()
        }
        for name in (
            sys.stdlib_module_names | libraries | {"mirrord", "sitecustomize", "usercustomize"}
        ):
            (self.directory / f"{name}.py").write_text(mine)
        (self.directory / "mirrord").mkdir()
        (self.directory / "mirrord/__init__.py").write_text(mine)
        self.put_programs(self.directory)
        for place in (".", ".config/mirrord", "mirrord"):
            (self.directory / place).mkdir(parents=True, exist_ok=True)
            (self.directory / place / "config.toml").write_text('state_dir = "/nonexistent"\n')

    def put_programs(self, directory: Path) -> None:
        for name in PROGRAMS:
            (directory / name).write_text(f"#!/bin/sh\necho {name} >>{self.mark}\n")
            (directory / name).chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "MIRRORD", "XDG"))
        }
        return {**kept, "PATH": f".::{kept['PATH']}:"}

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def assert_unsprung(self) -> None:
        ran = self.mark.read_text().split() if self.mark.exists() else []
        self.mark.unlink(missing_ok=True)
        assert ran == []


_TYPIST = """
import json, os, sys
from contextlib import redirect_stdout
from mirrord.cli import main
from mirrord.cli.main import run
with redirect_stdout(sys.stderr):
    run(["--socket", sys.argv[1], "status"])
for line in iter(sys.stdin.readline, ""):
    sys.argv[1:] = json.loads(line)
    if (pid := os.fork()) == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        sys.exit(main())
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Typist:
    """A process in the trap, forked for each verb: what all verbs load is loaded once."""

    def __init__(self, trap: Trap, socket: Path) -> None:
        self._printed = trap.directory.parent / "printed"
        with self._printed.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _TYPIST, str(socket)],
                cwd=trap.directory, env=trap.environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip

    def type(self, *words: str) -> tuple[int, str]:
        """The exit status, and what was printed."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin
        assert stdout
        stdin.write(json.dumps([str(self._printed), *words]) + "\n")
        stdin.flush()
        return int(stdout.readline()), self._printed.read_text()

    def close(self) -> None:
        self._process.communicate()


class World(NamedTuple):
    """A daemon that was started in the trap, with one instance and one checkout."""

    trap: Trap
    typist: Typist
    running: Daemon
    arguments: dict[str, list[str]]


class FromTrap(Daemon):
    """`mirrord serve` as it is typed, in the trap."""

    @property
    def command(self) -> list[str]:
        return [SCRIPT, "serve", "--config", str(self.config)]


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Trap:
    return Trap(tmp_path_factory.mktemp("trap"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("world")
    trap = Trap(root)
    upstream = Upstream(root / "a" / "b")
    first, last = upstream.history(2)
    name = upstream.git("ls-tree", "--name-only", first).split()[0]
    rows = root / "rows.jsonl"
    rows.write_text(json.dumps({"repo": "a/b", "instance_id": "i", "base_commit": first}) + "\n")
    patch = root / "empty.patch"
    patch.write_text(
        "diff --git a/new b/new\nnew file mode 100644\n--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+new\n"
    )
    recipes = root / "recipes.toml"
    recipes.write_text('[[environment]]\nkey = "k"\npython = "3.11"\n')
    with daemon(start=False) as made:
        text = f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n'
        text += f'[environments]\nindex = "{root}"\nnetwork = false\n'
        running = FromTrap(made.root, text, environment=trap.environment)
        running.start(prefix=("/usr/bin/env", "-C", str(trap.directory)))
        try:
            start = [SCRIPT, "--socket", str(running.socket)]
            imported = trap.run(*start, "dataset", "import", str(rows), "--name", "d")
            assert imported.returncode == 0, imported.stderr
            taken = trap.run(*start, "checkout", "i", "--view", "grader", "--json")
            assert taken.returncode == 0, taken.stderr
            identity = json.loads(taken.stdout)["id"]
            operation = running.json("GET", "/v1/operations")[0]["id"]
            given = {
                "pin add": ["a/b", last], "pin remove": ["a/b", last], "dataset import": [str(rows), "--name", "d"],
                "dataset diff": ["d", "d"], "dataset derive": [str(rows)],
                "environment import": [str(recipes)], "environment build": ["k"],
                "apply": [identity, str(patch)], "restore": [identity, "--commit", first, name], "release": [identity], "attach": [identity, "/nonexistent"],
                "ref diff": ["a/b", "latest", "latest"], "ref restore": ["a/b", "latest"], "exec": ["i", "--", "/bin/true"],
                "bundle create": ["a/b", str(root / "bundle")], "bundle import": [str(root / "bundle")],
                "verify-seal": [str(upstream.path), "--base", last], "mirror set-url": ["a/b", str(upstream.path)],
                **{name: [identity] for name in OF_CHECKOUTS},
                "layer save": [identity, "name"], "snapshot remove": [identity, "s1"],
                **{f"operation {name}": [operation] for name in ("show", "wait", "cancel")},
            }  # fmt: skip
            typist = Typist(trap, running.socket)
            yield World(trap, typist, running, {**ARGUMENTS, **given})
            typist.close()
        finally:
            running.stop()


@pytest.mark.parametrize(
    ("verb", "start"),
    [
        *[(verb, "script") for verb in VERBS if verb.name in {*NEEDS_NO_DAEMON, "status"}],
        *[(verb, "module") for verb in VERBS if verb.name in {"doctor", "status"}],
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_verb_without_a_daemon_runs_nothing_from_the_directory_it_is_started_in(
    verb: Verb, start: str, trap: Trap
) -> None:
    """Its status is what it is elsewhere; all that need a daemon miss it in the same way."""
    if verb.name == "serve":
        words = ["--config", "/nonexistent/config.toml"]
    else:
        words = {"verify-seal": ["/nonexistent", "--base", SHA]}.get(
            verb.name, ARGUMENTS.get(verb.name, [])
        )
    done = trap.run(*STARTS[start], *verb.name.split(), "--socket", "/nonexistent/s", *words)
    trap.assert_unsprung()
    expected = {0, 2, 4, 5, 7} if verb.name in NEEDS_NO_DAEMON else {9}
    assert done.returncode in expected, done.stderr


@pytest.mark.parametrize(
    "verb",
    IN_ORDER,
    ids=lambda verb: verb.name,
)
def test_a_verb_with_a_daemon_runs_nothing_from_the_directory_it_is_started_in(
    verb: Verb, world: World
) -> None:
    """Nor does the daemon, which was started there too; how a verb's process starts is above."""
    words = [
        *verb.name.split(),
        "--socket",
        str(world.running.socket),
        *world.arguments.get(verb.name, []),
    ]
    config = (
        ["--config", str(world.running.config)]
        if verb.name in NEEDS_NO_DAEMON - {"verify-seal"}
        else []
    )
    status, printed = world.typist.type(*config, *words)
    world.trap.assert_unsprung()
    expected = {
        "serve": {5},
        "doctor": {0, 7},
        "enter": {4},
        "attach": {4},
        "credential check": {6},
        "layer save": {3},
        "layer remove": {4},
        "mirror restore": {2},
        "mirror remove": {0, 5},
        "operation cancel": {0, 5},
        "service install": {0, 5, 7},
    }.get(verb.name, {0, 8})
    assert status in expected, printed


@pytest.mark.parametrize("inside", ["", ".git"])
def test_a_repository_that_is_looked_at_runs_nothing(
    inside: str, trap: Trap, tmp_path: Path
) -> None:
    """git is started in it, with the caller's PATH."""
    upstream = Upstream(tmp_path / "repository")
    base = upstream.history(1)[0]
    trap.put_programs(upstream.path / inside)
    done = trap.run(SCRIPT, "verify-seal", str(upstream.path), "--base", base)
    trap.assert_unsprung()
    assert "in the closure of" in done.stdout, done.stderr


@pytest.mark.root
def test_no_configuration_is_read_from_where_a_user_stands(trap: Trap) -> None:
    """A relative XDG_CONFIG_HOME is none."""
    trap.directory.chmod(0o755)
    done = subprocess.run(
        ["env", "XDG_CONFIG_HOME=.config", "HOME=/nonexistent", *anyone.python(), "-P", "-c", FIND],
        cwd=trap.directory, user=anyone.NOBODY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_the_trap_is_one(trap: Trap) -> None:
    """`python -c` and a PATH with the directory in it do run what lies there."""
    trap.run(sys.executable, "-c", "import wave")
    trap.run("git", "version")
    sprung = set(trap.mark.read_text().split())
    assert "git" in sprung
    # Python 3.13 imports linecache before what is asked for, and what lies there ends it
    assert sprung & {"wave", "linecache"}
    assert shutil.which("git", path=trap.environment["PATH"]) is not None
