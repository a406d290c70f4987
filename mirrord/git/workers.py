"""Worker processes: object work with a deadline, away from the daemon.

Owns a `pebble` pool that starts with the first call and is retired when idle, so that an idle daemon has no workers, and the fork
server that they come from (`nursery.py`), which stays. A call that misses its deadline costs its worker, which is killed and
replaced; libgit2 can hang with the GIL held, so nothing less helps. Never keeps a result. All of them die with the daemon,
whatever kills it.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from typing import Any, TypeVar, overload

import structlog
from pebble import ProcessExpired, ProcessPool

from ..errors import DeadlineError, StoppingError, WorkerCrashedError
from ..host.processes import die_with_parent, resident_bytes, trim_memory
from .forking import prepare_workers

T = TypeVar("T")

# Named, not imported: it changes the process that loads it.
_NURSERY = "mirrord.git.nursery"
_TRIM_STEP_BYTES = 32 * 1024**2
_CRASH_HINT = "try again; if it happens each time, audit the mirror, and look for the kernel's out-of-memory killer"

log = structlog.get_logger()


class Workers:
    """A pool of processes for sync, importable functions with picklable arguments and results.

    `on_start` runs in each new worker (to set up its logging). A call that no worker begins within `take`, though one is free, is
    lost. One pool belongs to one event loop.
    """

    def __init__(
        self,
        *,
        size: int = 2,
        idle: timedelta = timedelta(seconds=15),
        take: timedelta = timedelta(seconds=20),
        on_start: Callable[[], None] | None = None,
    ) -> None:
        self._size = size
        self._idle = idle
        self._on_start = on_start
        self._take = take
        self._pool: ProcessPool | None = None
        self._has_started = False
        self._running = 0
        self._futures: set[Future[Any]] = set()
        self._retire_timer: asyncio.TimerHandle | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._closed = False

    @overload
    async def call(self, function: Callable[..., T], /, *args: Any, timeout: timedelta, **kwargs: Any) -> T: ...

    @overload
    async def call(self, function: str, /, *args: Any, timeout: timedelta, **kwargs: Any) -> Any: ...

    async def call(self, function: Callable[..., Any] | str, /, *args: Any, timeout: timedelta, **kwargs: Any) -> Any:
        """Run `function` in a worker. `module:name` names one whose module the daemon must not load (pygit2, pyarrow).

        Raises what it raised; DeadlineError when it took longer than `timeout`; WorkerCrashedError when the worker died.
        Cancelling kills the worker.
        """
        pool = self._enter()
        try:
            future = await self._schedule(pool, function, args, kwargs, timeout)
            return await self._result(pool, future)
        except TimeoutError as error:
            log.warning("worker.killed", function=_name(function), timeout_s=timeout.total_seconds())
            raise DeadlineError(
                f"cannot finish {_name(function)}: it took longer than {timeout.total_seconds():g} s",
                hint="the repository may hold a damaged object; audit the mirror",
            ) from error
        except ProcessExpired as error:
            log.warning("worker.crashed", function=_name(function), status=error.exitcode)
            raise _crashed(function) from error
        except (BrokenProcessPool, RuntimeError) as error:
            if pool.active:
                raise
            self._forget(pool)
            raise _crashed(function) from error
        finally:
            self._leave()

    async def close(self) -> None:
        """Kill what runs and refuse new calls."""
        self._closed = True
        self._cancel_timer()
        for future in list(self._futures):
            future.cancel()
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.stop()  # type: ignore[no-untyped-call]
            await asyncio.to_thread(pool.join)
        await asyncio.gather(*self._retiring)

    async def _schedule(
        self, pool: ProcessPool, function: Callable[..., T] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any],
        timeout: timedelta,
    ) -> Future[T]:  # fmt: skip
        """The first call of a pool starts its workers, and waits for a fork server that is still loading."""
        context = structlog.contextvars.get_contextvars()
        call = partial(pool.schedule, _perform, (context, function, args, kwargs), timeout=timeout.total_seconds())
        if self._pool is pool and self._has_started:
            return call()
        future = await asyncio.to_thread(call)
        self._has_started = self._pool is pool
        return future

    async def _result(self, pool: ProcessPool, future: Future[T]) -> T:
        """Wait for one call. Stopping a pebble pool leaves its futures open for ever, so `close` cancels them."""
        self._futures.add(future)
        watch = asyncio.create_task(self._give_up_when_lost(pool, future))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _stopping() from error
        finally:
            watch.cancel()
            self._futures.discard(future)

    async def _give_up_when_lost(self, pool: ProcessPool, future: Future[Any]) -> None:
        """End a pool in which nobody takes a call though a worker is free.

        One that was killed while it took the call has it, and the pool's lock, for ever.
        """
        while not future.running():
            await asyncio.sleep(self._take.total_seconds())
            busy = sum(other.running() for other in self._futures)
            if not future.running() and not future.done() and busy < self._size:
                await asyncio.shield(self._forget(pool))
                if not future.done():  # the pool may have said so itself while it ended
                    future.set_exception(ProcessExpired("no worker takes the call", code=-signal.SIGKILL))  # type: ignore[no-untyped-call]
                return

    def _enter(self) -> ProcessPool:
        if self._closed:
            raise _stopping()
        self._cancel_timer()
        self._running += 1
        if self._pool is not None and not self._pool.active:
            self._forget(self._pool)
        if self._pool is None:
            prepare_workers()
            self._has_started = False
            self._pool = ProcessPool(
                max_workers=self._size, initializer=_begin, initargs=(self._on_start,), context=get_context("forkserver")
            )
        return self._pool

    def _leave(self) -> None:
        self._running -= 1
        if self._running == 0 and self._pool is not None and not self._closed:
            loop = asyncio.get_running_loop()
            self._retire_timer = loop.call_later(self._idle.total_seconds(), self._retire)

    def _cancel_timer(self) -> None:
        if self._retire_timer is not None:
            self._retire_timer.cancel()
            self._retire_timer = None

    def _retire(self) -> None:
        self._retire_timer = None
        if self._pool is not None:
            self._forget(self._pool)

    def _forget(self, pool: ProcessPool) -> asyncio.Task[None]:
        """End a pool in the background. A pebble pool wakes up ten times a second even when it has nothing to do."""
        if self._pool is pool:
            self._pool = None
        task = asyncio.get_running_loop().create_task(asyncio.to_thread(_end, pool))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
        return task


def _name(function: Callable[..., Any] | str) -> str:
    return function.rpartition(":")[2] if isinstance(function, str) else function.__name__


def _crashed(function: Callable[..., Any] | str) -> WorkerCrashedError:
    return WorkerCrashedError(f"cannot finish {_name(function)}: the worker process died", hint=_CRASH_HINT)


def _stopping() -> StoppingError:
    return StoppingError("cannot do the work: the daemon is stopping", hint="try again when it is back")


def _end(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()


# -- in the worker ----------------------------------------------------------------------------------------------------

_trimmed_at_bytes = 0


def _begin(on_start: Callable[[], None] | None) -> None:
    die_with_parent(import_module(_NURSERY).PID)
    gc.freeze()  # what the fork server loaded stays shared with it
    gc.enable()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's own handler is Python and never runs while libgit2 holds the GIL
    if on_start is not None:
        on_start()


def _perform(
    context: Mapping[str, Any], function: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
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
