"""Rooms: boxes of bubblewrap with a shell that starts commands, each with its own named pipes.

The shell is the only process that is started with the box. It reads names from its standard input,
and runs the script of each name with the pipes beside it, in a new session. So every process is
born in the box, unprivileged and within the limits, and none enters from outside. A box ends when
its shell is killed, when this process ends, and in `end`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BackendUnavailableError
from ..model import Isolation
from ..presence import exists, is_dir, matching
from .box import PIPES, Box, ScratchDirectory, explain, sweep_scratch
from .direct import isolate

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

_ENDS = ("in", "out", "err", "end", "report")
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class Pipes:
    """The host's ends of a command's pipes; `group` is its process group, 0 until it starts."""

    def __init__(self, directory: str, script: bytes, files: Mapping[str, bytes]) -> None:
        self.name = os.urandom(8).hex()
        self._path = os.path.join(directory, self.name)
        self.group = 0
        if files:
            self._make_files(files)
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with os.fdopen(file, "wb") as content:
            os.fchmod(file, 0o644)
            content.write(script)
        self.input, self.out, self.err, self.end, self.report = map(self._make_pipe, _ENDS)

    def _make_files(self, files: Mapping[str, bytes]) -> None:
        directory = Path(f"{self._path}.d")
        directory.mkdir()
        for name, content in files.items():
            (directory / name).write_bytes(content)
            (directory / name).chmod(0o444)
        directory.chmod(0o755)

    # In a directory of the host that the box sees read-only. It is opened before the box learns of
    # it, and never again by its path.
    def _make_pipe(self, end: str) -> int:
        os.mkfifo(path := f"{self._path}.{end}")
        # Read and write: opening a single end would wait for the other.
        made = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        # For another uid; the directory is not listable. Nobody inside reads what was reported.
        os.fchmod(made, 0o222 if end == "report" else 0o666)
        return made

    def close_input(self) -> None:
        if self.input >= 0:
            os.close(self.input)
            self.input = -1

    def close(self) -> bool:
        """Close all ends; returns True if a background process may still write."""
        # our own ends are for writing too, and would count as writers
        readers = [os.open(f"/proc/self/fd/{end}", _READ) for end in (self.out, self.err)]
        self.close_input()
        for end in (self.out, self.err, self.end, self.report):
            os.close(end)
        try:
            return any(_has_writer(reader) for reader in readers)
        finally:
            for reader in readers:
                os.close(reader)

    def remove(self) -> None:
        for path in (self._path, *(f"{self._path}.{name}" for name in _ENDS)):
            os.unlink(path)
        shutil.rmtree(f"{self._path}.d", ignore_errors=True)


class EndedError(Exception):
    """A box ended before it started a command, because an earlier command killed its shell."""


# A line is the name of a script, "-PGID" to kill a group, or "+NAME" to drain the output of a
# background process, which a full or closed pipe would stop.
_SHELL = """\
exec 2>/dev/null
cd "$1"
while IFS= read -r name; do
  case $name in
    -*) kill -KILL -- "$name" ;;
    +*) cat "${name#+}.out" >/dev/null & cat "${name#+}.err" >/dev/null & ;;
    *) { setsid --wait bash "$name" <"$name.in" >"$name.out" 2>"$name.err"
         echo $? 1<>"$name.end"; } & ;;
  esac
done
"""


class SandboxRoom:
    """A box with its shell; `has_worked` once it started a command."""

    has_worked = False

    def __init__(self, box: Box, limits: Limits, isolation: Isolation | None = None) -> None:
        _sweep_once(os.getpid())
        self._directory = ScratchDirectory()
        self._limits = limits
        self._lock, self._users = threading.Lock(), 1  # calls, and 1 until `close`
        try:
            box = replace(box, pipes=Path(self._directory.path))
            isolated = isolate(box, isolation)
            self.at, self.isolation = isolated.at, isolated.isolation
            command = [*limits.inside, "bash", "-c", _SHELL, "bash", isolated.at(PIPES)]
            options: dict[str, Any] = {
                "before": limits.before,
                "start_new_session": True,  # Ctrl-C reaches only the client
                **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
            }
            self._process = (
                _starter(os.getpid()).submit(isolated.start, command, **options).result()
            )
        except BaseException:
            self._remove()
            raise
        assert self._process.stdin
        assert self._process.stdout
        self._shell_input = self._process.stdin.fileno()
        self.life = self._process.stdout.fileno()

    @property
    def is_open(self) -> bool:
        return self._process.poll() is None

    def strikes(self) -> dict[str, int]:
        return self._limits.strikes()

    @contextmanager
    def pipes(self, script: bytes, files: Mapping[str, bytes]) -> Iterator[Pipes]:
        """Start a script; at the end the shell drains the pipes of background processes.

        `files` are in the directory that has the script's name and `.d`; commands can only read it.
        """
        with self._lock:
            self._users += 1
        try:
            pipes = Pipes(self._directory.path, script, files)
            self._send(pipes.name)
            try:
                yield pipes
            finally:
                if pipes.close():
                    self._send(f"+{pipes.name}")
                else:
                    pipes.remove()
        finally:
            self._leave()

    def kill(self, pipes: Pipes) -> None:
        """Kill a command's process group, or end the box if it has not started."""
        if pipes.group:
            self._send(f"-{pipes.group}")
        else:
            self.end()

    def _send(self, line: str) -> None:
        # the shell has ended, which who follows the command sees at `life`
        with suppress(BrokenPipeError):
            os.write(self._shell_input, f"{line}\n".encode())

    def raise_unless_started(self, pipes: Pipes) -> None:
        """Raise EndedError or BackendUnavailableError if the command did not start."""
        if pipes.group:
            return
        self.end()
        if self.has_worked:
            raise EndedError
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        message = (self._process.stderr.read() or b"").decode(errors="replace")
        fact = f"cannot make a sandbox: {explain(message)}"
        raise BackendUnavailableError(fact, hint="see `mirrord doctor`")

    def end(self) -> None:
        """Kill all processes and wait for their end."""
        self._process.end()

    def close(self) -> None:
        """End the box. Call it exactly once."""
        self.end()
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream:
                with suppress(BrokenPipeError):
                    stream.close()
        self._remove()

    def _remove(self) -> None:
        self._directory.remove()
        self._limits.remove()


_starters: dict[int, ThreadPoolExecutor] = {}


def _starter(pid: int) -> ThreadPoolExecutor:
    """A thread that lives as long as its process: a box ends with the thread that started it.

    Calls at once get the same one: an executor that is dropped ends its thread.
    """
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  (exec needs no thread)

    own = ThreadPoolExecutor(1, thread_name_prefix="mirrord-sandbox")  # it has no thread yet
    return _starters.setdefault(pid, own)


@cache
def _sweep_once(_pid: int) -> None:
    sweep_scratch()


_CHUNK = 64 * 1024


def read_some(stream: int) -> bytes:
    """Read what is in a pipe now, at most 64 KiB."""
    try:
        return os.read(stream, _CHUNK)
    except BlockingIOError:
        return b""


def _has_writer(reader: int) -> bool:
    # an empty pipe is EAGAIN as long as somebody has it open for writing, else at its end
    try:
        return bool(os.read(reader, 1))
    except BlockingIOError:
        return True


_ROOT = Path("/sys/fs/cgroup")
_NAME = "mirrord-sandbox-{}-{}"
_OWN_PROCESSES = 5  # of the sandbox itself


class Limits:
    """Limits of a box; `before` and `inside` are prefixes of its command, on the host and in it.

    A control group limits all processes together. Without one, rlimits limit the memory of each
    process, and the number of processes of each uid in a user namespace (Linux 5.14).
    """

    def __init__(self, memory_bytes: int | None, processes: int | None) -> None:
        wanted = {"memory": memory_bytes, "pids": processes and processes + _OWN_PROCESSES}
        limits = {name: limit for name, limit in wanted.items() if limit is not None}
        self.before: list[str] = []
        self.inside: list[str] = []
        self._is_unified = exists(_ROOT / "cgroup.controllers")
        self._groups: dict[str, Path] = {}
        if not limits:
            return
        try:
            self._make_groups(limits)
        except OSError:
            self.remove()
            # of an ordinary user, or in a container, whose control groups are read-only
            options = {"memory": "data", "pids": "nproc"}
            rlimits = [f"--{options[name]}={limit}" for name, limit in limits.items()]
            self.inside = ["prlimit", *rlimits, "--"]
            return
        # enters the groups, then replaces itself with the command
        enter = 'until [ "$1" = -- ]; do echo 0 >"$1" || exit; shift; done; shift; exec "$@"'
        members = [f"{path}/cgroup.procs" for path in sorted(set(self._groups.values()))]
        self.before = ["sh", "-c", enter, "sh", *members, "--"]

    def _make_groups(self, limits: dict[str, int]) -> None:
        parents = self._parents(limits)
        for parent in set(parents.values()):
            # a client that was killed could not remove its groups
            _sweep(parent)
        name = _NAME.format(os.getpid(), os.urandom(4).hex())
        for controller, parent in parents.items():
            # in the unified hierarchy both controllers have the same group
            (parent / name).mkdir(mode=0o755, exist_ok=True)
            self._groups[controller] = parent / name
        for controller, limit in limits.items():
            path = self._groups[controller]
            if controller == "pids":
                (path / "pids.max").write_text(str(limit))
                continue
            name = "memory.max" if self._is_unified else "memory.limit_in_bytes"
            (path / name).write_text(str(limit))
            with suppress(FileNotFoundError):  # a kernel without swap accounting
                if self._is_unified:
                    (path / "memory.swap.max").write_text("0")
                else:
                    # memory and swap together; not below the limit of memory, so it is set later
                    (path / "memory.memsw.limit_in_bytes").write_text(str(limit))

    def _parents(self, limits: dict[str, int]) -> dict[str, Path]:
        if not self._is_unified:
            return {controller: _own_group(controller) for controller in limits}
        # A group with processes, such as our own, cannot enable controllers for children.
        parent = _ROOT / "mirrord"
        parent.mkdir(exist_ok=True)
        enabled = " ".join(f"+{controller}" for controller in limits)
        (parent / "cgroup.subtree_control").write_text(enabled)
        return dict.fromkeys(limits, parent)

    def strikes(self) -> dict[str, int]:
        """Return how often the limits of `memory` and `processes` were met so far."""
        events = "memory.events" if self._is_unified else "memory.oom_control"
        files = {
            "memory": ("memory", events, "oom_kill"),
            "pids": ("processes", "pids.events", "max"),
        }
        strikes = {}
        for controller, path in self._groups.items():
            name, file, key = files[controller]
            lines = dict(line.split() for line in (path / file).read_text().splitlines())
            strikes[name] = int(lines.get(key, 0))
        return strikes

    def remove(self) -> None:
        """Remove the groups; their processes must have ended."""
        for path in set(self._groups.values()):
            with suppress(OSError):
                path.rmdir()
        self._groups = {}


def _own_group(controller: str) -> Path:
    """Return the group of this process in a hierarchy of version 1."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = _ROOT / controller / path.lstrip("/")
            # in a container the path may be that of the host
            return group if is_dir(group) else _ROOT / controller
    raise FileNotFoundError(f"the kernel has no controller {controller}")


def _sweep(parent: Path) -> None:
    for path in matching(parent, _NAME.format("*", "*")):
        pid = path.name.split("-")[2]
        if not exists(f"/proc/{pid}"):
            with suppress(OSError):
                path.rmdir()
