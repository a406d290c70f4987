"""The recipes of docs/sandboxes.md, run unchanged, with an agent that asks the daemon for the answer."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from accounts import accounts
from anyone import BARE_PYTHON, python
from daemons import Daemon, daemon
from gitrepos import Upstream

pytestmark = pytest.mark.root

AGENT, HARNESS, GROUP = 34581, 34582, 34583
RUN_AGENT = f"""#!{BARE_PYTHON}
import json, os, socket
body = b'{{"instance": "psf/requests@main"}}'
try:
    s = socket.socket(socket.AF_UNIX); s.connect("SOCKET")
    s.sendall(b"POST /v1/checkouts HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body)
    answer = s.recv(100).split()[1].decode()
except OSError as error:
    answer = type(error).__name__
open("README", "a").write("agent\\n")
print(json.dumps([os.getuid(), os.getgroups(), answer]))
"""


class World(NamedTuple):
    daemon: Daemon
    bin: Path
    work: Path

    def run(self, user: int, script: str) -> list[object]:
        """Run a recipe as root or as the harness; answers what the agent printed."""
        become = (
            [] if user == 0 else ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        )
        environment = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "MIRRORD_SOCKET": str(self.daemon.socket),
        }
        command = [*become, "sh", "-eu", "-c", script]
        done = subprocess.run(
            command, env=environment, cwd=self.work, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "+agent" in (self.work / "patch").read_text()
        (self.work / "patch").unlink()
        assert self.daemon.json("GET", "/v1/checkouts") == []
        found: list[object] = json.loads(done.stdout)
        return found


def recipes() -> list[str]:
    text = (Path(__file__).parents[2] / "docs/sandboxes.md").read_text()
    return re.findall(r"```sh\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("recipes")
    upstream = Upstream(root / "psf" / "requests")
    base = upstream.commit({"README": "readme\n"})
    upstream.commit({"README": "the fix\n"})
    row = {
        "instance_id": "psf__requests-2317",
        "repo": "psf/requests",
        "base_commit": base,
        "patch": "",
        "test_patch": "",
    }
    (root / "rows.jsonl").write_text(json.dumps({**row, "problem_statement": ""}) + "\n")
    passwd = f"agent:x:{AGENT}:{AGENT}::/:/bin/sh\nharness:x:{HARNESS}:{HARNESS}::/:/bin/sh\n"
    group = f"agent:x:{AGENT}:\nharness:x:{HARNESS}:\nmirrord:x:{GROUP}:harness\n"
    subids = "harness:200000:65536\n"
    with (
        accounts(passwd=passwd, group=group, subuid=subids, subgid=subids),
        daemon(start=False) as made,
    ):
        made.socket = made.root / "run" / "s"
        made.write_config(f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n')
        made.start()
        command = [*python(), "-m", "mirrord", "--socket", str(made.socket)]
        subprocess.run(
            [*command, "dataset", "import", str(root / "rows.jsonl")],
            check=True,
            capture_output=True,
        )
        places = World(made, made.root / "bin", made.root / "work")
        places.bin.mkdir()
        places.work.mkdir()
        places.work.chmod(0o777)
        programs = {
            "run-agent": RUN_AGENT.replace("SOCKET", str(made.socket)),
            "mirrord": f'#!/bin/sh\nexec {" ".join(python())} -m mirrord "$@"\n',
        }
        for name, text in programs.items():
            (places.bin / name).write_text(text)
            (places.bin / name).chmod(0o755)
        yield places


def test_each_recipe_keeps_the_daemon_out_of_the_agents_reach(world: World) -> None:
    """The agent's uid, groups, and the answer to its request for `main`."""
    as_root, with_subuids, plain = recipes()
    assert world.run(0, as_root) == [AGENT, [], "403"]
    assert world.run(HARNESS, with_subuids) == [200001, [], "FileNotFoundError"]
    uid, _, answer = world.run(HARNESS, plain)
    assert (uid, answer) == (HARNESS, "FileNotFoundError")


def test_a_member_of_the_group_would_have_got_it_nowhere_but_by_name_of_an_instance(
    world: World,
) -> None:
    """The last defence: `main` is not a recorded base commit."""
    script = "mirrord exec psf__requests-2317 --keep-access --diff patch -- run-agent"
    assert world.run(HARNESS, script)[2] == "403"
