"""`python -m mirrord.workers.forkserver`: the process that workers are forked from, and their loop.

It has one thread, has imported what workers need and has opened no file, so a fork is safe. A
worker is ready in 10 ms instead of 200 and shares the imported modules. The server ends when the
daemon's end of its socket closes, however the daemon ends; the kernel ends the workers with it.
"""

import gc
import sys

gc.disable()  # imports make no garbage; workers turn it on again
sys.modules.setdefault("rich", None)  # type: ignore[arg-type]  # structlog would import all of it

import os
import pickle
import signal
import socket
import traceback
from contextlib import suppress
from importlib import import_module

import structlog

from ..errors import MirrordError
from ..host.ctimes import may_forge_ctimes
from ..host.processes import (
    die_with_parent,
    drop_passed_capabilities,
    limit_memory,
    resident_bytes,
    trim_memory,
)

# glibc keeps what a call freed (malloc_trim(3)): large tree diffs reached 1.5 GB
_TRIM_STEP_BYTES = 32 * 1024**2
_LOW_NICE = 10  # as for background git children (`git/command.py`)


def main() -> None:
    """Fork a worker for each socket received, and send back its pidfd."""
    drop_passed_capabilities()
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        with suppress(Exception):  # a call into it will raise the error
            import_module(name)
    if os.geteuid() == 0:
        may_forge_ctimes()  # asks about devices once for all workers
    gc.freeze()  # a collection in a worker would write to, and so copy, the shared pages
    server = os.getpid()
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        # the byte is the priority of the worker; no descriptor is the end of the stream
        priority, descriptors, _, _ = socket.recv_fds(control, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not descriptors:
            return None
        with socket.socket(fileno=descriptors[0]) as connection:
            # reap no child before its pidfd is open: its pid could be reused
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            if (pid := os.fork()) == 0:
                # held here, it would hide the end of the server from the daemon
                control.close()
                die_with_parent(server)
                os.nice(_LOW_NICE if priority == b"\1" else 0)
                return _serve(connection)
            pidfd = os.pidfd_open(pid)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        socket.send_fds(control, [b"\0"], [pidfd])
        os.close(pidfd)


def _reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _serve(connection: socket.socket) -> None:
    """Perform calls until the daemon closes the connection or dies."""
    # the server's handler would reap git's processes before those who wait for their status
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    limit_memory()
    gc.enable()
    trimmed_at_bytes = 0
    stream = connection.makefile("rb")
    with suppress(ConnectionError):  # the daemon died; the kernel has yet to kill this worker
        while length := stream.read(8):
            answer = _perform(stream.read(int.from_bytes(length)))
            connection.sendall(len(answer).to_bytes(8) + answer)
            # else a long answer would count as memory that glibc keeps
            del answer
            if resident_bytes() > trimmed_at_bytes + _TRIM_STEP_BYTES:
                trim_memory()
                trimmed_at_bytes = resident_bytes()


def _perform(call: bytes) -> bytes:
    """Return a pickled pair of result and error; one of them is None."""
    try:
        prepare, context, function, args = pickle.loads(call)
        del call
        if prepare is not None:
            prepare()
        with structlog.contextvars.bound_contextvars(**context):
            return pickle.dumps((function(*args), None))
    except (MirrordError, MemoryError) as error:
        return pickle.dumps((None, error))
    except Exception as error:  # noqa: BLE001  (the caller gets it)
        # pickling drops the traceback
        error.add_note("".join(traceback.format_exception(error)))
        try:
            pickle.loads(answer := pickle.dumps((None, error)))
        except Exception:  # noqa: BLE001  (it does not survive pickling)
            return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
        return answer


if __name__ == "__main__":
    main()
