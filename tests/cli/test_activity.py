"""`mirrord status --watch`: on a terminal, in a pipe, and over a restart of the daemon."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from daemons import Daemon, daemon
from waiting import BOUND_S, until

from mirrord import Client, protocol
from mirrord.cli.activity import render
from mirrord.cli.output import ago

NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with daemon() as made:
        yield made


def command(running: Daemon, *words: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "mirrord",
        "status",
        "--watch",
        "--socket",
        str(running.socket),
        *words,
    ]


def _endpoint(name: str, requests: int) -> protocol.EndpointActivity:
    return protocol.EndpointActivity(
        endpoint=name, requests=requests, per_second=requests / 60, p50_s=0.002, p99_s=1.5
    )


def _busy(rows: int) -> protocol.Activity:
    """With so many rows in each list, and words as long as they come."""
    operation = protocol.Operation(
        id="a" * 16, kind="dataset.import", subject="x" * 100, state="running",
        progress=protocol.Progress(done=5, total=3000, unit="rows", note="o__" + "r" * 40),
        started_at=NOW - timedelta(hours=3),
    )  # fmt: skip
    return protocol.Activity(
        at=NOW, version="1.2.3", pid=1, started_at=NOW - timedelta(days=3), status="degraded",
        reasons=["the disk of /var/lib/mirrord is nearly full: " + "x" * 100] * 4,
        window_s=60.0, requests=_endpoint("all", 90_000),
        endpoints=[_endpoint(f"endpoint_{n}", n) for n in range(rows)],
        connections=2000, checkouts=1000, checkouts_max=1024,
        owners=[protocol.OwnerActivity(uid=70_000 + n, checkouts=n) for n in range(rows)],
        workers=10, workers_busy=10,
        calls=[protocol.WorkerActivity(function="build_layer", uid=0, since=NOW)] * rows,
        operations_running=rows, operations_queued=2000, operations=[operation] * rows,
        queues={"operations": 2000, "workers": 3}, caches=[], refusals={"limit-reached": 7},
        disk_bytes=10**12, disk_free_bytes=10**9, disk_reserve_bytes=2**30,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 100])
def test_a_picture_fits_a_small_terminal_with_a_part_of_every_list(rows: int) -> None:
    """80 columns and 24 lines; what is cut says how much."""
    lines = [text for text, _ in render(_busy(rows), 80, 24)]
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for heading in ("ENDPOINT", "OWNER", "SINCE"):
        assert any(line.startswith(heading) for line in lines)
    assert any(line.startswith("…") for line in lines) == (rows > 1)
    assert "degraded" in lines[0]


def test_without_a_screen_nothing_is_cut() -> None:
    lines = [text for text, _ in render(_busy(100))]
    assert sum("dataset.import" in line for line in lines) == 100


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0s"), (59.9, "59s"), (3600, "1h 0m"), (90_061, "1d 1h")]
)
def test_a_long_time_has_two_units(seconds: float, shown: str) -> None:
    assert ago(timedelta(seconds=seconds)) == shown


def test_a_pipe_gets_text_or_an_object_a_line(running: Daemon) -> None:
    """Without control characters; one after the other."""
    lines = []
    for words in ([], ["--json"]):
        watching = command(running, *words, "--interval", "100ms")
        with subprocess.Popen(watching, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines += [process.stdout.readline() for _ in range(2)]
            process.send_signal(signal.SIGINT)
        assert process.returncode == 128 + signal.SIGINT
    assert lines[0].startswith("mirrord ")
    assert "\x1b" not in "".join(lines[:2])
    first, second = (protocol.Activity.from_json(json.loads(line)) for line in lines[2:])
    assert first.at < second.at


def test_no_daemon_and_wrong_words_are_told_at_once(running: Daemon) -> None:
    for words, status in (
        (["--socket", "/nonexistent/s"], 9),
        (["--interval", "soon"], 2),
        (["--all"], 2),
    ):
        assert subprocess.run(command(running, *words), capture_output=True).returncode == status


class Terminal:
    """`mirrord status --watch` on a terminal of 80 by 24."""

    def __init__(self, words: list[str]) -> None:
        self.screen = b""
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.modes = termios.tcgetattr(theirs)
        self.theirs = theirs
        environment = {**os.environ, "TERM": "xterm-256color"}
        environment.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
        os.set_blocking(self.ours, False)

    def shows(self, text: str) -> bool:
        """Whether it was drawn since the last time that this was asked and true."""
        try:
            self.screen += os.read(self.ours, 1 << 20)
        except BlockingIOError:
            pass
        found = text.encode() in self.screen
        self.screen = b"" if found else self.screen
        return found

    def close(self) -> int:
        """Press q; answers the exit status. The terminal is as it was."""
        os.write(self.ours, b"q")
        until(lambda: self.shows("\x1b[?1049l"))  # the screen of before
        status = self.process.wait(BOUND_S)
        assert termios.tcgetattr(self.theirs) == self.modes
        for descriptor in (self.ours, self.theirs):
            os.close(descriptor)
        return status


def test_on_a_terminal_it_lives_through_a_restart_and_ends_with_q() -> None:
    """The last picture stays while the daemon is gone."""
    with daemon() as running:
        terminal = Terminal(command(running, "--interval", "100ms"))
        until(lambda: terminal.shows(f"pid {running.pid}"))
        running.stop()
        until(lambda: terminal.shows("waiting for the daemon"))
        running.start(wait=False).wait_until_healthy(60)
        until(lambda: terminal.shows(f"pid {running.pid}"))
        with Client(running.socket) as client:
            assert "get_activity" in {each.endpoint for each in client.activity().endpoints}
        assert terminal.close() == 0
