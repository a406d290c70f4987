"""A pipe in the place of a file: whoever opens it for reading waits for ever. Each request ends, a heal removes the pipe,
and a daemon with a thread that is stuck all the same ends, also where its log is a pipe that nobody reads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream, git
from waiting import until

pytestmark = pytest.mark.slow


def _mirrord(running: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    """Fails where an answer takes more than a minute: no deadline of ours is that short."""
    command = [sys.executable, "-P", "-m", "mirrord", "--socket", str(running.socket), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def _checkout(running: Daemon, commit: str) -> tuple[int, dict[str, Any]]:
    status, _, body = running.request("POST", "/v1/checkouts", {"mirror": "a/b", "commit": commit})
    return status, json.loads(body)


def _become_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)


def _pack(mirror: Path) -> Path:
    return max((mirror / "objects/pack").glob("*.pack"), key=lambda file: file.stat().st_size)


def _loose(mirror: Path) -> Path:
    """Of an object that every checkout needs."""
    stream = _pack(mirror).read_bytes()
    for file in list((mirror / "objects/pack").iterdir()):
        file.unlink()
    git(mirror, "unpack-objects", "-q", stdin=stream)
    oid = git(mirror, "rev-parse", "main^{tree}")
    return mirror / "objects" / oid[:2] / oid[2:]


PLACES = {
    "pack": _pack,
    "index": lambda mirror: _pack(mirror).with_suffix(".idx"),
    "multi-pack index": lambda mirror: mirror / "objects/pack/multi-pack-index",
    "alternates": lambda mirror: mirror / "objects/info/alternates",
    "HEAD": lambda mirror: mirror / "HEAD",
    "config": lambda mirror: mirror / "config",
    "packed refs": lambda mirror: mirror / "packed-refs",
    "branch": lambda mirror: mirror / "refs/heads/main",
    "grafts": lambda mirror: mirror / "info/grafts",
    "loose object": _loose,
}


def test_a_pipe_in_a_mirror_stops_no_request(tmp_path: Path) -> None:
    """A checkout that needs the file is refused or right, a sync ends, and a heal mends the mirror."""
    upstream = Upstream(tmp_path / "a" / "b")
    commits = upstream.history(2 * len(PLACES) + 1)
    with daemon(f'[upstream]\nurl = "file://{tmp_path}/{{owner}}/{{name}}"\n') as running:
        assert _mirrord(running, "mirror", "add", "a/b").returncode == 0
        mirror = running.state_dir / "mirrors/a__b"
        for place, find in PLACES.items():
            path = find(mirror)
            _become_pipe(path)
            status, tried = _checkout(running, commits.pop())
            assert status == 201 or "heal" in tried["hint"], (place, tried)
            _mirrord(running, "mirror", "sync", "a/b")
            healed = _mirrord(running, "heal", "a/b")
            assert not path.is_fifo(), (place, healed)
            status, done = _checkout(running, commits.pop())
            assert status == 201, (place, healed, done)
        assert running.stop() == 0
        assert "daemon.threads_left" not in running.log


def test_a_pipe_among_the_daemons_own_files_stops_no_start(tmp_path: Path) -> None:
    upstream = Upstream(tmp_path / "a" / "b")
    commit = upstream.history(2)[-1]
    with daemon(f'[upstream]\nurl = "file://{tmp_path}/{{owner}}/{{name}}"\n') as running:
        assert _mirrord(running, "mirror", "add", "a/b").returncode == 0
        ask = ("checkout", f"a/b@{commit}")
        first = json.loads(_mirrord(running, "--json", *ask).stdout)
        assert _mirrord(running, "release", first["id"]).returncode == 0
        running.stop()
        for name in ("manifest", "layer.json", "*.json", "packed-refs", "index", "*.idx"):
            for file in (running.state_dir / "templates").rglob(name):
                if file.is_file():
                    _become_pipe(file)
        running.start()
        assert _mirrord(running, *ask).returncode in {0, 7}
        assert running.stop() == 0


def test_a_thread_that_never_ends_does_not_keep_the_daemon(tmp_path: Path) -> None:
    """A disk that hangs can make one anywhere."""
    os.mkfifo(tmp_path / "pipe")
    script = (
        "import sys, threading; from mirrord.daemon.main import main;"
        " from mirrord.daemon.start import read_options;"
        f" threading.Thread(target=open, args=({str(tmp_path / 'pipe')!r},)).start();"
        " sys.exit(main(read_options()))"
    )

    class Stuck(Daemon):
        @property
        def command(self) -> list[str]:
            return [sys.executable, "-c", script, "--config", str(self.config)]

    with daemon(start=False) as made:
        stuck = Stuck(made.root)
        stuck.start()
        assert stuck.stop() == 0
        until(lambda: "daemon.threads_left" in stuck.log)


def test_a_log_that_nobody_reads_does_not_keep_the_daemon() -> None:
    """As of a journal that hangs: the daemon ends where Python's own end would wait for it."""
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "wb", buffering=0) as log:
        os.set_blocking(writing, False)
        while log.write(bytes(4096)):
            pass
        os.set_blocking(writing, True)
        with daemon(start=False) as made:
            environment = {**os.environ, "PYTHONUNBUFFERED": ""}
            made.process = subprocess.Popen(made.command, stderr=log, env=environment)
            made.wait_until_healthy()
            assert made.stop() == 0
