"""Leases that end with the process that took them: by its death, however it dies, and across
restarts of the daemon.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream
from waiting import until

from mirrord import Client
from mirrord.host.peers import open_by_number, peer_of, process_of

pytestmark = pytest.mark.slow

HOLDER = """
import json, socket, sys, time
def ask(body):
    s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])
    content = json.dumps(body).encode()
    head = "POST /v1/checkouts HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\n"
    head += f"content-length: {len(content)}\\r\\n\\r\\n"
    s.sendall(head.encode() + content)
    return json.loads(b"".join(iter(lambda: s.recv(65536), b"")).partition(b"\\r\\n\\r\\n")[2])
asked = [ask({"instance": "o/r@main", **json.loads(body)}) for body in sys.argv[2:]]
print(json.dumps(asked), flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("lifelines")
    Upstream(root / "o" / "r").history(2)
    with daemon(
        f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n[[mirror]]\nrepo = "o/r"\n'
    ) as made:
        with Client(made.socket) as client:
            client.wait(client.sync_mirror("o/r"))
        yield made


@pytest.fixture
def hold(running: Daemon) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], list[Any]]]]:
    """Start a process that takes a checkout for each request and closes its connections."""
    holders = []

    def start(*requests: dict[str, object]) -> tuple[subprocess.Popen[bytes], list[Any]]:
        command = [sys.executable, "-c", HOLDER, str(running.socket), *map(json.dumps, requests)]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE)
        holders.append(holder)
        assert holder.stdout is not None
        return holder, json.loads(holder.stdout.readline())

    yield start
    for holder in holders:
        holder.kill()
        holder.communicate()
    for held in running.json("GET", "/v1/checkouts"):
        running.request("DELETE", f"/v1/checkouts/{held['id']}")


BOUND = {"bind": "process"}


def held_ids(running: Daemon) -> set[str]:
    return {held["id"] for held in running.json("GET", "/v1/checkouts")}


def test_what_a_killed_process_took_is_released_within_a_second(
    running: Daemon, hold: Callable[..., Any]
) -> None:
    """4 of 4, after its connections were closed long ago; an unbound one stays until its deadline,
    as before.
    """
    holder, taken = hold(BOUND, BOUND, BOUND, BOUND, {})
    assert [lease["bind"] for lease in taken] == ["process"] * 4 + ["lease"]
    *bound, free = [lease["id"] for lease in taken]
    assert held_ids(running) >= {*bound, free}
    holder.kill()
    until(lambda: not held_ids(running) & set(bound))
    assert held_ids(running) == {free}
    assert not any((running.state_dir / "checkouts" / one).exists() for one in bound)


def test_the_lease_is_its_process_and_not_its_connection(
    running: Daemon, hold: Callable[..., Any]
) -> None:
    """Several turns of the job that releases leases go by; a reset and a renewal keep it bound."""
    holder, (lease,) = hold(BOUND)
    time.sleep(2.5)
    assert running.request("POST", f"/v1/checkouts/{lease['id']}/reset", {})[0] == 200
    assert running.json("POST", f"/v1/checkouts/{lease['id']}/renew", {})["bind"] == "process"
    holder.terminate()
    until(lambda: not held_ids(running) & {lease["id"]})


def test_a_restarted_daemon_still_knows_the_process(
    running: Daemon, hold: Callable[..., Any]
) -> None:
    """A live process is watched again; the lease of an ended one is released at the start."""
    (living, (kept,)), (dying, (lost,)) = hold(BOUND), hold(BOUND)
    running.kill()
    dying.kill()
    dying.wait()
    running.start()
    assert held_ids(running) == {kept["id"]}
    assert lost["id"] not in held_ids(running)
    living.kill()
    until(lambda: not held_ids(running) & {kept["id"]})


def test_a_number_that_another_process_has_is_another_process(
    running: Daemon, hold: Callable[..., Any]
) -> None:
    """The lease's file names inode and start time too: pids are used again, after a reboot from the
    first on.
    """
    holder, (lease,) = hold(BOUND)
    running.kill()
    (file,) = running.state_dir.glob(f"*/{lease['id']}/lease.json")
    facts = json.loads(file.read_text())
    assert facts["terms"]["bound_to"][0] == holder.pid
    facts["terms"]["bound_to"][0] = os.getpid()
    file.write_text(json.dumps(facts))
    running.start()
    assert held_ids(running) == set()


def test_a_process_that_ended_holds_no_descriptor(
    running: Daemon, hold: Callable[..., Any]
) -> None:
    """Nor does one that gave its checkouts back. The daemon has pidfds of its children, too."""
    holders = [hold(BOUND, BOUND) for _ in range(3)]
    pids = {holder.pid for holder, _ in holders}
    assert sorted(pid for pid in _pidfds(running) if pid in pids) == sorted(pids)
    for _, taken in holders[:2]:
        for lease in taken:
            assert running.request("DELETE", f"/v1/checkouts/{lease['id']}")[0] == 204
    until(lambda: pids & {*_pidfds(running)} == {holders[2][0].pid})
    holders[2][0].kill()
    holders[2][0].wait()
    until(lambda: not {*pids, _ENDED} & {*_pidfds(running)})


_ENDED = -1


def _pidfds(running: Daemon) -> list[int]:
    """The processes of which the daemon has a pidfd, each as often as it has one."""
    pids = []
    for file in Path(f"/proc/{running.pid}/fdinfo").iterdir():
        with suppress(FileNotFoundError):
            pids += [int(line[4:]) for line in file.read_text().splitlines() if line[:4] == "Pid:"]
    return pids


def test_before_linux_6_5_the_peer_is_found_by_its_number(tmp_path: Path) -> None:
    """A process that is younger than the connection is not the one that made it."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client.connect(str(tmp_path / "s"))
        connection, _ = listener.accept()
        with connection:
            peer = peer_of(connection)
            assert process_of(connection, peer).pid == os.getpid()
            os.close(open_by_number(peer))
            time.sleep(0.05)  # start times are whole ticks, of 10 ms
            younger = subprocess.Popen(["sleep", "1000"])
            try:
                with pytest.raises(ProcessLookupError):
                    open_by_number(replace(peer, pid=younger.pid))
            finally:
                younger.kill()
                younger.wait()


def test_a_process_that_has_ended_is_not_bound_to(running: Daemon) -> None:
    """Another process inherited its connection; its request fails."""
    script = HOLDER.replace("s.connect(sys.argv[1])", "s.connect(sys.argv[1]); leave()").replace(
        "def ask", """
import os
def leave():
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.01)
def ask""")  # fmt: skip
    command = [sys.executable, "-c", script, str(running.socket), json.dumps(BOUND)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as client:
        assert client.stdout is not None
        (answer,) = json.loads(client.stdout.readline())
        os.killpg(client.pid, signal.SIGKILL)
    assert (answer["status"], answer["code"]) == (409, "process-gone")
    assert held_ids(running) == set()


@pytest.mark.parametrize("client", ["Client", "AsyncClient"])
def test_the_client_library_binds_a_checkout_to_its_own_process(
    running: Daemon, client: str
) -> None:
    """It is killed in the middle of its block."""
    script = {
        "Client": """
with mirrord.Client(path) as c, c.checkout("o/r@main", bind="process") as one:
    print(one.id, flush=True)
    input()""",
        "AsyncClient": """
async def main():
    async with mirrord.AsyncClient(path) as c, c.checkout("o/r@main", bind="process") as one:
        print(one.id, flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())""",
    }[client]
    command = [
        sys.executable,
        "-c",
        f"import asyncio, sys, mirrord\npath = sys.argv[1]\n{script}",
        str(running.socket),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        held = process.stdout.readline().strip()
        assert held in held_ids(running)
        process.kill()
    until(lambda: not held_ids(running) & {held})
