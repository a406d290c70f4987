"""git commands: the only place that starts a git, and reads many objects from one.

Every git gets an empty environment, an explicit repository, safe configuration that outranks all
files, its own process group, a deadline and a bound on its output; its stderr becomes one of our
errors. No secret of a URL is on a command line, in an error or in a log. The group is killed when
the deadline passes or the caller is cancelled; git dies with the daemon, and the next start cleans
up after its children (`mirrors/maintenance.py`).
"""

import asyncio
import contextlib
import io
import signal
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import anyio

from .. import errors
from ..errors import CorruptObjectError, GitFailedError
from ..model import shown
from ..protocol import Progress
from ..telemetry import log
from .errors import StderrReader, failure, foreign_redirect
from .process import (
    NOTHING,
    PIPE,
    Child,
    Process,
    Remote,
    Stream,
    child_environment,
    in_memory,
    make_home,
    run_to_end,
    start,
)
from .turns import Askers

DEFAULT_TIMEOUT = timedelta(minutes=10)
_LIMIT_BYTES = 256 * 1024**2
# util-linux, because a preexec_fn may deadlock in a process with threads. git is not given what
# systemd lets the daemon do to files.
_DIE_WITH_PARENT = ("setpriv", "--ambient-caps=-all", "--pdeathsig", "KILL")
# never the disk's idle class: a child that holds a lock must end some time
_LOW_PRIORITY = (
    "ionice", "--class", "best-effort", "--classdata", "7", "--ignore",
    "nice", "--adjustment", "10",
)  # fmt: skip

_is_low_priority: ContextVar[bool] = ContextVar("git_is_low_priority", default=False)


@contextlib.contextmanager
def low_priority() -> Iterator[None]:
    """Start every git inside, by this task and those it starts, with low CPU and disk priority."""
    token = _is_low_priority.set(True)
    try:
        yield
    finally:
        _is_low_priority.reset(token)


def priority_prefix() -> tuple[str, ...]:
    """Nothing where a user waits for the work by now."""
    return _LOW_PRIORITY if _is_low_priority.get() and not Askers.present().uids else ()


class GitResult(NamedTuple):
    status: int
    stdout: bytes
    stderr: str

    @property
    def lines(self) -> list[str]:
        return self.stdout.decode("utf-8", "surrogateescape").splitlines()


class Git:
    """Starts git for the daemon. `home` becomes HOME: a directory of ours with one small file."""

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

        `stdin` is bytes, a file's path, or an open file, read from where it stands. `quiet_timeout`
        bounds the time without output. `quarantine_objects` receives new objects in place of the
        repository. `remote` is the upstream that the command talks to, with its credentials.
        `memory_bytes` bounds what each process of it may allocate. `doing` completes "cannot …" in
        an error. A status that is not in `ok` raises the error that stderr asks for.
        """
        doing = doing or f"run git {args[0]}"
        stdout, stderr = bytearray(), StderrReader(progress)
        environment = child_environment(home=self._home, remote=remote, extra=env)
        with _started(
            args, environment, git_dir, work_tree, stdin, stdout_path, quarantine_objects,
            memory_bytes,
        ) as process:  # fmt: skip
            began = anyio.current_time()
            end = began + timeout.total_seconds()
            quiet_s = (quiet_timeout or timeout).total_seconds()
            overflowed = False
            async with Child(process) as child:
                with anyio.CancelScope(deadline=min(end, began + quiet_s)) as scope:

                    def extend() -> None:
                        scope.deadline = min(end, anyio.current_time() + quiet_s)

                    async def read_stdout() -> None:
                        nonlocal overflowed
                        while piece := await child.read_stdout():
                            extend()
                            if len(stdout) + len(piece) > stdout_limit_bytes:
                                overflowed = True
                                child.signal(signal.SIGKILL)
                                return
                            stdout.extend(piece)

                    await asyncio.gather(read_stdout(), _read_stderr(child, stderr, extend))
                    await child.wait()
        duration_s = round(anyio.current_time() - began, 3)
        log.debug("git.ended", command=doing, status=child.status, duration_s=duration_s)
        if scope.cancelled_caught:
            raise _late(doing, timeout, quiet_timeout, upstream=remote is not None)
        if overflowed:
            error = errors.UpstreamError if remote else errors.GitFailedError
            raise error(f"cannot {doing}: its output is larger than {stdout_limit_bytes} bytes")
        result = GitResult(child.status or 0, bytes(stdout), stderr.text())
        _must_be_answered(result, ok, stderr, remote, doing)
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
        """Read git's output as it comes; git waits for its reader. Leaving the block ends git.

        The iterator ends in the error that stderr asks for, if git failed after all.
        """
        doing = doing or f"run git {args[0]}"
        environment = child_environment(home=self._home)

        async def pieces() -> AsyncGenerator[bytes]:
            stderr = StderrReader()
            beside = asyncio.ensure_future(_read_stderr(child, stderr, lambda: None))
            try:
                while True:
                    with anyio.fail_after(quiet_timeout.total_seconds()):
                        piece = await child.read_stdout()
                    if not piece:
                        break
                    yield piece
                await beside
                status = await child.wait()
            except TimeoutError as error:
                raise _late(doing, quiet_timeout, None, upstream=False) from error
            finally:
                beside.cancel()
            if status:
                raise failure(doing, status, stderr.text())

        with _started(
            args, environment, git_dir, stdin=stdin, quarantine=quarantine_objects
        ) as process:
            async with Child(process) as child, contextlib.aclosing(pieces()) as iterator:
                yield iterator


def _must_be_answered(
    result: GitResult, ok: Collection[int], stderr: StderrReader, remote: Remote | None, doing: str
) -> None:
    if result.status not in ok:
        is_upstream, secrets = remote is not None, remote.secrets if remote else ()
        raise failure(
            doing, result.status, result.stderr,
            upstream=is_upstream, http=stderr.http, secrets=secrets,
        )  # fmt: skip
    if remote is not None and stderr.http.is_garbage:
        raise errors.UpstreamError(
            f"cannot {doing}: upstream answers, but not as git does", hint="check the upstream URL"
        )
    if remote is not None and (target := foreign_redirect(remote.url, result.stderr)):
        raise errors.UpstreamError(
            f"cannot {doing}: upstream redirects to another host, {shown(target, 200)}",
            hint="nothing of it was taken; if the repository has moved there, give that URL",
        )


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
    """`Git.run` without an event loop, for workers and commands. Never talks to an upstream."""
    doing = doing or f"run git {args[0]}"
    environment = child_environment(home=home, extra=env)
    with _started(
        args, environment, git_dir, work_tree, stdin, stdout_path, quarantine_objects
    ) as process:
        ended = run_to_end(process, timeout)
    if ended is None:
        raise _late(doing, timeout, None, upstream=False)
    status, stdout, messages = ended
    stderr = StderrReader()
    stderr.feed(messages)
    result = GitResult(status, stdout, stderr.text())
    if result.status not in ok:
        raise failure(doing, result.status, result.stderr)
    return result


@contextlib.contextmanager
def _started(
    args: tuple[str, ...],
    environment: dict[str, str],
    git_dir: Path | None,
    work_tree: Path | None = None,
    stdin: bytes | Path | io.RawIOBase | None = None,
    stdout_path: Path | None = None,
    quarantine: Path | None = None,
    memory_bytes: int | None = None,
) -> Iterator[Process]:
    argv = [*priority_prefix(), *_DIE_WITH_PARENT, "git"]
    if memory_bytes is not None:
        # RLIMIT_DATA: since Linux 4.7 it counts private writable mappings, and so not the packs
        # that git maps to read
        argv = ["prlimit", f"--data={memory_bytes}", *argv]
    if git_dir:
        argv.append(f"--git-dir={git_dir}")
    if work_tree:
        argv.append(f"--work-tree={work_tree}")
    if quarantine is not None and git_dir is not None:  # git refuses to move refs meanwhile
        environment = environment | {
            "GIT_OBJECT_DIRECTORY": str(quarantine),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(git_dir / "objects"),
            "GIT_QUARANTINE_PATH": str(quarantine),
        }
    with contextlib.ExitStack() as stack:
        source: Stream = NOTHING
        if isinstance(stdin, bytes):
            source = stack.enter_context(in_memory(stdin))
        elif isinstance(stdin, Path):
            source = stack.enter_context(stdin.open("rb"))
        elif stdin is not None:
            source = stdin.fileno()
        sink = stack.enter_context(stdout_path.open("wb")) if stdout_path else PIPE
        yield start([*argv, *args], environment, work_tree or git_dir or Path("/"), source, sink)


async def _read_stderr(child: Child, reader: StderrReader, extend: Callable[[], None]) -> None:
    while piece := await child.read_stderr():
        extend()
        reader.feed(piece)


def _late(
    doing: str, timeout: timedelta, quiet_timeout: timedelta | None, *, upstream: bool
) -> errors.MirrordError:
    seconds = min(timeout, quiet_timeout or timeout).total_seconds()
    if upstream:
        fact = "upstream was silent for" if quiet_timeout else "no end after"
        hint = "try again later, or raise upstream.timeout"
        return errors.UpstreamTimeoutError(f"cannot {doing}: {fact} {seconds:g} s", hint=hint)
    return errors.DeadlineError(
        f"cannot {doing}: no end after {seconds:g} s",
        hint="the disk may be slow or the repository damaged",
    )


# -- cat-file in its batch modes: many objects asked of one process --------------------------------
#
# git (2.39) dies of the first damaged object and says nothing of the rest. With `bisect` the names
# are asked again by halves, until the damaged ones stand alone.

_INFO, _CONTENTS = "info", "contents"
_INFO_FORMAT = "--batch-command=%(objectname) %(objecttype)"  # a size costs a look into each delta
_CONTENTS_FORMAT = f"{_INFO_FORMAT} %(objectsize)"
_TYPES = {"commit", "tree", "blob", "tag"}
_Asked = list[tuple[str, str]]


class BatchObject(NamedTuple):
    """What git says of `name`: an object id, or an expression that leads on from one (`ID^{tree}`).

    `kind` is the object's type, or git's word for none (`missing`, `ambiguous`; `oid` and `data`
    are empty then), or `damaged` where git died of it. A loose object that does not inflate is
    `missing`.
    """

    name: str
    oid: str
    kind: str
    data: bytes = b""

    @property
    def exists(self) -> bool:
        return bool(self.oid)


def lines_of(names: Iterable[str]) -> bytes:
    """Names as git reads them from stdin."""
    return "".join(f"{name}\n" for name in names).encode("utf-8", "surrogateescape")


async def object_info(
    git: Git,
    git_dir: Path,
    names: Collection[str],
    *,
    doing: str,
    contents: bool = False,
    bisect: bool = False,
    quarantine_objects: Path | None = None,
) -> list[BatchObject]:
    """Id and type of each name, in order; with `contents` the bytes too."""
    found: list[BatchObject] = []
    verb, form = (_CONTENTS, _CONTENTS_FORMAT) if contents else (_INFO, _INFO_FORMAT)
    pending = [[(verb, name) for name in names]]
    while pending:
        if not (asked := pending.pop()):
            continue
        try:
            done = await git.run(
                "cat-file", "--buffer", form,
                git_dir=git_dir,
                stdin=lines_of(map(" ".join, asked)),
                quarantine_objects=quarantine_objects,
                doing=doing,
            )  # fmt: skip
            found += _parse(asked, done.stdout)
        except (CorruptObjectError, GitFailedError):
            if not bisect:
                raise
            found += _ask_again(asked, pending)
    return found


def read_objects_sync(
    git_dir: Path,
    names: Collection[str],
    *,
    info: Collection[str] = (),
    doing: str,
    options: Sequence[str] = (),
    timeout: timedelta = DEFAULT_TIMEOUT,
    bisect: bool = False,
) -> Iterator[BatchObject]:
    """Id and type of each of `info`, then id, type and bytes of each of `names`, in order.

    `options` stand before `cat-file`. Runs, and fails, from the first `next` on.
    """
    pending = [[*((_INFO, name) for name in info), *((_CONTENTS, name) for name in names)]]
    while pending:
        if not (asked := pending.pop()):
            continue
        try:
            done = run_git_sync(
                *options, "cat-file", "--buffer",
                _INFO_FORMAT if asked[-1][0] == _INFO else _CONTENTS_FORMAT,
                git_dir=git_dir,
                stdin=lines_of(map(" ".join, asked)),
                timeout=timeout,
                doing=doing,
            )  # fmt: skip
        except (CorruptObjectError, GitFailedError):
            if not bisect:
                raise
            yield from _ask_again(asked, pending)
        else:
            yield from _parse(asked, done.stdout)


def _ask_again(asked: _Asked, pending: list[_Asked]) -> list[BatchObject]:
    """Ask by halves what git died of; the damaged object is where one name stands alone."""
    if len(asked) == 1:
        return [BatchObject(asked[0][1], "", "damaged")]
    middle = len(asked) // 2
    pending += [asked[middle:], asked[:middle]]
    return []


def _parse(asked: Iterable[tuple[str, str]], output: bytes) -> Iterator[BatchObject]:
    at = 0
    for verb, name in asked:
        end = output.index(b"\n", at)
        oid, _, kind = output[at:end].decode("utf-8", "surrogateescape").partition(" ")
        at = end + 1
        kind, _, size = kind.partition(" ") if kind.rpartition(" ")[2].isdigit() else (kind, "", "")
        if kind not in _TYPES:  # `<name> missing`; a name may have spaces
            yield BatchObject(name, "", kind.rpartition(" ")[2])
        elif verb == _INFO:
            yield BatchObject(name, oid, kind)
        else:
            yield BatchObject(name, oid, kind, output[at : at + int(size)])
            at += int(size) + 1
