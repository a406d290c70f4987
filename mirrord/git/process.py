"""Child processes: started by vfork, awaited on the event loop, gone when their block is left.

asyncio's own subprocess reaps a child when it ends, and the number of its group may be another's
then. Here the group is killed first.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, BinaryIO, Self

import anyio

from ..errors import ResourceError
from ..host.files import host_error

NOTHING = subprocess.DEVNULL
PIPE = subprocess.PIPE
Process = subprocess.Popen[bytes]
Stream = BinaryIO | int  # a file, or one of the two above

_GRACE_S = 2.0
_CHUNK = 1 << 16


def start(
    argv: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path,
    stdin: Stream = NOTHING,
    stdout: Stream = PIPE,
) -> Process:
    """Start a command as the leader of a session, with no terminal to ask on and stderr a pipe.

    Its stdin is a file, never a pipe: nobody has to write while it runs.
    """
    try:
        return subprocess.Popen(
            argv,
            env=environment,
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
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
    """A process that runs until the block is left: `async with Child(start(…)) as child`.

    Start it on the event loop's thread: a child that dies with its parent dies with the *thread*
    that started it.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._gone = anyio.Event()
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except BaseException:
            with process:
                process.kill()
            raise
        self._pipes = [pipe for pipe in (process.stdout, process.stderr) if pipe is not None]
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
        """End the group: politely, so that git removes its temporary files, then for good."""
        with anyio.CancelScope(shield=True):
            self.signal(signal.SIGTERM)
            try:
                with anyio.move_on_after(_GRACE_S):
                    await self.wait()
            finally:
                self.signal(signal.SIGKILL)
                for pipe in self._pipes:
                    anyio.notify_closing(pipe)
                    pipe.close()
            await self.wait()

    @property
    def status(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.returncode if self._gone.is_set() else None

    async def wait(self) -> int:
        """Wait for its end; answer its status."""
        await self._gone.wait()
        return self._process.returncode

    async def read_stdout(self) -> bytes:
        """The next bytes; empty at the end, or without a pipe. A child that is not read waits."""
        return await self._read(self._process.stdout)

    async def read_stderr(self) -> bytes:
        return await self._read(self._process.stderr)

    def signal(self, number: signal.Signals) -> None:
        """Signal the group: its number is its own until the leader was reaped."""
        if not self._gone.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def _read(self, pipe: IO[bytes] | None) -> bytes:
        while pipe is not None:
            await anyio.wait_readable(pipe)  # first, else a fast writer holds up the loop
            piece: bytes | None = pipe.read(_CHUNK)
            if piece is not None:
                return piece
        return b""

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._gone.set()


@contextlib.contextmanager
def in_memory(data: bytes) -> Iterator[BinaryIO]:
    """A file without a name, to be read by a child from its beginning."""
    with open(os.memfd_create("stdin"), "w+b") as file:
        file.write(data)
        file.seek(0)
        yield file


def run_to_end(process: Process, timeout: timedelta) -> tuple[int, bytes, bytes] | None:
    """Status, stdout and stderr, without an event loop; None, and the group killed, if too late."""
    with process:
        try:
            stdout, stderr = process.communicate(timeout=timeout.total_seconds())
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, stdout or b"", stderr


def start_module(name: str, connection: socket.socket, arguments: Sequence[str]) -> Process:
    """Run a module of ours in another interpreter, with a socket as its first argument.

    -P: without it, Python looks for modules in the working directory first, where a json.py in a
    checkout would run as root.
    """
    number = connection.fileno()
    path = os.pathsep.join(filter(os.path.isabs, sys.path))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", name, str(number), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        cwd="/",  # a directory that is a process's own cannot be unmounted
        stdin=NOTHING,
        pass_fds=(number,),
        start_new_session=True,
    )


def await_end(process: Process) -> None:
    """Wait for a process that was asked to end; kill it where it does not."""
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
