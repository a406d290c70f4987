"""The listening socket: simultaneous connections wait in the kernel and are accepted in small steps."""

import asyncio
import socket
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path

from starlette.responses import Response

from mirrord.api.server import HttpConnection, Server

CROWD = 300


class Count:
    """Takes every connection."""

    def __init__(self) -> None:
        self.connections = 0

    def add(self, _: HttpConnection) -> None:
        self.connections += 1

    def remove(self, _: HttpConnection) -> None:
        self.connections -= 1


def test_a_crowd_is_accepted_in_small_steps(tmp_path: Path) -> None:
    """Otherwise answers wait until thousands are accepted: half a second or more."""
    path = str(tmp_path / "socket")

    def connect() -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.setblocking(False)  # a full queue raises
        client.connect(path)
        return client

    async def main() -> list[int]:
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(path)
            listener.setblocking(False)
            count = Count()
            server = Server(Response(), count)
            await server.listen(listener)
            for _ in range(CROWD):
                stack.enter_context(closing(connect()))
            steps = []
            while count.connections < CROWD:
                before = count.connections
                await asyncio.sleep(0)
                steps.append(count.connections - before)
            await server.close(timedelta(seconds=10))
            assert not count.connections
        return steps

    assert max(asyncio.run(main())) <= 32
