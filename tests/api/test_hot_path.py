"""The number of system calls of warm work on overlay checkouts."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream
from waiting import until

_ROUNDS = 5
_CALLS = (
    "mkdir,mkdirat,mount,umount2,fsopen,fsmount,move_mount,setxattr,rmdir,unlink,unlinkat,rename,renameat,renameat2,link,linkat,chmod,fchmodat,chown,openat,write,writev,sendto,sendmsg,"
    "fsync,fdatasync,sync,syncfs"
)
_SENDS = ("write", "writev", "sendto", "sendmsg")
_LINE = re.compile(r"(?P<thread>\d+) +(?P<name>\w+)\((?P<arguments>.*)")

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not on this machine"),
]


class Trace:
    """System calls of the daemon below its state directory, in total and by the event loop's thread."""

    def __init__(self, text: str, running: Daemon) -> None:
        found = [match for line in text.splitlines() if (match := _LINE.match(line))]
        ours = [each for each in found if _is_ours(each, running)]
        self.all = Counter(map(_kind, ours))
        self.loop = Counter(_kind(each) for each in ours if each["thread"] == str(running.pid))
        self.answers = [
            each["arguments"]
            for each in found
            if each["name"] in _SENDS and "HTTP/1.1 " in each["arguments"]
        ]


def _is_ours(call: re.Match[str], running: Daemon) -> bool:
    is_below = str(running.state_dir) in call["arguments"]
    return call["name"] not in _SENDS and (
        is_below or "sync" in call["name"] or call["name"] in ("fsopen", "fsmount")
    )


def _kind(call: re.Match[str]) -> str:
    if call["name"] == "openat":
        return (
            "write" if "O_WRONLY" in call["arguments"] or "O_RDWR" in call["arguments"] else "read"
        )
    return call["name"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    upstream = Upstream(tmp_path_factory.mktemp("upstream") / "r")
    upstream.commit({"README": "one\n"})
    with daemon(
        '[sync]\ninterval = "0"\n[audit]\ninterval = "0"\n[checkouts]\nprewarm = false\n'
    ) as made:
        operation = made.json("POST", "/v1/mirrors", {"repo": "o/r", "url": upstream.url})
        while operation["state"] == "running":
            time.sleep(0.05)
            operation = made.json("GET", f"/v1/operations/{operation['id']}")
        warm = checkout(made)
        if warm["backend"] != "overlay":
            pytest.skip("this machine allows no mounts")
        release(made, warm["id"])
        yield made


def checkout(running: Daemon) -> dict[str, str]:
    made: dict[str, str] = running.json("POST", "/v1/checkouts", {"instance": "o__r@main"})
    return made


def release(running: Daemon, identity: str) -> None:
    """Release a checkout and wait until its files are removed."""
    assert running.request("DELETE", f"/v1/checkouts/{identity}")[0] == 204
    until(lambda: not list(running.state_dir.glob(f"[cl]*s/*{identity}")))


@contextmanager
def traced(running: Daemon, file: Path) -> Iterator[list[Trace]]:
    """The trace is in the list at the end."""
    found: list[Trace] = []
    command = [
        "strace",
        "-f",
        "-s",
        "4096",
        "-o",
        str(file),
        "-e",
        f"trace={_CALLS}",
        "-p",
        str(running.pid),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as tracer:
        assert tracer.stderr is not None
        assert b"attached" in tracer.stderr.readline()
        try:
            yield found
        finally:
            tracer.send_signal(signal.SIGINT)
            tracer.communicate()
    found.append(Trace(file.read_text(), running))


def test_a_warm_checkout_is_six_mkdirs_a_mount_and_one_small_file(
    running: Daemon, tmp_path: Path
) -> None:
    """No flush, one rename, and two at the release; the event loop does not wait for the disk."""
    with traced(running, tmp_path / "trace") as found:
        for _ in range(_ROUNDS):
            release(running, checkout(running)["id"])
    (trace,) = found
    made = {
        "mkdir": 6,
        "write": 1,
        "read": 3,
        "fsopen": 1,
        "fsmount": 1,
        "move_mount": 1,
        "rename": 1 + 2,
    }
    assert trace.loop == {call: count * _ROUNDS for call, count in made.items()}
    assert sum("HTTP/1.1 201" in answer for answer in trace.answers) == _ROUNDS
    assert trace.all["rmdir"] <= 10 * _ROUNDS
    assert trace.all["unlink"] == 2 * _ROUNDS


def test_a_reset_is_a_layer_that_is_mounted_in_the_place_of_the_old_one(
    running: Daemon, tmp_path: Path
) -> None:
    """Four renames: the lease that says so, before and after, and the layers. Nothing is written but the lease, with
    one reset more; nothing is read but HEAD.
    """
    made = checkout(running)
    with traced(running, tmp_path / "trace") as found:
        reset(running, made)
    (trace,) = found
    mounted = {"fsopen": 1, "fsmount": 1, "move_mount": 1, "umount2": 1}
    lease = {"write": 1, "unlink": 1}
    assert trace.loop == {"mkdir": 3, "read": 4, "rename": 4, **lease, **mounted}
    release(running, made["id"])
    until(lambda: not list(running.state_dir.glob("[cl]*s/*")))


def reset(running: Daemon, made: dict[str, str]) -> None:
    (Path(made["path"]) / "mine").write_text("work")
    assert running.request("POST", f"/v1/checkouts/{made['id']}/reset", {})[0] == 200
    assert not (Path(made["path"]) / "mine").exists()
