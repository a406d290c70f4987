"""A state directory of another release: an older one is opened, a later one refused."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream
from next_release import NEXT, next_release
from waiting import BOUND_S, until

from mirrord.catalog.schema import HEAD

pytestmark = [pytest.mark.slow, pytest.mark.root]

OLDER = f"catalog-{HEAD}.sqlite3"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """With a mirror, a dataset, pins, an audit, and a checkout of each backend."""
    upstream = Upstream(tmp_path_factory.mktemp("upstreams") / "r")
    commits = upstream.history(3)
    rows = [
        {"instance_id": f"o__r-{number}", "repo": "o/r", "base_commit": commit}
        for number, commit in enumerate(commits[:2])
    ]
    with daemon(f'[upstream]\nurl = "file://{upstream.path.parent}/{{name}}"\n') as made:
        _done(made, "/v1/datasets?name=d", "".join(json.dumps(row) + "\n" for row in rows).encode())
        pin = {"mirror": "o/r", "commit": commits[2], "reason": "paper"}
        assert made.request("POST", "/v1/pins", pin)[0] == 201
        for backend in ("overlay", "pool"):
            request = {"instance": "o__r-0", "backend": backend}
            held = made.json("POST", "/v1/checkouts", request)
            Path(held["path"], "work").write_text("done\n")
        yield made


def _done(running: Daemon, path: str, body: Any) -> dict[str, Any]:
    answer = running.json("POST", path, body)
    until(lambda: running.json("GET", f"/v1/operations/{answer['id']}")["state"] == "done")
    found: dict[str, Any] = running.json("GET", f"/v1/operations/{answer['id']}")["result"]
    return found


def _content(running: Daemon) -> dict[str, Any]:
    """Recorded facts and leases, without changes of audits and starts."""
    checkouts = running.json("GET", "/v1/checkouts")
    return {
        "instances": [
            running.json("GET", f"/v1/instances/o__r-{number}?view=grader") for number in (0, 1)
        ],
        "pins": running.json("GET", "/v1/pins"),
        "datasets": running.json("GET", "/v1/datasets"),
        "refs": running.json("GET", "/v1/mirrors/o__r/refs/log"),
        "checkouts": sorted((each["id"], each["path"], each["commit"]) for each in checkouts),
        "work": {
            each["id"]: running.get(f"/v1/checkouts/{each['id']}/diff")[2] for each in checkouts
        },
    }


def _ended(running: Daemon) -> tuple[int, str]:
    running.log_path.unlink()
    running.start(wait=False)
    assert running.process is not None
    status, running.process = running.process.wait(BOUND_S), None
    return status, running.log


def test_a_state_version_emptied_by_a_power_cut_is_written_again(running: Daemon) -> None:
    running.stop()
    version = running.state_dir / "state_version"
    version.write_text("")
    running.start()
    assert version.read_text() == "1\n"


@pytest.mark.parametrize(("content", "shown"), [(b"7\n", "'7'"), (b"\xff7", "'\\3777'")])
def test_a_later_state_version_is_refused(running: Daemon, content: bytes, shown: str) -> None:
    running.stop()
    version = running.state_dir / "state_version"
    version.write_bytes(content)
    status, log = _ended(running)
    assert status == 5
    assert f"its version is {shown}, and this mirrord knows 1 and older" in log
    assert version.read_bytes() == content
    version.write_text("1\n")
    running.start()
    assert len(running.json("GET", "/v1/checkouts")) == 2


def test_an_older_state_opens_and_a_later_one_is_refused_with_the_way_back(
    running: Daemon,
) -> None:
    """By the schema of the catalog; a refusal changes nothing."""
    before = _content(running)
    running.stop()
    (running.state_dir / "state_version").unlink()  # as before there were versions
    running.upgrade(next_release())
    running.start()
    assert _content(running) == before
    assert (running.state_dir / "state_version").read_text() == "1\n"
    assert _done(running, "/v1/audits", {})["counts"] == {"ok": 2}
    for checkout in running.json("GET", "/v1/checkouts"):
        assert running.request("POST", f"/v1/checkouts/{checkout['id']}/reset")[0] == 200
        assert os.listdir(checkout["path"]).count("work") == 0

    running.stop()
    state, older = running.state_dir, running.state_dir / OLDER
    assert older.stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(state / "catalog.sqlite3")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    status, log = _ended(running)
    assert status == 5
    assert f"does not know its schema 9999, only {NEXT} and older" in log
    assert f"remove {state}/catalog.sqlite3* and move {older} to {state}/catalog.sqlite3" in log
    for file in state.glob("catalog.sqlite3*"):
        file.unlink()
    older.rename(state / "catalog.sqlite3")
    running.start()
    assert _content(running)["instances"] == before["instances"]
    assert older.exists(), "it was migrated again, after another copy"
