"""What a command of `mirrord exec` can reach: real users, and an agent that tries every way to the socket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from accounts import accounts
from anyone import BARE_PYTHON, python
from daemons import Daemon, daemon
from gitrepos import Upstream
from procsearch import command as search
from waiting import BOUND_S, until

from mirrord.sandbox.relaying import forwarding

pytestmark = pytest.mark.root

GROUP = 1  # daemon, on every Debian
MEMBER, AGENT, SUBUID, SUBGID = 34511, 34512, 210003, 410003

ASK_SCRIPT = """
import socket, sys
s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])
s.sendall(b"GET /v1/checkouts HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\n\\r\\n")
print(s.recv(100).split()[1].decode())
"""
AGENT_SCRIPT = """
import json, os, subprocess, sys
path, outside, ask = sys.argv[1:]
def attempt(*before, path=path):
    done = subprocess.run([*before, sys.executable, "-c", ask, path], capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]
uncover = f'umount -l {path}; umount -l {os.path.dirname(path)}; exec "$@"'
print(json.dumps({
    "uid": os.getuid(), "gid": os.getgid(),
    "environment": sorted(name for name in os.environ if "MIRRORD" in name),
    "cwd": os.getcwd(), "written": open("README", "a").write("agent\\n"),
    "status": [l.split()[1] for l in open("/proc/self/status") if l.startswith(("NoNewPrivs", "CapEff"))],
    "attempts": {
        "plain": attempt(),
        "outside": attempt(path=f"/proc/{outside}/root{path}"),
        "init": attempt(path=f"/proc/1/root{path}"),
        "umount": attempt("sh", "-c", uncover, "sh"),
        "nested": attempt("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", uncover, "sh"),
        "enter": attempt("nsenter", "--target", outside, "--mount"),
        "group": attempt("sg", "daemon", "-c", f"{sys.executable} -c 'import os' && echo {path}"),
    },
}))
"""


class World(NamedTuple):
    daemon: Daemon
    scratch: Path

    def exec(
        self, uid: int, *options: str, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """`mirrord exec` as `uid`, a member of the group; its command tries what an agent could."""
        agent = [BARE_PYTHON, "-c", AGENT_SCRIPT, self.daemon.socket, os.getpid(), ASK_SCRIPT]
        command = [
            *map(str, python()),
            "-m",
            "mirrord",
            "--socket",
            str(self.daemon.socket),
            "exec",
            "o__r-0",
            *options,
            "--",
            *agent,
        ]
        return subprocess.run(
            list(map(str, command)), user=uid, group=uid, extra_groups=[GROUP], capture_output=True, text=True, check=False, cwd="/",
            env={"PATH": os.environ["PATH"], "MIRRORD_SOCKET": str(self.daemon.socket), **(environment or {})},
        )  # fmt: skip

    def held(self) -> Any:
        return self.daemon.json("GET", "/v1/checkouts")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("exec")
    commit = Upstream(root / "o" / "r").commit({"README": "readme\n"})
    row = {
        "instance_id": "o__r-0",
        "repo": "o/r",
        "base_commit": commit,
        "patch": "",
        "test_patch": "",
        "problem_statement": "",
    }
    (root / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with daemon(start=False) as made:
        made.socket = made.root / "run" / "s"
        made.write_config(
            f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n[access]\ngroup = "daemon"\n'
        )
        made.start()
        subprocess.run(
            [*python(), "-m", "mirrord", "--socket", str(made.socket), "dataset", "import", str(root / "rows.jsonl")],
            check=True, capture_output=True,
        )  # fmt: skip
        scratch = made.root / "scratch"
        scratch.mkdir()
        scratch.chmod(0o777)
        yield World(made, scratch)


@pytest.fixture
def subids() -> Iterator[None]:
    with accounts(
        passwd=f"mirrord-member:x:{MEMBER}:{MEMBER}::/:/bin/sh",  # newuidmap wants a name
        subuid=f"{MEMBER}:210000:10",
        subgid=f"{MEMBER}:410000:10",
    ):
        yield


def must_be_alone(found: dict[str, Any]) -> None:
    """No way to the daemon answered, and no right is left that could make one."""
    reached = {way: answer for way, answer in found["attempts"].items() if answer.isdecimal()}
    assert reached == {}
    assert (found["status"], found["written"]) == (["0000000000000000", "1"], 6)
    assert not {"MIRRORD_SOCKET", "MIRRORD_CONFIG"} & set(found["environment"])
    assert found["cwd"] == "/testbed"


@pytest.mark.parametrize(
    ("uid", "owner", "ids"),
    [
        (0, AGENT, (AGENT, AGENT)),
        (0, None, (0, 0)),
        (MEMBER, None, (MEMBER, MEMBER)),
        (MEMBER, SUBUID, (SUBUID, SUBGID)),
    ],
)
def test_a_command_reaches_no_socket_whoever_it_runs_as(
    world: World, subids: None, uid: int, owner: int | None, ids: tuple[int, int]
) -> None:
    """Root hands it to an agent's uid in one call; a member needs no privilege for its own uids."""
    options = ["--owner", str(owner)] if owner else []
    ran = world.exec(uid, *options, "--diff", str(world.scratch / f"patch-{uid}-{owner}"))
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["uid"], found["gid"]) == ids
    must_be_alone(found)
    assert "+agent" in (world.scratch / f"patch-{uid}-{owner}").read_text()
    assert ("name another user" in ran.stderr) is (ids == (0, 0))
    assert world.held() == []


def test_what_cannot_be_boxed_does_not_run(world: World, subids: None) -> None:
    """Without bwrap there is an error that names it, no command, and no checkout left."""
    tools = world.scratch / "bin"
    tools.mkdir(exist_ok=True)
    for name in ("env", "git", "setpriv", "unshare"):
        (tools / name).unlink(missing_ok=True)
        (tools / name).symlink_to(f"/usr/bin/{name}")
    ran = world.exec(MEMBER, environment={"PATH": str(tools)})
    assert (ran.returncode, ran.stdout) == (7, "")
    assert "cannot make a sandbox: bwrap is not installed" in ran.stderr
    assert world.held() == []


def test_the_host_stays_in_reach_when_asked(world: World) -> None:
    """As for a harness that asks for its own checkouts from inside."""
    ran = world.exec(MEMBER, "--keep-access")
    found = json.loads(ran.stdout)
    assert found["attempts"]["plain"] == "200"
    assert "MIRRORD_SOCKET" in found["environment"]


@pytest.mark.parametrize(("uid", "owner"), [(0, AGENT), (MEMBER, SUBUID), (MEMBER, None)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_ends_with_its_exec_whoever_it_has_become(
    world: World, subids: None, uid: int, owner: int | None, number: signal.Signals
) -> None:
    """With a signal that it can catch it may end as it likes; what it left behind ends too."""
    options = ["--owner", str(owner)] if owner else []
    seconds = f"9{os.getpid()}"
    script = f"setsid sleep {seconds} & trap 'echo caught; exit 3' TERM; echo began; sleep {seconds} & wait"
    start = [*python(), "-m", "mirrord", "--socket", str(world.daemon.socket), "exec", "o__r-0"]
    with subprocess.Popen(
        [*start, *options, "--", "bash", "-c", script], user=uid, group=uid, extra_groups=[GROUP], cwd="/",
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={"PATH": os.environ["PATH"]},
    ) as running:  # fmt: skip
        assert running.stdout is not None
        assert running.stdout.readline() == "began\n"
        assert world.held()
        running.send_signal(number)
        caught = number == signal.SIGTERM
        assert running.wait(BOUND_S) == (3 if caught else -number)
        assert running.stdout.read() == ("caught\n" if caught else "")
    until(lambda: not world.held() and f"sleep\0{seconds}\0".encode() not in _commands())


def _commands() -> set[bytes]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.add(path.read_bytes())
    return found


def mirrord(world: World, *words: str) -> subprocess.CompletedProcess[str]:
    start = [*python(), "-m", "mirrord", "--socket", str(world.daemon.socket), "exec"]
    return subprocess.run([*start, *words], capture_output=True, text=True, check=False, cwd="/")


def test_limits_strike_and_are_told(world: World) -> None:
    common = ["o__r-0", "--owner", str(AGENT)]
    late = mirrord(world, *common, "--timeout", "300ms", "--", "sleep", "1000")
    assert late.returncode == 137
    assert "mirrord: the command was killed after 0:00:00.3" in late.stderr
    forks = "import os, time; [os.fork() or time.sleep(1000) for _ in range(9)]"
    script = f"python3 -c 'bytearray(200 << 20)'; python3 -c '{forks}'"
    options = ["--memory", "100MiB", "--processes", "3"]
    struck = mirrord(world, *common, *options, "--", "bash", "-c", script)
    assert "the command met its limit of memory" in struck.stderr
    assert "the command met its limit of processes" in struck.stderr
    assert mirrord(world, "o__r-0", "--memory", "much", "--", "true").returncode == 2
    assert mirrord(world, "o__r-0", "--processes", "0", "--", "true").returncode == 2


def test_a_held_checkout_is_used_and_stays(world: World) -> None:
    held = world.daemon.json("POST", "/v1/checkouts", {"instance": "o__r-0", "owner": AGENT})
    try:
        for target in (held["id"], held["path"]):
            ran = mirrord(world, target, "--", "sh", "-c", "echo x >>README; wc -l <README")
            assert ran.returncode == 0, ran.stderr
        assert ran.stdout == "3\n"
        refused = mirrord(world, held["id"], "--owner", "5", "--", "true")
        assert refused.returncode == 2
        assert [each["id"] for each in world.held()] == [held["id"]]
    finally:
        world.daemon.request("DELETE", f"/v1/checkouts/{held['id']}")


def test_what_of_the_host_is_shown_is_named(world: World, tmp_path: Path) -> None:
    """But for the program itself, which is found as in a shell."""
    shown = world.scratch / "shown"
    shown.mkdir()
    shown.chmod(0o755)
    (shown / "data").write_text("data\n")
    (shown / "agent").write_text(f'#!/bin/sh\ncat {shown}/data; echo "$A $B"; ls {shown}\n')
    (shown / "agent").chmod(0o755)
    common = ["o__r-0", "--owner", str(AGENT)]
    alone = mirrord(world, *common, "--", str(shown / "agent"))
    assert alone.stdout == " \nagent\n"
    options = ["--show", str(shown), "--variable", "A=a b", "--variable", "PATH"]
    beside = mirrord(world, *common, *options, "--", str(shown / "agent"))
    assert beside.stdout == "data\na b \nagent\ndata\n"
    assert mirrord(world, *common, "--variable", "UNSET", "--", "true").returncode == 2
    absent = mirrord(world, *common, "--show", str(shown / "absent"), "--", "true")
    assert (absent.returncode, "no such path" in absent.stderr) == (4, True)
    missing = mirrord(world, *common, "--", "no-such-command")
    assert (missing.returncode, "no-such-command: not found" in missing.stderr) == (127, True)


def test_a_signal_from_before_the_command_was_known_reaches_it() -> None:
    """It may come while the command has begun and its process is not yet in our hands."""
    with forwarding() as forward_to:
        os.kill(os.getpid(), signal.SIGTERM)
        with subprocess.Popen(["sleep", "1000"]) as process:
            forward_to(process)
            assert process.wait(BOUND_S) == -signal.SIGTERM


ATTACKS = {
    "ignores the signal": "trap '' TERM HUP INT; echo began; while :; do sleep 1000 & wait; done",
    "stops what started it": "trap '' TERM; kill -STOP 1; kill -STOP $PPID; echo began; kill -STOP $$; sleep 1000",
    "leaves daemons": "(setsid sleep 1000 &) ; trap '' TERM; echo began; setsid sleep 1000 & while :; do wait; done",
    "forks while it is killed": "trap '' TERM; echo began; f() { while :; do (sleep 2 & sleep 1); f2=1; done; }; f & f & wait",
    "traces pid 1": "trap '' TERM; echo began; exec python3 -c 'import ctypes as c; l = c.CDLL(None); l.ptrace(16, 1, 0, 0);"
    " import time; time.sleep(1000)'",
}  # fmt: skip


@pytest.mark.parametrize("by", ["a signal", "its time limit"])
def test_an_agent_cannot_keep_its_exec_from_ending(world: World, by: str) -> None:
    """Ten seconds after a SIGTERM it is killed, whatever it did. All at once, for the ten seconds."""
    start = [*python(), "-m", "mirrord", "--socket", str(world.daemon.socket), "exec", "o__r-0"]
    start += ["--owner", str(AGENT), *(["--timeout", "1s"] if by == "its time limit" else [])]
    running = [
        subprocess.Popen([*start, "--", "bash", "-c", script], stdout=subprocess.PIPE, text=True, cwd="/")
        for script in ATTACKS.values()
    ]  # fmt: skip
    for process in running:
        assert process.stdout is not None
        if by == "a signal":
            assert process.stdout.readline() == "began\n"
            process.send_signal(signal.SIGTERM)
    statuses = [process.wait(BOUND_S) for process in running]
    for process in running:
        assert process.stdout is not None
        process.stdout.close()
    assert dict(zip(ATTACKS, statuses, strict=True)) == dict.fromkeys(ATTACKS, 137)
    assert world.held() == []


def test_nothing_of_a_harness_is_readable_by_its_command(world: World) -> None:
    """Its keys, arguments and directory, and the log that it writes the command's output to."""
    words = [f"canary-{part}-{os.getpid()}" for part in ("variable", "argument", "place", "log")]
    variable, argument, place, log = words
    directory = world.scratch / place
    directory.mkdir()
    with (directory / "log").open("w+") as file:
        file.write(log)
        file.flush()
        done = subprocess.run(
            [*python(), "-m", "mirrord", "--socket", str(world.daemon.socket), "exec", "o__r-0", "--diff", argument,
             "--", *search(*words)],
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.PIPE, cwd=directory,
            env={"PATH": os.environ["PATH"], "KEY": variable}, check=False,
        )  # fmt: skip
        file.seek(0)
        before, _, answer = file.read().partition("{")
    assert (done.returncode, before) == (0, log), done.stderr
    found = json.loads("{" + answer)
    assert found["where"] == {}
    assert found["read"] > 300
