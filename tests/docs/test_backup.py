"""docs/backup.md: its commands make a backup that another directory can serve."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.root]

DOCUMENT = Path(__file__).parents[2] / "docs/backup.md"
STOPPED, RUNNING, RESTORE = re.findall(
    r"^```sh\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE
)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f'[upstream]\nurl = "file://{tmp_path}/upstreams/{{name}}"\n'


@pytest.fixture
def running(make_upstream: Callable[[str], Upstream], url: str) -> Iterator[Daemon]:
    upstream = make_upstream("r")
    commits = upstream.history(3)
    upstream.git("reset", "--hard", "--quiet", commits[1])
    rows = [
        {"instance_id": f"o__r-{n}", "repo": "o/r", "base_commit": commit}
        for n, commit in enumerate(commits[:2])
    ]
    with daemon(url) as made:
        body = "".join(json.dumps(row) + "\n" for row in rows).encode()
        _done(made, "/v1/datasets?name=d", body)
        pin = {"mirror": "o/r", "commit": commits[0], "reason": "paper"}
        assert made.request("POST", "/v1/pins", pin)[0] == 201
        yield made


def _done(running: Daemon, path: str, body: Any) -> Any:
    answer = running.json("POST", path, body)
    until(lambda: running.json("GET", f"/v1/operations/{answer['id']}")["state"] == "done")
    return running.json("GET", f"/v1/operations/{answer['id']}")["result"]


def _audit(running: Daemon) -> Any:
    found = _done(running, "/v1/audits", {"level": "content"})
    return {name: found[name] for name in ("counts", "findings", "mirrors")}


def _recorded(running: Daemon) -> Any:
    """Recorded facts that a restore preserves, so without times of syncs and imports."""
    dataset = running.json("GET", "/v1/datasets/d")
    refs = running.json("GET", "/v1/mirrors/o__r/refs/log")
    pins = running.json("GET", "/v1/pins")
    return (
        {name: dataset[name] for name in ("digest", "instance_count", "unpinned_count")},
        [each["id"] for each in refs],
        sorted((each["commit"], each["owner"], each["reason"]) for each in pins),
    )


def _shell(script: str, directory: Path, state: Path, socket: Path) -> None:
    """Run a block of the document on another state directory, without systemctl."""
    lines = [line for line in script.splitlines() if not line.startswith("systemctl")]
    text = "\n".join(["set -e", *lines]).replace("/var/lib/mirrord", str(state))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "MIRRORD_SOCKET": str(socket)}
    subprocess.run(["bash", "-c", text], check=True, cwd=directory, env=environment)


def test_a_killed_daemons_state_is_restored_into_another_directory(
    running: Daemon, url: str, tmp_path: Path
) -> None:
    """Without checkouts, with the catalog, and with the same audit."""
    assert running.request("POST", "/v1/checkouts", {"instance": "o__r-0"})[0] == 201
    audit, recorded = _audit(running), _recorded(running)
    running.kill()
    _shell(STOPPED, tmp_path, running.state_dir, running.socket)
    with daemon(url, start=False) as other:
        _shell(RESTORE, tmp_path, other.state_dir, other.socket)
        other.start()
        assert (_audit(other), _recorded(other)) == (audit, recorded)
        assert other.json("GET", "/v1/checkouts") == []
        assert other.request("POST", "/v1/checkouts", {"instance": "o__r-1"})[0] == 201
    running.start()
    assert len(running.json("GET", "/v1/checkouts")) == 1


def test_bundles_of_a_running_daemon_bring_mirrors_pins_and_rows_back(
    running: Daemon, url: str, tmp_path: Path
) -> None:
    audit, recorded = _audit(running), _recorded(running)
    _shell(RUNNING, tmp_path, running.state_dir, running.socket)
    with daemon(url) as other:
        _shell("mirrord bundle import backup/*.bundle", tmp_path, other.state_dir, other.socket)
        assert (_audit(other), _recorded(other)) == (audit, recorded)
