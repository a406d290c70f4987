"""Child processes, awaited on the event loop and ended with their block.

asyncio's own subprocess reaps a child as soon as it ends. From then on the number of its process
group may be reused, and its remaining members can no longer be killed safely. Here the group is
killed before the child is reaped.
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

from ..errors import ResourceError, host_error

NOTHING = subprocess.DEVNULL
PIPE = subprocess.PIPE
Popen = subprocess.Popen[bytes]
Stream = BinaryIO | int  # a file, NOTHING or PIPE

# between SIGTERM, on which git removes its temporary files, and SIGKILL
_GRACE_S = 2.0
# a pipe holds as much (pipe(7), since Linux 2.6.11)
_CHUNK = 1 << 16


def start(
    argv: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path,
    stdin: Stream = NOTHING,
    stdout: Stream = PIPE,
) -> Popen:
    """Start a command in a session of its own, with stderr as a pipe and no terminal to prompt on.

    Its stdin is a file, never a pipe that must be fed while it runs.
    """
    try:
        return subprocess.Popen(
            argv,
            env=environment,
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=PIPE,
            # an empty raw pipe reads as None, and no buffer hides bytes from the event loop
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        hint = "install git and util-linux (setpriv); see `mirrord doctor`"
        raise host_error(error, "start git") or ResourceError(
            f"cannot start git: {error}", hint=hint
        ) from error


class Child:
    """A process that is ended with its block: `async with Child(start(…)) as child`.

    Start it on the event loop's thread: PR_SET_PDEATHSIG kills a child when the *thread* that
    started it ends.
    """

    def __init__(self, process: Popen) -> None:
        self._process = process
        self._ended = anyio.Event()
        try:
            # readable once the child has ended; SIGCHLD would have one handler for the whole
            # process
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
        """End the group: SIGTERM, so that git removes its temporary files, then SIGKILL."""
        with anyio.CancelScope(shield=True):
            self.signal(signal.SIGTERM)
            try:
                with anyio.move_on_after(_GRACE_S):
                    await self.wait()
            finally:
                self.signal(signal.SIGKILL)
                for pipe in self._pipes:
                    # epoll(7) forgets what is closed: a task that waits for it would wait for ever
                    anyio.notify_closing(pipe)
                    pipe.close()
            await self.wait()

    @property
    def status(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.returncode if self._ended.is_set() else None

    async def wait(self) -> int:
        await self._ended.wait()
        return self._process.returncode

    async def read_stdout(self) -> bytes:
        """Read the next bytes; empty at the end, or without a pipe. An unread child blocks."""
        return await self._read(self._process.stdout)

    async def read_stderr(self) -> bytes:
        return await self._read(self._process.stderr)

    def signal(self, number: signal.Signals) -> None:
        """Signal the group. Its number is not reused before the leader is reaped."""
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def _read(self, pipe: IO[bytes] | None) -> bytes:
        while pipe is not None:
            await anyio.wait_readable(pipe)  # always, so that a fast writer cannot hold the loop
            piece: bytes | None = pipe.read(_CHUNK)
            if piece is not None:
                return piece
        return b""

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._ended.set()


@contextlib.contextmanager
def in_memory(data: bytes) -> Iterator[BinaryIO]:
    """Make a file in memory, to be read by a child from its beginning."""
    with open(os.memfd_create("stdin"), "w+b") as file:
        file.write(data)
        file.seek(0)
        yield file


def run_to_end(process: Popen, timeout: timedelta) -> tuple[int, bytes, bytes] | None:
    """Wait without an event loop; return status, stdout and stderr, or None after a timeout."""
    with process:
        try:
            stdout, stderr = process.communicate(timeout=timeout.total_seconds())
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, stdout or b"", stderr


def start_module(name: str, connection: socket.socket, arguments: Sequence[str]) -> Popen:
    """Run a module of ours in a new interpreter; its first argument is the number of a socket.

    Without -P, Python would look for modules in the working directory first: a json.py in a
    checkout would run as root.
    """
    number = connection.fileno()
    path = os.pathsep.join(filter(os.path.isabs, sys.path))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", name, str(number), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        cwd="/",  # a file system with a process's working directory cannot be unmounted
        stdin=NOTHING,
        pass_fds=(number,),
        start_new_session=True,
    )


def await_end(process: Popen) -> None:
    """Wait for a process that was asked to end; kill it if it does not."""
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
