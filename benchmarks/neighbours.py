"""Two users of one daemon: what 200 connections of one cost the other, who asks one thing at a time.

Both are ordinary members, in processes of their own with their own uids, and speak plain HTTP, so that what is measured is
the daemon and the machine. The crowd makes warm checkouts, resets, diffs, forks and first checkouts of ever new commits.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from measured_daemon import MEMBERS, MIRROR, Daemon
from results import Figure, Latency

CONNECTIONS = 200
_CROWD, _NEIGHBOUR = 61001, 61002
VERBS = ("checkout", "diff", "reset")

Asked = tuple[str, str, dict[str, str] | None]
Script = Generator[Asked, Any]


@dataclass
class Connection:
    """One connection that follows a script: what it yields is asked, and the answer sent into it."""

    script: Script
    socket: socket.socket
    answered: Counter[str]
    received: bytes = b""
    retry_at: float = 0.0
    asked: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.ask(next(self.script))

    def ask(self, asked: Asked) -> None:
        method, path, body = asked
        content = json.dumps(body).encode() if body else b""
        self.asked = (
            f"{method} /v1/{path} HTTP/1.1\r\nhost: m\r\ncontent-length: {len(content)}\r\n\r\n"
        ).encode() + content
        self.socket.sendall(self.asked)

    def read(self) -> bool:
        """Take what came, and go on where the answer is whole; False at the script's end."""
        piece = self.socket.recv(1 << 18)
        if not piece:
            raise ConnectionError("the daemon hung up")
        self.received += piece
        head, whole, body = self.received.partition(b"\r\n\r\n")
        at = head.lower().find(b"content-length: ")
        if not whole or (at >= 0 and len(body) < int(head[at + 16 :].split(b"\r\n")[0])):
            return True
        self.received = b""
        status = int(head.split(b" ", 2)[1])
        self.answered[str(status)] += 1
        if status in (429, 503):
            self.retry_at = time.monotonic() + json.loads(body).get("retry_after", 1)
            return True
        if status >= 400:
            raise AssertionError(body)
        try:
            self.ask(self.script.send(json.loads(body) if body[:1] == b"{" else body))
        except StopIteration:
            return False
        return True


def _make(commit: str) -> Asked:
    return "POST", "checkouts", {"mirror": MIRROR, "commit": commit}


def _release(checkout: dict[str, Any]) -> Asked:
    return "DELETE", f"checkouts/{checkout['id']}", None


def _write(checkout: dict[str, Any]) -> None:
    Path(checkout["path"], "neighbour.txt").write_text("changed\n" * 40)


def checkouts(commit: str, ends: float) -> Script:
    while time.monotonic() < ends:
        made = yield _make(commit)
        yield _release(made)


def resets(commit: str, ends: float) -> Script:
    made = yield _make(commit)
    while time.monotonic() < ends:
        _write(made)
        yield "POST", f"checkouts/{made['id']}/reset", None
    yield _release(made)


def diffs(commit: str, ends: float) -> Script:
    made = yield _make(commit)
    _write(made)
    while time.monotonic() < ends:
        yield "GET", f"checkouts/{made['id']}/diff", None
    yield _release(made)


def forks(commit: str, ends: float) -> Script:
    made = yield _make(commit)
    _write(made)
    while time.monotonic() < ends:
        fork = yield "POST", f"checkouts/{made['id']}/fork", None
        yield _release(fork)
    yield _release(made)


def first_checkouts(commits: Iterator[str], ends: float) -> Script:
    while time.monotonic() < ends and (commit := next(commits, None)):
        made = yield _make(commit)
        yield _release(made)


def be_crowd(path: str, commit: str, cold: list[str], ends: float) -> Counter[str]:
    """Answers by status."""
    _become(_CROWD)
    commits = iter(cold)
    kinds: list[Callable[[], Script]] = [
        *[lambda: checkouts(commit, ends)] * 4,
        *[lambda: resets(commit, ends)] * 2,
        *[lambda: diffs(commit, ends)] * 2,
        lambda: forks(commit, ends),
        lambda: first_checkouts(commits, ends),
    ]
    answered: Counter[str] = Counter()
    waiting: set[Connection] = set()
    with selectors.DefaultSelector() as selector:
        for number in range(CONNECTIONS):
            connected = socket.socket(socket.AF_UNIX)
            connected.connect(path)
            each = Connection(kinds[number % len(kinds)](), connected, answered)
            selector.register(connected, selectors.EVENT_READ, each)
        while selector.get_map():
            for key, _ in selector.select(0.05):
                each = key.data
                if not each.read():
                    selector.unregister(each.socket)
                    each.socket.close()
                elif each.retry_at:
                    waiting.add(each)
            now = time.monotonic()
            for each in [each for each in waiting if each.retry_at <= now]:
                waiting.remove(each)
                each.retry_at = 0.0
                each.socket.sendall(each.asked)
    return answered


def be_neighbour(path: str, commit: str, seconds: float) -> dict[str, list[float]]:
    """Seconds of each verb."""
    _become(_NEIGHBOUR)
    taken: dict[str, list[float]] = {verb: [] for verb in VERBS}
    ends = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(path)
        each = Connection(_neighbour(commit, ends, taken), connected, Counter())
        while each.read():
            if each.retry_at:
                raise AssertionError("the neighbour was refused")
    return taken


def _neighbour(commit: str, ends: float, taken: dict[str, list[float]]) -> Script:
    while time.monotonic() < ends:
        began = time.perf_counter()
        made = yield _make(commit)
        taken["checkout"].append(time.perf_counter() - began)
        _write(made)
        began = time.perf_counter()
        yield "GET", f"checkouts/{made['id']}/diff", None
        taken["diff"].append(time.perf_counter() - began)
        began = time.perf_counter()
        yield "POST", f"checkouts/{made['id']}/reset", None
        taken["reset"].append(time.perf_counter() - began)
        yield _release(made)


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(MEMBERS, MEMBERS, MEMBERS)
    os.setresuid(uid, uid, uid)


def compare(daemon: Daemon, line: list[str], seconds: float) -> tuple[list[Latency], list[Figure]]:
    """The neighbour alone, with the crowd, and alone again, `rounds` times."""
    taken: dict[tuple[str, bool], list[float]] = {}
    answered: Counter[str] = Counter()
    cold = line[1:]
    for number in range(2):
        for crowded in (False, True):
            with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
                if crowded:
                    mine = cold[number::2]
                    at = str(daemon.socket), line[0], mine, time.monotonic() + seconds + 3
                    crowd = pool.submit(be_crowd, *at)
                    time.sleep(2)
                    spent = daemon.cpu_s()
                asked = str(daemon.socket), line[0], seconds if crowded else seconds / 2
                found = pool.submit(be_neighbour, *asked).result()
                for verb, each in found.items():
                    taken.setdefault((verb, crowded), []).extend(each)
                if crowded:
                    print(
                        f"  daemon and workers {(daemon.cpu_s() - spent) / seconds:.2f} processors"
                    )
                    answered += crowd.result()
            while daemon.has_trash():
                time.sleep(0.05)
    latencies = [
        Latency.of(f"{verb}, {'with' if crowded else 'without'} the crowd", each)
        for (verb, crowded), each in taken.items()
    ]
    p50 = {each.what: each.p50_ms for each in latencies}
    figures = [
        Figure(
            f"{verb} of a user while another has {CONNECTIONS} connections, p50 with / without",
            p50[f"{verb}, with the crowd"] / p50[f"{verb}, without the crowd"],
            "times",
            "under 1.5",
        )
        for verb in VERBS
    ]
    each_s = answered.total() / (2 * (seconds + 3))
    figures.append(Figure("answers to the crowd meanwhile", each_s, "a second"))
    print(f"  answers to the crowd: {dict(answered)}", flush=True)
    return latencies, figures
