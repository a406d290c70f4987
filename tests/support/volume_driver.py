"""A daemon with a socket for volumes, passed as systemd does, and calls to it as docker makes them."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from daemons import Daemon, daemon, parse_response
from gitrepos import Upstream
from waiting import BOUND_S

import mirrord

# binds the socket, and becomes the command that follows
_PASS = """
import os, socket, sys
place, *command = sys.argv[1:]
if os.path.exists(place):
    os.unlink(place)
listener = socket.socket(socket.AF_UNIX)
listener.bind(place)
os.chmod(place, 0o600)
listener.listen()
os.dup2(listener.fileno(), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES="docker.socket")
os.execvp(command[0], command)
"""


class VolumeWorld:
    """The daemon knows the instances `o__r-0` and `o__r-1`, and the environment `tools`; `plugin` is
    the socket for volumes.
    """

    def __init__(self, running: Daemon, commits: list[str]) -> None:
        self.daemon, self.commits = running, commits
        self.plugin = running.root / "plugin.sock"

    @property
    def client(self) -> mirrord.Client:
        return mirrord.Client(self.daemon.socket)

    def start(self) -> None:
        self.daemon.start(prefix=(sys.executable, "-c", _PASS, str(self.plugin)))

    def raw(self, verb: str, body: bytes, *lines: str) -> tuple[int, dict[str, str], bytes]:
        """As docker does it, whose Host is the path of the socket."""
        head = [f"POST /{verb} HTTP/1.1", f"Host: {self.plugin}", "Connection: close", *lines]
        if "Transfer-Encoding: chunked" not in lines:
            head.append(f"Content-Length: {len(body)}")
        received = b""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(BOUND_S)
            connection.connect(str(self.plugin))
            connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
            while piece := connection.recv(65536):
                received += piece
        return parse_response(received)

    def call(self, verb: str, **body: Any) -> dict[str, Any]:
        status, _, content = self.raw(f"VolumeDriver.{verb}", json.dumps(body).encode())
        answer: dict[str, Any] = json.loads(content)
        assert (status == 200) == (answer["Err"] == ""), answer
        return answer

    def create(self, name: str, **options: str) -> str:
        """Make a volume; answers its error."""
        answer = self.call("Create", Name=name, Opts=options)
        return str(answer["Err"])

    def names(self) -> list[str]:
        return [volume["Name"] for volume in self.call("List")["Volumes"]]

    def checkouts(self) -> dict[str, mirrord.protocol.Checkout]:
        """What is held, by the names of its volumes."""
        with self.client as client:
            return {" ".join(each.volumes): each for each in client.list_checkouts()}


def put_environment(state_dir: Path, key: str) -> None:
    """Put one on disk, as a build leaves it, with one file in it."""
    place = state_dir / "templates" / ".environments" / ("d" * 64)
    (place / "files" / "bin").mkdir(parents=True)
    (place / "files" / "bin" / "tool").write_text("tool\n")
    facts = {"key": key, "digest": place.name, "state": "ready", "at": 0.0}
    (place / "environment.json").write_text(json.dumps(facts))


def write_tasks(root: Path) -> tuple[list[str], str]:
    """Write `rows.jsonl`, and the upstream that its instances are of.

    Answers the upstream's commits, and the settings that find it.
    """
    commits = Upstream(root / "o" / "r").history(3)
    rows = "".join(
        json.dumps({"instance_id": name, "repo": "o/r", "base_commit": commits[n]}) + "\n"
        for name, n in (("o__r-0", 0), ("o__r-1", 1), ("psf__requests-2317", 0))
    )
    (root / "rows.jsonl").write_text(rows)
    return commits, f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n'


@contextmanager
def volume_world(root: Path, text: str = "") -> Iterator[VolumeWorld]:
    commits, settings = write_tasks(root)
    with daemon(f"{settings}[docker]\nvolumes = true\n{text}", start=False) as running:
        world = VolumeWorld(running, commits)
        put_environment(running.state_dir, "tools")
        world.start()
        with world.client as client:
            client.wait(client.import_dataset(root / "rows.jsonl"))
        yield world
