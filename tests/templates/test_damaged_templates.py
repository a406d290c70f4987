"""What checkouts are made from, damaged below a running daemon: an audit of content finds it, and
the next checkout is whole.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream, git
from waiting import until

pytestmark = pytest.mark.root


class World:
    """A daemon with one mirror."""

    def __init__(self, running: Daemon, upstream: Upstream, commits: list[str]) -> None:
        self.daemon = running
        self.upstream = upstream
        self.commits = commits

    @property
    def templates(self) -> Path:
        return self.daemon.state_dir / "templates/owner__name"

    def add(self) -> None:
        answer = self.daemon.json("POST", "/v1/mirrors", {"repo": "owner/name"})
        while answer["state"] == "running":
            time.sleep(0.02)
            answer = self.daemon.json("GET", f"/v1/operations/{answer['id']}")
        assert answer["state"] == "done"

    def hand_out(self, commit: str) -> dict[str, Any]:
        """A checkout that is what it says, in its files and in its store."""
        made: dict[str, Any] = self.daemon.json(
            "POST", "/v1/checkouts", {"mirror": "owner/name", "commit": commit}
        )
        tree = Path(made["path"])
        git(tree, "fsck", "--full", "--no-dangling")
        assert git(tree, "status", "--porcelain") == ""
        assert git(tree, "write-tree") == self.upstream.git("rev-parse", f"{commit}^{{tree}}")
        assert (tree / "README").read_text().rstrip("\n") == self.upstream.git(
            "show", f"{commit}:README"
        )
        return made

    def release(self, made: dict[str, Any]) -> None:
        """Release a checkout, and wait until nothing holds its template any more."""
        assert self.daemon.request("DELETE", f"/v1/checkouts/{made['id']}")[0] == 204
        leases = self.daemon.state_dir / "leases"
        until(lambda: not any(leases.iterdir()))

    def findings(self) -> list[str]:
        command = [
            sys.executable,
            "-m",
            "mirrord",
            "--config",
            str(self.daemon.config),
            "--json",
            "audit",
            "--level",
            "content",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return [finding["detail"] for finding in json.loads(done.stdout)["findings"]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    upstream = Upstream(tmp_path_factory.mktemp("damaged") / "owner+name")
    commits = upstream.history(6)
    with daemon(
        f'[upstream]\nurl = "file://{upstream.path.parent}/{{owner}}+{{name}}"\n'
    ) as running:
        made = World(running, upstream, commits)
        made.add()
        yield made


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)


def _truncate(file: Path) -> None:
    file.chmod(0o644)
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


@pytest.mark.parametrize(
    "damage", [_flip, _truncate, Path.unlink], ids=["flipped", "truncated", "gone"]
)
@pytest.mark.parametrize(
    ("part", "reported"),
    [
        ("trees/*/files/README", "template "),
        ("packs/*/*.pack", "closure pack "),
        ("packs/*/*.idx", "closure pack "),
        ("gits/*/.git/packed-refs", "sealed store "),
        ("gits/*/.git/HEAD", "sealed store "),
        ("trees/*/index/.git/index", "template "),
    ],
)
def test_an_audit_finds_it_and_the_next_checkout_is_whole(
    world: World, part: str, reported: str, damage: Callable[[Path], None]
) -> None:
    """While no checkout holds it."""
    world.release(world.hand_out(world.commits[3]))
    damage(max(world.templates.glob(part)))
    found = world.findings()
    assert found, "nothing was found"
    assert all(detail.startswith(reported) for detail in found), found
    assert world.findings() == []
    world.release(world.hand_out(world.commits[3]))
