"""The life of the daemon between its start and its end: readiness, signals, the watchdog, an orderly stop.

The sockets are served before the engine is open: health answers at once, everything else waits. The first SIGTERM or SIGINT
stops in order, each step within a bound: accept nothing new, end or cancel operations, let requests finish, close the engine.
The second ends the process on the spot, which must be safe because a power cut is no kinder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine, Sequence
from datetime import timedelta

import structlog

from ..api.application import Application
from ..api.server import Server
from ..engine import Engine
from ..errors import MirrordError
from ..host.systemd import Notifier
from .listener import Listener

log = structlog.get_logger()

OPERATIONS_DRAIN = timedelta(seconds=1)
REQUESTS_DRAIN = timedelta(seconds=10)
ENGINE_BOUND = timedelta(seconds=20)


class Service:
    """Runs one engine on its listeners until a signal ends it."""

    def __init__(self, engine: Engine, listeners: Sequence[Listener], notifier: Notifier) -> None:
        self._engine = engine
        self._listeners = listeners
        self._notifier = notifier
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve; answers the exit status. Raises the MirrordError that keeps the engine from opening."""
        self._take_signals()
        server = Server(Application(self._engine))
        for listener in self._listeners:
            await server.listen(listener.socket)
        self._notifier.status("opening")
        try:
            if await self._open():
                self._spawn(self._say_alive())
                await self._stop.wait()
        finally:
            await self._shut_down(server)
        return 0

    async def _open(self) -> bool:
        """Open the engine unless a signal comes first."""
        opening = asyncio.ensure_future(self._engine.open())
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([opening, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not opening.done():
            opening.cancel()
            await asyncio.wait([opening])
            return False
        opening.result()
        self._notifier.ready(self._serving())
        log.info(
            "daemon.started",
            pid=os.getpid(),
            sockets=[str(listener.path) for listener in self._listeners],
        )
        return True

    async def _shut_down(self, server: Server) -> None:
        self._notifier.stopping("stopping")
        log.info("daemon.stopping")
        server.stop_accepting()
        for task in self._tasks:
            task.cancel()
        await self._engine.operations.close(OPERATIONS_DRAIN)
        self._engine.events.close()
        await server.close(REQUESTS_DRAIN)
        try:
            async with asyncio.timeout(ENGINE_BOUND.total_seconds()):
                await self._engine.close()
        except TimeoutError:
            log.exception("daemon.stop_timed_out", bound_s=ENGINE_BOUND.total_seconds())
        log.info("daemon.stopped")

    # -- signals ------------------------------------------------------------------------------------------------------

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop_signal, number)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._spawn(self._reload()))

    def _on_stop_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            for listener in self._listeners:
                listener.remove()
            os._exit(128 + number)  # workers and git children die with us
        log.info("signal.received", signal=number.name)
        self._stop.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload(self) -> None:
        self._notifier.reloading()
        with contextlib.suppress(
            MirrordError
        ):  # the engine has told it, and the old settings go on
            await self._engine.reload()
        self._notifier.ready(self._serving())

    async def _say_alive(self) -> None:
        """From the event loop itself: a loop that hangs is a daemon that hangs."""
        interval = self._notifier.watchdog_interval
        while interval:
            self._notifier.alive()
            await asyncio.sleep(interval.total_seconds())

    def _serving(self) -> str:
        return f"serving {self._listeners[0].path}"
