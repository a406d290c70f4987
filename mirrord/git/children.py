"""One child process whose pipes and whose end are waited for on the event loop.

Owns the start. uvloop forks the daemon for it and waits until the child has begun: 3 ms at rest and ten times that beside others,
in which nothing else is answered, eight times for a first checkout. `subprocess` uses vfork, which copies no page table. Knows
nothing of git; whoever starts a child ends it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, BinaryIO


class Child:
    """`stdin`, `stdout` and `stderr` are None where they are no pipes."""

    stdin: asyncio.StreamWriter | None = None
    stdout: asyncio.StreamReader | None = None
    stderr: asyncio.StreamReader | None = None

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process
        self._gone = asyncio.Event()
        self._transports: list[asyncio.BaseTransport] = []
        self._end = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._end, self._reap)

    @property
    def returncode(self) -> int | None:
        """None while it runs, and until its end was noticed."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end; the status, negative for a signal."""
        await self._gone.wait()
        return self._process.returncode

    def close(self) -> None:
        """Let go of the pipes: a child's own child may keep their other ends."""
        for transport in self._transports:
            transport.close()

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._end)
        os.close(self._end)
        self._process.wait()
        self._gone.set()

    async def connect(self) -> None:
        process = self._process
        self.stdin = await self._connect_writer(process.stdin) if process.stdin else None
        self.stdout = await self._connect_reader(process.stdout) if process.stdout else None
        self.stderr = await self._connect_reader(process.stderr) if process.stderr else None

    async def _connect_reader(self, pipe: IO[bytes]) -> asyncio.StreamReader:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        self._transports.append(transport)
        return reader

    async def _connect_writer(self, pipe: IO[bytes]) -> asyncio.StreamWriter:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.connect_write_pipe(lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), pipe)
        self._transports.append(transport)
        return asyncio.StreamWriter(transport, protocol, None, loop)


async def start_child(
    argv: Sequence[str], *, environment: Mapping[str, str], cwd: str, stdin: BinaryIO | int, stdout: BinaryIO | int
) -> Child:
    """Start a process in a group of its own. Raises OSError where it cannot be started."""
    process = subprocess.Popen(  # noqa: ASYNC220  (it returns when the child has begun, a millisecond)
        argv, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, env=environment, cwd=cwd, bufsize=0, start_new_session=True
    )
    try:
        child = Child(process)
        await child.connect()
    except BaseException:
        process.kill()
        raise
    return child
