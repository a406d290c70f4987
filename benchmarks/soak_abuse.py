"""Bad clients of the soak: slow ones, gone ones, garbage, crowds of connections, huge requests, answers never read.

Each speaks over bare sockets, as a member or as a stranger. What they are answered must be a problem with a documented
code, or the end of the connection.
"""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property

from measured_daemon import MIRROR
from soak_clients import become
from soak_tally import Tally

MEMBER, STRANGER = 61008, 62008
_LONGEST_S = 30.0


@dataclass
class Abuse:
    """Who asks for what, and for how long; at most `connections` at a time in a crowd."""

    socket: str
    uid: int
    commit: str
    seconds: float
    connections: int

    @cached_property
    def ends(self) -> float:
        """Counted from the first look, in the process that asks."""
        return time.monotonic() + self.seconds


def be_bad(abuse: Abuse) -> Tally:
    """Runs in a process of its own."""
    if abuse.uid == STRANGER:
        os.setgroups([])
        os.setresgid(STRANGER, STRANGER, STRANGER)
        os.setresuid(STRANGER, STRANGER, STRANGER)
    else:
        become(abuse.uid)
    tally = Tally()
    assert abuse.ends  # the time begins
    kinds = (_slow, _gone, _garbage, _crowd, _huge_head, _huge_body, _unread, _pipelined)
    threads = [
        threading.Thread(target=_again, args=(kind, abuse, tally, number))
        for number, kind in enumerate(kinds)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tally


Kind = Callable[[Abuse, random.Random, Tally], None]


def _again(kind: Kind, abuse: Abuse, tally: Tally, seed: int) -> None:
    chance = random.Random(f"{abuse.uid} {seed}")
    while time.monotonic() < abuse.ends:
        try:
            kind(abuse, chance, tally)
        except OSError as error:  # the daemon hung up, or refused
            tally.refused[kind.__name__.strip("_"), type(error).__name__] += 1
        time.sleep(chance.uniform(0.2, 1.0))


def _connect(abuse: Abuse) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX)
    connected.settimeout(_LONGEST_S)
    try:
        connected.connect(abuse.socket)
    except OSError:
        connected.close()
        raise
    return connected


def _request(method: str, path: str, body: bytes = b"", *lines: str) -> bytes:
    head = [f"{method} {path} HTTP/1.1", "host: m", f"content-length: {len(body)}", *lines]
    return "\r\n".join([*head, "", ""]).encode() + body


def _make(abuse: Abuse, ttl: int = 5) -> bytes:
    body = {"mirror": MIRROR, "commit": abuse.commit, "ttl": ttl}
    return _request("POST", "/v1/checkouts", json.dumps(body).encode())


def _judge(what: str, answered: bytes, tally: Tally) -> None:
    """Nothing, or an answer of HTTP/1.1 which is good or a problem."""
    if not answered:
        tally.refused[what, "hung up"] += 1
        return
    head, _, body = answered.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if words[0] != b"HTTP/1.1" or not words[1].isdigit():
        tally.broken.append(f"{what}: answered {answered[:100]!r}")
        return
    if (status := int(words[1])) < 400:
        tally.refused[what, str(status)] += 1
        return
    try:
        problem = json.loads(body)
        if problem.get("status") == "degraded":  # an answer of health, and no error
            tally.refused[what, "degraded"] += 1
            return
        tally.refuse(what, problem["code"], problem["detail"], status)
    except (ValueError, KeyError, TypeError, AttributeError):
        tally.broken.append(f"{what}: {status} without a problem: {body[:100]!r}")


def _read(connected: socket.socket, limit: int = 1 << 20) -> bytes:
    """What comes until the end, or until an answer is whole."""
    received = b""
    while len(received) < limit:
        with suppress(ConnectionError):
            piece = connected.recv(65536)
            received += piece
            head, whole, body = received.partition(b"\r\n\r\n")
            at = head.lower().find(b"content-length: ")
            if piece and not (
                whole and at >= 0 and len(body) >= int(head[at + 16 :].split(b"\r\n")[0])
            ):
                continue
        break
    return received


def _slow(abuse: Abuse, _: random.Random, tally: Tally) -> None:
    """Some connections that send a byte a second."""
    with ExitStack() as stack:
        slow = [stack.enter_context(_connect(abuse)) for _ in range(4)]
        request = _make(abuse)
        for at in range(20):
            if time.monotonic() > abuse.ends:
                return
            for each in slow:
                with suppress(ConnectionError):
                    each.send(request[at : at + 1])
            time.sleep(1)
        for each in slow:
            _judge("a byte a second", _read(each), tally)


def _gone(abuse: Abuse, chance: random.Random, tally: Tally) -> None:
    """Hangs up within a request, or before its answer."""
    for _ in range(10):
        with _connect(abuse) as gone:
            request = chance.choice([_make(abuse), _request("GET", "/v1/status")])
            gone.sendall(request[: chance.choice([len(request), chance.randrange(len(request))])])
            time.sleep(chance.choice([0, 0.001, 0.003, 0.01, 0.05]))
        tally.refused["gone", "went"] += 1


def _garbage(abuse: Abuse, chance: random.Random, tally: Tally) -> None:
    data = chance.choice(
        [
            chance.randbytes(chance.randint(1, 5000)),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500),
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/checkouts HTTP/1.1\r\nhost: m\r\ncontent-length: -1\r\n\r\n",
            b"POST /v1/checkouts HTTP/1.1\r\nhost: m\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
            _request("POST", "/v1/checkouts", b"[" * chance.randint(1, 5000)),
            _request("POST", "/v1/checkouts", chance.randbytes(100)),
            _request("GET", "/v1/" + "%ff" * chance.randint(1, 50)),
            _request("DELETE", "/v1/checkouts/..%2f..%2fetc"),
            _request("BREW", "/v1/status"),
        ]
    )
    with _connect(abuse) as connected:
        connected.sendall(data)
        connected.shutdown(socket.SHUT_WR)
        _judge("garbage", _read(connected), tally)


def _crowd(abuse: Abuse, chance: random.Random, tally: Tally) -> None:
    """Many idle connections at once, some of which ask for something."""
    with ExitStack() as stack:
        many = [stack.enter_context(_connect(abuse)) for _ in range(abuse.connections)]
        for each in chance.sample(many, min(40, len(many))):
            with suppress(OSError):
                each.sendall(_request("GET", "/v1/health"))
                _judge("a crowd of connections", _read(each), tally)
        time.sleep(min(3.0, max(0.0, abuse.ends - time.monotonic())))


def _huge_head(abuse: Abuse, chance: random.Random, tally: Tally) -> None:
    line = "x-long: " + "x" * chance.choice([70_000, 500_000])
    with _connect(abuse) as connected:
        with suppress(ConnectionError):
            connected.sendall(_request("GET", "/v1/health", b"", line))
        _judge("a huge head", _read(connected), tally)


def _huge_body(abuse: Abuse, chance: random.Random, tally: Tally) -> None:
    with _connect(abuse) as connected:
        with suppress(ConnectionError):
            if chance.random() < 0.5:
                connected.sendall(_request("POST", "/v1/checkouts", b" " * (3 << 20)))
            else:
                head = b"POST /v1/checkouts HTTP/1.1\r\nhost: m\r\ncontent-length: 999999999999\r\n\r\n"
                connected.sendall(head + b" " * 100_000)
        _judge("a huge body", _read(connected), tally)


def _unread(abuse: Abuse, chance: random.Random, tally: Tally) -> None:
    """Follows events, or asks for large answers, and reads nothing for a while."""
    paths = ["/v1/events", "/metrics", "/v1/openapi.json"]
    with ExitStack() as stack:
        for _ in range(6):
            connected = stack.enter_context(_connect(abuse))
            connected.sendall(_request("GET", chance.choice(paths)))
        time.sleep(min(chance.uniform(1, 20), max(0.0, abuse.ends - time.monotonic())))
    tally.refused["answers not read", "went"] += 6


def _pipelined(abuse: Abuse, chance: random.Random, tally: Tally) -> None:
    """Hundreds of requests on one connection, whose answers nobody reads."""
    with _connect(abuse) as connected:
        connected.settimeout(2)
        with suppress(OSError):
            connected.sendall(_request("GET", "/v1/openapi.json") * chance.randint(20, 400))
        time.sleep(min(2.0, max(0.0, abuse.ends - time.monotonic())))
    tally.refused["pipelined and not read", "went"] += 1
