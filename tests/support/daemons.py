"""A real daemon process for tests: its own state directory, configuration and socket, started, waited for, stopped by pid."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import anyone
from forked import Forked, Forker
from mount_table import mount_lines
from waiting import BOUND_S

from mirrord.api.application import Routes
from mirrord.errors import MirrordError

_ROUTES = Routes()


class Daemon:
    """One daemon. `root` holds its configuration, state and socket; it must be short, because a socket's path must be."""

    def __init__(
        self,
        root: Path,
        text: str = "",
        *,
        environment: Mapping[str, str] | None = None,
        user: int | None = None,
    ) -> None:
        self.root = root
        self.config = root / "config.toml"
        self.state_dir = root / "state"
        self.socket = root / "s"
        self.log_path = root / "daemon.log"
        self.user = user
        self.process: subprocess.Popen[bytes] | Forked | None = None
        self._environment = {
            **os.environ,
            "PYTHONWARNINGS": "",
            "PYTHONUNBUFFERED": "1",  # a test reads a line as soon as its answer is there
            **(environment or {}),
        }
        self.write_config(text)

    def upgrade(self, release: Path) -> None:
        """Start the release in a directory from now on."""
        self._environment["PYTHONPATH"] = str(release)

    def write_config(self, text: str) -> None:
        """Everything but the two paths is the test's."""
        self.config.write_text(f'state_dir = "{self.state_dir}"\nsocket = "{self.socket}"\n{text}')

    @property
    def command(self) -> list[str]:
        python = [sys.executable] if self.user is None else anyone.python()
        return [*python, "-P", "-m", "mirrord.daemon", "--config", str(self.config)]

    @property
    def _can_be_forked(self) -> bool:
        """Where it is this Python's, and started by no other command."""
        is_ours = self.user is None or anyone.python()[-1] == sys.executable
        is_plain = is_ours and type(self).command is Daemon.command
        return is_plain and _forker().can_fork(self._environment)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    @property
    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]

    def start(self, *, wait: bool = True, prefix: tuple[str, ...] = ()) -> Daemon:
        """Start it; with `wait`, until it is open."""
        with self.log_path.open("ab") as log:
            if self._can_be_forked and not prefix:
                arguments = ["--config", str(self.config)]
                self.process = _forker().start(
                    arguments, self._environment, log.fileno(), self.user
                )
            else:
                self.process = subprocess.Popen(
                    [*prefix, *self.command],
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    user=self.user,
                    group=self.user,
                )
        if wait:
            self.wait_until_healthy()
        return self

    def wait_until_healthy(self, bound_s: float = 120.0) -> None:
        """Until requests are answered and the engine is open; a degraded daemon (a full disk, say) is open too."""
        deadline = time.monotonic() + bound_s
        while time.monotonic() < deadline:
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(
                    f"the daemon ended with {self.process.returncode}:\n{self.log}"
                )
            if self.is_open():
                return
            time.sleep(0.02)
        raise AssertionError(f"the daemon did not become healthy in {bound_s} s:\n{self.log}")

    def is_open(self) -> bool:
        with suppress(OSError):
            # unlike health it is answered when the engine is open, to any peer
            status, _, body = self.get("/v1/checkouts/none")
            return status != 503 or b"cannot open its state" not in body
        return False

    def stop(self, number: int = signal.SIGTERM, bound_s: float = 40.0) -> int:
        """Send a signal and wait for the end; answers the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(bound_s)
        self.process = None
        return status

    def kill(self) -> None:
        """As a crash would: SIGKILL, nothing is tidied up."""
        self.stop(signal.SIGKILL)

    # -- plain HTTP, with none of our own code in it ----------------------------------------------------------------------

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(BOUND_S)
        try:
            connection.connect(str(self.socket))
        except OSError:
            connection.close()
            raise
        return connection

    def exchange(self, raw: bytes) -> bytes:
        """Send bytes, and read until the daemon hangs up, which it may do before it has read them all."""
        received = b""
        with self.connect() as connection:
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(raw)
            with suppress(ConnectionResetError):
                while chunk := connection.recv(65536):
                    received += chunk
        return received

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers in lower case, body. `body` is bytes, or anything JSON."""
        content = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        lines = {
            "host": "mirrord",
            "connection": "close",
            "content-length": str(len(content)),
            **(headers or {}),
        }
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(
            f"{name}: {value}\r\n" for name, value in lines.items()
        )
        answer = parse_response(self.exchange(head.encode() + b"\r\n" + content))
        _must_be_documented(method, path, answer)
        return answer

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        return self.request("GET", path, headers=headers)

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """The answer read as JSON, whatever its status."""
        return json.loads(self.request(method, path, body)[2])


@cache
def _forker() -> Forker:
    return Forker()


def _must_be_documented(method: str, path: str, answer: tuple[int, dict[str, str], bytes]) -> None:
    """Whatever problem a test provokes, the document has its status and its code at that endpoint."""
    status, headers, body = answer
    if headers.get("content-type") != "application/problem+json" or method == "HEAD":
        return
    try:
        endpoint, _ = _ROUTES.find(method, path.partition("?")[0].encode())
    except MirrordError:
        return  # no endpoint, so nothing that could be documented
    code = json.loads(body)["code"]
    assert (status, code) in {(error.http_status, error.code) for error in endpoint.errors}, (
        f"{method} {path}: {code}"
    )


def parse_response(raw: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = raw.partition(b"\r\n\r\n")
    if not head:
        raise ConnectionResetError("no answer")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join(_iter_chunks(body))
    return int(first.split()[1]), headers, body


def _iter_chunks(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        yield body[:length]
        body = body[length + 2 :]


def unmount_below(root: Path) -> None:
    """Take away the mounts of checkouts that nobody released: they outlive the daemon, as they should."""
    lines = mount_lines()
    for target in sorted((line.split()[4] for line in lines), reverse=True):
        if target.startswith(f"{root}/"):
            subprocess.run(["umount", "--lazy", target], check=False, capture_output=True)


@contextmanager
def daemon(
    text: str = "",
    *,
    start: bool = True,
    environment: Mapping[str, str] | None = None,
    user: int | None = None,
    kind: type[Daemon] = Daemon,
) -> Iterator[Daemon]:
    """A daemon in a short scratch directory, stopped at the end whatever happened."""
    with tempfile.TemporaryDirectory(prefix="md-", ignore_cleanup_errors=True) as scratch:
        root = Path(scratch)
        root.chmod(0o755)
        if user is not None:
            os.chown(root, user, user)
        made = kind(root, text, environment=environment, user=user)
        try:
            yield made.start() if start else made
        finally:
            if made.process is not None:
                made.stop()
            unmount_below(root)
