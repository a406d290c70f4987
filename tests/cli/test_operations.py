"""Background work from the command line: what runs, waiting for it, coming back to it, ending it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream
from typed import typed
from waiting import BOUND_S, until

pytestmark = pytest.mark.slow


class Site(NamedTuple):
    """A daemon, an upstream that answers, and one that never does until it is closed."""

    running: Daemon
    silent: socket.socket

    @property
    def silent_url(self) -> str:
        return f"git://127.0.0.1:{self.silent.getsockname()[1]}/x"

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-P",
            "-m",
            "mirrord",
            "--socket",
            str(self.running.socket),
            *words,
        ]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *words: str) -> tuple[int, str, str]:
        done = typed("--socket", self.running.socket, *words)
        return done.returncode, done.stdout, done.stderr

    @property
    def polls(self) -> int:
        """How often the state of an operation was answered."""
        answered = r'requests_total\{endpoint="get_operation",status="200"\} (\d+)'
        found = re.search(answered, self.running.get("/metrics")[2].decode())
        return int(found[1]) if found else 0

    def start_stuck(self, name: str) -> str:
        """The id of an operation that waits for the silent upstream."""
        status, out, err = self.run(
            "mirror", "add", name, "--url", self.silent_url, "--no-wait", "--json"
        )
        assert status == 0, err
        return str(json.loads(out)[0]["id"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("upstreams")
    Upstream(root / "a" / "b").history(2)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        # no scheduled syncs: a test counts those that it asked for
        daemon(
            f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n[sync]\ninterval = "0"\n'
        ) as running,
    ):
        yield Site(running, silent)
        for found in running.json("GET", "/v1/operations"):
            running.request("DELETE", f"/v1/operations/{found['id']}")


def test_what_ran_is_listed_shown_and_waited_for(site: Site) -> None:
    """By anybody who knows the id, also after it has ended."""
    identity = site.run("mirror", "add", "a/b", "--no-wait")[1].splitlines()[1].split()[0]
    status, out, _ = site.run("operation", "wait", identity)
    assert (status, out.split()[:3]) == (0, ["mirror.add", "a__b", "done"])
    assert identity in site.run("operation", "list")[1]
    assert identity not in site.run("operation", "list", "--running")[1]
    assert "state      done" in site.run("operation", "show", identity)[1]
    shown = json.loads(site.run("operation", "show", identity, "--json")[1])
    assert (shown["state"], shown["result"] is None) == ("done", False)
    assert site.run("operation", "wait", "--follow", identity)[0] == 0
    assert site.run("operation", "show", "nosuchid")[0] == 4


def test_ctrl_c_leaves_the_work_and_says_how_to_come_back(site: Site) -> None:
    """By its id: to wait for it, or to end it; and status says that it runs."""
    before = site.polls
    process = site.start("mirror", "add", "c/stuck", "--url", site.silent_url)
    until(lambda: site.polls > before)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=BOUND_S)
    assert process.returncode == 130
    found = re.search(
        r"operation (\w+) is still running: `mirrord operation wait \1` waits for it, `mirrord operation cancel \1` cancels it",
        err,
    )
    assert found is not None, err
    assert any(
        line.split()[:4] == [found[1], "running", "mirror.add", "c__stuck"]
        for line in site.run("status")[1].splitlines()
    )
    status, out, _ = site.run("operation", "cancel", found[1])
    assert (status, out.split()[:3]) == (0, ["mirror.add", "c__stuck", "cancelled"])
    assert site.run("operation", "wait", found[1])[0] == 5
    assert found[1] not in site.run("status")[1]


def test_ctrl_c_names_every_operation_that_continues(site: Site) -> None:
    """Not those that have ended."""
    process = site.start("mirror", "sync", "a/b", "c/stuck")
    until(lambda: "c__stuck" in site.run("operation", "list", "--running")[1])
    until(lambda: "a__b" not in site.run("operation", "list", "--running")[1])
    before = site.polls  # then one may come that is still of the first operation, and its last
    until(lambda: site.polls > before + 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=BOUND_S)
    (identity,) = re.findall(r"operation (\w+) is still running", err)
    assert site.run("operation", "cancel", identity)[0] == 0


def test_watching_ends_as_the_work_does(site: Site) -> None:
    """With a line for each change, or an object."""
    identity = site.start_stuck("d/stuck")
    watchers = [
        site.start("operation", "wait", "--follow", identity, *json_) for json_ in ([], ["--json"])
    ]
    for watcher in watchers:
        assert watcher.stdout is not None
        assert identity in (line := watcher.stdout.readline()) or "d__stuck running" in line
    site.run("operation", "cancel", identity)
    for watcher in watchers:
        _, err = watcher.communicate(timeout=BOUND_S)
        assert watcher.returncode == 5
        assert "cancelled" in err


def test_status_waits_for_a_daemon_that_is_starting(site: Site) -> None:
    """As long as it was told, then it is no daemon."""
    with daemon(start=False) as made:
        command = [
            sys.executable,
            "-P",
            "-m",
            "mirrord",
            "--socket",
            str(made.socket),
            "status",
            "--json",
            "--wait",
        ]
        assert subprocess.run([*command, "50ms"], capture_output=True, check=False).returncode == 9
        with subprocess.Popen([*command, "30s"], stdout=subprocess.PIPE) as waiting:
            time.sleep(0.3)
            made.start()
            out, _ = waiting.communicate(timeout=BOUND_S)
        assert json.loads(out)["pid"] == made.pid


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo", "UTC"])
def test_a_printed_time_is_read_back_anywhere(
    site: Site, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ref log`'s own AT names its record, whatever the reader's zone."""
    monkeypatch.setenv("TZ", zone)
    site.run("mirror", "add", "a/b")
    row = site.run("ref", "log", "a/b")[1].splitlines()[1].split()
    record, at = row[0], row[1]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", at)
    found = json.loads(site.run("ref", "diff", "a/b", at, "latest", "--json")[1])
    assert found["a"] == record
    assert site.run("ref", "restore", "a/b", at)[0] == 0
    assert f"synced          {at[:10]}T" in site.run("mirror", "show", "a/b")[1]


@pytest.mark.parametrize(
    "words",
    [["--help"], ["status"], ["operation", "list"], ["events"], ["config", "show"], ["doctor"]],
    ids=" ".join,
)
def test_a_reader_that_hangs_up_ends_a_verb_quietly(site: Site, words: list[str]) -> None:
    """`mirrord … | head`: what SIGPIPE would have been, and no words."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", "mirrord", *words, "--socket", str(site.running.socket)],
            stdout=writing, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert (process.returncode, process.stderr) == (141, "")


def test_a_piped_table_has_a_line_for_each_row(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """However narrow the terminal is said to be."""
    monkeypatch.setenv("COLUMNS", "40")
    site.run("mirror", "add", "a/b")
    header, *rows = site.run("mirror", "list")[1].splitlines()
    assert header.startswith("MIRROR")
    assert [row.split()[0] for row in rows if row.startswith("a__b")] == ["a__b"]
    assert all(len(row.split()) >= 7 for row in rows)


def test_an_empty_patch_is_refused_in_a_patchs_words(site: Site, tmp_path: Path) -> None:
    """Not as a request without a body."""
    site.run("mirror", "add", "a/b")
    tree = site.run("checkout", "a/b@main")[1].rstrip("\n")
    (tmp_path / "empty").touch()
    status, _, err = site.run("apply", tree, str(tmp_path / "empty"))
    assert (status, err.splitlines()) == (
        2,
        [
            "mirrord: cannot apply the patch: it is empty",
            "hint: give the output of `git diff`, or the name @test_patch or @patch",
        ],
    )
    status, _, err = site.run("apply", tree, "@gold")
    assert (status, "an instance has @patch and @test_patch, not @gold" in err) == (2, True)
    assert site.run("release", tree)[0] == 0
