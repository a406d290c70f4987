"""A daemon that starts on a full disk serves what it has, and everything when there is space again."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon
from gitrepos import Upstream
from mount_table import mount_lines
from waiting import until

from mirrord.catalog.database import Database, prepare
from mirrord.errors import DiskFullError
from mirrord.host.room import write_fault

pytestmark = pytest.mark.root

_REFUSED = {"disk-full", "resource"}


class Disk:
    """An ext4 of 64 MB with a daemon's state, which can be filled."""

    def __init__(self, root: Path, kind: str) -> None:
        self.at = root / "disk"
        self.kind = kind
        self._ballast: list[Path] = []
        image = root / "image"
        subprocess.run(["truncate", "-s", "64M", image], check=True)
        inodes = ["-N", "400"] if kind == "no inodes" else []
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", *inodes, image], check=True)
        self.at.mkdir()
        if subprocess.run(
            ["mount", "-o", "loop", image, self.at], capture_output=True, check=False
        ).returncode:
            pytest.skip("this machine has no loop devices")

    def shut(self) -> None:
        if self.kind == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", self.at], check=True)
        elif self.kind == "no blocks":
            self._fill(self.at / "ballast")
        else:
            self._use_up()

    def open(self) -> None:
        if self.kind == "read-only":
            subprocess.run(["mount", "-o", "remount,rw", self.at], check=True)
        for path in self._ballast:
            path.unlink()

    def _fill(self, path: Path) -> None:
        self._ballast.append(path)
        with path.open("wb", 0) as file:
            for size in (1 << 20, 4096, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue

    def _use_up(self) -> None:
        try:
            while True:
                path = self.at / f"ballast-{len(self._ballast)}"
                path.touch()
                self._ballast.append(path)
        except OSError:
            return

    def remove(self) -> None:
        mounted = [line.split()[4] for line in mount_lines() if f" {self.at}" in line]
        for place in reversed(mounted):
            subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Short, because a socket's path must be."""
    with tempfile.TemporaryDirectory(prefix="md-") as directory:
        yield Path(directory)


@pytest.fixture(params=["no blocks", "no inodes", "read-only"])
def disk(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Disk]:
    made = Disk(scratch, request.param)
    try:
        yield made
    finally:
        made.remove()


def done(it: Daemon, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """The answer, or the result of its operation."""
    answer: dict[str, Any] = it.json(method, path, body)
    while answer.get("state") == "running":
        time.sleep(0.02)
        answer = it.json("GET", f"/v1/operations/{answer['id']}")
    return answer


def leave_something_to_remove(state: Path, over: str) -> list[Path]:
    """A lease that ended while no daemon ran, a half-made checkout, a spare tree, a released one."""
    file = state / "leases" / over / "lease.json"
    lease = json.loads(file.read_text())
    lease["terms"]["expires_at"] = "2020-01-01T00:00:00+00:00"
    file.write_text(json.dumps(lease))
    kinds = ("leases", "checkouts")
    made = [state / kind / f"{name}half" for kind in kinds for name in ("", ".warm-", ".trash-")]
    for path in made:
        path.mkdir()
    return [*made, *(state / kind / over for kind in kinds)]


@pytest.mark.parametrize("disk", ["no blocks"], indirect=True)
def test_a_second_process_does_not_wait_for_a_catalog_without_room(disk: Disk) -> None:
    """A worker that imports rows: opened as for one process alone, it would wait minutes for the daemon's connections."""
    path = disk.at / "catalog.sqlite3"
    with closing(Database(path)) as first:
        prepare(first)
        disk.shut()
        with pytest.raises(DiskFullError, match="no room beside it"):
            Database(path, is_second=True)
        disk.open()
        with closing(Database(path, is_second=True)) as second, second.write():
            pass


@pytest.mark.parametrize("end", [Daemon.stop, Daemon.kill], ids=["stopped", "killed"])
def test_a_disk_that_takes_nothing_stops_new_work_and_nothing_else(
    disk: Disk,
    scratch: Path,
    make_upstream: Callable[[str], Upstream],
    end: Callable[[Daemon], object],
) -> None:
    """Health, audits and existing checkouts; then everything, without a restart."""
    upstream = make_upstream("owner+name")
    head = upstream.history(3)[-1]
    it = Daemon(scratch)
    it.state_dir = disk.at / "state"
    it.write_config(f'[upstream]\nurl = "file://{upstream.path.parent}/{{owner}}+{{name}}"\n')
    row = json.dumps(
        {
            "instance_id": "a",
            "repo": "owner/name",
            "base_commit": head,
            "patch": "",
            "test_patch": "",
        }
    ).encode()
    writes = [
        ("POST", "/v1/checkouts", {"instance": "a"}),
        ("POST", "/v1/pins", {"mirror": "owner__name", "commit": head}),
        ("POST", "/v1/datasets?name=more&filename=more.jsonl", row),
    ]
    try:
        it.start()
        assert (
            done(it, "POST", "/v1/datasets?name=lite&filename=lite.jsonl", row)["state"] == "done"
        )
        held = it.json("POST", "/v1/checkouts", {"instance": "a"})
        over = it.json("POST", "/v1/checkouts", {"instance": "a"})["id"]
        end(it)
        # elsewhere its removal would make room
        left = leave_something_to_remove(it.state_dir, over) if disk.kind == "read-only" else []
        disk.shut()
        it.start()

        assert it.request("GET", "/v1/health")[0] == 503
        assert [mirror["state"] for mirror in it.json("GET", "/v1/mirrors")] == ["ready"]
        assert (Path(held["path"]) / "README").read_text() == "number 2\n"
        audit = done(it, "POST", "/v1/audits", {"level": "content"})
        assert (audit["state"], audit["result"]["counts"]) == ("done", {"ok": 1})
        for write in writes:
            answer = done(it, *write)
            assert {answer.get("code"), (answer.get("error") or {}).get("code")} & _REFUSED, answer
        assert it.get("/v1/status")[0] == 200
        assert "Traceback" not in it.log and not [
            line for line in it.log_lines if line["event"].endswith("crashed")
        ]

        disk.open()
        until(lambda: not [path for path in left if path.exists()])
        for write in writes:
            answer = done(it, *write)
            assert not answer.get("code") and not answer.get("error"), answer
        assert it.request("DELETE", f"/v1/checkouts/{held['id']}")[0] == 204
        audit = done(it, "POST", "/v1/audits", {"level": "content"})
        assert (audit["result"]["counts"], audit["result"]["findings"]) == ({"ok": 1}, [])
    finally:
        if it.process is not None:
            it.stop()


@pytest.mark.parametrize("disk", ["read-only"], indirect=True)
def test_a_disk_that_refuses_changes_after_an_error_is_told(disk: Disk) -> None:
    """ext4 mounted with errors=remount-ro says so since Linux 6.15 by no flag, only by EROFS; nothing is written to see it."""
    remount = ["mount", "-o", "remount,errors=remount-ro", str(disk.at)]
    subprocess.run(remount, check=True)
    os.sync()
    before = disk.at.stat().st_ctime_ns
    assert write_fault(disk.at) is None
    assert disk.at.stat().st_ctime_ns == before
    device = next(line.split()[2] for line in mount_lines() if f" {disk.at} " in line)
    name = Path(f"/sys/dev/block/{device}").resolve().name
    Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("a test")
    with pytest.raises(OSError, match="Read-only file system"):
        (disk.at / "new").touch()
    assert write_fault(disk.at) in {"is read-only", "takes no changes (Read-only file system)"}
