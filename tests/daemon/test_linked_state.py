"""A state directory behind a symlink, and one that goes away while the daemon runs."""

from __future__ import annotations

import json
from datetime import UTC, datetime
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


@pytest.mark.parametrize("part", ["", "mirrors"])
@pytest.mark.parametrize("is_replaced", [False, True], ids=["gone", "another"])
def test_what_is_not_seen_while_the_state_directory_is_gone_is_not_said_to_be_absent(
    tmp_path: Path, part: str, is_replaced: bool
) -> None:
    """Moved away, or a disk that was unmounted from an empty directory: no request finds a bug, and
    nothing is lost. A lease that ended meanwhile is released when it is back.
    """
    upstream = Upstream(tmp_path / "r")
    commit = upstream.history(2)[0]
    with daemon(_configured(upstream)) as running:
        _sync(running)
        request = {"mirror": "o/r", "commit": commit, "backend": "pool"}
        held = running.json("POST", "/v1/checkouts", request)
        short = running.json("POST", "/v1/checkouts", request | {"ttl": 3})
        aside, place = running.root / "aside", running.state_dir / part
        place.rename(aside)
        if is_replaced:
            place.mkdir()
        asked: list[tuple[str, str, object]] = [
            *(("GET", f"/v1/{noun}", None) for noun in ("mirrors", "mirrors/o__r", "datasets")),
            *(("GET", f"/v1/{noun}", None) for noun in ("checkouts", "usage", "pins", "audits")),
            *(("POST", f"/v1/{noun}", {}) for noun in ("audits", "heals", "mirrors/o__r/sync")),
            ("POST", "/v1/checkouts", request),
            ("POST", "/v1/pins", {"mirror": "o/r", "commit": commit}),
            ("POST", f"/v1/checkouts/{held['id']}/renew", {}),
            ("DELETE", f"/v1/checkouts/{held['id']}", None),
            ("DELETE", "/v1/mirrors/o__r", None),
        ]
        for method, path, body in asked:
            status, _, answer = running.request(method, path, body)
            problem = json.loads(answer)
            assert (status, problem["code"]) == (503, "resource"), (method, path, problem)
            assert f"cannot read the state directory {place}" in problem["detail"]
        assert str(place) in running.get("/v1/health")[2].decode()
        assert running.json("GET", "/v1/status")["health"]["status"] == "degraded"
        until(lambda: datetime.fromisoformat(short["expires_at"]) < datetime.now(UTC))
        until(lambda: str(place) in _last_error(running, "checkouts.expire"))
        if is_replaced:
            place.rmdir()
        aside.rename(place)
        until(lambda: [it["id"] for it in running.json("GET", "/v1/checkouts")] == [held["id"]])
        audit = running.json("POST", "/v1/audits", {})
        path = f"/v1/operations/{audit['id']}"
        until(lambda: running.json("GET", path)["state"] == "done")
        assert running.json("GET", path)["result"]["open_count"] == 0
        assert running.request("DELETE", f"/v1/checkouts/{held['id']}")[0] == 204
        assert "Traceback" not in running.log


def _last_error(running: Daemon, name: str) -> str:
    jobs = running.json("GET", "/v1/status")["jobs"]
    return next(job["last_error"] or "" for job in jobs if job["name"] == name)
