"""Daemons forked from a process that has loaded their modules, which is most of a start's processor time.

Each is a process of its own as after an exec: user, environment, directory, descriptors, a fresh
run of `mirrord.daemon.__main__`. Only what Python and the linker read before they start needs the real
thing (`can_fork`); so do tests of the command itself. A daemon's first fork server is forked from
it in the same way, before it has threads; one that takes the place of a dead one is started.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

_MODULE = "mirrord.daemon"
_FORK_SERVER = "mirrord.workers.forkserver"
_LOADED = (
    "anyio._backends._asyncio",  # with the first event loop else
    f"{_MODULE}.main",
    "mirrord.changes.pools",
    "mirrord.changes.survey",
    "mirrord.grading.prepare",
    "mirrord.patches.diff",
    "mirrord.templates.layers",
)
_BEFORE_A_START = ("PYTHON", "LD_", "MALLOC_", "COVERAGE")


class Forked:
    """The part of `subprocess.Popen` that tests of daemons use."""

    def __init__(self, pid: int, pidfd: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = pidfd
        self._status = status

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._status, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(_MODULE, timeout or 0)
            self.returncode = int(os.read(self._status, 16))
            os.close(self._status)
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forker:
    """The process that daemons are forked from, as the tests see it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._before = _before_a_start(os.environ)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), _MODULE],
                env={**os.environ, "PYTHONWARNINGS": ""},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        atexit.register(self.close)

    def can_fork(self, environment: Mapping[str, str]) -> bool:
        return _before_a_start(environment) == self._before and "COVERAGE_AREA" not in environment

    def start(
        self, arguments: list[str], environment: Mapping[str, str], log: int, user: int | None
    ) -> Forked:
        """`arguments` are those of `python -m mirrord.daemon`; `log` is its stdout and stderr."""
        request = json.dumps([arguments, dict(environment), os.getcwd(), user]).encode()
        status, theirs = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._control, [request], [log, theirs])
                answer, (pidfd,), _, _ = socket.recv_fds(
                    self._control, 16, 1, socket.MSG_CMSG_CLOEXEC
                )
        finally:
            os.close(theirs)
        return Forked(int(answer), pidfd, status)

    def close(self) -> None:
        self._control.close()
        self._process.wait()


# the first is set here as for a daemon, the second read by our own code alone
_OURS = {"PYTHONWARNINGS", "PYTHONUNBUFFERED"}


def _before_a_start(environment: Mapping[str, str]) -> dict[str, str]:
    """What is read before a line of ours runs."""
    names = {name for name in environment if name.startswith(_BEFORE_A_START)}
    return {name: environment[name] for name in names - _OURS}


# -- in that process -------------------------------------------------------------------------------


def main() -> None:
    gc.disable()
    sys.modules["rich"] = None  # type: ignore[assignment]  # as mirrord.daemon.__main__ does
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    for name in _LOADED:
        import_module(name)
    gc.freeze()
    ended = selectors.DefaultSelector()
    ended.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in ended.select():
            if key.fileobj is not control:
                ended.unregister(key.fileobj)
                _tell_status(key.fd, *key.data)
                continue
            request, descriptors, _, _ = socket.recv_fds(
                control, 1 << 20, 2, socket.MSG_CMSG_CLOEXEC
            )
            if not request:
                return
            log, status = descriptors
            if (pid := os.fork()) == 0:
                ended.close()
                control.close()
                _become_daemon(log, *json.loads(request))
            pidfd = os.pidfd_open(pid)
            socket.send_fds(control, [str(pid).encode()], [pidfd])
            os.close(log)
            ended.register(pidfd, selectors.EVENT_READ, (pid, status))


def _tell_status(pidfd: int, pid: int, status: int) -> None:
    os.close(pidfd)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError):  # nobody asks any more
        os.write(status, str(code).encode())
    os.close(status)


def _become_daemon(
    log: int, arguments: list[str], environment: dict[str, Any], cwd: str, user: int | None
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.path[0] = cwd
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        _be_dumpable()
    pygit2 = import_module("pygit2")
    for level in ("SYSTEM", "XDG", "GLOBAL"):
        # of this environment's HOME, not of the one in which libgit2 was loaded
        pygit2.settings.search_path[pygit2.enums.ConfigLevel[level]] = None
    _fork_the_first_server()
    try:
        _run(_MODULE, arguments)
    except SystemExit as end:
        _exit(end)


def _exit(end: SystemExit) -> None:
    """End as Python does, but free no object: those of the forker would be copied for it, 0.08 s."""
    if isinstance(end.code, str):
        raise end
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(end.code or 0)


def _run(module: str, arguments: Sequence[str]) -> None:
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


def _fork_the_first_server() -> None:
    pool: Any = import_module("mirrord.workers.pool")
    start_module = pool.start_module

    def fork(name: str, connection: socket.socket, arguments: Sequence[str]) -> _Child:
        pool.start_module = start_module
        return _Child(name, connection, arguments)

    pool.start_module = fork


class _Child(subprocess.Popen[bytes]):
    """What `mirrord.host.children.start_module` makes, without the exec."""

    def __init__(self, name: str, connection: socket.socket, arguments: Sequence[str]) -> None:
        self._module, self._connection = name, connection
        super().__init__([sys.executable, "-P", "-m", name, *arguments])

    def _execute_child(self, *_: object) -> None:
        if (pid := os.fork()) == 0:
            try:
                self._become()
            except SystemExit:
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        self.pid, self._child_created = pid, True

    def _become(self) -> None:
        os.setsid()
        if os.geteuid() != 0:
            _be_dumpable()
            _keep_ambient_capabilities()
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(os.path.isabs, sys.path))
        os.chdir("/")
        number = self._connection.detach()
        os.closerange(3, number)
        os.closerange(number + 1, os.sysconf("SC_OPEN_MAX"))
        assert isinstance(self.args, list)
        _write_command_line([*map(str, self.args[:4]), str(number)])
        _run(self._module, [str(number), *map(str, self.args[4:])])


_libc = ctypes.CDLL(None, use_errno=True)


def _be_dumpable() -> None:
    """As exec makes a process; a change of user or of the namespace takes its own /proc away."""
    _libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE


def _keep_ambient_capabilities() -> None:
    """As exec does for all but root (capabilities(7))."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sets = {line[:6]: int(line.split()[1], 16) for line in lines if line.startswith("Cap")}
    ambient, inheritable = sets["CapAmb"], sets["CapInh"]
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3
    low = (ambient, ambient, inheritable)
    words = [number >> shift & 0xFFFFFFFF for shift in (0, 32) for number in low]
    assert _libc.capset(header, (ctypes.c_uint32 * 6)(*words)) == 0, os.strerror(ctypes.get_errno())


def _write_command_line(words: list[str]) -> None:
    """By which tests find the processes of a daemon; there is room for as much as the forker's own."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    line = "\0".join([*words, ""]).encode()
    assert len(line) <= end - start, line
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(line.ljust(end - start, b"\0"))


if __name__ == "__main__":
    main()
