"""One client or user never stops others: hanging work is confined to its user and ends with its client."""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, daemon, parse_response
from gitrepos import Upstream
from waiting import until

from mirrord.jobs.events import FOLLOWERS_OF_USER

pytestmark = pytest.mark.root

ALICE, BOB = 61001, 61002
MEMBERS, GROUP = (61003, 61004), 61000
ADMINS = f'[access]\ngroup = "{GROUP}"\nadmins = [{ALICE}, {BOB}]\n[checkouts]\nprewarm = false\n'
BOMB = {".gitignore": "*a" * 24 + "b\n", "a" * 100 + "cb": "x"}


@contextmanager
def being(uid: int) -> Iterator[None]:
    """Connect as another user: the kernel records the peer's credentials at connect."""
    os.setegid(GROUP if uid in MEMBERS else uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def connect(running: Daemon, uid: int) -> socket.socket:
    with being(uid):
        return running.connect()


def send(connection: socket.socket, method: str, path: str, body: Any = None) -> None:
    content = (
        b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    )
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)


def receive(connection: socket.socket) -> tuple[int, bytes]:
    raw = b""
    while chunk := connection.recv(1 << 16):
        raw += chunk
    status, _, body = parse_response(raw)
    return status, body


def ask(running: Daemon, uid: int, method: str, path: str, body: Any = None) -> Any:
    """Send one request as a user; fails without an answer within 30 s."""
    with connect(running, uid) as connection:
        send(connection, method, path, body)
        status, content = receive(connection)
    assert status < 300, content
    return json.loads(content) if content.startswith((b"{", b"[")) else content


def children(running: Daemon, word: str) -> list[int]:
    """The processes below the daemon with a word in their command line."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            parents[int(path.name)] = (
                int(fields[1]),
                (path / "cmdline").read_bytes().decode(errors="replace").split("\0"),
            )
        except OSError:
            continue
    found = []
    for pid, (parent, words) in parents.items():
        while parent in parents and parent != running.pid:
            parent = parents[parent][0]
        if parent == running.pid and word in words:
            found.append(pid)
    return found


def busy_workers(running: Daemon) -> list[int]:
    """Workers that are running or runnable."""
    found = children(running, "mirrord.workers.forkserver")
    for _ in range(10):
        found = [pid for pid in found if _state(pid) == "R"]
        time.sleep(0.02)
    return found


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with daemon(ADMINS) as made:
        yield made


@pytest.fixture
def house(make_upstream: Callable[[str], Upstream]) -> Iterator[tuple[Daemon, Upstream]]:
    upstream = make_upstream("up")
    upstream.commit({"a.txt": "a\n"})
    with daemon(ADMINS) as made:
        add_mirror(made, upstream)
        yield made, upstream


def add_mirror(running: Daemon, upstream: Upstream) -> None:
    operation = running.json("POST", "/v1/mirrors", {"repo": "up/stream", "url": upstream.url})
    until(lambda: running.json("GET", f"/v1/operations/{operation['id']}")["state"] == "done")


def check_out(running: Daemon, uid: int, commit: str = "main", backend: str = "pool") -> Any:
    return ask(
        running,
        uid,
        "POST",
        "/v1/checkouts",
        {"mirror": "up/stream", "commit": commit, "backend": backend},
    )


def plant(checkout: Any, uid: int, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = Path(checkout["path"]) / name
        path.write_text(text)
        os.chown(path, uid, uid)


@contextmanager
def hanging_diffs(running: Daemon, uid: int, count: int) -> Iterator[list[socket.socket]]:
    """Diffs of trees with a pattern that takes minutes to match, all running when the block begins."""
    with ExitStack() as stack:
        connections = []
        for _ in range(count):
            checkout = check_out(running, uid)
            plant(checkout, uid, BOMB)
            connection = stack.enter_context(connect(running, uid))
            send(connection, "GET", f"/v1/checkouts/{checkout['id']}/diff")
            connections.append(connection)
        until(lambda: len(busy_workers(running)) == count)
        yield connections


def test_two_diffs_that_hang_keep_nobody_else_waiting(house: tuple[Daemon, Upstream]) -> None:
    """Another user's diff, pool checkout, new commit and OpenAPI document are answered meanwhile."""
    running, upstream = house
    with hanging_diffs(running, ALICE, 2) as hanging:
        checkout = check_out(running, BOB)
        plant(checkout, BOB, {"new.txt": "new\n"})
        assert b"+new\n" in ask(running, BOB, "GET", f"/v1/checkouts/{checkout['id']}/diff")
        new = upstream.commit({"b.txt": "b\n"})
        sync = running.json("POST", "/v1/mirrors/up__stream/sync", {})
        until(lambda: running.json("GET", f"/v1/operations/{sync['id']}")["state"] == "done")
        assert check_out(running, BOB, "main")["commit"] == new
        assert "paths" in ask(running, BOB, "GET", "/v1/openapi.json")
        assert select.select(hanging, [], [], 0)[0] == []
        until(lambda: len(busy_workers(running)) >= 2)


def test_what_is_released_goes_while_diffs_of_its_user_hang(house: tuple[Daemon, Upstream]) -> None:
    """Otherwise all users would wait in the end."""
    running, _ = house
    checkout = check_out(running, ALICE, backend="overlay")
    with being(ALICE):
        (Path(checkout["path"]) / "d/e").mkdir(parents=True)
    with hanging_diffs(running, ALICE, 2) as hanging:
        ask(running, ALICE, "DELETE", f"/v1/checkouts/{checkout['id']}")
        places = [running.state_dir / name for name in ("checkouts", "leases")]
        until(lambda: all(len(list(place.iterdir())) == 2 for place in places))
        assert select.select(hanging, [], [], 0)[0] == []


def abandoned(running: Daemon) -> list[int]:
    return [line["uid"] for line in running.log_lines if line["event"] == "request.abandoned"]


def test_a_diff_ends_with_its_client(house: tuple[Daemon, Upstream]) -> None:
    """Its worker ends, and the checkout can be reset immediately."""
    running, _ = house
    with hanging_diffs(running, ALICE, 1) as [connection]:
        [worker] = busy_workers(running)
        connection.close()
        until(lambda: worker not in children(running, "mirrord.workers.forkserver"))
    until(lambda: bool(abandoned(running)))  # logged once the worker was waited for
    assert abandoned(running) == [ALICE]
    [checkout] = [
        each for each in running.json("GET", "/v1/checkouts") if each["owner_uid"] == ALICE
    ]
    assert (
        ask(running, ALICE, "POST", f"/v1/checkouts/{checkout['id']}/reset", {})["proof"][
            "files_removed"
        ]
        == 2
    )
    assert ask(running, ALICE, "GET", f"/v1/checkouts/{checkout['id']}/diff") == b""


_START = {"mirror": "up/stream", "commit": "main"}


@pytest.mark.parametrize(
    ("path", "asked"), [("checkouts", _START), ("turns", {"checkouts": [_START]})]
)
def test_a_checkout_whose_answer_nobody_read_is_released(
    house: tuple[Daemon, Upstream], path: str, asked: dict[str, object]
) -> None:
    """Its client was killed, or its task cancelled, with the answer already in the socket."""
    running, _ = house
    before = [each["id"] for each in running.json("GET", "/v1/checkouts")]
    body = json.dumps(asked).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    gone = _abandoned_checkouts(running)
    for is_read in (True, False):
        with connect(running, ALICE) as connection:
            connection.sendall(head.encode() + body)
            assert select.select([connection], [], [], 60)[0]
            answer = b""
            while is_read and not answer.endswith(b"}"):
                answer += connection.recv(1 << 16)
    until(lambda: _abandoned_checkouts(running) == gone + 1)
    held = [each["id"] for each in running.json("GET", "/v1/checkouts")]
    [kept] = [identity for identity in held if identity not in before]
    ask(running, ALICE, "DELETE", f"/v1/checkouts/{kept}")


def _abandoned_checkouts(running: Daemon) -> int:
    return sum(line["event"] == "checkout.abandoned" for line in running.log_lines)


def test_the_first_checkout_of_a_commit_ends_with_the_last_who_wants_it(
    make_upstream: Callable[[str], Upstream],
) -> None:
    """Nothing is left, and the next request builds it."""
    upstream = make_upstream("up")
    upstream.commit({f"d{n // 100}/{n}": f"{n}\n" for n in range(4_000)})
    with daemon(ADMINS) as running:
        add_mirror(running, upstream)
        templates = running.state_dir / "templates" / "up__stream"
        connections = [connect(running, ALICE) for _ in range(2)]
        for connection in connections:
            send(
                connection,
                "POST",
                "/v1/checkouts",
                {"mirror": "up/stream", "commit": "main", "backend": "overlay"},
            )
        until(lambda: any(templates.glob("trees/.building-*")))
        for connection in connections:
            connection.close()
        until(lambda: sum(line["event"] == "request.abandoned" for line in running.log_lines) == 2)
        until(lambda: not any(templates.glob("*/.building-*")))
        assert not any(templates.glob("trees/*"))
        assert running.json("GET", "/v1/checkouts") == []
        assert check_out(running, ALICE, backend="overlay")["mirror"] == "up__stream"
        assert running.json("GET", "/v1/health")["status"] == "ok"


# -- connections ------------------------------------------------------------------------------------------------------


def test_idle_strangers_keep_nobody_out(running: Daemon) -> None:
    """Four users open all connections they can; others still connect, and each of the four is logged once."""
    strangers = (62001, 62002, 62003, 62004)
    with ExitStack() as stack:
        held = {
            uid: [stack.enter_context(connect(running, uid)) for _ in range(64)]
            for uid in strangers
        }
        for uid in (MEMBERS[0], 0):
            assert ask(running, uid, "GET", "/v1/status")["pid"] == running.pid
        refused = [
            connection
            for those in held.values()
            for connection in those
            if select.select([connection], [], [], 0)[0]
        ]
        assert len(refused) >= 4 * 64 - 128
        status, headers, body = parse_response(read_all(refused[-1]))
        assert (status, json.loads(body)["code"]) == (503, "overloaded")
        assert headers["retry-after"] == "1"
        lines = [line["uid"] for line in running.log_lines if line["event"] == "connection.refused"]
        assert sorted(lines) == sorted(strangers)


def read_all(connection: socket.socket) -> bytes:
    raw = b""
    with suppress(ConnectionResetError):  # the end of a connection whose body was not read
        while chunk := connection.recv(1 << 16):
            raw += chunk
    return raw


def test_a_refused_connection_can_still_send_its_request(running: Daemon) -> None:
    """A client that writes everything before it reads gets the answer instead of EPIPE."""
    with ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(connect(running, 62001))
        for _ in range(20):
            with connect(running, 62001) as connection:
                time.sleep(0.01)
                send(connection, "POST", "/v1/checkouts", b"x" * 1000)
                assert receive(connection)[0] == 503


class _Http(http.client.HTTPConnection):
    def __init__(self, made: socket.socket) -> None:
        super().__init__("mirrord")
        self.sock = made


def test_who_is_refused_reads_why(running: Daemon) -> None:
    """200 of 200 requests of http.client, which writes the whole request before it reads."""
    for number in range(200):
        client = _Http(connect(running, 62005))
        try:
            client.request("POST", "/v1/mirrors", b"{" + b" " * (number * 300) + b"}")
            answer = client.getresponse()
            assert (answer.status, json.loads(answer.read())["code"]) == (403, "not-allowed")
        finally:
            client.close()


def test_a_refused_body_is_read_and_the_connection_used_again(running: Daemon) -> None:
    """If it is short; a long one ends the connection unread."""
    client = _Http(connect(running, 62005))
    for _ in range(3):
        client.request("POST", "/v1/mirrors", b"{}")
        answer = client.getresponse()
        assert (answer.status, answer.headers["connection"]) == (403, None)
        answer.read()
    client.putrequest("POST", "/v1/mirrors")
    client.putheader("content-length", str(1 << 30))
    client.endheaders()
    assert client.getresponse().headers["connection"] == "close"
    client.close()


# -- followers --------------------------------------------------------------------------------------------------------


def test_a_user_has_so_many_followers_and_no_more(running: Daemon) -> None:
    """The next one is refused, others are not, and one that ends makes room."""
    with ExitStack() as stack:
        for _ in range(FOLLOWERS_OF_USER):
            connection = stack.enter_context(connect(running, ALICE))
            send(connection, "GET", "/v1/events")
            assert b" 200 OK" in connection.recv(1 << 16)
        with connect(running, ALICE) as another:
            send(another, "GET", "/v1/events")
            status, body = receive(another)
        assert (status, json.loads(body)["code"]) == (503, "limit-reached")
        with connect(running, BOB) as other:
            send(other, "GET", "/v1/events")
            assert b" 200 OK" in other.recv(1 << 16)
        connection.close()
        until(lambda: is_followed(running))


def is_followed(running: Daemon) -> bool:
    with connect(running, ALICE) as connection:
        send(connection, "GET", "/v1/events")
        return b" 200 OK" in connection.recv(1 << 16)


# -- open files -------------------------------------------------------------------------------------------------------


def test_few_open_files_are_shared_with_idle_clients(
    make_upstream: Callable[[str], Upstream],
) -> None:
    """With a limit of 256 and 200 idle clients, root is served, without bugs or git failures."""
    upstream = make_upstream("up")
    upstream.commit({"a.txt": "a\n"})
    with daemon(ADMINS, start=False) as running, ExitStack() as stack:
        running.start(prefix=("prlimit", "--nofile=256:256"))
        idle = []
        for _ in range(200):
            connection = stack.enter_context(connect(running, MEMBERS[0]))
            idle.append(connection)
        add_mirror(running, upstream)
        statuses = set()
        for _ in range(10):
            with connect(running, 0) as connection:
                send(
                    connection,
                    "POST",
                    "/v1/checkouts",
                    {"mirror": "up/stream", "commit": "main", "backend": "pool"},
                )
                status, body = receive(connection)
                statuses.add(status)
            checkout = json.loads(body)
            plant(checkout, 0, {"n.txt": "n\n"})
            assert b"+n" in ask(running, 0, "GET", f"/v1/checkouts/{checkout['id']}/diff")
        assert statuses == {201}
        assert len([each for each in idle if select.select([each], [], [], 0)[0]]) >= 200 - 64
        assert ask(running, MEMBERS[1], "GET", "/v1/status")["pid"] == running.pid
        assert "Traceback" not in running.log
        assert "install git" not in running.log
        assert any(
            "open files" in reason for reason in running.json("GET", "/v1/health")["reasons"]
        )


# -- bodies -----------------------------------------------------------------------------------------------------------


def announce(connection: socket.socket, path: str, size: int) -> None:
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n".encode()
    )


def resident_bytes(running: Daemon) -> int:
    lines = Path(f"/proc/{running.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def test_a_patch_for_no_checkout_is_refused_before_it_is_read(running: Daemon) -> None:
    """Thirty requests are answered before their 64 MiB are sent."""
    with ExitStack() as stack:
        for _ in range(30):
            connection = stack.enter_context(connect(running, ALICE))
            announce(connection, f"/v1/checkouts/{'a' * 16}/apply", 64 << 20)
            assert b" 404 " in connection.recv(1 << 16)


def test_patches_that_wait_are_on_disk_and_bounded(house: tuple[Daemon, Upstream]) -> None:
    """Of six bodies with 48 of 64 MiB each the last is refused; memory does not grow, and no file is left."""
    running, _ = house
    checkout = check_out(running, ALICE)
    path = f"/v1/checkouts/{checkout['id']}/apply"
    before = resident_bytes(running)
    quarantine = running.state_dir / "quarantine"
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(running, ALICE)) for _ in range(5)]
        for connection in connections:
            announce(connection, path, 64 << 20)
            connection.sendall(bytes(48 << 20))
        until(lambda: sum(file.stat().st_size for file in quarantine.iterdir()) >= 5 * 47 << 20)
        assert resident_bytes(running) - before < 64 << 20
        another = stack.enter_context(connect(running, ALICE))
        announce(another, path, 64 << 20)
        with suppress(OSError):
            another.sendall(bytes(48 << 20))
        assert b"limit-reached" in read_all(another)
        assert ask(running, BOB, "GET", "/v1/status")["pid"] == running.pid
    until(lambda: list(quarantine.iterdir()) == [])


def test_a_long_patch_goes_through_files_both_ways(house: tuple[Daemon, Upstream]) -> None:
    """A checkout's diff is applied to another and equals its diff; no file is left."""
    running, _ = house
    first, second = check_out(running, ALICE), check_out(running, ALICE)
    plant(first, ALICE, {"long.txt": "".join(f"line {number}\n" for number in range(200_000))})
    patch = ask(running, ALICE, "GET", f"/v1/checkouts/{first['id']}/diff")
    assert len(patch) > 2 << 20
    ask(running, ALICE, "POST", f"/v1/checkouts/{second['id']}/apply", patch)
    assert ask(running, ALICE, "GET", f"/v1/checkouts/{second['id']}/diff") == patch
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (patch[:1000], patch[1000:]))
    ask(running, ALICE, "POST", f"/v1/checkouts/{second['id']}/reset", {})
    with connect(running, ALICE) as connection:
        head = (
            f"POST /v1/checkouts/{second['id']}/apply HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        )
        connection.sendall(
            head.encode() + b"transfer-encoding: chunked\r\n\r\n" + chunked + b"0\r\n\r\n"
        )
        assert receive(connection)[0] == 200
    assert ask(running, ALICE, "GET", f"/v1/checkouts/{second['id']}/diff") == patch
    assert list((running.state_dir / "quarantine").iterdir()) == []
