"""Child processes, awaited on the event loop and ended with their block; git's environment.

asyncio's own subprocess reaps a child as soon as it ends. From then on the number of its process
group may be reused, and its remaining members can no longer be killed safely. Here the group is
killed before the child is reaped. Every git child gets its whole environment from here, with the
safe configuration in it.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, BinaryIO, Self
from urllib.parse import urlsplit

import anyio

from ..errors import ResourceError, host_error
from ..host.processes import search_path

NOTHING = subprocess.DEVNULL
PIPE = subprocess.PIPE
Popen = subprocess.Popen[bytes]
Stream = BinaryIO | int  # a file, NOTHING or PIPE

_GRACE_S = 2.0
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


# -- the environment of a git child: explicit, nothing inherited -----------------------------------
#
# Safe configuration is passed by GIT_CONFIG_COUNT and friends instead of `-c`, so that a process
# list shows only the command. Both outrank every configuration file.

_PASSED_ON = (
    "SSH_AUTH_SOCK", "SSL_CERT_FILE", "SSL_CERT_DIR", "http_proxy", "https_proxy", "all_proxy",
    "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
)  # fmt: skip
"""How this machine reaches the network."""

_SAFE: tuple[tuple[str, str], ...] = (
    # no program that a repository's own configuration names may run
    ("core.hooksPath", "/dev/null"),
    ("core.fsmonitor", "false"),
    ("core.attributesFile", "/dev/null"),
    ("core.excludesFile", "/dev/null"),
    ("core.pager", "cat"),
    ("core.editor", "false"),
    ("core.alternateRefsCommand", "true"),
    ("diff.external", ""),
    ("protocol.ext.allow", "never"),
    ("safe.directory", "*"),
    ("safe.bareRepository", "all"),
    ("submodule.recurse", "false"),
    ("fetch.recurseSubmodules", "false"),
    ("init.templateDir", ""),
    ("init.defaultBranch", "main"),
    # a replace ref changes what a recorded commit checks out to
    ("core.useReplaceRefs", "false"),
    # only `mirrors/maintenance.py` packs a mirror
    ("gc.auto", "0"),
    ("gc.autoDetach", "false"),
    ("maintenance.auto", "false"),
    ("fetch.writeCommitGraph", "false"),
    # we write none, and git does not verify a bitmap
    ("pack.useBitmaps", "false"),
    # as Gitaly does; git's default does not flush references
    ("core.fsync", "objects,derived-metadata,reference"),
    # fetched objects stay in packs: libgit2 1.9 hangs on a truncated loose object
    ("transfer.unpackLimit", "1"),
    ("fetch.unpackLimit", "1"),
    ("pack.writeReverseIndex", "true"),
    ("http.followRedirects", "initial"),
    ("http.lowSpeedLimit", "1"),
    ("http.lowSpeedTime", "300"),
    ("credential.helper", ""),
    ("credential.interactive", "false"),
    ("user.name", "mirrord"),
    ("user.email", "mirrord@localhost"),
    ("fetch.fsckObjects", "true"),
)

_HARMLESS = (
    "badDate", "badDateOverflow", "badEmail", "badName", "badTimezone", "missingAuthor",
    "missingCommitter", "missingEmail", "missingNameBeforeEmail", "missingSpaceBeforeDate",
    "missingSpaceBeforeEmail", "missingTaggerEntry", "multipleAuthors", "nulInCommit",
    "zeroPaddedDate", "zeroPaddedFilemode",
)  # fmt: skip
"""fsck's names for faults in authors and dates, which real histories have; no tree is affected."""

STRICT = "--strict=" + ",".join(f"{name}=ignore" for name in _HARMLESS)
"""For `git index-pack`, which does not read `fetch.fsck.*`."""

UNTRUSTING = ("-c", "core.commitGraph=false", "-c", "core.multiPackIndex=false")
"""Options of git: both files are optional, and each can hide that an object is missing."""

_HELPER = (
    '!f() { test "$1" = get && printf "username=%s\\npassword=%s\\n"'
    ' "$MIRRORD_UPSTREAM_USERNAME" "$MIRRORD_UPSTREAM_PASSWORD"; }; f'
)
_CONFIGURATION = (*_SAFE, *((f"fetch.fsck.{name}", "ignore") for name in _HARMLESS))


def _as_variables(configuration: Sequence[tuple[str, str]]) -> dict[str, str]:
    environment = {"GIT_CONFIG_COUNT": str(len(configuration))}
    for number, (key, value) in enumerate(configuration):
        environment |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return environment


_VARIABLES = _as_variables(_CONFIGURATION)


@dataclass(frozen=True, slots=True)
class Remote:
    """An upstream: a URL without secrets, for the command line, and the credentials."""

    url: str
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    @property
    def is_http(self) -> bool:
        return self.url.lower().startswith(("http://", "https://"))

    @property
    def secrets(self) -> tuple[str, ...]:
        return tuple(secret for secret in (self.password, self.username) if secret)


def child_environment(
    *, home: Path, remote: Remote | None = None, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the whole environment of a git child. `remote`'s credentials serve its host only."""
    environment = _VARIABLES | {
        "PATH": search_path(),
        "HOME": str(home),
        "LC_ALL": "C.UTF-8",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "false",
        "SSH_ASKPASS": "false",
        "GIT_SSH_COMMAND": "ssh -oBatchMode=yes -oConnectTimeout=30",
        "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
        "GIT_NO_REPLACE_OBJECTS": "1",
        # a repository's grafts and shallow file would cut history short; empty means none
        "GIT_GRAFT_FILE": "/nonexistent",
        "GIT_SHALLOW_FILE": "",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_ADVICE": "0",
        "GIT_FLUSH": "0",  # else `rev-list` flushes each commit into a pipe
    }
    if remote is not None:
        environment |= {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        if remote.is_http:
            environment |= {"GIT_TRACE_CURL": "1", "GIT_TRACE_CURL_NO_DATA": "1"}
        if remote.username is not None:
            # bound to scheme, host and port: a redirect to another host gets nothing
            parts = urlsplit(remote.url)
            helper = f"credential.{parts.scheme}://{parts.netloc}.helper"
            environment |= _as_variables((*_CONFIGURATION, (helper, _HELPER)))
            environment["MIRRORD_UPSTREAM_USERNAME"] = remote.username
            environment["MIRRORD_UPSTREAM_PASSWORD"] = remote.password or ""
    return environment | dict(extra or {})


def make_home(home: Path) -> None:
    """Make the directory that becomes HOME, with a .gitconfig.

    upload-pack of a local upstream ignores configuration in the environment, and refuses a
    repository of another user. An intact file is kept: on a full disk a rewrite would empty it.
    """
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    file, text = home / ".gitconfig", "[safe]\n\tdirectory = *\n"
    if not file.exists() or file.read_text(encoding="ascii") != text:
        new = home / ".gitconfig.new"
        new.write_text(text, encoding="ascii")
        new.rename(file)
