"""Commands in a sandbox: what is run, what becomes of its output, and which limit struck."""

import fcntl
import os
import re
import select
import shlex
import shutil
import signal
import tarfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal

from ...errors import PathOutsideCheckoutError, ResourceError, UsageError
from ...model import shown
from ...places import ACTIVATE, TESTBED
from .rooms import Pipes, SandboxRoom, read_some

OUTPUT_BYTES = 16 * 1024 * 1024
_CHUNK = 64 * 1024
_TOLD_BYTES = 100  # by the shell, or by an agent in its place
_GRACE = 2.0
_KILLED = 128 + signal.SIGKILL

Struck = Literal["time", "memory", "processes"]


@dataclass(frozen=True, slots=True)
class Executed:
    """What a command did. `exit_code` is 128 and the signal's number where a signal ended it.

    `struck` is the limit that it met: `time` ended it; for the others see its output. Of longer
    output the middle is left out, which a line in its place says.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    struck: Struck | None = None


class Output:
    """The first and the last bytes of what was written, together `most`."""

    def __init__(self, most: int = OUTPUT_BYTES) -> None:
        self._half = most // 2
        self._head, self._tail, self._left_out = bytearray(), bytearray(), 0

    def write(self, data: bytes) -> None:
        room = self._half - len(self._head)
        self._head += data[:room] if room > 0 else b""
        self._tail += data[room:] if room > 0 else data
        if (excess := len(self._tail) - self._half) > self._half:  # seldom, as it moves bytes
            self._drop(excess)

    def _drop(self, excess: int) -> None:
        del self._tail[:excess]
        self._left_out += excess

    def bytes(self) -> bytes:
        self._drop(max(0, len(self._tail) - self._half))
        mark = f"\n[mirrord: {self._left_out} bytes left out here]\n".encode()
        return bytes(self._head + (mark if self._left_out else b"") + self._tail)


_MOST_BYTES = 16 * 1024**3


class Capped:
    """A file that takes no more than 16 GiB."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._left = file, _MOST_BYTES

    def write(self, data: bytes) -> int:
        self._left -= len(data)
        if self._left < 0:
            hint = "take parts of it"
            raise ResourceError(f"cannot download more than {_MOST_BYTES} bytes at once", hint=hint)
        return self._file.write(data)


Sink = Output | Capped


class SandboxCall:
    """One command: what it is, where its bytes come from and go, and a way to end it early."""

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        variables: Mapping[str, str] | None = None,
        timeout: float | None = None,
        source: BinaryIO | None = None,
        stdout: Sink | None = None,
    ) -> None:
        words = ["bash", "-c", command] if isinstance(command, str) else command
        lines = [
            'echo "$$" 1<>"$0.end"',
            f"[ ! -e {ACTIVATE} ] || . {ACTIVATE}",
            *(
                f"export {_name(name)}={shlex.quote(value)}"
                for name, value in (variables or {}).items()
            ),
            f"cd -- {TESTBED} && cd -- {shlex.quote(cwd or '.')} || exit 126",
            f"exec {shlex.join(words)}",
        ]
        self.script = os.fsencode("\n".join(lines) + "\n")
        self.timeout = timeout
        self.source = source
        self.stdout, self.stderr = stdout or Output(), Output()
        self._cancelled, cancel = os.pipe2(os.O_CLOEXEC)
        self._cancel = os.fdopen(cancel, "wb", buffering=0)

    def cancel(self) -> None:
        """End the command, from another thread, as if its time was up."""
        with suppress(ValueError):  # it ended
            self._cancel.write(b".")

    def close(self) -> None:
        self._cancel.close()
        os.close(self._cancelled)

    def follow(self, room: SandboxRoom) -> Executed:
        """Run it there to its end."""
        before = room.strikes()
        with room.pipes(self.script) as pipes:
            try:
                status, is_late = self._watch(room, pipes)
            except BaseException:  # such as KeyboardInterrupt
                room.kill(pipes)
                raise
            for stream, sink in ((pipes.out, self.stdout), (pipes.err, self.stderr)):
                _drain(stream, sink)
        after = {**room.strikes(), "time": is_late}
        # of several memory, for the kernel ended a process for it
        each: tuple[Struck, ...] = ("memory", "processes", "time")
        struck = next((it for it in each if after.get(it, 0) > before.get(it, 0)), None)
        printed = self.stdout.bytes() if isinstance(self.stdout, Output) else b""
        return Executed(status, printed, self.stderr.bytes(), struck)

    def _watch(self, room: SandboxRoom, pipes: Pipes) -> tuple[int, bool]:
        """Move bytes until the command has ended; answers its status and whether it was late."""
        poll = select.poll()
        for stream in (pipes.out, pipes.err, pipes.end, self._cancelled):
            poll.register(stream, select.POLLIN)
        poll.register(room.life, 0)  # only that it ends: an agent may write there
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        told, rest, is_late = b"", b"", False
        while True:
            left = None if deadline is None else max(0, deadline - time.monotonic()) * 1000 + 1
            events = dict(poll.poll(left))
            if pipes.out in events:
                self.stdout.write(read_some(pipes.out))
            if pipes.err in events:
                self.stderr.write(read_some(pipes.err))
            if pipes.end in events:
                told = (told + read_some(pipes.end))[:_TOLD_BYTES]
                began, *ended = told.split(b"\n")
                if ended and not pipes.group:
                    pipes.group, room.has_worked = _number(began), True
                    poll.register(pipes.input, select.POLLOUT)
                if len(ended) > 1:
                    return _number(ended[0]), is_late
            if pipes.group and pipes.input in events:
                rest = rest or (self.source.read(_CHUNK) if self.source else b"")
                if rest:
                    rest = rest[os.write(pipes.input, rest) :]
                else:
                    poll.unregister(pipes.input)
                    pipes.close_input()
            if room.life in events:
                room.must_have_begun(pipes)
                return _KILLED, is_late
            is_over = deadline is not None and time.monotonic() >= deadline
            if is_over or self._cancelled in events:
                if is_late:  # neither the command nor its shell answered
                    room.end()
                    return _KILLED, True
                is_late, deadline = True, time.monotonic() + _GRACE
                poll.unregister(self._cancelled)
                room.kill(pipes)


def _name(variable: str) -> str:
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
        return variable
    hint = "letters, digits and _, not a digit first"
    raise UsageError(f"cannot set variable {shown(variable)}: no such name can be", hint=hint)


def _drain(stream: int, sink: Sink) -> None:
    """What is in a pipe now; a process that goes on may fill it for ever."""
    left = fcntl.fcntl(stream, fcntl.F_GETPIPE_SZ)
    while left > 0 and (data := read_some(stream)):
        sink.write(data)
        left -= len(data)


def _number(told: bytes) -> int:
    """What the shell says; an agent could write there, too."""
    return int(told) if re.fullmatch(rb"[0-9]{1,9}", told) else _KILLED


# -- files and directories on their way in and out, as tar archives; what comes out was made by ----
# -- somebody else; it is bounded, and written only below the target -------------------------------


def pack(local: Path, path: str, packed: BinaryIO) -> str:
    """Write what `local` is into an archive; answers the directory in which it becomes `path`."""
    inside = PurePosixPath(path)
    is_directory = local.is_dir()
    try:
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(os.path.realpath(local), "." if is_directory else inside.name)
    except OSError as error:
        hint = "name a file or directory that you may read"
        raise UsageError(f"cannot read {local}: {error.strerror}", hint=hint) from error
    packed.seek(0)
    return str(inside if is_directory else inside.parent)


def unpack(packed: BinaryIO, path: str, local: Path) -> None:
    """Write an archive as `local`, which must not exist: of a directory, or of one file.

    Links come last, so that nothing is written through one.
    """
    packed.seek(0)
    links: list[tuple[Path, str]] = []
    try:
        with tarfile.open(fileobj=packed, mode="r:") as archive:
            for member in archive:
                inside = PurePosixPath(member.name)
                if ".." in inside.parts:
                    raise tarfile.TarError(f"{member.name} leads out of it")
                target = local if inside.is_absolute() else local / inside
                if member.isdir():
                    target.mkdir()
                elif member.issym():
                    links.append((target, member.linkname))
                elif content := archive.extractfile(member):
                    with content, target.open("xb") as file:
                        shutil.copyfileobj(content, file)
                    target.chmod(0o755 if member.mode & 0o100 else 0o644)
        for target, aim in links:
            target.symlink_to(aim)
    except tarfile.TarError as error:
        fact = f"cannot download {path}: {error}"
        raise PathOutsideCheckoutError(fact, hint="take other paths of it") from error
    except OSError as error:
        fact = f"cannot download {path} to {local}: {error.strerror}"
        raise UsageError(fact, hint="name a new file in a directory of yours") from error
