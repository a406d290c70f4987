"""Child processes: started by vfork, awaited on the event loop, gone when their block is left.

asyncio's own subprocess reaps a child when it ends, and the number of its group may be another's
then. Here the group is killed first. Also what every git child gets: its whole environment, with
the safe configuration in it.
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

from ..errors import ResourceError
from ..host.files import host_error
from ..host.processes import search_path

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


# -- the environment of a git child: explicit, nothing of the caller's ----------------------------
#
# The table of safe configuration travels as GIT_CONFIG_COUNT and friends, not as `-c`, so that a
# process list shows the command and nothing else; both outrank every configuration file.

_PASSED_ON = (
    "SSH_AUTH_SOCK", "SSL_CERT_FILE", "SSL_CERT_DIR", "http_proxy", "https_proxy", "all_proxy",
    "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
)  # fmt: skip
"""A machine's way to the network."""

_SAFE: tuple[tuple[str, str], ...] = (
    # nothing of a repository's own configuration may run
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
    # we say when a repository is packed
    ("gc.auto", "0"),
    ("gc.autoDetach", "false"),
    ("maintenance.auto", "false"),
    ("fetch.writeCommitGraph", "false"),
    # we write none, and git believes whatever one says
    ("pack.useBitmaps", "false"),
    # Gitaly's choice; git's default does not flush references
    ("core.fsync", "objects,derived-metadata,reference"),
    # land as packs: libgit2 1.9 hangs on a torn loose object
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
"""fsck's names for slips in real histories that change no tree: who and when."""

STRICT = "--strict=" + ",".join(f"{name}=ignore" for name in _HARMLESS)
"""An option of `git index-pack`, which reads no configuration about it."""

UNTRUSTING = ("-c", "core.commitGraph=false", "-c", "core.multiPackIndex=false")
"""Neither file is needed to read a repository, and each can hide that an object is missing."""

_HELPER = (
    '!f() { test "$1" = get && printf "username=%s\\npassword=%s\\n"'
    ' "$MIRRORD_UPSTREAM_USERNAME" "$MIRRORD_UPSTREAM_PASSWORD"; }; f'
)
_OURS = (*_SAFE, *((f"fetch.fsck.{name}", "ignore") for name in _HARMLESS))


def _configured(config: Sequence[tuple[str, str]]) -> dict[str, str]:
    environment = {"GIT_CONFIG_COUNT": str(len(config))}
    for number, (key, value) in enumerate(config):
        environment |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return environment


_CONFIG = _configured(_OURS)


@dataclass(frozen=True, slots=True)
class Remote:
    """An upstream: a URL without secrets, for the command line, and its secrets."""

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
    """The whole environment of one git child. `remote` adds its credentials, for that host only."""
    environment = _CONFIG | {
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
        # a repository's own grafts and shallow file would cut history short; empty means none
        "GIT_GRAFT_FILE": "/nonexistent",
        "GIT_SHALLOW_FILE": "",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_ADVICE": "0",
        "GIT_FLUSH": "0",  # else `rev-list` writes commit by commit into a pipe
    }
    if remote is not None:
        environment |= {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        if remote.is_http:
            environment |= {"GIT_TRACE_CURL": "1", "GIT_TRACE_CURL_NO_DATA": "1"}
        if remote.username is not None:
            # bound to scheme, host and port: a redirect to another host gets nothing
            parts = urlsplit(remote.url)
            helper = f"credential.{parts.scheme}://{parts.netloc}.helper"
            environment |= _configured((*_OURS, (helper, _HELPER)))
            environment["MIRRORD_UPSTREAM_USERNAME"] = remote.username
            environment["MIRRORD_UPSTREAM_PASSWORD"] = remote.password or ""
    return environment | dict(extra or {})


def make_home(home: Path) -> None:
    """Make the directory that becomes HOME. An intact file stays: a full disk would leave it empty.

    upload-pack of a local upstream does not get our environment's configuration, and refuses a
    repository of another user.
    """
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    file, text = home / ".gitconfig", "[safe]\n\tdirectory = *\n"
    if not file.exists() or file.read_text(encoding="ascii") != text:
        new = home / ".gitconfig.new"
        new.write_text(text, encoding="ascii")
        new.rename(file)
