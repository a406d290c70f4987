"""git as a child process: the only place that starts one.

Every git gets an empty environment, an explicit repository, safe configuration that outranks all files, its own process group, a
deadline and a bound on its output; what it says on stderr becomes one of our errors. Nothing of a URL's secrets is on a command
line, in an error or in a log. The whole group is killed when the deadline passes or the caller is cancelled; git itself dies with
the daemon, and what its own children leave behind is cleaned at the next start (`mirrors/leftovers.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import anyio
import structlog

from ..errors import DeadlineError, GitFailedError, MirrordError, ResourceError, UpstreamError, UpstreamTimeoutError
from ..protocol import Progress
from .environment import Remote, child_environment
from .failures import HttpAnswer, failure, masked_url
from .output import StderrReader
from .priority import before_git

__all__ = ["DEFAULT_TIMEOUT", "Git", "GitResult", "Remote", "masked_url", "run_git_sync"]

DEFAULT_TIMEOUT = timedelta(minutes=10)
_LIMIT_BYTES = 256 * 1024**2
_GRACE = timedelta(seconds=2)
_CHUNK = 1 << 16
# util-linux; a preexec_fn may deadlock in a process that has threads. What systemd lets the daemon do to files is not for git.
_DIE_WITH_PARENT = ("setpriv", "--ambient-caps=-all", "--pdeathsig", "KILL")


log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class GitResult:
    status: int
    stdout: bytes
    stderr: str

    @property
    def lines(self) -> list[str]:
        return self.stdout.decode("utf-8", "surrogateescape").splitlines()


class Git:
    """Starts git for the daemon. `home` becomes HOME: a directory of ours with one small file in it."""

    def __init__(self, *, home: Path) -> None:
        self._home = home
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        # upload-pack of a local upstream gets none of our environment's configuration, and refuses a repository of another user
        (home / ".gitconfig").write_text("[safe]\n\tdirectory = *\n", encoding="ascii")

    async def run(
        self,
        *args: str,
        git_dir: Path | None = None,
        work_tree: Path | None = None,
        stdin: bytes | Path | io.RawIOBase | None = None,
        env: Mapping[str, str] | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        quiet_timeout: timedelta | None = None,
        progress: Callable[[Progress], None] | None = None,
        stdout_path: Path | None = None,
        stdout_limit_bytes: int = _LIMIT_BYTES,
        ok: Collection[int] = (0,),
        quarantine_objects: Path | None = None,
        remote: Remote | None = None,
        memory_bytes: int | None = None,
        doing: str | None = None,
    ) -> GitResult:
        """Run one git command to its end.

        `stdin` is bytes, a file's path, or an open file that is read from where it stands. `quiet_timeout` is the longest time
        without any output. `quarantine_objects` receives new objects in place of the repository. `remote` says that the command
        talks to an upstream, and holds its credentials. `memory_bytes` bounds what each process of it may allocate. `doing`
        completes "cannot …" in an error. A status that is not in `ok` raises the error that stderr asks for.
        """
        doing = doing or f"run git {args[0]}"
        environment = child_environment(home=self._home, remote=remote, extra=env)
        environment |= _quarantine(quarantine_objects, git_dir)
        with _files(stdin, stdout_path) as (source, sink):
            argv = [*_bounded(memory_bytes), *_argv(args, git_dir, work_tree)]
            child = await _start(argv, environment, work_tree or git_dir, source, sink)
            reading = _Reading(child, stdin if isinstance(stdin, bytes) else None, StderrReader(progress), stdout_limit_bytes)
            started = anyio.current_time()
            finished = await reading.finish(timeout, quiet_timeout)
        log.debug("git.ended", command=doing, status=child.returncode, duration_s=round(anyio.current_time() - started, 3))
        if not finished:
            raise _late(doing, timeout, quiet_timeout, upstream=remote is not None)
        if reading.overflowed:
            raise GitFailedError(f"cannot {doing}: its output is larger than {stdout_limit_bytes} bytes")
        result = GitResult(child.returncode or 0, bytes(reading.stdout), reading.stderr.text())
        if result.status not in ok:
            raise _failure(doing, result, remote, reading.stderr.http)
        if remote is not None and reading.stderr.http.is_garbage:
            raise UpstreamError(f"cannot {doing}: upstream answers, but not as git does", hint="check the upstream URL")
        return result

    @contextlib.asynccontextmanager
    async def stream(
        self,
        *args: str,
        git_dir: Path,
        stdin: bytes = b"",
        quarantine_objects: Path | None = None,
        quiet_timeout: timedelta = DEFAULT_TIMEOUT,
        doing: str | None = None,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Read what git writes while it comes; git waits when its reader does. Leaving the block ends git.

        The iterator ends in the error that stderr asks for, when git failed after all.
        """
        doing = doing or f"run git {args[0]}"
        environment = child_environment(home=self._home) | _quarantine(quarantine_objects, git_dir)
        child = await _start(_argv(args, git_dir, None), environment, git_dir, subprocess.PIPE, subprocess.PIPE)
        reading = _Reading(child, stdin, StderrReader(), 0)
        pieces = reading.pieces(quiet_timeout, doing)
        try:
            yield pieces
        finally:
            with anyio.CancelScope(shield=True):
                await pieces.aclose()
                await _kill(child)


_HUNG_UP = (BrokenPipeError, ConnectionResetError, RuntimeError)
"""What a write to a child that ended raises; the last where uvloop (0.23) noticed before us, and has closed the pipe."""


class _Reading:
    """The three streams of one child, read at the same time and within bounds."""

    def __init__(self, child: asyncio.subprocess.Process, stdin: bytes | None, stderr: StderrReader, limit_bytes: int) -> None:
        self._child = child
        self._stdin = stdin
        self._limit_bytes = limit_bytes
        self._touch: Callable[[], None] = lambda: None
        self.stdout = bytearray()
        self.stderr = stderr
        self.overflowed = False

    async def finish(self, timeout: timedelta, quiet_timeout: timedelta | None) -> bool:
        """Wait for the end. False when a deadline passed; the child and its children are gone either way."""
        end = anyio.current_time() + timeout.total_seconds()
        with anyio.CancelScope() as scope:
            self._touch = lambda: _extend(scope, end, quiet_timeout)
            self._touch()
            try:
                await asyncio.gather(self._write(), self._read_stdout(), self._read_stderr())
                await self._child.wait()
            finally:
                with anyio.CancelScope(shield=True):
                    await _kill(self._child)
        return not scope.cancelled_caught

    async def pieces(self, quiet_timeout: timedelta, doing: str) -> AsyncGenerator[bytes]:
        """What comes on stdout, as it comes; at the end the error that stderr asks for."""
        pipe = self._child.stdout
        beside = asyncio.gather(self._write(), self._read_stderr())
        try:
            while pipe is not None and (chunk := await asyncio.wait_for(pipe.read(_CHUNK), quiet_timeout.total_seconds())):
                yield chunk
            await beside
            await self._child.wait()
        except TimeoutError as error:
            raise _late(doing, quiet_timeout, None, upstream=False) from error
        finally:
            beside.cancel()
        if self._child.returncode:
            raise _failure(doing, GitResult(self._child.returncode, b"", self.stderr.text()), None, HttpAnswer())

    async def _write(self) -> None:
        pipe = self._child.stdin
        if pipe is None:
            return
        with contextlib.suppress(*_HUNG_UP):  # it ended early; its status says why
            pipe.write(self._stdin or b"")
            await pipe.drain()
        with contextlib.suppress(*_HUNG_UP):
            pipe.close()
            await pipe.wait_closed()

    async def _read_stdout(self) -> None:
        pipe = self._child.stdout
        while pipe is not None and (chunk := await pipe.read(_CHUNK)):
            self._touch()
            if len(self.stdout) + len(chunk) > self._limit_bytes:
                self.overflowed = True
                _signal(self._child, signal.SIGKILL)
                return
            self.stdout += chunk

    async def _read_stderr(self) -> None:
        pipe = self._child.stderr
        while pipe is not None and (chunk := await pipe.read(_CHUNK)):
            self._touch()
            self.stderr.feed(chunk)


def _extend(scope: anyio.CancelScope, end: float, quiet_timeout: timedelta | None) -> None:
    quiet_end = end if quiet_timeout is None else anyio.current_time() + quiet_timeout.total_seconds()
    scope.deadline = min(end, quiet_end)


async def _start(
    argv: list[str], environment: dict[str, str], cwd: Path | None, stdin: BinaryIO | int, stdout: BinaryIO | int
) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=stdin,
            stdout=stdout,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            cwd=str(cwd or "/"),
            start_new_session=True,  # an own process group, and no terminal to ask anybody on
        )
    except OSError as error:
        raise _cannot_start(error) from error


async def _kill(child: asyncio.subprocess.Process) -> None:
    """End the whole group: politely, so that git removes its temporary files, then for good."""
    if child.returncode is None:
        _signal(child, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(child.wait(), _GRACE.total_seconds())
    _signal(child, signal.SIGKILL)
    await child.wait()


def _signal(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


# -- the same without an event loop -----------------------------------------------------------------------------------


def run_git_sync(
    *args: str,
    git_dir: Path | None = None,
    work_tree: Path | None = None,
    stdin: bytes | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    stdout_path: Path | None = None,
    ok: Collection[int] = (0,),
    quarantine_objects: Path | None = None,
    home: Path = Path("/nonexistent"),
    doing: str | None = None,
) -> GitResult:
    """`Git.run` for worker processes and for verbs that need no daemon. Never talks to an upstream."""
    doing = doing or f"run git {args[0]}"
    environment = child_environment(home=home, extra=env) | _quarantine(quarantine_objects, git_dir)
    with _files(stdin, stdout_path) as (source, sink):
        result = _run_to_end(_argv(args, git_dir, work_tree), environment, work_tree or git_dir, stdin, source, sink, timeout)
    if result is None:
        raise _late(doing, timeout, None, upstream=False)
    if result.status not in ok:
        raise _failure(doing, result, None, HttpAnswer())
    return result


def _run_to_end(
    argv: list[str],
    environment: dict[str, str],
    cwd: Path | None,
    stdin: bytes | Path | None,
    source: BinaryIO | int,
    sink: BinaryIO | int,
    timeout: timedelta,
) -> GitResult | None:
    try:
        child = subprocess.Popen(
            argv, stdin=source, stdout=sink, stderr=subprocess.PIPE, env=environment, cwd=cwd or "/", start_new_session=True
        )
    except OSError as error:
        raise _cannot_start(error) from error
    reader = StderrReader()
    try:
        stdout, stderr = child.communicate(stdin if isinstance(stdin, bytes) else None, timeout=timeout.total_seconds())
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
    reader.feed(stderr)
    return GitResult(child.returncode, stdout or b"", reader.text())


# -- parts of both ----------------------------------------------------------------------------------------------------


def _argv(args: tuple[str, ...], git_dir: Path | None, work_tree: Path | None) -> list[str]:
    where = [f"--git-dir={git_dir}"] if git_dir else []
    tree = [f"--work-tree={work_tree}"] if work_tree else []
    return [*before_git(), *_DIE_WITH_PARENT, "git", *where, *tree, *args]


def _bounded(memory_bytes: int | None) -> list[str]:
    """RLIMIT_DATA: since Linux 4.7 it counts private writable mappings, and so not the packs that git maps to read."""
    return [] if memory_bytes is None else ["prlimit", f"--data={memory_bytes}"]


def _quarantine(objects: Path | None, git_dir: Path | None) -> dict[str, str]:
    """New objects go to `objects`, old ones are read from the repository; git refuses to move refs meanwhile."""
    if objects is None or git_dir is None:
        return {}
    return {
        "GIT_OBJECT_DIRECTORY": str(objects),
        "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(git_dir / "objects"),
        "GIT_QUARANTINE_PATH": str(objects),
    }


@contextlib.contextmanager
def _files(
    stdin: bytes | Path | io.RawIOBase | None, stdout_path: Path | None
) -> Iterator[tuple[BinaryIO | int, BinaryIO | int]]:
    with contextlib.ExitStack() as stack:
        source: BinaryIO | int = subprocess.DEVNULL if stdin is None else subprocess.PIPE
        if isinstance(stdin, Path):
            source = stack.enter_context(stdin.open("rb"))
        elif isinstance(stdin, io.RawIOBase):
            source = stdin.fileno()
        sink: BinaryIO | int = subprocess.PIPE
        if stdout_path is not None:
            sink = stack.enter_context(stdout_path.open("wb"))
        yield source, sink


def _failure(doing: str, result: GitResult, remote: Remote | None, http: HttpAnswer) -> MirrordError:
    return failure(
        doing=doing,
        status=result.status,
        stderr=result.stderr,
        upstream=remote is not None,
        http=http,
        secrets=remote.secrets if remote else (),
    )


def _late(doing: str, timeout: timedelta, quiet_timeout: timedelta | None, *, upstream: bool) -> MirrordError:
    seconds = min(timeout, quiet_timeout or timeout).total_seconds()
    if upstream:
        return UpstreamTimeoutError(
            f"cannot {doing}: upstream was silent for {seconds:g} s"
            if quiet_timeout
            else f"cannot {doing}: no end after {seconds:g} s",
            hint="try again later, or raise upstream.timeout",
        )
    return DeadlineError(f"cannot {doing}: no end after {seconds:g} s", hint="the disk may be slow or the repository damaged")


def _cannot_start(error: OSError) -> ResourceError:
    return ResourceError(f"cannot start git: {error}", hint="install git and util-linux (setpriv); see `mirrord doctor`")
