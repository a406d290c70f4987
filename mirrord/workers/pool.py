"""Worker processes: work on objects, with a deadline, outside of the daemon's process.

A worker runs one call at a time and is kept for the next; idle workers end after a while. A call
that misses its deadline, needs too much memory or is cancelled costs its worker, which is killed:
libgit2 can hang while it holds the GIL. `turns.py` decides who gets a worker. All of them die with
the daemon, however it ends.
"""

import asyncio
import atexit
import copyreg
import os
import pickle
import select
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import PosixPath
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

import anyio
import structlog

from ..errors import DeadlineError, OutOfMemoryError, StoppingError, WorkerCrashedError
from ..host.children import Popen, await_end, start_module
from ..host.processes import memory_limit_bytes, passing_capabilities
from ..model import utc_now
from ..telemetry import log
from .turns import Askers, Turns

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# as one string: to join its parts again was a tenth of the processor time of a grade's call
copyreg.pickle(PosixPath, lambda path: (PosixPath, (str(path),)))

# most answers come at once; a longer one is read in pieces of it
_RECEIVED_BYTES = 64 * 1024
_USERS = 5  # users that can have their full share of calls at a time
# then the worker is killed; calls that may take longer say so
CALL_TIMEOUT = timedelta(minutes=10)


class ForkServer:
    """The process that workers are forked from (`forkserver.py`), started when first needed.

    Workers get the umask and the limits that the daemon had at that moment. `preload` names modules
    that it imports for its workers.
    """

    def __init__(self) -> None:
        self.preload: Sequence[str] = ()
        # reentrant: `fork` starts and stops the server itself
        self._lock = threading.RLock()
        self._running: tuple[Popen, socket.socket] | None = None

    def start(self) -> None:
        with self._lock:
            control, far_end = socket.socketpair()
            with far_end, passing_capabilities():
                process = start_module("mirrord.workers.forkserver", far_end, self.preload)
            self._running = process, control

    def stop(self) -> None:
        """End the process, and all its workers with it."""
        with self._lock:
            if self._running is not None:
                process, control = self._running
                self._running = None
                control.close()
                await_end(process)

    def fork(self, *, is_low: bool = False) -> tuple[socket.socket, int]:
        """Fork a worker; return the connection to it and its pidfd. Waits for a starting server.

        `is_low` gives the worker and its git children low CPU priority, for good.
        """
        connection, far_end = socket.socketpair()
        with self._lock, far_end:
            for _ in range(2):  # the server may have been killed
                if self._running is None:
                    self.start()
                assert self._running is not None
                try:
                    # a descriptor travels with at least one byte (unix(7)), which says the priority
                    socket.send_fds(self._running[1], [bytes([is_low])], [far_end.fileno()])
                    # CLOEXEC at once: another thread may be starting a program
                    _, pidfds, _, _ = socket.recv_fds(
                        self._running[1], 1, 1, socket.MSG_CMSG_CLOEXEC
                    )
                except ConnectionError:
                    pidfds = []
                if pidfds:
                    connection.setblocking(False)
                    return connection, pidfds[0]
                self.stop()
        connection.close()
        raise _crashed("start a worker", "the fork server ended")


# the one of this process, which it does not outlive
FORK_SERVER = ForkServer()
atexit.register(FORK_SERVER.stop)


class _WorkerProcess:
    def __init__(self, connection: socket.socket, pidfd: int, *, is_low: bool) -> None:
        self.connection, self._pidfd, self.is_low = connection, pidfd, is_low
        self.is_prepared = False
        self.gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, self._end)

    def has_ended(self) -> bool:
        """Ask the kernel: the event loop may not know yet."""
        if self.gone.is_set():
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it has ended, which the event loop does not know yet
            if not self.gone.is_set():
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def exchange(self, call: bytes) -> bytes:
        """Send a call and return the answer. Raises ConnectionError if the worker died."""
        loop, connection = asyncio.get_running_loop(), self.connection
        await loop.sock_sendall(connection, len(call).to_bytes(8) + call)
        # eight bytes with the length, then as many bytes
        answer, length = bytearray(), 8
        while len(answer) < length:
            received = await loop.sock_recv(connection, max(length - len(answer), _RECEIVED_BYTES))
            if not received:
                raise ConnectionResetError("the worker died")
            answer += received
            if length == 8 <= len(answer):
                length += int.from_bytes(answer[:8])
        return bytes(memoryview(answer)[8:])

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.gone.set()


class WorkerCall(NamedTuple):
    """A running call. `uid` is the user it counts for; None for background work."""

    function: str
    uid: int | None
    since: datetime


# calls up to it have turns of their own, and never wait behind an audit
_SHORT = timedelta(minutes=1)


class Workers:
    """Runs sync, importable functions with picklable arguments and results in worker processes.

    At most `size` calls run for one user, `size` in the background, and five times `size` in all;
    the others wait. Calls with a deadline of at most a minute are counted separately, so that a
    diff does not wait for a template build. Background calls run in workers of low priority, which
    stay so: an unprivileged process cannot raise its priority. `on_start` runs once in each worker,
    to set up its logging; `charge` is called with the users and seconds of each call. Belongs to
    one event loop.
    """

    def __init__(
        self,
        *,
        size: int = 2,
        # a new worker is ready in 10 ms, so they need not be kept for long
        idle: timedelta = timedelta(seconds=15),
        on_start: Callable[[], None] | None = None,
        charge: Callable[[Collection[int], float], None] = lambda uids, seconds: None,
        server: ForkServer = FORK_SERVER,
    ) -> None:
        self._short = Turns(size * _USERS, each=size, background=size)
        self._long = Turns(size * _USERS, each=size, background=size)
        self._idle = idle
        self._on_start = on_start
        self._charge = charge
        self._server = server
        self._free: list[_WorkerProcess] = []
        self._busy: dict[_WorkerProcess, WorkerCall] = {}
        self._calls = 0
        self._retire_timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def run(
        self, function: Callable[[*Ts], T], /, *args: *Ts, timeout: timedelta = CALL_TIMEOUT
    ) -> T:
        """Run `function` in a worker.

        Raises its errors; DeadlineError after `timeout`; OutOfMemoryError above
        `memory_limit_bytes`; WorkerCrashedError when the worker died. Cancelling kills the worker
        and waits for its end, so the call writes nothing afterwards.
        """
        if self._retire_timer is not None:
            self._retire_timer.cancel()
            self._retire_timer = None
        self._calls += 1
        try:
            async with (self._short if timeout <= _SHORT else self._long).turn() as uid:
                return await self._run(function, args, timeout, uid)
        finally:
            self._calls -= 1
            if not self._calls and not self._closed:
                loop = asyncio.get_running_loop()
                self._retire_timer = loop.call_later(self._idle.total_seconds(), self._retire)

    def prepare_by(self, on_start: Callable[[], None]) -> None:
        """Run `on_start` in every worker before its next call."""
        self._on_start = on_start
        for worker in (*self._free, *self._busy):
            worker.is_prepared = False

    @property
    def count(self) -> int:
        return len(self._busy) + len(self._free)

    def calls(self) -> list[WorkerCall]:
        """Return the running calls, the oldest first."""
        return list(self._busy.values())

    def waiting(self) -> Counter[int | None]:
        """Count the waiting calls by user; None is background work."""
        return self._short.waiting() + self._long.waiting()

    async def close(self) -> None:
        """Kill running calls and refuse new ones."""
        self._closed = True
        if self._retire_timer is not None:
            self._retire_timer.cancel()
        workers = [*self._busy, *self._free]
        for worker in workers:
            worker.kill()
        await asyncio.gather(*(worker.gone.wait() for worker in workers))
        self._retire()

    async def _run(
        self, function: Callable[..., T], args: tuple[Any, ...], timeout: timedelta, uid: int | None
    ) -> T:
        name = getattr(function, "__name__", repr(function))
        context = structlog.contextvars.get_contextvars()
        worker = await self._get_worker(is_low=not Askers.present().uids)
        self._busy[worker] = WorkerCall(name, uid, utc_now())
        is_sound = False
        result: T
        try:
            if self._closed:
                raise _stopping()
            prepare = None if worker.is_prepared else self._on_start
            worker.is_prepared = True
            call = pickle.dumps((prepare, context, function, args))
            async with asyncio.timeout(timeout.total_seconds()):
                began = asyncio.get_running_loop().time()
                try:
                    answer = await worker.exchange(call)
                finally:
                    took_s = asyncio.get_running_loop().time() - began
                    self._charge(Askers.present().uids, took_s)
            result, raised = pickle.loads(answer)  # noqa: S301  (a process of ours)
            is_sound = not isinstance(raised, MemoryError)
        except TimeoutError as error:
            log.warning("worker.killed", function=name, timeout_s=timeout.total_seconds())
            raise DeadlineError(
                f"cannot finish {name}: it took longer than {timeout.total_seconds():g} s",
                hint="a damaged object of the mirror can cause it, or a costly pattern in a "
                ".gitignore or .gitattributes",
            ) from error
        except ConnectionError as error:
            if self._closed:
                raise _stopping() from error
            log.warning("worker.crashed", function=name)
            raise _crashed(f"finish {name}", "the worker process died") from error
        finally:
            del self._busy[worker]
            if is_sound and not self._closed:
                self._free.append(worker)
            else:
                worker.kill()
                worker.connection.close()
                with anyio.CancelScope(shield=True):
                    await worker.gone.wait()
        if isinstance(raised, MemoryError):
            limit = memory_limit_bytes()
            log.warning("worker.killed", function=name, memory_bytes=limit)
            raise OutOfMemoryError(
                f"cannot finish {name}: it needs more than {limit >> 20} MiB of memory",
                hint="the request is too large for this machine",
            ) from raised
        if raised is not None:
            raise raised
        return result

    async def _get_worker(self, *, is_low: bool) -> _WorkerProcess:
        """Take the free worker of this priority that was busy last, or fork one."""
        if self._closed:
            raise _stopping()
        for worker in reversed([idle for idle in self._free if idle.is_low is is_low]):
            self._free.remove(worker)
            if not worker.has_ended():
                return worker
            worker.connection.close()
        loop = asyncio.get_running_loop()
        # in a thread: a server that has just begun imports for 200 ms
        forking = loop.run_in_executor(None, partial(self._server.fork, is_low=is_low))
        try:
            # a thread cannot be cancelled: `_abandon` ends what it forks all the same
            return _WorkerProcess(*await asyncio.shield(forking), is_low=is_low)
        except asyncio.CancelledError:
            forking.add_done_callback(_abandon)
            raise

    def _retire(self) -> None:
        self._retire_timer = None
        for worker in self._free:
            worker.connection.close()  # at which a worker ends
        self._free.clear()


def _abandon(forked: asyncio.Future[tuple[socket.socket, int]]) -> None:
    if not forked.cancelled() and not forked.exception():
        connection, pidfd = forked.result()
        connection.close()
        os.close(pidfd)


def _crashed(verb: str, fact: str) -> WorkerCrashedError:
    return WorkerCrashedError(
        f"cannot {verb}: {fact}",
        hint="try again; if it happens each time, audit the mirror, and check dmesg for the "
        "OOM killer",
    )


def _stopping() -> StoppingError:
    return StoppingError(
        "cannot do the work: the daemon is stopping", hint="try again when it is back"
    )
