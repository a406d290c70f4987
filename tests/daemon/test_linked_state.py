"""A state directory behind a symlink, and one that goes away while the daemon runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream
from waiting import BOUND_S, until

pytestmark = [pytest.mark.slow, pytest.mark.root]


def _configured(upstream: Upstream) -> str:
    return f'[[mirror]]\nrepo = "o/r"\nurl = "file://{upstream.path}"\n'


def _sync(running: Daemon) -> None:
    answer = running.json("POST", "/v1/mirrors/o__r/sync")
    path = f"/v1/operations/{answer['id']}"
    until(lambda: running.json("GET", path)["state"] not in ("pending", "running"))


def test_a_link_to_a_directory_is_a_state_directory(tmp_path: Path) -> None:
    """Also at the next start."""
    upstream = Upstream(tmp_path / "r")
    commit = upstream.history(2)[0]
    with daemon(_configured(upstream), start=False) as running:
        real = running.root / "real"
        real.mkdir()
        running.state_dir.symlink_to(real)
        running.start()
        _sync(running)
        request = {"mirror": "o/r", "commit": commit}
        made = [running.json("POST", "/v1/checkouts", request | {"backend": backend}) for backend in ("overlay", "pool")]  # fmt: skip
        assert all(Path(each["path"]).is_relative_to(real) for each in made), made
        running.stop()
        running.start()
        held = running.json("GET", "/v1/checkouts")
        assert {each["id"] for each in held} == {each["id"] for each in made}
        assert running.request("POST", "/v1/checkouts", request)[0] == 201


def test_a_link_to_nothing_is_refused(tmp_path: Path) -> None:
    with daemon(start=False) as running:
        running.state_dir.symlink_to(running.root / "unmounted")
        running.start(wait=False)
        assert running.process is not None
        assert running.process.wait(BOUND_S) == 7
        running.process = None
        assert "Traceback" not in running.log
        assert not (running.root / "unmounted").exists()


def test_a_state_directory_that_is_gone_is_said_and_served_when_it_is_back(tmp_path: Path) -> None:
    """No request finds a bug, and nothing is lost."""
    upstream = Upstream(tmp_path / "r")
    commit = upstream.history(2)[0]
    with daemon(_configured(upstream)) as running:
        _sync(running)
        aside = running.root / "aside"
        running.state_dir.rename(aside)
        request = {"mirror": "o/r", "commit": commit, "backend": "pool"}
        status, _, body = running.request("POST", "/v1/checkouts", request)
        problem = json.loads(body)
        assert (status, problem["status"]) == (503, 503), problem["detail"]
        assert str(running.state_dir) in problem["detail"]
        aside.rename(running.state_dir)
        assert running.request("POST", "/v1/checkouts", request)[0] == 201
        assert "Traceback" not in running.log
