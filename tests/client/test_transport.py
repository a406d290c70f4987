"""The client's HTTP against real sockets: connections, bodies of every framing, ends in the middle, load."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import daemons
import pytest
from httpserver import Handler, Route, serving
from waiting import BOUND_S, until

from mirrord import AsyncClient, Client, errors

pytestmark = pytest.mark.slow

HEALTH = b'{"status": "ok", "reasons": [], "version": "1"}'
OK: dict[tuple[str, str], Route] = {("GET", "/v1/health"): lambda h: h.answer(HEALTH)}
RELOADED = b'{"applied": [], "refused": []}'
OPERATION = b"""{"id": "op1", "kind": "k", "subject": "s", "state": "running", "progress": {},
"started_at": "2026-01-01T00:00:00Z"}"""


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mc-") as directory:
        yield Path(directory) / "s"


@contextmanager
def answering(path: Path, *talks: Callable[[socket.socket], None]) -> Iterator[list[int]]:
    """A bare server: the nth connection is given to the nth talk, then closed; answers the count of connections."""
    count = [0]

    def serve() -> None:
        for talk in talks:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            count[0] += 1
            with connection, suppress(ConnectionError):
                talk(connection)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield count
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(BOUND_S)


def says(raw: bytes) -> Callable[[socket.socket], None]:
    """Reads one head, answers, hangs up."""

    def talk(connection: socket.socket) -> None:
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(65536)
        for at in range(0, len(raw), 7):
            connection.sendall(raw[at : at + 7])

    return talk


# -- connections ------------------------------------------------------------------------------------------------------


def test_requests_one_after_another_use_one_connection(path: Path) -> None:
    """Sixteen threads at once use sixteen at most."""
    with serving(path, OK) as server, Client(path) as client:
        for _ in range(20):
            client.health()
        assert len(server.connections) == 1
        with ThreadPoolExecutor(16) as threads:
            assert {
                answer.status for answer in threads.map(lambda _: client.health(), range(200))
            } == {"ok"}
        assert len(server.connections) <= 16


def test_the_cost_of_a_request_does_not_grow_with_the_connections_of_its_client(path: Path) -> None:
    """Counted in calls of Python: httpcore's pool looked at each of its connections, for each request."""

    def calls_of_one_request(connections: int) -> int:
        together = threading.Barrier(connections)

        def together_then_answer(handler: Handler) -> None:
            together.wait(BOUND_S)
            handler.answer(HEALTH)

        calls, least = [0], [sys.maxsize]

        def count(frame: object, event: str, argument: object) -> None:
            calls[0] += event == "call"

        async def scene() -> None:
            async with AsyncClient(path) as client:
                await asyncio.gather(*[client.health() for _ in range(connections)])
                server.routes = OK
                for _ in range(
                    50
                ):  # the event loop may have something else to do, and an answer may come in two pieces
                    calls[0] = 0
                    sys.setprofile(count)
                    await client.health()
                    sys.setprofile(None)
                    least[0] = min(least[0], calls[0])

        with serving(path, {("GET", "/v1/health"): together_then_answer}) as server:
            asyncio.run(scene())
            assert len(server.connections) == connections
        return least[0]

    assert calls_of_one_request(48) <= calls_of_one_request(2) + 20


def test_hundreds_of_tasks_and_threads_share_one_client_of_a_real_daemon() -> None:
    """Each gets its own answer: instances that are not there are named in the error."""

    async def ask(client: AsyncClient, task: int) -> None:
        for turn in range(3):
            with pytest.raises(errors.InstanceNotFoundError, match=f"x-{task}-{turn}"):
                await client.get_instance(f"x-{task}-{turn}")

    async def scene(socket: Path) -> None:
        async with AsyncClient(socket) as client:
            await asyncio.gather(*[ask(client, task) for task in range(256)])

    def ask_in_thread(task: int) -> None:
        for turn in range(3):
            with pytest.raises(errors.InstanceNotFoundError, match=f"x-{task}-{turn}"):
                client.get_instance(f"x-{task}-{turn}")

    with daemons.daemon() as running:
        asyncio.run(scene(running.socket))
        with Client(running.socket) as client, ThreadPoolExecutor(64) as threads:
            list(threads.map(ask_in_thread, range(64)))


def test_a_connection_that_the_daemon_closed_while_it_was_idle_is_no_error(path: Path) -> None:
    """Also for a POST: nothing was sent, so it is sent once, over a new connection."""
    routes: Any = {**OK, ("POST", "/v1/reload"): lambda h: h.answer(RELOADED)}
    with serving(path, routes) as server, Client(path) as client:
        client.health()
        server.connections[0].shutdown(socket.SHUT_RDWR)
        assert client.reload().applied == []
        assert server.asked == [("GET", "/v1/health"), ("POST", "/v1/reload")]
        assert len(server.connections) == 2


def test_a_get_whose_connection_ends_before_the_answer_is_sent_again_and_a_post_is_not(
    path: Path,
) -> None:
    """The POST may have been done."""
    talks = [
        says(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(HEALTH), HEALTH)),
        says(b""),
        says(b""),
    ]
    with answering(
        path,
        *talks,
        says(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(HEALTH), HEALTH)),
    ) as count:
        with Client(path) as client:
            client.health()
            with pytest.raises(errors.NoDaemonError, match="closed the connection"):
                client.reload()
            assert client.health().status == "ok"
        assert count == [4]


def test_a_client_may_be_used_from_one_event_loop_after_another(path: Path) -> None:
    """Its connections belong to none."""
    client = AsyncClient(path)
    with serving(path, OK) as server:
        for _ in range(3):
            assert asyncio.run(client.health()).status == "ok"
        assert len(server.connections) == 1
        asyncio.run(client.aclose())


def test_a_forked_child_opens_its_own_connection(path: Path) -> None:
    """On one connection parent and child would read each other's answers."""
    with serving(path, OK) as server, Client(path) as client:
        client.health()
        child = os.fork()
        if not child:
            os._exit(0 if client.health().status == "ok" else 1)
        assert os.waitpid(child, 0)[1] == 0
        client.health()
        assert len(server.connections) == 2


def test_a_cancelled_request_leaves_nothing_for_the_next(path: Path) -> None:
    """Its connection is closed: the late answer would be the next one's."""
    held = threading.Event()

    def late(handler: Handler) -> None:
        held.wait(BOUND_S)
        handler.answer(b'{"status": "degraded", "reasons": ["late"], "version": "1"}')

    async def scene() -> None:
        async with AsyncClient(path) as client:
            asking = asyncio.create_task(client.health())
            await asyncio.to_thread(until, lambda: server.seen)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            server.routes = OK
            held.set()
            assert (await client.health()).status == "ok"

    with serving(path, {("GET", "/v1/health"): late}) as server:
        asyncio.run(scene())
        assert len(server.connections) == 2


def test_a_full_backlog_is_waited_for(path: Path) -> None:
    """connect(2) of a Unix socket answers EAGAIN, and never completes later."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(1)]
        for blocker in waiting:
            blocker.connect(str(path))

        def accept_all() -> None:
            time.sleep(0.2)
            for _ in range(2):
                connection, _ = listener.accept()
                with connection, suppress(ConnectionError):
                    connection.settimeout(BOUND_S)
                    if connection.recv(65536):
                        connection.sendall(
                            b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b"
                            % (len(HEALTH), HEALTH)
                        )

        accepting = threading.Thread(target=accept_all)
        accepting.start()
        waiting[0].shutdown(socket.SHUT_WR)
        with Client(path) as client:
            assert client.health().status == "ok"
        accepting.join()
        waiting[0].close()


# -- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(HEALTH), HEALTH),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n%b\r\n%x;a=b\r\n%b\r\n0\r\nx: y\r\n\r\n"
        % (HEALTH[:5], len(HEALTH) - 5, HEALTH[5:]),
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + HEALTH,
        b"HTTP/1.0 200 OK\r\n\r\n" + HEALTH,
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b"
        % (len(HEALTH), HEALTH),
    ],
    ids=["length", "chunks", "until the end", "HTTP/1.0", "after 100"],
)
def test_a_body_of_every_framing_is_read_whole(path: Path, raw: bytes) -> None:
    """However its bytes come in."""
    with answering(path, says(raw)), Client(path) as client:
        assert client.health().version == "1"


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nmany\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000,
    ],
    ids=["no HTTP", "length", "chunk", "endless head"],
)
def test_what_is_not_http_is_not_mirrord(path: Path, raw: bytes) -> None:
    """An error of ours, whatever speaks there."""
    with (
        answering(path, says(raw)),
        Client(path) as client,
        pytest.raises(errors.NoDaemonError, match=r"not HTTP/1\.1"),
    ):
        client.status()


@pytest.mark.parametrize(
    "end", [b"content-length: 100\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n64\r\n{"]
)
def test_a_body_that_is_cut_off_is_an_error(path: Path, end: bytes) -> None:
    """Never half an answer."""
    talk = says(b"HTTP/1.1 200 OK\r\n" + end)
    refusal = pytest.raises(errors.NoDaemonError, match="closed the connection")
    with answering(path, talk), Client(path) as client, refusal:
        client.status()


@pytest.mark.parametrize("size", [1, 200_000, 30_000_000])
def test_a_patch_of_any_size_arrives_whole(path: Path, size: int) -> None:
    """Larger than what a socket's buffer takes at once too."""
    patch = os.urandom(size)
    lease = b"""{"id": "a", "path": "/p/tree", "directory": "/p", "mirror": "m", "commit": "c", "tree": "t", "history": "sealed",
    "view": "agent",
    "backend": "pool", "owner_uid": 0, "owner_gid": 0, "taken_by": 0, "strategy": "exact",
    "created_at": "2026-01-01T00:00:00Z", "expires_at": "2026-01-01T00:00:00Z"}"""
    with (
        serving(path, {("POST", "/v1/checkouts/a/apply"): lambda h: h.answer(lease)}) as server,
        Client(path) as client,
    ):
        client.apply_patch("a", patch)
        client.apply_patch("a", b"")
    assert [request.body for request in server.seen] == [patch, b""]
    assert len(server.connections) == 1


@pytest.mark.parametrize("colour", ["threads", "asyncio"])
def test_an_answer_that_comes_before_the_end_of_an_upload_is_read(
    tmp_path: Path, path: Path, colour: str
) -> None:
    """A daemon that refuses the head of an upload reads no further."""
    file = tmp_path / "rows.jsonl"
    with file.open("wb") as empty:
        empty.truncate(512 * 1024**2)
    problem = b'{"status": 413, "code": "body-too-large", "detail": "cannot: too large"}'
    head = b"HTTP/1.1 413 X\r\ncontent-type: application/problem+json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    sent: list[int] = []

    async def upload() -> None:
        async with AsyncClient(path) as client:
            await client.import_dataset(file, progress=lambda progress: sent.append(progress.done))

    with (
        answering(path, says(head % len(problem) + problem)),
        pytest.raises(errors.BodyTooLargeError),
    ):
        if colour == "asyncio":
            asyncio.run(upload())
        else:
            with Client(path) as client:
                client.import_dataset(file, progress=lambda progress: sent.append(progress.done))
    assert not sent or sent[-1] < 16 * 1024**2


def test_a_real_daemon_refuses_an_upload_in_its_own_words(tmp_path: Path) -> None:
    """Not an error of the connection: it looks at who asks for what before it reads."""
    file = tmp_path / "x.bundle"
    with file.open("wb") as empty:
        empty.truncate(64 * 1024**2)
    with daemons.daemon() as running, Client(running.socket) as client:
        with pytest.raises(errors.MirrorNotFoundError):
            client.heal_with_bundle("a/b", file)
        with pytest.raises(errors.CheckoutNotFoundError):
            client.apply_patch("a" * 16, b"x" * (65 * 1024**2))


# -- ends -------------------------------------------------------------------------------------------------------------


def test_breaking_off_a_stream_closes_its_connection(path: Path) -> None:
    """The daemon sees that nobody listens any longer."""
    ended = threading.Event()
    event = b'data: {"id": 1, "boot": "b", "at": "2026-01-01T00:00:00Z", "name": "a.b", "fields": {}}\n\n'

    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n"

    def talk(connection: socket.socket) -> None:
        with suppress(ConnectionError):  # it was closed with the end of the chunk unread
            says(answer % (len(event), event))(connection)
            assert connection.recv(1) == b""
        ended.set()

    with answering(path, talk), Client(path) as client:
        assert next(client.events()).id == 1
        assert ended.wait(BOUND_S)


def test_a_signal_in_the_middle_of_a_request_ends_it(path: Path) -> None:
    """Control-C: the connection is closed and the client can be used again."""

    is_over = threading.Event()

    def interrupt(handler: Handler) -> None:
        server.routes = OK
        os.kill(os.getpid(), signal.SIGINT)
        is_over.wait(BOUND_S)

    with serving(path, {("GET", "/v1/health"): interrupt}) as server, Client(path) as client:
        with pytest.raises(KeyboardInterrupt):
            client.health()
        is_over.set()
        assert client.health().status == "ok"
        assert len(server.connections) == 2
