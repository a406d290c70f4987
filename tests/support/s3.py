"""A real S3 server for tests: moto's, in a process and an environment of its own."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from ports import free_port
from waiting import BOUND_S

PROGRAM = Path(__file__).parents[2] / ".venv/moto/bin/moto_server"
OF_EACH_KIND = pytest.mark.parametrize(
    "store", ["directory", pytest.param("s3", marks=pytest.mark.slow)], indirect=True
)


@dataclass
class Server:
    """`environment` is what a client of it needs."""

    port: int
    buckets: int = 0

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def create(self) -> str:
        """A new bucket; answers the URL of a prefix in it."""
        self.buckets += 1
        self.ask("PUT", f"bucket{self.buckets}")
        return f"s3://bucket{self.buckets}/prefix"

    def ask(self, method: str, path: str) -> bytes:
        """One request of an administrator's."""
        url = f"http://127.0.0.1:{self.port}/{path}"
        with urllib.request.urlopen(urllib.request.Request(url, method=method)) as answer:
            return bytes(answer.read())


@cache
def shared() -> Server:
    """Start the one of this process, whose tests have a bucket each, and faults of their own links."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(running())


@contextmanager
def running(environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Skips where moto is not installed."""
    if not PROGRAM.exists():
        pytest.skip("needs moto's S3 server: `make harnesses` installs it")
    port = free_port()
    process = subprocess.Popen(
        [PROGRAM, "-H", "127.0.0.1", "-p", str(port)],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + BOUND_S
        while True:
            assert process.poll() is None
            assert time.monotonic() < deadline
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield Server(port)
    finally:
        process.kill()
        process.wait()
