"""Sandboxes with an environment, against a worktree with a copy of the same virtual environment and no sandbox at all."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from measured_daemon import NOBODY, Daemon
from results import Figure, Row
from rivals import Git, disk_bytes
from rollouts import Change, make_change

from mirrord import Checkout, Client, Sandbox

_KEY, _DIGEST = "bench", "ab" * 32
_TEST = Change("a test", {"test_agent.py": b"import json\n\nassert json.loads('1') == 1\n"})
_RUN = ["python", "test_agent.py"]
_TURNS = 3


class Sandboxes:
    """Places a virtual environment in the daemon's state, as a build would have left it."""

    def __init__(self, daemon: Daemon, git: Git, commit: str, compare: Callable[..., None]) -> None:
        self._daemon, self._git, self._commit, self._compare = daemon, git, commit, compare
        self.figures: list[Figure] = []
        self._venv = git.fresh()
        subprocess.run(["/usr/bin/python3", "-m", "venv", self._venv], check=True)
        place = daemon.state / "templates/.environments" / _DIGEST
        daemon.stop()
        place.mkdir(parents=True, mode=0o700)
        subprocess.run(["cp", "-a", self._venv, place / "files"], check=True)
        facts = {"key": _KEY, "digest": _DIGEST, "recipe": None, "state": "ready", "at": 0}
        (place / "environment.json").write_text(json.dumps(facts))
        daemon.start()
        self._instance = daemon.record(commit, make_patch(git, commit))

    def alone(self, rounds: int) -> None:
        """One at a time: what is added to a command by mirrord, its environment and its sandbox."""
        tree = self._git.fresh()
        self._git.worktree_add(tree, self._commit)
        python = f"{self._venv}/bin/python"
        with self._daemon.client() as client:

            def ours() -> float:
                began = time.perf_counter()
                checkout = self._take(client)
                with Sandbox(checkout) as sandbox:
                    assert sandbox.exec(["python", "-c", "pass"]).exit_code == 0
                    took = time.perf_counter() - began
                checkout.release()
                return took

            def theirs() -> float:
                began = time.perf_counter()
                subprocess.run([python, "-c", "pass"], cwd=tree, check=True)
                return time.perf_counter() - began

            ours()
            times = [(ours(), theirs()) for _ in range(rounds)]
        more = statistics.median(one - other for one, other in times) * 1000
        name = "checkout with environment, sandbox, python -c pass: more than python -c pass alone"
        self.figures.append(Figure(name, more, "ms", "under 30"))

    def many(self, count: int = 64) -> None:
        """At once, each with the environment for itself."""
        before = _used_bytes(self._daemon.state)
        with self._daemon.client() as client, ThreadPoolExecutor(count) as threads:
            began = time.perf_counter()
            held = list(threads.map(lambda _: self._take(client), range(count)))
            sandboxes = list(map(Sandbox, held))
            ran = list(threads.map(lambda each: each.exec(["python", "-c", "pass"]), sandboxes))
            took = time.perf_counter() - began
            assert all(each.exit_code == 0 for each in ran)
            added = (_used_bytes(self._daemon.state) - before) / count
            for sandbox, checkout in zip(sandboxes, held, strict=True):
                sandbox.close()
                checkout.release()
        self.figures += [
            Figure(f"{count} checkouts and sandboxes with one environment, at once", took, "s"),
            Figure("disk that each of them takes", added / 1024, "KiB"),
            Figure("disk of the environment", disk_bytes(self._venv) / 1024, "KiB"),
        ]

    def loop(self, environments: int = 64) -> None:
        """Each turn: a checkout, a file and a run of it, a diff, a grade, a reset; all of them at once."""
        with self._daemon.client() as client, ThreadPoolExecutor(environments) as threads:

            def all_of(turn: Callable[[], None]) -> Callable[[], float]:
                def run() -> float:
                    began = time.perf_counter()
                    for done in [threads.submit(turn) for _ in range(environments)]:
                        done.result()
                    took = time.perf_counter() - began
                    while self._daemon.has_trash():
                        time.sleep(0.01)
                    return took

                return run

            self._turn(client)
            row = Row(
                f"{environments} turns at once: checkout, environment, test, diff, grade, reset",
                "git worktree add twice, cp -a of the environment, test, add, diff, apply twice, reset, clean, remove",
                goal=10,
            )
            ours, theirs = all_of(lambda: self._turn(client)), all_of(self._git_turn)
            self._compare(row, ours, theirs, _TURNS)
            self.figures += [
                Figure("turns by mirrord", environments / statistics.median(row.ours), "a second"),
                Figure("turns by git and cp", environments / statistics.median(row.theirs), "a second"),
            ]  # fmt: skip

    def _take(self, client: Client) -> Checkout:
        return client.checkout(self._instance, environment=_KEY, owner=NOBODY)

    def _turn(self, client: Client) -> None:
        with self._take(client) as checkout, Sandbox(checkout) as sandbox:
            _TEST.write(checkout.path)
            assert sandbox.exec(_RUN).exit_code == 0
            assert b"test_agent.py" in checkout.diff()
            checkout.grade().release()
            sandbox.reset()

    def _git_turn(self) -> None:
        agent, venv = self._add_worktree(), self._git.fresh()
        subprocess.run(["cp", "-a", self._venv, venv], check=True)
        _TEST.write(agent)
        command = [f"{venv}/bin/python", *_RUN[1:]]
        subprocess.run(command, cwd=agent, check=True, stderr=subprocess.DEVNULL)
        patch = self._git.diff(agent)
        grader = self._add_worktree()
        self._git.apply(grader, patch)
        self._git.reset_and_clean(agent)
        # not by git: of 64 at once some `worktree remove` fail over a neighbour that goes
        subprocess.run(["rm", "-r", agent, grader, venv], check=True)

    def _add_worktree(self) -> Path:
        """Again, where git fails over the half-made worktree of a neighbour, as it does of 64 at once."""
        while True:
            path = self._git.fresh()
            try:
                self._git.worktree_add(path, self._commit)
            except RuntimeError as error:
                if "worktrees/" not in str(error):
                    raise
            else:
                return path


def _used_bytes(place: Path) -> int:
    """Of the whole file system: what is removed meanwhile stops du."""
    os.sync()
    found = os.statvfs(place)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def make_patch(with_git: Git, commit: str) -> bytes:
    """One that changes a file of the commit."""
    clone = with_git.fresh()
    with_git.clone_isolated(clone, commit)
    make_change(clone, 1, 0, 7).write(clone)
    return with_git.diff(clone)
