"""Worker processes: object work with a deadline, away from the daemon.

Owns a `pebble` pool of one process for each call that runs at the same time: started when a call finds none free, retired when
nothing ran for a while, so that an idle daemon has no workers; and the fork server that they come from (`nursery.py`), which
stays. A call that misses its deadline costs its worker, which is killed and replaced; libgit2 can hang with the GIL held, so
nothing less helps. So does one that nobody waits for any more, and one that needs too much memory. Who gets a worker is
`turns.py`'s to say. Never keeps a result. All of them die with the daemon, whatever kills it.

One process to a pool, because processes that share one share its lock: one that is killed while it holds that has it for ever. A
pool of one is given up with its process.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from importlib import import_module
from multiprocessing import get_context
from typing import Any, TypeVar, overload

import anyio
import structlog
from pebble import ProcessExpired, ProcessPool

from ..errors import DeadlineError, OutOfMemoryError, StoppingError, WorkerCrashedError
from ..host.processes import (
    die_with_parent,
    limit_memory,
    memory_limit_bytes,
    resident_bytes,
    trim_memory,
)
from .forking import prepare_workers
from .turns import Turns

T = TypeVar("T")

# Named, not imported: it changes the process that loads it.
_NURSERY = "mirrord.git.nursery"
_TRIM_STEP_BYTES = 32 * 1024**2
_USERS = 5  # with as many calls as one may have; the next waits for a turn, until one of theirs ends or is killed
_PAUSES_S = (
    0.0,
    0.05,
    0.5,
)  # a fork server that was killed still counts as alive until the kernel has taken it apart
_CRASH_HINT = "try again; if it happens each time, audit the mirror, and look for the kernel's out-of-memory killer"

log = structlog.get_logger()


class Workers:
    """Processes for sync, importable functions with picklable arguments and results.

    At most `size` calls run for one user, as many in the background, and five times as many in all; the others wait. `on_start`
    runs in each new worker (to set up its logging). A call that its worker does not begin within `take` is lost. Belongs to one
    event loop.
    """

    def __init__(
        self,
        *,
        size: int = 2,
        idle: timedelta = timedelta(seconds=15),
        take: timedelta = timedelta(seconds=20),
        on_start: Callable[[], None] | None = None,
    ) -> None:
        self._turns = Turns(size * _USERS, each=size, background=size)
        self._idle = idle
        self._on_start = on_start
        self._take = take
        self._free: list[ProcessPool] = []
        self._running = 0
        self._futures: set[Future[Any]] = set()
        self._retire_timer: asyncio.TimerHandle | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._closed = False

    @overload
    async def call(
        self, function: Callable[..., T], /, *args: Any, timeout: timedelta, **kwargs: Any
    ) -> T: ...

    @overload
    async def call(
        self, function: str, /, *args: Any, timeout: timedelta, **kwargs: Any
    ) -> Any: ...

    async def call(
        self, function: Callable[..., Any] | str, /, *args: Any, timeout: timedelta, **kwargs: Any
    ) -> Any:
        """Run `function` in a worker. `module:name` names one whose module the daemon must not load (pygit2, pyarrow).

        Raises what it raised; DeadlineError when it took longer than `timeout`; OutOfMemoryError when it needed more than
        `memory_limit_bytes`; WorkerCrashedError when the worker died. Cancelling kills the worker, and ends when that is gone:
        nothing of the call writes anywhere afterwards.
        """
        self._enter()
        try:
            async with self._turns.turn():
                for pause_s in _PAUSES_S:
                    try:
                        return await self._call(function, args, kwargs, timeout)
                    except (
                        BrokenProcessPool
                    ):  # an idle worker was killed, or the fork server: nobody has begun the call
                        log.warning("worker.missed", function=_name(function))
                        await asyncio.sleep(pause_s)
                return await self._call(function, args, kwargs, timeout)
        except BrokenProcessPool as error:
            raise _crashed(function) from error
        finally:
            self._leave()

    async def close(self) -> None:
        """Kill what runs and refuse new calls."""
        self._closed = True
        self._cancel_timer()
        for future in list(self._futures):
            future.cancel()
        self._retire()
        await asyncio.gather(*self._retiring)

    async def _call(
        self,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        timeout: timedelta,
    ) -> Any:
        """Raises BrokenProcessPool when the worker died before it took the call."""
        pool = await self._get_pool()
        is_sound = False
        try:
            work = (structlog.contextvars.get_contextvars(), function, args, kwargs)
            result = await self._result(_schedule(pool, work, timeout))
            is_sound = True
            return result
        except TimeoutError as error:
            is_sound = True
            log.warning(
                "worker.killed", function=_name(function), timeout_s=timeout.total_seconds()
            )
            raise DeadlineError(
                f"cannot finish {_name(function)}: it took longer than {timeout.total_seconds():g} s",
                hint="a damaged object of the mirror can cause it, or a costly pattern in a .gitignore or .gitattributes",
            ) from error
        except ProcessExpired as error:
            log.warning("worker.crashed", function=_name(function), status=error.exitcode)
            raise _crashed(function) from error
        except MemoryError as error:
            log.warning(
                "worker.killed", function=_name(function), memory_bytes=memory_limit_bytes()
            )
            raise OutOfMemoryError(
                f"cannot finish {_name(function)}: it needs more than {memory_limit_bytes() >> 20} MiB of memory",
                hint="the request is too large for this machine",
            ) from error
        except Exception:
            is_sound = pool.active
            raise
        finally:
            await self._give_back(pool, is_sound=is_sound)

    async def _result(self, future: Future[T]) -> T:
        """Wait for one call. Stopping a pebble pool leaves its futures open for ever, so `close` cancels them."""
        self._futures.add(future)
        answer = asyncio.wrap_future(future)
        try:
            await asyncio.wait([answer], timeout=self._take.total_seconds())
            if not answer.done() and not future.running():
                raise ProcessExpired("the worker does not take the call", code=-signal.SIGKILL)  # type: ignore[no-untyped-call]
            return await answer
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _stopping() from error
        finally:
            answer.cancel()
            self._futures.discard(future)

    async def _get_pool(self) -> ProcessPool:
        """The one that was busy last; or a new one, which may have to wait for a fork server that is still loading."""
        if self._closed:
            raise _stopping()
        while self._free:
            if (pool := self._free.pop()).active:
                return pool
            self._forget(pool)
        prepare_workers()
        pool = ProcessPool(
            max_workers=1,
            initializer=_begin,
            initargs=(self._on_start,),
            context=get_context("forkserver"),
        )
        starting = asyncio.get_running_loop().create_task(asyncio.to_thread(_start, pool))
        try:
            await asyncio.shield(starting)
        except BaseException:
            self._forget(pool, starting)
            raise
        return pool

    async def _give_back(self, pool: ProcessPool, *, is_sound: bool) -> None:
        """One whose process died, or has a call that nobody waits for, is of no more use; returns when that process is gone."""
        if is_sound and not self._closed:
            self._free.append(pool)
            return
        with anyio.CancelScope(shield=True):
            await asyncio.wait([self._forget(pool)])

    def _enter(self) -> None:
        if self._closed:
            raise _stopping()
        self._cancel_timer()
        self._running += 1

    def _leave(self) -> None:
        self._running -= 1
        if self._running == 0 and self._free and not self._closed:
            loop = asyncio.get_running_loop()
            self._retire_timer = loop.call_later(self._idle.total_seconds(), self._retire)

    def _cancel_timer(self) -> None:
        if self._retire_timer is not None:
            self._retire_timer.cancel()
            self._retire_timer = None

    def _retire(self) -> None:
        self._retire_timer = None
        while self._free:
            self._forget(self._free.pop())

    def _forget(
        self, pool: ProcessPool, starting: asyncio.Task[None] | None = None
    ) -> asyncio.Task[None]:
        """End a pool in the background. A pebble pool wakes up ten times a second even when it has nothing to do."""

        async def end() -> None:
            if starting is not None:
                await asyncio.wait([starting])
            await asyncio.to_thread(_end, pool)

        task = asyncio.get_running_loop().create_task(end())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
        return task


def _name(function: Callable[..., Any] | str) -> str:
    return function.rpartition(":")[2] if isinstance(function, str) else function.__name__


def _crashed(function: Callable[..., Any] | str) -> WorkerCrashedError:
    return WorkerCrashedError(
        f"cannot finish {_name(function)}: the worker process died", hint=_CRASH_HINT
    )


def _stopping() -> StoppingError:
    return StoppingError(
        "cannot do the work: the daemon is stopping", hint="try again when it is back"
    )


def _start(pool: ProcessPool) -> None:
    """Pebble starts a pool when it is first asked for anything. Raises BrokenProcessPool."""
    if not pool.active:
        raise BrokenProcessPool("it ended at once")


def _schedule(pool: ProcessPool, work: tuple[Any, ...], timeout: timedelta) -> Future[Any]:
    try:
        return pool.schedule(_perform, work, timeout=timeout.total_seconds())
    except RuntimeError as error:  # it ended since it was looked at
        raise BrokenProcessPool(str(error)) from error


def _end(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()


# -- in the worker ----------------------------------------------------------------------------------------------------

_trimmed_at_bytes = 0


def _begin(on_start: Callable[[], None] | None) -> None:
    die_with_parent(import_module(_NURSERY).PID)
    limit_memory()
    gc.freeze()  # what the fork server loaded stays shared with it
    gc.enable()
    signal.signal(
        signal.SIGTERM, signal.SIG_DFL
    )  # pebble's own handler is Python and never runs while libgit2 holds the GIL
    if on_start is not None:
        on_start()


def _perform(
    context: Mapping[str, Any],
    function: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    with structlog.contextvars.bound_contextvars(**context):
        try:
            return _load(function)(*args, **kwargs)
        finally:
            _trim()


def _load(function: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    loaded: Callable[..., Any] = getattr(import_module(module), name)
    return loaded


def _trim() -> None:
    global _trimmed_at_bytes  # noqa: PLW0603  (one worker, one thread)
    if resident_bytes() > _trimmed_at_bytes + _TRIM_STEP_BYTES:
        trim_memory()
        _trimmed_at_bytes = resident_bytes()
