"""What attacks work with: requests of any uid, checkouts of a victim and of the attacker, and the list of attacks."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STRANGER, MEMBER, OWNER, VICTIM = 60901, 60902, 60903, 60904  # nobody's, as long as they are not
SECRET = "the victim's own"
_BOUND_S = 40


class BreachError(Exception):
    """The attack succeeded."""


def must(held: object, what: str) -> None:
    if not held:
        raise BreachError(what)


@dataclass(frozen=True)
class Attack:
    name: str
    uid: int
    work: Callable[[Scene], str]


ATTACKS: list[Attack] = []


def attack(uid: int) -> Callable[[Callable[[Scene], str]], Callable[[Scene], str]]:
    """Register an attack that is made with this uid, in a process of its own; it answers what stopped it."""

    def register(work: Callable[[Scene], str]) -> Callable[[Scene], str]:
        ATTACKS.append(Attack(work.__name__.replace("_", "-"), uid, work))
        return work

    return register


@dataclass
class Scene:
    """A daemon, and what was made in it for the attacks."""

    socket: Path
    group: int
    mirrord: str
    commit: str
    mirror: str
    later: str = ""
    state: Path = Path()
    config: Path = Path()
    victim: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    trap: Path = Path()
    settings: dict[str, Any] = field(default_factory=dict)
    routes: list[tuple[str, str]] = field(default_factory=list)

    @property
    def tree(self) -> Path:
        """Of the attacker's checkout."""
        return Path(self.own["path"])

    def ask(
        self, method: str, path: str, body: Any = None, *, raw: bytes | None = None
    ) -> tuple[int, bytes]:
        """Status and body, for whichever uid asks; status 0 where the daemon hangs up without an answer."""
        content = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: m\r\nconnection: close\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        )
        received = b""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_BOUND_S)
            connection.connect(str(self.socket))
            try:
                connection.sendall(head.encode("latin-1") + content)
                while piece := connection.recv(1 << 16):
                    received += piece
            except (BrokenPipeError, ConnectionResetError):
                pass
        head_, _, answer = received.partition(b"\r\n\r\n")
        return int(head_.split()[1]) if head_ else 0, answer

    def refused(self, *requests: tuple[str, str, Any]) -> str:
        """What refuses all of these."""
        seen = set()
        for method, path, body in requests:
            status, answer = self.ask(method, path, body)
            must(400 <= status < 500, f"{method} {path} {body}: {status} {answer[:200]!r}")
            seen.add(f"{status} {json.loads(answer)['code']}")
        return ", ".join(sorted(seen))

    def check_out(self, owner: int, **more: Any) -> dict[str, Any]:
        """A checkout for a uid; root asks."""
        body = {"mirror": self.mirror, "commit": self.commit, "owner": owner, "ttl": "10m", **more}
        status, answer = self.ask("POST", "/v1/checkouts", body)
        assert status == 201, answer
        made: dict[str, Any] = json.loads(answer)
        return made

    def must_live(self) -> None:
        """The daemon answers, and none of it was a bug."""
        status, answer = self.ask("GET", "/v1/health")
        must(status == 200, f"health: {status} {answer[:200]!r}")

    def run_as(self, uid: int, work: Callable[[Scene], str]) -> tuple[bool, str]:
        """Run an attack in a child with that uid; answers whether it was stopped, and by what."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            os.setsid()
            result = self._attempt(uid, work)
            os.write(writer, json.dumps(result).encode()[:60_000])
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            said = _read_in_time(pipe.fileno(), child)
        os.waitpid(child, 0)
        if not said:
            return False, f"no end after {_BOUND_S} s"
        held, what = json.loads(said)
        return held, what

    def _attempt(self, uid: int, work: Callable[[Scene], str]) -> tuple[bool, str]:
        try:
            if uid:
                gid = self.group if uid == MEMBER else uid
                os.setgroups([gid] if uid == MEMBER else [])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                ctypes.CDLL(None).prctl(
                    4, 1, 0, 0, 0
                )  # PR_SET_DUMPABLE: /proc/self is its own again
            os.chdir("/tmp")
            return True, work(self)
        except BreachError as breach:
            return False, str(breach)
        except Exception as error:  # else this child would go on as its parent
            return False, f"the attack itself failed: {error!r}"


def _read_in_time(pipe: int, child: int) -> bytes:
    said, end = b"", time.monotonic() + _BOUND_S
    os.set_blocking(pipe, False)
    while time.monotonic() < end:
        try:
            piece = os.read(pipe, 1 << 16)
        except BlockingIOError:
            time.sleep(0.005)
            continue
        if not piece:
            return said
        said += piece
    os.killpg(child, signal.SIGKILL)
    return b""


def denied(*attempts: Callable[[], object]) -> str:
    """The errors of calls that must fail."""
    seen = set()
    for attempt in attempts:
        try:
            got = attempt()
        except OSError as error:
            seen.add(errno.errorcode.get(error.errno or 0, repr(error)))
        else:
            raise BreachError(f"allowed: {got!r}")
    return ", ".join(sorted(seen))
