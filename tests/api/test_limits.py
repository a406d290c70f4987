"""Clients cannot exhaust the disk, the daemon's memory or its time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import Daemon, daemon
from waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def small_disk() -> Iterator[Daemon]:
    """A daemon whose state directory is on a file system of 24 MiB."""
    with tempfile.TemporaryDirectory(prefix="md-") as scratch:
        root = Path(scratch)
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", scratch],
            check=False,
            capture_output=True,
        )
        if mounted.returncode:
            pytest.skip("this machine allows no mounts")
        made = Daemon(root)
        try:
            yield made.start()
        finally:
            made.stop()
            subprocess.run(
                ["umount", "--lazy", scratch], check=True
            )  # the fork server ends a moment after the daemon


def test_an_upload_that_fills_the_disk_is_refused_and_removed(small_disk: Daemon) -> None:
    """The daemon is degraded with a reason and still serves."""
    status, _, body = small_disk.request("POST", "/v1/datasets?filename=x.jsonl", b"x" * 40_000_000)
    assert (status, json.loads(body)["code"]) == (507, "disk-full")
    assert list((small_disk.state_dir / "quarantine").iterdir()) == []
    disk = os.statvfs(small_disk.state_dir)
    ballast = bytes(disk.f_bavail * disk.f_frsize - (1 << 20))
    (small_disk.state_dir / "ballast").write_bytes(ballast)
    until(lambda: small_disk.get("/v1/health")[0] == 503)
    status, _, body = small_disk.get("/v1/health")
    assert "nearly full" in json.loads(body)["reasons"][0]
    assert small_disk.json("GET", "/v1/mirrors") == []


SMALL_RING = """
import runpy
from mirrord.jobs.events import Events
Events.__init__.__kwdefaults__["capacity"] = 512
runpy.run_module("mirrord.daemon", run_name="__main__", alter_sys=True)
"""


class SmallRing(Daemon):
    """It keeps 512 events instead of 4,096, which a socket's buffers may hold by themselves."""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-P", "-c", SMALL_RING, "--config", str(self.config)]


def heal_nothing(running: Daemon, numbers: range) -> None:
    """Three events each."""
    with running.connect() as connection:
        for _ in numbers[::100]:
            connection.sendall(b"POST /v1/heals HTTP/1.1\r\nhost: x\r\n\r\n" * 100)
            received = b""
            while received.count(b"HTTP/1.1 202") < 100:
                received += connection.recv(1 << 20)
    ended = b'mirrord_events_total{name="operation.finished"} %d' % numbers.stop
    while ended not in running.get("/metrics")[2]:
        time.sleep(1)  # an answer lists all that runs


@pytest.mark.timeout(300)
def test_a_follower_that_does_not_read_costs_nothing_and_learns_what_it_missed() -> None:
    """The daemon neither waits for it nor buffers its events."""
    with daemon('[log]\nlevel = "error"\n', kind=SmallRing) as running:
        heal_nothing(running, range(100))
        with running.connect() as connection:
            connection.sendall(b"GET /v1/events?after=0 HTTP/1.1\r\nhost: x\r\n\r\n")
            raw = b""
            while b"operation.started" not in raw:
                raw += connection.recv(1 << 16)
            heal_nothing(running, range(100, 800))
            while b"events.dropped" not in raw:
                chunk = connection.recv(1 << 20)
                assert chunk, "the stream ended without saying what was dropped"
                raw += chunk
        assert raw.index(b"operation.started") < raw.index(b"events.dropped")
        assert running.get("/v1/health")[0] == 200
