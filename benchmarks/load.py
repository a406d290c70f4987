"""Load: requests as fast as they go, from Python clients, from a lean one, and by the kernel without any daemon.

A Python client costs the machine about as much as the daemon does. The lean one is plain HTTP on open connections, from two
processes, as `wrk` would send it; the kernel alone is the system calls of a checkout and its removal, in two processes. Each
function runs in a process of its own and answers how often it came round.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from mirrord import AsyncClient, Client
from mirrord.checkouts.overlay import remove_layer
from mirrord.host.files import opened
from mirrord.host.mounts import attach, make_overlay, umount


def python_client(socket_path: str, mirror: str, commit: str, seconds: float) -> int:
    done = 0
    with Client(socket_path) as client:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with client.checkout(mirror=mirror, commit=commit) as checkout:
                assert (checkout.path / ".git").is_dir()
            done += 1
    return done


def tasks_of_one_client(socket_path: str, count: int, seconds: float) -> int:
    """`health`, by many tasks on one `AsyncClient`."""

    async def main() -> int:
        async with AsyncClient(socket_path) as client:
            return await _come_round([client.health] * count, seconds)

    return asyncio.run(main())


def tasks_of_streams(socket_path: str, count: int, seconds: float) -> int:
    """The floor beside it: bare streams, which read nothing of the answer but its length."""

    async def main() -> int:
        streams = [await asyncio.open_unix_connection(socket_path) for _ in range(count)]
        done = await _come_round([partial(_ask, *each) for each in streams], seconds)
        for _, writer in streams:
            writer.close()
        return done

    return asyncio.run(main())


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /v1/health HTTP/1.1\r\nhost: m\r\n\r\n")
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))


async def _come_round(calls: list[Callable[[], Awaitable[object]]], seconds: float) -> int:
    ends = time.monotonic() + seconds

    async def work(call: Callable[[], Awaitable[object]]) -> int:
        done = 0
        while time.monotonic() < ends:
            await call()
            done += 1
        return done

    return sum(await asyncio.gather(*map(work, calls)))


def lean_clients(socket_path: str, mirror: str, commit: str, seconds: float, count: int) -> int:
    """`count` connections, each with one request under way."""
    ends = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for _ in range(count):
            lean = _Lean(socket_path, mirror, commit, ends)
            selector.register(lean.connection, selectors.EVENT_READ, lean)
        done = 0
        while selector.get_map():
            for key, _ in selector.select():
                lean = key.data
                lean.read()
                if lean.is_over:
                    selector.unregister(lean.connection)
                    lean.connection.close()
                    done += lean.done
    return done


class _Lean:
    """One connection: a POST, the DELETE of what came, and again."""

    def __init__(self, socket_path: str, mirror: str, commit: str, ends: float) -> None:
        body = json.dumps({"mirror": mirror, "commit": commit}).encode()
        self._start = b"POST /v1/checkouts HTTP/1.1\r\nhost: m\r\ncontent-length: %d\r\n\r\n%s" % (
            len(body),
            body,
        )
        self._ends = ends
        self._received = b""
        self._held = b""
        self.done = 0
        self.is_over = False
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(socket_path)
        self.connection.sendall(self._start)

    def read(self) -> None:
        self._received += self.connection.recv(65536)
        head, whole, body = self._received.partition(b"\r\n\r\n")
        if not whole or (not self._held and not body.endswith(b"}}")):
            return
        self._received = b""
        if self._held:
            self._released(head)
        else:
            self._checked_out(head, body)

    def _checked_out(self, head: bytes, body: bytes) -> None:
        assert head.startswith(b"HTTP/1.1 201"), body
        self._held = json.loads(body)["id"].encode()
        self.connection.sendall(b"DELETE /v1/checkouts/%s HTTP/1.1\r\nhost: m\r\n\r\n" % self._held)

    def _released(self, head: bytes) -> None:
        assert head.startswith(b"HTTP/1.1 204"), head
        self._held = b""
        self.done += 1
        if time.monotonic() < self._ends:
            self.connection.sendall(self._start)
        else:
            self.is_over = True


def kernel_alone(area: Path, lower: str, seconds: float) -> int:
    """Five mkdirs, a mount, an unmount, and all that removed again."""
    done = 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        at = f"{area}/kernel-{os.getpid()}-{done}"
        for path in (at, f"{at}/tree", f"{at}/layer", f"{at}/layer/upper", f"{at}/layer/work"):
            os.mkdir(path)
        with ExitStack() as stack:
            names = (lower, f"{at}/layer/upper", f"{at}/layer/work")
            below, upper, work = (
                stack.enter_context(opened(os.open(name, os.O_PATH))) for name in names
            )
            attach(stack.enter_context(opened(make_overlay([below], upper, work))), f"{at}/tree")
        umount(f"{at}/tree")
        assert remove_layer(Path(at, "layer"))
        os.rmdir(f"{at}/tree")
        os.rmdir(at)
        done += 1
    return done
