"""Changes by a reload while the daemon serves."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream
from waiting import until

from mirrord.places import DOCKER_SOCKET


def _reload(running: Daemon, text: str) -> None:
    running.write_config(text)
    assert running.request("POST", "/v1/reload")[0] == 200


@pytest.mark.slow
def test_the_directory_of_datasets_is_watched_when_that_is_switched_on(
    make_upstream: Callable[[str], Upstream],
) -> None:
    upstream = make_upstream("o")
    base = upstream.commit({"a": "b"})
    row = {"instance_id": "i-1", "repo": "x/o", "base_commit": base}
    url = f'[upstream]\nurl = "file://{upstream.path.parent}/{{name}}"\n'
    with daemon(f"{url}[datasets]\nwatch = false\n") as running:
        dropped = running.state_dir / "datasets" / "dropped.jsonl"
        dropped.write_text(json.dumps(row) + "\n")

        def names() -> list[str]:
            return [each["name"] for each in running.json("GET", "/v1/datasets")]

        _reload(running, f"{url}[datasets]\nwatch = true\n")
        until(lambda: names() == ["dropped"])
        _reload(running, f"{url}[datasets]\nwatch = false\n")
        dropped.with_name("later.jsonl").write_text(json.dumps(row) + "\n")
        # what is on again finds the file; had the first watch gone on, there would be two imports
        _reload(running, f"{url}[datasets]\nwatch = true\n")
        until(lambda: names() == ["dropped", "later"])
        started = [line for line in running.log_lines if line.get("kind") == "dataset.import"]
        assert [line["subject"] for line in started if line["event"] == "operation.started"] == [
            "dropped.jsonl",
            "later.jsonl",
        ]


@pytest.mark.root
def test_the_next_checkout_is_of_the_backend_that_a_reload_sets(
    make_upstream: Callable[[str], Upstream],
) -> None:
    """An existing checkout keeps its backend and can be reset and released."""
    upstream = make_upstream("o")
    upstream.commit({"a": "b"})
    url = f'[upstream]\nurl = "file://{upstream.path.parent}/{{name}}"\n'
    with daemon(url) as running:
        until(lambda: running.request("POST", "/v1/mirrors", {"repo": "x/o"})[0] == 202)
        until(lambda: bool(running.json("GET", "/v1/mirrors/x__o").get("synced_at")))
        before = running.json("GET", "/v1/status")["backend"]
        held = running.json("POST", "/v1/checkouts", {"instance": "x/o@main"})
        assert held["backend"] == before == "overlay"
        _reload(running, f'{url}[checkouts]\nbackend = "pool"\n')
        assert running.json("GET", "/v1/status")["backend"] == "pool"
        assert running.json("POST", "/v1/checkouts", {"instance": "x/o@main"})["backend"] == "pool"
        assert running.json("POST", f"/v1/checkouts/{held['id']}/reset")["backend"] == "overlay"
        assert running.request("DELETE", f"/v1/checkouts/{held['id']}")[0] == 204


@pytest.mark.root
def test_dockers_socket_comes_and_goes() -> None:
    with Path("/run/lock/mirrord-tests-docker").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if DOCKER_SOCKET.exists():
            pytest.skip("a daemon of this machine serves there")
        with daemon() as running:
            for _ in range(2):
                _reload(running, "[docker]\nvolumes = true\n")
                assert DOCKER_SOCKET.is_socket()
                _reload(running, "")
                assert not DOCKER_SOCKET.exists()
            _reload(running, "[docker]\nvolumes = true\n")
            running.stop()
        assert not DOCKER_SOCKET.exists()


def test_the_log_is_written_in_the_new_form_and_level() -> None:
    """By the daemon and its existing workers."""
    with daemon() as running:
        _reload(running, '[log]\nlevel = "debug"\nformat = "console"\n')
        at = len(running.log)
        running.request("POST", "/v1/reload")
        until(lambda: "config.reloaded" in running.log[at:])
        assert not any(line.startswith("{") for line in running.log[at:].splitlines())
