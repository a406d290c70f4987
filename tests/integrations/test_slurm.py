"""A real Slurm with our prolog, task prolog and epilog, set up as docs/fleet.md says."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import anyone
import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream
from sessions import section
from slurm_node import Slurm, slurm
from waiting import BOUND_S, until

from mirrord import Client

pytestmark = [pytest.mark.slow, pytest.mark.root]

PROJECT = Path(__file__).parents[2]
SCRIPTS = PROJECT / "packaging" / "slurm"
USER = "nobody"  # a job's user is one of the host's
_INSTALLED = "/usr/share/mirrord/slurm/"
_BY_CLIENT = "import mirrord; print(mirrord.Client().checkout('psf__requests-v2.31.0').id)"


class World(NamedTuple):
    running: Daemon
    slurm: Slurm
    environment: dict[str, str]

    def submit(self, script: str, *options: str) -> str:
        """A job of USER; answers its id."""
        file = self.slurm.home / "job.sh"
        file.write_text(script)
        words = ("sbatch", "--parsable", f"--uid={USER}", "--output=/dev/null", "--chdir=/tmp")
        return self.slurm.run(*words, *options, str(file), env=self.environment)

    def await_end(self, job: str) -> None:
        """Until the node is free again, which it is after its epilog."""
        until(lambda: self.slurm.state(job) == "COMPLETED", told=self.slurm.logs)
        until(lambda: self.slurm.node_state() == "idle", told=self.slurm.logs)


def documented(language: str) -> str:
    text = section("docs/fleet.md", "Slurm")
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return str(block)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("slurm")
    commits = Upstream(root / "psf" / "requests").history(2)
    rows = [
        {"instance_id": f"psf__requests-{version}", "repo": "psf/requests", "base_commit": commit}
        for version, commit in zip(("v2.3.0", "v2.31.0"), commits, strict=True)
    ]
    (root / "releases.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n[access]\ngroup = "nogroup"\n'
    with daemon(f"{text}[checkouts]\nprewarm = false\n") as running:
        with Client(running.socket) as client:
            client.wait(client.import_dataset(root / "releases.jsonl"))
        programs = running.root / "bin"
        programs.mkdir()
        python = shlex.join(anyone.python())
        _script(programs / "mirrord", f'cd / && exec {python} -m mirrord "$@"')
        _script(programs / "python", f'exec {python} "$@"')
        environment = {"PATH": f"{programs}:/usr/bin:/bin", "MIRRORD_SOCKET": str(running.socket)}
        exports = "".join(f"export {name}={value}\n" for name, value in environment.items())
        for name in ("prolog", "epilog"):  # as a node calls them from scripts of its own
            _script(running.root / f"{name}.sh", f"{exports}exec {SCRIPTS / name}.sh")
        (running.root / "task_prolog.sh").symlink_to(SCRIPTS / "task_prolog.sh")
        with slurm(documented("ini").replace(_INSTALLED, f"{running.root}/")) as made:
            yield World(running, made, environment)


def _script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_what_a_job_leaves_is_released_with_it(world: World, tmp_path: Path) -> None:
    """The documented job, which leaves a checkout by the program, and one more by the client."""
    go = world.running.root / "go"
    more = f'python -c "{_BY_CLIENT}"\nmirrord checkout psf__requests-v2.3.0 --label mine\n'
    more += f"while [ ! -e {go} ]; do sleep 0.1; done\n"
    with Client(world.running.socket) as client:
        others = client.checkout("psf__requests-v2.3.0", label="slurm/0")
        job = world.submit(documented("sh") + more)
        until(lambda: len(client.list_checkouts()) == 4, told=world.slurm.logs)
        held = client.list_checkouts(f"slurm/{job}")
        assert [each.owner_uid for each in held] == [anyone.NOBODY] * 2
        assert all(Path(each.path, ".git").is_dir() for each in held)
        prepared = [each for each in client.list_operations() if each.kind == "dataset.prepare"]
        assert [each.subject for each in prepared] == ["releases"] * 2  # prolog, and the job itself
        assert all(each.result == {"prepared": 2, "failed": 0, "left": 0} for each in prepared)
        go.touch()
        world.await_end(job)
        left = {each.label: each.id for each in client.list_checkouts()}
        assert left.keys() == {"slurm/0", "mine"}
        assert not any(Path(each.path).exists() for each in held)
        client.release_checkout(left["mine"])
        others.release()


@pytest.mark.parametrize(
    "comment", ["", "mirrord=absent", "mirrord=--help mirrord=releases", "* mirrord=$(id);`id` '"]
)
def test_a_job_whose_comment_is_not_understood_runs(world: World, comment: str) -> None:
    job = world.submit("#!/bin/sh\ntrue\n", f"--comment={comment}")
    world.await_end(job)


def test_a_node_without_mirrord_runs_jobs(world: World) -> None:
    world.running.stop()
    try:
        job = world.submit("#!/bin/sh\ntrue\n", "--comment=mirrord=releases")
        world.await_end(job)
    finally:
        world.running.start()


@pytest.mark.parametrize(("script", "bound_s"), [("prolog", 5), ("epilog", 20)])
def test_a_daemon_that_is_silent_costs_bounded_time(
    world: World, script: str, bound_s: float
) -> None:
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_COMMENT": "mirrord=releases"}
    os.kill(world.running.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        done = subprocess.run(
            [str(world.running.root / f"{script}.sh")], env=job, check=False, cwd="/"
        )
        assert done.returncode == 0
        assert bound_s - 1 < time.monotonic() - began < bound_s + BOUND_S
    finally:
        os.kill(world.running.pid, signal.SIGCONT)
