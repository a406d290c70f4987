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
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import anyio
import structlog

from ..errors import (
    DeadlineError,
    GitFailedError,
    MirrordError,
    UpstreamError,
    UpstreamTimeoutError,
)
from ..protocol import Progress
from .environment import Remote, child_environment, make_home
from .errors import HttpAnswer, failure, masked_url
from .output import StderrReader
from .priority import before_git
from .process import NOTHING, PIPE, Child, Command, Stream, in_memory, run_to_end

__all__ = ["DEFAULT_TIMEOUT", "Git", "GitResult", "Remote", "masked_url", "run_git_sync"]

DEFAULT_TIMEOUT = timedelta(minutes=10)
_LIMIT_BYTES = 256 * 1024**2
_NOWHERE = Path("/")
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
        make_home(home)

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
            command = Command(argv, environment, work_tree or git_dir or _NOWHERE, source, sink)
            began = anyio.current_time()
            async with Child(command) as child:
                reading = _Reading(child, StderrReader(progress), stdout_limit_bytes)
                finished = await reading.finish(timeout, quiet_timeout)
        log.debug(
            "git.ended",
            command=doing,
            status=child.status,
            duration_s=round(anyio.current_time() - began, 3),
        )
        if not finished:
            raise _late(doing, timeout, quiet_timeout, upstream=remote is not None)
        if reading.overflowed:
            raise GitFailedError(
                f"cannot {doing}: its output is larger than {stdout_limit_bytes} bytes"
            )
        result = GitResult(child.status or 0, bytes(reading.stdout), reading.stderr.text())
        if result.status not in ok:
            raise _failure(doing, result, remote, reading.stderr.http)
        if remote is not None and reading.stderr.http.is_garbage:
            raise UpstreamError(
                f"cannot {doing}: upstream answers, but not as git does",
                hint="check the upstream URL",
            )
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
        with _files(stdin, None) as (source, sink):
            async with Child(
                Command(_argv(args, git_dir, None), environment, git_dir, source, sink)
            ) as child:
                pieces = _Reading(child, StderrReader(), 0).pieces(quiet_timeout, doing)
                async with contextlib.aclosing(pieces):
                    yield pieces


class _Reading:
    """What one child writes, both streams at the same time and within bounds."""

    def __init__(self, child: Child, stderr: StderrReader, limit_bytes: int) -> None:
        self._child = child
        self._limit_bytes = limit_bytes
        self._touch: Callable[[], None] = lambda: None
        self.stdout = bytearray()
        self.stderr = stderr
        self.overflowed = False

    async def finish(self, timeout: timedelta, quiet_timeout: timedelta | None) -> bool:
        """Read to the end. False when a deadline passed before it."""
        end = anyio.current_time() + timeout.total_seconds()
        with anyio.CancelScope() as scope:
            self._touch = lambda: _extend(scope, end, quiet_timeout)
            self._touch()
            await asyncio.gather(self._read_stdout(), self._read_stderr())
            await self._child.wait()
        return not scope.cancelled_caught

    async def pieces(self, quiet_timeout: timedelta, doing: str) -> AsyncGenerator[bytes]:
        """What comes on stdout, as it comes; at the end the error that stderr asks for."""
        beside = asyncio.ensure_future(self._read_stderr())
        try:
            while piece := await self._next(quiet_timeout):
                yield piece
            await beside
            status = await self._child.wait()
        except TimeoutError as error:
            raise _late(doing, quiet_timeout, None, upstream=False) from error
        finally:
            beside.cancel()
        if status:
            raise _failure(doing, GitResult(status, b"", self.stderr.text()), None, HttpAnswer())

    async def _next(self, quiet_timeout: timedelta) -> bytes:
        with anyio.fail_after(quiet_timeout.total_seconds()):
            return await self._child.read_stdout()

    async def _read_stdout(self) -> None:
        while piece := await self._child.read_stdout():
            self._touch()
            if len(self.stdout) + len(piece) > self._limit_bytes:
                self.overflowed = True
                self._child.signal(signal.SIGKILL)
                return
            self.stdout += piece

    async def _read_stderr(self) -> None:
        while piece := await self._child.read_stderr():
            self._touch()
            self.stderr.feed(piece)


def _extend(scope: anyio.CancelScope, end: float, quiet_timeout: timedelta | None) -> None:
    quiet_end = (
        end if quiet_timeout is None else anyio.current_time() + quiet_timeout.total_seconds()
    )
    scope.deadline = min(end, quiet_end)


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
        command = Command(
            _argv(args, git_dir, work_tree),
            environment,
            work_tree or git_dir or _NOWHERE,
            source,
            sink,
        )
        ended = run_to_end(command, timeout)
    if ended is None:
        raise _late(doing, timeout, None, upstream=False)
    status, stdout, stderr = ended
    reader = StderrReader()
    reader.feed(stderr)
    result = GitResult(status, stdout, reader.text())
    if result.status not in ok:
        raise _failure(doing, result, None, HttpAnswer())
    return result


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
) -> Iterator[tuple[Stream, Stream]]:
    with contextlib.ExitStack() as stack:
        source: Stream = NOTHING
        if isinstance(stdin, bytes):
            source = stack.enter_context(in_memory(stdin))
        elif isinstance(stdin, Path):
            source = stack.enter_context(stdin.open("rb"))
        elif stdin is not None:
            source = stdin.fileno()
        yield source, stack.enter_context(stdout_path.open("wb")) if stdout_path else PIPE


def _failure(
    doing: str, result: GitResult, remote: Remote | None, http: HttpAnswer
) -> MirrordError:
    return failure(
        doing=doing,
        status=result.status,
        stderr=result.stderr,
        upstream=remote is not None,
        http=http,
        secrets=remote.secrets if remote else (),
    )


def _late(
    doing: str, timeout: timedelta, quiet_timeout: timedelta | None, *, upstream: bool
) -> MirrordError:
    seconds = min(timeout, quiet_timeout or timeout).total_seconds()
    if upstream:
        return UpstreamTimeoutError(
            f"cannot {doing}: upstream was silent for {seconds:g} s"
            if quiet_timeout
            else f"cannot {doing}: no end after {seconds:g} s",
            hint="try again later, or raise upstream.timeout",
        )
    return DeadlineError(
        f"cannot {doing}: no end after {seconds:g} s",
        hint="the disk may be slow or the repository damaged",
    )
