"""The daemon process: start, lock, sockets, signals, shutdown."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import anyone
import pytest
from anyone import NOBODY
from daemons import Daemon, daemon
from waiting import BOUND_S, until

pytestmark = pytest.mark.slow


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Short, because a socket's path must be."""
    with tempfile.TemporaryDirectory(prefix="md-") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    """A daemon that no test stops or changes."""
    text = "[audit]\ncontent_interval = '1d'\n[maintenance]\ninterval = '0'\n"
    with daemon(text + "[checkouts]\nmax = 5\n") as made:
        yield made


def opens(pid: int, name: str) -> bool:
    """Whether a process has a file of that name open."""
    with suppress(FileNotFoundError):  # a descriptor that was just closed
        return any(os.readlink(fd).endswith(f"/{name}") for fd in Path(f"/proc/{pid}/fd").iterdir())
    return False


def ended(made: Daemon) -> tuple[int, str]:
    """Exit status and output of a daemon that ends."""
    made.start(wait=False)
    assert made.process is not None
    status = made.process.wait(BOUND_S)
    made.process = None
    return status, made.log


def heaps_of_threads(pid: int) -> list[int]:
    """The 64 MiB that glibc reserves for each arena but the first: a part in use, and the rest of them."""
    regions = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, mode, _ = line.split(maxsplit=2)
        start, end = (int(place, 16) for place in span.split("-"))
        regions.append((start, end, mode))
    size = 64 * 1024**2
    return [
        start
        for (start, end, mode), rest in pairwise(regions)
        if mode == "rw-p" and start % size == 0 and rest == (end, start + size, "---p")
    ]


def test_its_threads_share_two_arenas(running: Daemon) -> None:
    """What threads freed is kept for the next ones, instead of once for each."""
    assert running.process
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: running.get("/v1/status")[0], range(64)))
    assert set(answers) == {200}
    assert len(os.listdir(f"/proc/{running.process.pid}/task")) > 4
    assert len(heaps_of_threads(running.process.pid)) == 1


def test_it_serves_and_stops_on_sigterm_with_status_0() -> None:
    """The socket appears, answers, and is removed at the end."""
    with daemon() as running:
        status, headers, body = running.get("/v1/health")
        assert (status, json.loads(body)["status"]) == (200, "ok")
        assert headers["content-type"] == "application/json"
        assert running.stop() == 0
        assert not running.socket.exists()


def test_sigint_stops_it_too() -> None:
    """Ctrl-C in the foreground is an orderly stop."""
    with daemon() as running:
        assert running.stop(signal.SIGINT) == 0


def test_the_modes_of_the_state_directory_let_nobody_in_but_to_checkouts(running: Daemon) -> None:
    """Others may enter `checkouts`, but not list it, and nothing else."""
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in running.state_dir.iterdir()}
    assert oct(running.state_dir.stat().st_mode & 0o777) == "0o711"
    assert modes["checkouts"] == "0o711"
    assert {modes[name] for name in ("mirrors", "datasets", "templates", "quarantine")} == {"0o700"}
    assert {mode for name, mode in modes.items() if name.startswith("catalog")} == {"0o600"}
    assert oct(running.socket.stat().st_mode & 0o777) == "0o666"


def test_a_second_daemon_on_the_same_state_is_refused_and_told_who_holds_it(
    running: Daemon,
) -> None:
    """By pid, uid and start time; the first daemon is not affected."""
    with daemon(start=False) as second:
        second.state_dir = running.state_dir
        second.write_config("")
        status, log = ended(second)
        assert status == 5
        assert f"process {running.pid} of uid {os.geteuid()}, started 20" in log
        assert running.get("/v1/health")[0] == 200


def test_a_second_daemon_on_the_same_socket_is_refused(running: Daemon) -> None:
    """Even with another state directory."""
    with daemon(start=False) as second:
        second.socket = running.socket
        second.write_config("")
        status, log = ended(second)
        assert (status, "another process listens there" in log) == (5, True)
        assert running.get("/v1/health")[0] == 200


def test_what_a_child_of_a_killed_daemon_still_holds_is_waited_for() -> None:
    """Between fork and exec it has the lock and the listening socket, and soon lets go of both."""
    with daemon(start=False) as made, socket.socket(socket.AF_UNIX) as listener:
        made.state_dir.mkdir(mode=0o700)
        held = os.open(made.state_dir / "daemon.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(held, fcntl.LOCK_EX)
        listener.bind(str(made.socket))
        listener.listen()
        listener.settimeout(BOUND_S)
        made.start(wait=False)
        until(lambda: opens(made.pid, "daemon.lock"))
        os.close(held)
        listener.accept()[0].close()
        listener.close()
        made.wait_until_healthy()


def test_a_bad_configuration_lists_every_fault_and_ends_with_2() -> None:
    """Nothing is created on disk."""
    with daemon(
        "[sync]\ninterval = 'soon'\nconcurency = 3\n[checkouts]\nmax = 0\n", start=False
    ) as made:
        status, log = ended(made)
        assert status == 2
        for fault in (
            "sync.interval",
            "sync.concurency",
            "did you mean sync.concurrency",
            "checkouts.max",
            "3 faults",
        ):
            assert fault in log
        assert not made.state_dir.exists()


@pytest.mark.parametrize("length", [120, 300])
def test_a_socket_path_that_is_too_long_is_a_configuration_error(length: int) -> None:
    """The kernel allows 107 bytes."""
    with daemon(start=False) as made:
        made.socket = made.root / ("x" * length)
        made.write_config("")
        status, log = ended(made)
        assert (status, "longer than 107 bytes" in log) == (2, True)


def test_a_file_at_the_sockets_place_is_not_replaced() -> None:
    """A file that is not a socket is not replaced."""
    with daemon(start=False) as made:
        made.socket.write_text("precious")
        status, log = ended(made)
        assert (status, "not a socket" in log, made.socket.read_text()) == (5, True, "precious")


def test_after_kill_9_it_starts_again_over_the_stale_socket() -> None:
    """The kernel released the lock; the file alone does not count."""
    with daemon() as running:
        running.kill()
        assert running.socket.exists()
        running.start()
        assert running.get("/v1/health")[0] == 200


@pytest.mark.root
@pytest.mark.parametrize("inodes", [12, 13])
def test_a_disk_without_room_for_a_start_is_said_and_ends_with_7(inodes: int) -> None:
    """No traceback; the state does not change and opens when there is space."""
    with daemon(start=False) as made:
        made.state_dir.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"nr_inodes={inodes}", "none", made.state_dir],
            check=True,
        )
        try:
            status, log = ended(made)
        finally:
            subprocess.run(["umount", made.state_dir], check=True)
        assert (status, "Traceback" in log) == (7, False)
        assert "cannot start the daemon: No space left on device" in log


@pytest.mark.root
def test_a_request_that_waits_for_a_start_that_fails_is_answered_at_once() -> None:
    """The socket is served before the state is open."""
    with daemon(start=False) as made:
        made.state_dir.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "nr_inodes=13", "none", made.state_dir], check=True
        )
        try:
            made.start(wait=False)
            assert made.process is not None
            while not made.socket.exists() and made.process.poll() is None:
                time.sleep(0.005)
            answer = None
            with suppress(ConnectionError, FileNotFoundError):  # the daemon was quicker
                answer = made.get("/v1/status")
            ended, made.process = made.process.wait(BOUND_S), None
        finally:
            subprocess.run(["umount", made.state_dir], check=True)
        if answer is not None:
            assert (answer[0], json.loads(answer[2])["code"]) == (503, "stopping")
        assert ended == 7
        assert "Traceback" not in made.log


@pytest.mark.root
@pytest.mark.parametrize("inodes", [15, 18, 21, 400])
def test_a_disk_with_or_without_room_can_be_unmounted_after_a_stop(inodes: int) -> None:
    """Bind mounts and trial mounts are removed if there are no checkouts."""
    with daemon(start=False) as made:
        made.state_dir.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"nr_inodes={inodes}", "none", made.state_dir],
            check=True,
        )
        try:
            made.start(wait=False)
            while not made.socket.exists():
                time.sleep(0.02)
            assert made.get("/v1/status")[0] == 200
            assert made.stop() == 0
        finally:
            subprocess.run(["umount", made.state_dir], check=True)


def test_a_killed_daemon_leaves_nothing_where_temporary_files_are(scratch: Path) -> None:
    """Its fork server ends with it."""
    place = scratch / "tmp"
    place.mkdir()
    environment = {"TMPDIR": str(place), "RUNTIME_DIRECTORY": "", "XDG_RUNTIME_DIR": ""}
    with daemon(environment=environment) as running:
        [server] = children_of(running.pid)
        running.kill()
        until(lambda: not Path(f"/proc/{server}").exists())
        assert list(place.iterdir()) == []


def children_of(pid: int) -> list[str]:
    command = ["pgrep", "-P", str(pid)]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()


def test_what_workers_come_from_is_in_no_directory_of_a_disk(
    running: Daemon,
) -> None:
    """A disk can be unmounted as soon as the daemon on it has ended."""
    assert {os.readlink(f"/proc/{child}/cwd") for child in children_of(running.pid)} == {"/"}


def test_an_ordinary_user_can_run_it() -> None:
    """With separate state directories and sockets."""
    with daemon(user=NOBODY, environment={"HOME": "/nonexistent"}) as running:
        assert running.json("GET", "/v1/health")["status"] == "ok"
        assert running.json("GET", "/v1/status")["uid"] == NOBODY


SOCKETS: dict[str, tuple[dict[str, str], str]] = {
    "a login session": ({"XDG_RUNTIME_DIR": "{}/run"}, "run/mirrord/mirrord.sock"),
    "cron": ({}, ".local/state/mirrord/run/mirrord.sock"),
    "su": ({"XDG_RUNTIME_DIR": "{}/root"}, ".local/state/mirrord/run/mirrord.sock"),
    "a logout": ({"XDG_RUNTIME_DIR": "{}/none"}, ".local/state/mirrord/run/mirrord.sock"),
    "told": ({"MIRRORD_SOCKET": "{}/told"}, "told"),
}


@pytest.mark.parametrize("case", SOCKETS)
def test_an_ordinary_user_needs_no_login_session(scratch: Path, case: str) -> None:
    """Without a configuration, daemon and client choose the same socket, closed to other users."""
    shutil.chown(scratch, NOBODY, NOBODY)
    for name, owner in (("run", NOBODY), ("root", 0)):
        (scratch / name).mkdir(mode=0o700)
        shutil.chown(scratch / name, owner, owner)
    variables, socket_name = SOCKETS[case]
    made = Daemon(scratch)
    made.config.unlink()
    made.socket = scratch / socket_name
    made.user = NOBODY
    made._environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(scratch),
        **{name: value.format(scratch) for name, value in variables.items()},
    }

    def start(*command: str, **changed: str) -> subprocess.Popen[bytes]:
        environment, output = made._environment | changed, made.log_path.open("ab")
        with output:
            return subprocess.Popen(
                [*anyone.python(), "-P", *command],
                env=environment,
                user=NOBODY,
                stdout=output,
                stderr=output,
            )

    made.process = start("-m", "mirrord", "serve")
    try:
        made.wait_until_healthy()
        assert (scratch / ".local/state/mirrord/mirrors").is_dir()
        assert start("-m", "mirrord", "status").wait(BOUND_S) == 0, made.log
        if "state" in socket_name:
            assert made.socket.parent.stat().st_mode & 0o777 == 0o700
            logged_in = {"XDG_RUNTIME_DIR": str(scratch / "run")}
            assert start("-m", "mirrord", "status", **logged_in).wait(BOUND_S) == 0, made.log
    finally:
        assert made.stop() == 0


def test_systemds_socket_is_served_and_left_in_place(scratch: Path) -> None:
    """systemd-socket-activate binds it and starts the daemon at the first connection; the file stays."""
    activate = shutil.which("systemd-socket-activate")
    if not activate:
        pytest.skip("systemd-socket-activate is not on this machine")
    made = Daemon(scratch)
    made.start(wait=False, prefix=(activate, f"--listen={made.socket}", "--fdname=mirrord.socket"))
    try:
        made.wait_until_healthy()
        assert made.json("GET", "/v1/status")["pid"] == made.pid
        assert made.stop() == 0
        assert made.socket.exists()
    finally:
        if made.process is not None:
            made.stop()


def test_the_service_manager_hears_of_each_step(scratch: Path) -> None:
    """READY when requests are served, RELOADING around a reload, WATCHDOG from the loop, STOPPING at the end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(scratch / "notify"))
        manager.settimeout(BOUND_S)
        made = Daemon(
            scratch,
            environment={"NOTIFY_SOCKET": str(scratch / "notify"), "WATCHDOG_USEC": "200000"},
        )
        made.start()
        try:
            _expect(manager, "READY=1", "STATUS=serving")
            _expect(manager, "WATCHDOG=1")
            os.kill(made.pid, signal.SIGHUP)
            _expect(manager, "RELOADING=1", "MONOTONIC_USEC=")
            _expect(manager, "READY=1")
        finally:
            assert made.stop() == 0
        _expect(manager, "STOPPING=1")


def _expect(manager: socket.socket, *parts: str) -> None:
    """The next notification that has all parts; raises TimeoutError when none comes."""
    while True:
        text = manager.recv(4096).decode()
        if all(part in text for part in parts):
            return


def test_sighup_applies_what_is_live_and_refuses_the_rest_by_name() -> None:
    """The answer of a reload names the keys."""
    with daemon("[checkouts]\nmax = 5\n") as running:
        running.write_config("[checkouts]\nmax = 7\n")
        text = running.config.read_text().replace(f'"{running.socket}"', '"/other"')
        running.config.write_text(text)
        assert running.json("POST", "/v1/reload")["refused"] == ["socket"]
        # the daemon that watches the file may have been first
        told = [line for line in running.log_lines if line["event"] == "config.reloaded"]
        assert [key for line in told for key in line["applied"]] == ["checkouts.max"]
        assert running.json("GET", "/v1/status")["checkout_max"] == 7


def test_a_reload_of_a_bad_file_changes_nothing(running: Daemon) -> None:
    """All faults are reported; the old settings stay in effect."""
    running.write_config("[checkouts]\nmax = 0\n")
    status, _, body = running.request("POST", "/v1/reload")
    assert (status, json.loads(body)["code"]) == (400, "invalid-config")
    assert json.loads(body)["faults"][0]["key"] == "checkouts.max"
    assert running.json("GET", "/v1/status")["checkout_max"] == 5


def test_a_reload_of_what_toml_trips_over_is_a_fault_like_any_other() -> None:
    """The file is still watched: the next valid one is applied."""
    with daemon("[checkouts]\nmax = 5\n") as running:
        running.write_config('[checkouts]\nttl = "\\UFFFFFFFF"\n')
        status, _, body = running.request("POST", "/v1/reload")
        assert (status, json.loads(body)["code"]) == (400, "invalid-config")
        assert json.loads(body)["faults"][0]["message"].startswith("not TOML")
        until(lambda: "watch.failed" in running.log)
        running.write_config("[checkouts]\nmax = 6\n")
        until(lambda: running.json("GET", "/v1/status")["checkout_max"] == 6)
        assert "watch.crashed" not in running.log


def test_the_process_is_lean_and_idle(running: Daemon) -> None:
    """pyarrow is not loaded, and idling costs neither memory nor CPU."""
    maps = Path(f"/proc/{running.pid}/maps").read_text()
    assert "pyarrow" not in maps
    resident = next(
        line
        for line in Path(f"/proc/{running.pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )
    assert int(resident.split()[1]) < 90 * 1024


def test_a_backend_that_the_host_lacks_degrades_the_daemon_with_its_reason() -> None:
    """An ordinary user cannot mount; everything else works, and status answers."""
    with daemon(
        "[checkouts]\nbackend = 'overlay'\n", user=NOBODY, environment={"HOME": "/nonexistent"}
    ) as running:
        status, _, body = running.get("/v1/health")
        assert status == 503
        assert "overlay" in json.loads(body)["reasons"][0]
        assert running.json("GET", "/v1/status")["backend"] == "overlay"


def test_what_happens_by_the_clock_follows_the_intervals(running: Daemon) -> None:
    """Templates are verified as often as content is audited; an interval of zero disables jobs."""
    jobs = {job["name"] for job in running.json("GET", "/v1/status")["jobs"]}
    assert {
        "audit",
        "audit.content",
        "templates.scrub",
        "templates.evict",
        "checkouts.expire",
    } <= jobs
    assert "maintenance" not in jobs
