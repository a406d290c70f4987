"""A disk that agents fill: caches are dropped first, then new work is refused; serving continues."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, unmount_below
from faults.disks import CutDisk, unmount
from gitrepos import Upstream
from waiting import until

from mirrord.cli.main import run

pytestmark = pytest.mark.root

_AGENT = 65534
_CONFIG = """[upstream]
url = "file://{root}/up/{{owner}}__{{name}}"
[sync]
interval = "0"
[checkouts]
prewarm = false
[access]
commits = "any"
group = "nogroup"
"""
# one file after the other, as builds and logs do, until `free` bytes are left
_FILL = """
import os, sys
free, number = int(sys.argv[1]), 0
while (disk := os.statvfs('.')).f_bavail * disk.f_frsize > free:
    with open(f'log-{number}', 'wb') as log:
        log.write(os.urandom(1 << 20))
    number += 1
"""


class Farm:
    """A daemon with one mirror on an ext4 of 192 MB with a reserve of a tenth."""

    def __init__(self, root: Path) -> None:
        self.upstream = Upstream(root / "up" / "o__r")
        self.upstream.commit({"big": os.urandom(1 << 20).hex()})
        self.commits = self.upstream.history(4)
        self.daemon = Daemon(root, _CONFIG.format(root=root))

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        status, _, content = self.daemon.request(method, f"/v1/{path}", body)
        return status, json.loads(content) if content.startswith((b"{", b"[")) else content

    def end_of(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """An operation that has ended."""
        _, operation = self.ask(method, path, body)
        ended: list[dict[str, Any]] = []

        def has_ended() -> bool:
            ended[:] = [self.ask("GET", f"operations/{operation['id']}")[1]]
            return ended[0]["state"] not in {"queued", "running"}

        until(has_ended)
        return ended[0]

    def checkout(self, commit: str, **more: Any) -> tuple[int, dict[str, Any]]:
        body = {"mirror": "o__r", "commit": commit, "owner": _AGENT, **more}
        return self.ask("POST", "checkouts", body)

    def fill(self, tree: str, free_bytes: int) -> None:
        """Let an agent write to its checkout."""
        command = ["python3", "-c", _FILL, str(free_bytes)]
        subprocess.run(command, cwd=tree, user=_AGENT, group=_AGENT, check=True)

    def events(self, name: str) -> int:
        status, _, text = self.daemon.request("GET", "/metrics")
        assert status == 200
        lines = [line for line in text.decode().splitlines() if f'name="{name}"' in line]
        return round(sum(float(line.split()[-1]) for line in lines))

    @property
    def stores(self) -> set[str]:
        return {path.name for path in self.daemon.state_dir.glob("templates/*/gits/[!.]*")}


@pytest.fixture
def farm() -> Iterator[Farm]:
    root = Path(f"/tmp/nf-{os.getpid()}")  # a socket's path is short
    root.mkdir(mode=0o755)
    disk = CutDisk(root / "image", 192 << 20)
    (root / "state").mkdir()
    try:
        try:
            disk.make(root / "state")
        except subprocess.CalledProcessError:
            pytest.skip("this machine has no loop devices")
        made = Farm(root)
        made.daemon.start()
        try:
            assert made.end_of("POST", "mirrors", {"repo": "o/r"})["state"] == "done"
            yield made
        finally:
            made.daemon.stop()
            unmount_below(root / "state")
    finally:
        unmount(root)
        subprocess.run(["rm", "-rf", root], check=True)


def test_agents_that_fill_the_disk_stop_new_work_and_not_the_serving(
    farm: Farm, capfd: pytest.CaptureFixture[str]
) -> None:
    """Unused cache entries are dropped first; health recovers when the agent's files are removed."""
    for commit in farm.commits[:2]:
        status, made = farm.checkout(commit)
        assert status == 201
    idle, used = (f"sealed-{commit}" for commit in farm.commits[:2])
    for lease in farm.ask("GET", "checkouts")[1]:
        if lease["id"] != made["id"]:
            farm.daemon.request("DELETE", f"/v1/checkouts/{lease['id']}")
    farm.daemon.stop()
    for record in farm.daemon.state_dir.glob(f"templates/*/gits/*{farm.commits[0]}*"):
        os.utime(record, (0, 0))  # its last use
    farm.daemon.start()
    assert {idle, used} <= farm.stores

    farm.fill(made["path"], 16 << 20)
    until(lambda: farm.events("disk.ran_low") == 1)
    status, health = farm.ask("GET", "health")
    assert (status, "nearly full" in health["reasons"][0]) == (503, True)
    assert farm.events("templates.evicted") == 1
    assert idle not in farm.stores
    assert used in farm.stores

    farm.upstream.commit({"new": "x"})
    assert farm.end_of("POST", "mirrors/o__r/sync")["error"]["code"] == "disk-full"
    cold = farm.checkout(farm.commits[2])
    copied = farm.checkout(farm.commits[1], backend="pool")
    imported = farm.ask("POST", "datasets?filename=x.jsonl", b"{}")
    built = farm.ask("POST", "environments", {"names": ["x"]})
    for status, problem in (cold, copied, imported, built):
        assert (status, problem["code"], "free space" in problem["hint"]) == (
            507,
            "disk-full",
            True,
        )
    words = ["--socket", str(farm.daemon.socket)]
    assert run(["checkout", f"o__r@{farm.commits[2]}", *words]) == 7
    assert "nearly full" in capfd.readouterr().err

    status, warm = farm.checkout(farm.commits[1])
    assert status == 201
    Path(warm["path"], "mine").write_text("x\n")
    assert b"+x" in farm.ask("GET", f"checkouts/{warm['id']}/diff")[1]
    assert farm.ask("POST", f"checkouts/{warm['id']}/reset", {})[0] == 200
    assert farm.ask("DELETE", f"checkouts/{warm['id']}")[0] == 204

    assert farm.ask("POST", f"checkouts/{made['id']}/reset", {})[0] == 200
    until(lambda: farm.events("disk.recovered") == 1)
    assert farm.end_of("POST", "mirrors/o__r/sync")["result"]["changed"]
    assert farm.ask("GET", "health")[0] == 200
    assert farm.checkout(farm.commits[2])[0] == 201
