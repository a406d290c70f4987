"""Sandboxes, shared by both clients. The client's process starts them, not the daemon.

A `Keeper` keeps the room of a checkout, a `SandboxCall` is a command in it.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import shlex
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, TypeAlias

from .. import protocol
from ..errors import CheckoutNotFoundError, PathNotFoundError, UsageError
from ..model import Backend, Isolation, shown
from ..places import ACTIVATE, PROGRAMS, TESTBED, read_workdir
from ..presence import is_dir
from .box import Box
from .room import EndedError, Limits, Pipes, SandboxRoom, read_some

if TYPE_CHECKING:  # its parsers of logs are half of what `mirrord exec` would import
    from .archive import Capped
    from .verdicts import Reporter


class Keeper:
    """Keeps the room of a checkout, and replaces it after a reset by any client."""

    def __init__(
        self,
        lease: Callable[[], protocol.Checkout],
        make_box: Callable[[protocol.Checkout], Box],
        memory_bytes: int | None,
        processes: int | None,
        isolation: Isolation | None,
    ) -> None:
        self._lease, self._make_box = lease, make_box
        self._limits, self._isolation = (memory_bytes, processes), isolation
        self._lock = threading.Lock()
        self._room: SandboxRoom | None = None
        self._mounts: object = None

    def run(self, call: SandboxCall, mount: int | None = None) -> Executed:
        """Run a command; `mount` is that of the checkout's directory, if its path is not shown."""
        try:
            while True:
                with self._lock:
                    room = self._enter(mount)
                with suppress(EndedError):
                    return call.follow(room)
        finally:
            call.close()

    def _enter(self, mount: int | None) -> SandboxRoom:
        lease = self._lease()
        mounts = _identify_mounts(lease, mount)
        if self._room is None or not self._room.is_open or mounts != self._mounts:
            self._close()
            box = replace(self._make_box(lease), mount=mount)
            self._room = SandboxRoom(box, Limits(*self._limits), self._isolation)
            if self._isolation is None:
                _warn_of(self._room.isolation)
            self._mounts = mounts
        return self._room

    def isolation(self, mount: int | None = None) -> Isolation:
        """Return what isolates the commands; starts the room where there is none."""
        with self._lock:
            return self._enter(mount).isolation

    def at(self, path: str, mount: int | None = None) -> str:
        """Return where commands find a path of the sandbox; starts the room where there is none."""
        with self._lock:
            return self._enter(mount).at(path)

    def close(self) -> None:
        """End all processes and remove HOME and /tmp."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        room, self._room = self._room, None
        if room:
            room.close()


@cache
def _warn_of(isolation: Isolation) -> None:
    if isolation is not Isolation.NAMESPACES:
        warnings.warn(weaker(isolation), RuntimeWarning, stacklevel=2)


def weaker(isolation: Isolation) -> str:
    """Say what a weaker isolation than namespaces leaves open."""
    said = {
        Isolation.LANDLOCK: "it sees the host's processes, and its paths are those of the host",
        Isolation.UID: "it sees the host's processes, and reads what every user may read",
        Isolation.NONE: "it may do to the host's files and processes what its user may",
    }
    return (
        f"the sandbox has no namespaces, but isolation {isolation}: {said[isolation]};"
        " see `mirrord doctor`"
    )


def choose_environment(lease: protocol.Checkout, named: Path | str | None) -> Path | None:
    """Return the named directory; None for the checkout's environment, which must have the name.

    Raises UsageError, PathNotFoundError.
    """
    if named is None:
        return None
    if isinstance(named, Path) or "/" in named:
        if not is_dir(f"{named}/bin"):
            hint = "name the prefix of an environment, such as a virtual environment's"
            raise PathNotFoundError(f"cannot use environment {named}: it has no bin", hint=hint)
        return Path(named).absolute()
    key, _, digest = named.partition("@")
    own = lease.environment or ""
    if own.partition("@")[0] != key or not own.startswith(f"{key}@{digest[:12]}"):
        fact = f"cannot use environment {named}: the checkout has {own or 'none'}"
        raise UsageError(fact, hint="name it when the checkout is made or reset")
    return None


def box_of(
    lease: protocol.Checkout,
    environment: Path | None = None,
    *,
    network: bool,
    variables: Mapping[str, str],
    frozen: Sequence[str] = (),
    workdir: str | None = None,
) -> Box:
    """Return the box of a checkout, by default with the checkout's environment and workdir."""
    is_own = lease.owner_uid == os.geteuid()
    image = lease.image if environment is None else None
    identity = {
        "MIRRORD_CHECKOUT": lease.id,
        "MIRRORD_REPOSITORY": lease.mirror.replace("__", "/", 1),
    }
    identity |= {"MIRRORD_INSTANCE": lease.instance} if lease.instance else {}
    own = environment_of(lease)
    # the environment of a pool tree names its own path and that of the tree
    is_copy = own is not None and environment is None and lease.backend == Backend.POOL
    return Box(
        tree=Path(lease.path),
        environment=environment or own,
        is_environment_shared=environment is not None,
        owner=None if is_own else (lease.owner_uid, lease.owner_gid),
        network=network,
        variables={**identity, **variables},
        frozen=frozen,
        workdir=workdir or lease.workdir or (image.tree if image else TESTBED),
        image=image,
        readable={lease.borrows: Path(lease.borrows)} if lease.borrows else {},
        writable={str(path): path for path in (own, Path(lease.path))} if own and is_copy else {},
        files=_git_files(network=network),
    )


# Without it `git commit`, `stash`, `merge` and `tag -a` fail; it tells nobody's name.
_IDENTITY = b"""\
[user]
	name = testbed
	email = testbed@localhost
"""
# always: git's default for helpers like this one leaves out submodules (git-config(1))
_FORGE = b"""\
[url "mirrord::https://github.com/"]
	insteadOf = https://github.com/
[protocol "mirrord"]
	allow = always
"""


@cache
def _git_files(*, network: bool) -> dict[str, bytes]:
    """Return git-remote-mirrord, and git's configuration: it has an identity, and without network
    it uses git-remote-mirrord for GitHub.
    """
    return {
        f"{PROGRAMS}/git-remote-mirrord": Path(__file__).with_name("gitremote.py").read_bytes(),
        "/etc/gitconfig": _IDENTITY if network else _IDENTITY + _FORGE,
    }


def choose_workdir(given: str | None) -> str | None:
    """Return the caller's path for the tree; raises UsageError."""
    if given is None:
        return None
    try:
        return read_workdir(given)
    except ValueError as error:
        hint = "name a directory such as /app or /workspace/NAME"
        raise UsageError(f"cannot use workdir {shown(given)}: it {error}", hint=hint) from error


def environment_of(lease: protocol.Checkout, mount: int | None = None) -> Path | None:
    """Return the path of a checkout's environment on the host, or below an open directory."""
    above = lease.directory if mount is None else f"/proc/self/fd/{mount}"
    return Path(above, "environment") if lease.environment else None


def is_shown(lease: protocol.Checkout) -> bool:
    """Return whether this mount namespace shows a checkout at its path; an overlay is a mount."""
    if lease.backend is not Backend.OVERLAY:
        return True
    try:
        return os.stat(lease.path).st_dev != os.stat(lease.directory).st_dev
    except PermissionError:  # of a subordinate uid; mountinfo is readable
        return bool(_mounted_at({lease.path}))
    except FileNotFoundError:
        return True  # released; or another host's, which no mount can be attached for


def _mounted_at(paths: Collection[str]) -> list[bytes]:
    names = set(map(os.fsencode, paths))
    with open("/proc/self/mountinfo", "rb") as mounts:
        return [line for line in mounts if line.split()[4] in names]


def _identify_mounts(lease: protocol.Checkout, mount: int | None) -> object:
    """Return what a box of a checkout shows; unique as long as a box uses the mounts."""
    tree = Path(lease.path) if mount is None else Path(f"/proc/self/fd/{mount}/tree")
    environment = environment_of(lease, mount)
    paths = [tree, *([environment] if environment else [])]
    try:
        return lease.borrows, [(st.st_dev, st.st_ino) for st in map(os.stat, paths)]
    except PermissionError:  # of a subordinate uid; mountinfo is readable
        return _mounted_at(list(map(str, paths)))
    except FileNotFoundError as error:
        fact = f"cannot find the tree of checkout {lease.id}: it was released, or has expired"
        raise CheckoutNotFoundError(fact, hint="check it out again") from error


# -- commands --------------------------------------------------------------------------------------

OUTPUT_BYTES = 16 * 1024 * 1024
_REPORT_BYTES = 4 * OUTPUT_BYTES  # 0.1 kB for each phase of a test
# what a pipe holds by default (pipe(7))
_CHUNK = 64 * 1024
# of two short numbers; an agent can write to that pipe without end
_STATUS_MAX_BYTES = 100
# the shell of the room kills the group, and an agent may have stopped that shell
_KILL_GRACE_S = 2.0
# as a shell tells that a signal ended a command
_KILLED = 128 + signal.SIGKILL

Struck = Literal["time", "memory", "processes"]


@dataclass(frozen=True, slots=True)
class Executed:
    """The result of a command. `exit_code` is 128 plus the signal's number after a signal.

    `struck` is the limit that it met: `time` killed it, the others show in its output. `stdout` and
    `stderr` have at most 16 MiB each; of longer output a line replaces the middle.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    struck: Struck | None = None
    isolation: Isolation = Isolation.NAMESPACES


class Output:
    """Keeps the first and last bytes of output, `limit` in total."""

    def __init__(self, limit: int = OUTPUT_BYTES) -> None:
        self._half = limit // 2
        self._head, self._tail, self._left_out = bytearray(), bytearray(), 0

    def write(self, data: bytes) -> None:
        room = self._half - len(self._head)
        self._head += data[:room] if room > 0 else b""
        self._tail += data[room:] if room > 0 else data
        if (excess := len(self._tail) - self._half) > self._half:  # rarely: it moves bytes
            self._drop(excess)

    def _drop(self, excess: int) -> None:
        del self._tail[:excess]
        self._left_out += excess

    def bytes(self) -> bytes:
        self._drop(max(0, len(self._tail) - self._half))
        mark = f"\n[mirrord: {self._left_out} bytes left out here]\n".encode()
        return bytes(self._head + (mark if self._left_out else b"") + self._tail)


Sink: TypeAlias = "Output | Capped"


class SandboxCall:
    """A command with its script, its input and output, and a way to cancel it."""

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        variables: Mapping[str, str] | None = None,
        timeout: float | None = None,
        source: BinaryIO | None = None,
        stdout: Sink | None = None,
        reporter: Reporter | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        words = ["bash", "-c", command] if isinstance(command, str) else command
        self._exports = [
            f"export {_name(name)}={shlex.quote(value)}"
            for name, value in (variables or {}).items()
        ]
        self._cwd, self._exec = cwd or ".", f"exec {shlex.join(words)}"
        self.timeout = timeout
        self.source = source
        self.stdout, self.stderr = stdout or Output(), Output()
        self.report = Output(_REPORT_BYTES)
        self.reporter, self._files = reporter, {**(files or {})}
        if reporter:
            self._files[f"{reporter.module}.py"] = reporter.text
        self._cancelled, cancel = os.pipe2(os.O_CLOEXEC)
        # a file object: a late `cancel` finds it closed, not another file with its number
        self._cancel = os.fdopen(cancel, "wb", buffering=0)

    def _script(self, at: Callable[[str], str]) -> bytes:
        activate = shlex.quote(at(ACTIVATE))
        lines = [
            # <> waits for no reader of the pipe (fifo(7))
            'echo "$$" 1<>"$0.end"',
            f"[ ! -e {activate} ] || . {activate}",
            *self._exports,
            'export MIRRORD_FILES="$PWD/$0.d"' if self._files else "",
            *(self.reporter.setup if self.reporter else ()),
            f'cd -- "$MIRRORD_WORKDIR" && cd -- {shlex.quote(at(self._cwd))} || exit 126',
            self._exec,
        ]
        return os.fsencode("\n".join(lines) + "\n")

    def cancel(self) -> None:
        """Kill the command, from any thread, as after its timeout."""
        with suppress(ValueError):  # it has ended
            self._cancel.write(b".")

    def close(self) -> None:
        self._cancel.close()
        os.close(self._cancelled)

    def follow(self, room: SandboxRoom) -> Executed:
        before = room.strikes()
        with room.pipes(self._script(room.at), self._files) as pipes:
            try:
                status, is_late = self._watch(room, pipes)
            except BaseException:  # such as KeyboardInterrupt
                room.kill(pipes)
                raise
            sinks = (pipes.out, self.stdout), (pipes.err, self.stderr), (pipes.report, self.report)
            for stream, sink in sinks:
                _drain(stream, sink)
        after = {**room.strikes(), "time": is_late}
        limits: tuple[Struck, ...] = ("memory", "processes", "time")  # the kernel's kill first
        struck = next((name for name in limits if after.get(name, 0) > before.get(name, 0)), None)
        printed = self.stdout.bytes() if isinstance(self.stdout, Output) else b""
        return Executed(status, printed, self.stderr.bytes(), struck, room.isolation)

    def _watch(self, room: SandboxRoom, pipes: Pipes) -> tuple[int, bool]:
        """Move bytes until the command ends; returns its status, and whether it ran too long."""
        poll = select.poll()
        for stream in (pipes.out, pipes.err, pipes.report, pipes.end, self._cancelled):
            poll.register(stream, select.POLLIN)
        poll.register(room.life, 0)  # for its end alone: an agent may write to it
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        status, unsent, is_late = b"", b"", False
        while True:
            left = None if deadline is None else max(0, deadline - time.monotonic()) * 1000 + 1
            events = dict(poll.poll(left))
            if pipes.out in events:
                self.stdout.write(read_some(pipes.out))
            if pipes.err in events:
                self.stderr.write(read_some(pipes.err))
            if pipes.report in events:
                self.report.write(read_some(pipes.report))
            if pipes.end in events:
                status = (status + read_some(pipes.end))[:_STATUS_MAX_BYTES]
                began, *ended = status.split(b"\n")
                if ended and not pipes.group:
                    pipes.group, room.has_worked = _number(began), True
                    poll.register(pipes.input, select.POLLOUT)
                if len(ended) > 1:
                    return _number(ended[0]), is_late
            if pipes.group and pipes.input in events:
                unsent = unsent or (self.source.read(_CHUNK) if self.source else b"")
                if unsent:
                    unsent = unsent[os.write(pipes.input, unsent) :]
                else:
                    poll.unregister(pipes.input)
                    pipes.close_input()
            if room.life in events:
                room.raise_unless_started(pipes)
                return _KILLED, is_late
            is_over = deadline is not None and time.monotonic() >= deadline
            if is_over or self._cancelled in events:
                if is_late:  # the kill had no effect
                    room.end()
                    return _KILLED, True
                is_late, deadline = True, time.monotonic() + _KILL_GRACE_S
                poll.unregister(self._cancelled)
                room.kill(pipes)


def _name(variable: str) -> str:
    # the script has it without quotes
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
        return variable
    hint = "use letters, digits and _, and no digit first"
    raise UsageError(f"cannot set variable {shown(variable)}: invalid name", hint=hint)


def _drain(stream: int, sink: Sink) -> None:
    """Read what is in a pipe now; a background process may keep writing."""
    left = fcntl.fcntl(stream, fcntl.F_GETPIPE_SZ)
    while left > 0 and (data := read_some(stream)):
        sink.write(data)
        left -= len(data)


def _number(text: bytes) -> int:
    """Parse a number of the shell; an agent can write to the pipe too."""
    return int(text) if re.fullmatch(rb"[0-9]{1,9}", text) else _KILLED
