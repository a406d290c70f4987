"""What a command of `mirrord exec` can reach: real users, and an agent that tries every way to the socket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from accounts import accounts
from anyone import BARE_PYTHON, python
from daemons import Daemon, daemon
from gitrepos import Upstream

from mirrord.cli.execute import _forwarding

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
    done = subprocess.run([*before, sys.executable, ask, path], capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]
uncover = f'umount -l {path}; umount -l {os.path.dirname(path)}; exec "$@"'
print(json.dumps({
    "uid": os.getuid(), "gid": os.getgid(), "groups": os.getgroups(),
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
        "group": attempt("sg", "daemon", "-c", f"{sys.executable} {ask} {path}"),
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
        (self.scratch / "agent.py").write_text(AGENT_SCRIPT)
        (self.scratch / "ask.py").write_text(ASK_SCRIPT)
        agent = [
            BARE_PYTHON,
            self.scratch / "agent.py",
            self.daemon.socket,
            str(os.getpid()),
            self.scratch / "ask.py",
        ]
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


@pytest.fixture(scope="module", params=["a directory of its own", "a directory with other files"])
def world(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[World]:
    """With the socket as systemd has it, and beside other files."""
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
        if request.param == "a directory of its own":
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
    assert found["environment"] == ["MIRRORD_CHECKOUT"]


def test_a_command_of_roots_runs_as_the_owner_with_no_groups_and_no_socket(world: World) -> None:
    """Root hands it to an agent's uid in one call, and hears which groups the command has lost."""
    ran = world.exec(0, "--owner", str(AGENT), "--diff", str(world.scratch / "patch"))
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["uid"], found["gid"], found["groups"]) == (AGENT, AGENT, [])
    assert ran.stderr == f"mirrord: the command runs as uid {AGENT}, without the groups daemon\n"
    must_be_alone(found)
    assert "+agent" in (world.scratch / "patch").read_text()
    assert world.held() == []


def test_a_members_command_reaches_no_socket_though_it_keeps_the_group(world: World) -> None:
    """No privilege is needed for it: a user namespace with a cover over the socket, which the command cannot take off."""
    ran = world.exec(MEMBER)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["uid"], found["gid"]) == (MEMBER, MEMBER)
    must_be_alone(found)
    assert world.held() == []


def test_a_members_command_runs_as_a_subordinate_uid(world: World, subids: None) -> None:
    """As real as root's way: another uid for the kernel, with no groups."""
    ran = world.exec(MEMBER, "--owner", str(SUBUID))
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["uid"], found["gid"], found["groups"]) == (SUBUID, SUBGID, [])
    must_be_alone(found)
    assert world.held() == []


def test_what_cannot_be_confined_does_not_run(world: World, subids: None) -> None:
    """Without newuidmap there is an error that names it, no command, and no checkout left."""
    tools = world.scratch / "bin"
    tools.mkdir(exist_ok=True)
    for name in ("env", "git"):
        (tools / name).unlink(missing_ok=True)
        (tools / name).symlink_to(f"/usr/bin/{name}")
    ran = world.exec(MEMBER, "--owner", str(SUBUID), environment={"PATH": str(tools)})
    assert (ran.returncode, ran.stdout) == (7, "")
    assert (
        f"without access to the daemon: cannot become uid {SUBUID} gid {SUBGID}: newuidmap or newgidmap failed"
        in ran.stderr
    )
    assert world.held() == []


def test_the_socket_stays_in_reach_when_asked(world: World) -> None:
    """As for a harness that asks for its own checkouts from inside."""
    ran = world.exec(MEMBER, "--keep-access")
    found = json.loads(ran.stdout)
    assert found["attempts"]["plain"] == "200"
    assert "MIRRORD_SOCKET" in found["environment"]


def test_root_is_told_that_a_command_of_its_own_is_not_kept_out(world: World) -> None:
    """Root takes any cover off."""
    ran = world.exec(0)
    assert "name a user with --owner" in ran.stderr
    found = json.loads(ran.stdout)
    assert not found["attempts"]["plain"].isdecimal()
    assert (found["uid"], found["groups"]) == (0, [])
    assert "without the groups daemon" in ran.stderr


@pytest.mark.parametrize(("uid", "owner"), [(0, AGENT), (MEMBER, SUBUID), (MEMBER, None)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_ends_with_its_exec_whoever_it_has_become(
    world: World, subids: None, uid: int, owner: int | None, number: signal.Signals
) -> None:
    """A change of the uid takes back what ties a process to its parent; another uid takes no signals of a user's."""
    options = ["--owner", str(owner)] if owner else []
    command = [
        *python(),
        "-m",
        "mirrord",
        "--socket",
        str(world.daemon.socket),
        "exec",
        "o__r-0",
        *options,
        "--",
    ]
    with subprocess.Popen(
        [*command, "sh", "-c", "echo $$; exec sleep 1000"], user=uid, group=uid, extra_groups=[GROUP], cwd="/",
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={"PATH": os.environ["PATH"]},
    ) as running:  # fmt: skip
        assert running.stdout is not None
        pid = int(running.stdout.readline())
        assert world.held()
        running.send_signal(number)
        assert running.wait(20) in {-number, 128 + number}
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() or world.held():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_signal_from_before_the_command_was_known_reaches_it() -> None:
    """It may come while the command has begun and its process is not yet in our hands."""
    with _forwarding() as forward_to:
        os.kill(os.getpid(), signal.SIGTERM)
        with subprocess.Popen(["sleep", "1000"]) as process:
            forward_to(process)
            assert process.wait(20) == -signal.SIGTERM
