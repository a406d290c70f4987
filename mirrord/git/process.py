"""Child processes: started by vfork, waited for on the event loop, and gone when the block that they were started for is left.

Owns their start, their pipes and the end of their whole group. Each descriptor has one owner, who closes it once; the loop only
says when it can be read. asyncio's own way is not taken: uvloop (0.23) forks the daemon for each child, 2.8 ms of processor time
and 13 to 20 ms beside other work in which nothing else moves, against 0.35 and 1 to 3; and a pipe that is handed to it is closed
twice, which in a process of several threads hits what somebody else has opened since. What git is, and says, is `command.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, BinaryIO, Self

import anyio

from ..errors import ResourceError
from ..host.files import host_error

NOTHING = subprocess.DEVNULL
PIPE = subprocess.PIPE

_GRACE = timedelta(seconds=2)
_CHUNK = 1 << 16

Stream = BinaryIO | int
"""A file, or one of the two above."""


@dataclass(frozen=True, slots=True)
class Command:
    """What to start. stderr is always a pipe; `stdin` never is: who reads what nobody has to write cannot break it."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    cwd: Path
    stdin: Stream = NOTHING
    stdout: Stream = PIPE

    def start(self) -> subprocess.Popen[bytes]:
        """As the leader of a session and a group of its own: with no terminal to ask anybody on."""
        try:
            return subprocess.Popen(
                self.argv,
                env=self.environment,
                cwd=self.cwd,
                stdin=self.stdin,
                stdout=self.stdout,
                stderr=PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            hint = "install git and util-linux (setpriv); see `mirrord doctor`"
            raise host_error(error, "start git") or ResourceError(
                f"cannot start git: {error}", hint=hint
            ) from error


class Child:
    """A process that runs until the block is left: `async with Child(command) as child`. Belongs to one event loop.

    It is started by the loop's own thread: a child that is to die with its parent dies with the *thread* that started it.
    """

    def __init__(self, command: Command) -> None:
        self._process = command.start()
        self._pipes = [
            pipe for pipe in (self._process.stdout, self._process.stderr) if pipe is not None
        ]
        self._gone = anyio.Event()
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except BaseException:
            with self._process:
                self._process.kill()
            raise
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self._end()

    @property
    def status(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.returncode if self._gone.is_set() else None

    async def wait(self) -> int:
        """Wait for its end; its status."""
        await self._gone.wait()
        return self._process.returncode

    async def read_stdout(self) -> bytes:
        """What comes next; nothing at the end, and where it is no pipe. Who does not read holds the child up."""
        return await _read(self._process.stdout)

    async def read_stderr(self) -> bytes:
        return await _read(self._process.stderr)

    def signal(self, number: signal.Signals) -> None:
        """To the whole group, whose number cannot be anybody else's before its leader was reaped."""
        if not self._gone.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def _end(self) -> None:
        """End the group: politely, so that git removes its temporary files, then for good. Then nothing of it is left open."""
        self.signal(signal.SIGTERM)
        try:
            with anyio.move_on_after(_GRACE.total_seconds()):
                await self.wait()
        finally:
            self.signal(signal.SIGKILL)
            for pipe in self._pipes:
                anyio.notify_closing(pipe)
                pipe.close()
        await self.wait()

    def _reap(self) -> None:
        """It ended; so does what is left of its group. Happens whether or not anybody waits."""
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._gone.set()


async def _read(pipe: IO[bytes] | None) -> bytes:
    """Waits first, so that a child that writes without pause does not hold the loop."""
    while pipe is not None:
        await anyio.wait_readable(pipe)
        piece: bytes | None = pipe.read(_CHUNK)
        if piece is not None:
            return piece
    return b""


@contextlib.contextmanager
def in_memory(data: bytes) -> Iterator[BinaryIO]:
    """A file without a name that a child reads from its beginning."""
    with open(os.memfd_create("stdin"), "w+b") as file:
        file.write(data)
        file.seek(0)
        yield file


def run_to_end(command: Command, timeout: timedelta) -> tuple[int, bytes, bytes] | None:
    """The same without an event loop: status, stdout and stderr; None where it took longer, and the whole group is gone."""
    with command.start() as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout.total_seconds())
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, stdout or b"", stderr


Process = subprocess.Popen[bytes]


def start_module(name: str, connection: socket.socket, arguments: Sequence[str]) -> Process:
    """Run a module of ours in another interpreter, with a socket as its first argument.

    -P: without it the working directory is looked in for modules, where a json.py in a checkout would
    run as root.
    """
    number = connection.fileno()
    path = os.pathsep.join(filter(os.path.isabs, sys.path))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", name, str(number), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        cwd="/",  # a directory that is some process's own cannot be unmounted
        stdin=NOTHING,
        pass_fds=(number,),
        start_new_session=True,
    )


def await_end(process: Process) -> None:
    """Wait for a process that was asked to end; kill it where it does not."""
    try:
        process.wait(_GRACE.total_seconds())
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
