"""git commands: the only place that starts git.

Every git gets an empty environment, an explicit repository, safe configuration that outranks all
files, its own process group, a deadline and a bound on its output. Its stderr becomes one of our
errors. No secret of a URL is on a command line, in an error or in a log. git dies with the daemon;
the next start removes what its children left (`mirrors/maintenance.py`).
"""

import asyncio
import contextlib
import io
import re
import signal
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
)
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import anyio

from .. import errors
from ..errors import GitFailedError
from ..host.children import NOTHING, PIPE, Child, Popen, Stream, in_memory, run_to_end, start
from ..host.files import has_room, open_plain
from ..model import shown
from ..protocol import Progress
from ..quoting import decode_name, encode_name
from ..telemetry import log
from ..workers.turns import Askers
from . import ssh
from .configuration import Remote, child_environment, make_home
from .errors import StderrReader, failure, foreign_redirect
from .special import must_be_plain

# then git and its children are killed; calls that may take longer say so
DEFAULT_TIMEOUT = timedelta(minutes=10)
# of standard output in memory; larger answers go to a file
_LIMIT_BYTES = 256 * 1024**2
_NO_HOME = Path("/nonexistent")

_is_low_priority: ContextVar[bool] = ContextVar("git_is_low_priority", default=False)


@contextlib.contextmanager
def low_priority() -> Iterator[None]:
    """Give low CPU and disk priority to every git that this task and its children start."""
    token = _is_low_priority.set(True)
    try:
        yield
    finally:
        _is_low_priority.reset(token)


# not the disk's idle class, which may starve a child that holds a lock
_LOW_PRIORITY = (
    # --ignore: where the priority cannot be set, git runs all the same
    "ionice", "--class", "best-effort", "--classdata", "7", "--ignore",
    "nice", "--adjustment", "10",
)  # fmt: skip


def priority_prefix() -> tuple[str, ...]:
    """Return the prefix of a command; empty if a user waits for the work by now."""
    return _LOW_PRIORITY if _is_low_priority.get() and not Askers.present().uids else ()


class GitResult(NamedTuple):
    status: int
    stdout: bytes
    stderr: str

    @property
    def lines(self) -> list[str]:
        """Names are text as in `quoting.py`; only a line feed ends a line, not U+2028 in a name."""
        return decode_name(self.stdout).removesuffix("\n").split("\n") if self.stdout else []


class Git:
    """Runs git for the daemon. `home` becomes HOME, a directory with one small file."""

    def __init__(self, *, home: Path) -> None:
        self._home = home
        make_home(home)

    async def run(
        self,
        *args: str,
        git_dir: Path | None = None,
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
        packets: Callable[[str], None] | None = None,
        ends_with: str | None = None,
        doing: str | None = None,
    ) -> GitResult:
        """Run one git command to its end.

        `stdin` is bytes, a path, or an open file at its present offset. `quiet_timeout` bounds the
        time without output. `quarantine_objects` receives new objects instead of the repository.
        `remote` is the upstream that the command talks to, with its credentials. `memory_bytes`
        limits each of its processes. `packets` receives what GIT_TRACE_PACKET prints. `doing`
        completes "cannot …" in an error. A status outside of `ok` raises the error that fits
        stderr, unless `ends_with` is one of its lines.
        """
        doing = doing or f"run git {args[0]}"
        stderr = StderrReader(progress, packets)
        environment = child_environment(home=self._home, remote=remote, extra=env)
        began = anyio.current_time()
        with _started(
            args, environment, git_dir, stdin, stdout_path, quarantine_objects,
            memory_bytes=memory_bytes,
        ) as process:  # fmt: skip
            async with Child(process) as child:
                stdout = await _read_to_end(
                    child, stderr, stdout_limit_bytes, timeout, quiet_timeout or timeout
                )
        duration_s = round(anyio.current_time() - began, 3)
        log.debug("git.ended", command=doing, status=child.status, duration_s=duration_s)
        if stdout is None:
            raise _timed_out(doing, timeout, quiet_timeout, upstream=remote is not None)
        if len(stdout) > stdout_limit_bytes:
            error = errors.UpstreamError if remote else errors.GitFailedError
            raise error(f"cannot {doing}: its output is larger than {stdout_limit_bytes} bytes")
        result = GitResult(child.status or 0, stdout, stderr.text())
        # a server that loses its client says so after it: over ssh, and of a local upstream
        if ends_with is not None and ends_with in result.stderr.split("\n"):
            ok = (result.status,)
        with _full_disk_told(git_dir, doing):
            _check_result(result, ok, stderr, remote, doing)
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
        """Stream git's output; git waits for its reader. Leaving the block ends git.

        The iterator raises the error that fits stderr if git fails in the end.
        """
        doing = doing or f"run git {args[0]}"
        environment = child_environment(home=self._home)

        async def pieces() -> AsyncGenerator[bytes]:
            stderr = StderrReader()
            reading = asyncio.ensure_future(_read_stderr(child, stderr, lambda: None))
            try:
                while True:
                    with anyio.fail_after(quiet_timeout.total_seconds()):
                        piece = await child.read_stdout()
                    if not piece:
                        break
                    yield piece
                await reading
                status = await child.wait()
            except TimeoutError as error:
                raise _timed_out(doing, quiet_timeout, upstream=False) from error
            finally:
                reading.cancel()
            if status:
                raise failure(doing, status, stderr.text())

        with _started(args, environment, git_dir, stdin, None, quarantine_objects) as process:
            async with Child(process) as child, contextlib.aclosing(pieces()) as iterator:
                yield iterator


# git (2.39) ends with status 0 all the same, and keeps the objects
_SHALLOW = re.compile(r"(?m)^warning: rejected ([0-9a-f]{40}) because shallow roots")


def _check_result(
    result: GitResult, ok: Collection[int], stderr: StderrReader, remote: Remote | None, doing: str
) -> None:
    if result.status not in ok:
        if remote and (error := ssh.explain(doing, result.stderr, remote, stderr.host_key)):
            raise error
        is_upstream, secrets = remote is not None, remote.secrets if remote else ()
        raise failure(
            doing, result.status, result.stderr,
            upstream=is_upstream, http=stderr.http, secrets=secrets,
        )  # fmt: skip
    if remote is not None and stderr.http.is_garbage:
        if "html" in (stderr.http.content_type or ""):
            fact, hint = "upstream does not answer as a git server", "check the upstream URL"
        else:
            fact = "upstream is served as plain files (dumb HTTP), without a git server"
            hint = "ask for git http-backend there, or mirror a copy on this disk"
        raise errors.UpstreamError(f"cannot {doing}: {fact}", hint=hint)
    if remote is not None and (cut := _SHALLOW.findall(result.stderr)):
        # git names what was asked for: a commit or a tag, not the commits in their histories
        who = "1 commit lacks its" if len(cut) == 1 else f"commits of {len(cut)} refs lack their"
        raise errors.UpstreamIncompleteError(
            f"cannot {doing}: upstream is shallow: {who} parents",
            hint="its commits can be checked out with history squashed only; for all of the history"
            " run `git fetch --unshallow` there, or mirror the repository it was cloned from",
            objects=cut[:400],
        )
    if remote is not None and (target := foreign_redirect(remote.url, result.stderr)):
        raise errors.UpstreamError(
            f"cannot {doing}: upstream redirects to another host, {shown(target, 200)}",
            hint="nothing was fetched; if the repository has moved there, give that URL",
        )


def run_git_sync(
    *args: str,
    git_dir: Path | None = None,
    work_tree: Path | None = None,
    stdin: bytes | Path | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    stdout_path: Path | None = None,
    ok: Collection[int] = (0,),
    quarantine_objects: Path | None = None,
    doing: str | None = None,
) -> GitResult:
    """Run one git command without an event loop, as `Git.run`. Never talks to an upstream."""
    doing = doing or f"run git {args[0]}"
    if work_tree is not None:
        args = (f"--work-tree={work_tree}", *args)
    environment = child_environment(home=_NO_HOME)
    with _started(
        args, environment, git_dir, stdin, stdout_path, quarantine_objects, cwd=work_tree
    ) as process:
        ended = run_to_end(process, timeout)
    if ended is None:
        raise _timed_out(doing, timeout, upstream=False)
    status, stdout, messages = ended
    stderr = StderrReader()
    stderr.feed(messages)
    result = GitResult(status, stdout, stderr.text())
    if result.status not in ok:
        with _full_disk_told(git_dir, doing):
            raise failure(doing, result.status, result.stderr)
    return result


@contextlib.contextmanager
def _full_disk_told(git_dir: Path | None, doing: str) -> Iterator[None]:
    """Turn a failure that git (2.39) did not explain into DiskFullError, if the disk has no room.

    It says "couldn't write REF.lock" without errno, for one.
    """
    try:
        yield
    except GitFailedError as error:
        if git_dir is None or has_room(git_dir):
            raise
        hint = "free space below the state directory; nothing was changed"
        raise errors.DiskFullError(f"cannot {doing}: the disk has no room", hint=hint) from error


# setpriv of util-linux: a preexec_fn may deadlock in a process with threads. git does not inherit
# the ambient capabilities that systemd gives to the daemon.
_DIE_WITH_PARENT = ("setpriv", "--ambient-caps=-all", "--pdeathsig", "KILL")


@contextlib.contextmanager
def _started(
    args: tuple[str, ...],
    environment: dict[str, str],
    git_dir: Path | None,
    stdin: bytes | Path | io.RawIOBase | None,
    stdout_path: Path | None,
    quarantine: Path | None,
    *,
    memory_bytes: int | None = None,
    cwd: Path | None = None,
) -> Iterator[Popen]:
    if git_dir:
        must_be_plain(git_dir)
    argv = [*priority_prefix(), *_DIE_WITH_PARENT, "git"]
    if memory_bytes is not None:
        # RLIMIT_DATA counts private writable mappings since Linux 4.7, not the packs that git maps
        argv = ["prlimit", f"--data={memory_bytes}", *argv]
    if git_dir:
        argv.append(f"--git-dir={git_dir}")
    if quarantine is not None and git_dir is not None:
        # no GIT_QUARANTINE_PATH: with it, git 2.53 refuses each fetch, also one that moves no ref
        environment = environment | {
            "GIT_OBJECT_DIRECTORY": str(quarantine),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(git_dir / "objects"),
        }
    with contextlib.ExitStack() as stack:
        source: Stream = NOTHING
        if isinstance(stdin, bytes):
            source = stack.enter_context(in_memory(stdin))
        elif isinstance(stdin, Path):
            source = stack.enter_context(open_plain(stdin))
        elif stdin is not None:
            source = stdin.fileno()
        sink = stack.enter_context(stdout_path.open("wb")) if stdout_path else PIPE
        yield start([*argv, *args], environment, cwd or git_dir or Path("/"), source, sink)


async def _read_to_end(
    child: Child, stderr: StderrReader, limit_bytes: int, timeout: timedelta, quiet: timedelta
) -> bytes | None:
    """Return what a child prints, None at the deadline or where it is silent for `quiet`.

    One that prints more than the limit is killed, and a little more than that is returned.
    """
    stdout = bytearray()
    end = anyio.current_time() + timeout.total_seconds()
    with anyio.CancelScope() as scope:

        def extend() -> None:
            scope.deadline = min(end, anyio.current_time() + quiet.total_seconds())

        async def read_stdout() -> None:
            while piece := await child.read_stdout():
                extend()
                stdout.extend(piece)
                if len(stdout) > limit_bytes:
                    child.signal(signal.SIGKILL)
                    return

        extend()
        await asyncio.gather(read_stdout(), _read_stderr(child, stderr, extend))
        await child.wait()
    return None if scope.cancelled_caught else bytes(stdout)


async def _read_stderr(child: Child, reader: StderrReader, extend: Callable[[], None]) -> None:
    while piece := await child.read_stderr():
        extend()
        reader.feed(piece)


def _timed_out(
    doing: str, timeout: timedelta, quiet_timeout: timedelta | None = None, *, upstream: bool
) -> errors.MirrordError:
    seconds = min(timeout, quiet_timeout or timeout).total_seconds()
    if upstream:
        fact = "upstream was silent for" if quiet_timeout else "not finished after"
        hint = "try again later, or raise upstream.timeout"
        return errors.UpstreamTimeoutError(f"cannot {doing}: {fact} {seconds:g} s", hint=hint)
    return errors.DeadlineError(
        f"cannot {doing}: not finished after {seconds:g} s",
        hint="the disk may be slow or the repository damaged",
    )


def lines_of(names: Iterable[str]) -> bytes:
    """Encode names as git reads them from stdin."""
    return encode_name("".join(f"{name}\n" for name in names))
