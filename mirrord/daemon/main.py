"""From a command line to an exit status: configuration, lock, sockets, and then the service until it is told to stop.

Prints what it cannot start for on stderr and ends with the error's exit status; from then on everything goes to the log.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import structlog

from .. import config, places, telemetry
from ..api.application import Application
from ..api.server import Server
from ..engine import Engine
from ..errors import MirrordError
from ..host.files import host_error
from ..host.systemd import Notifier
from .listener import Listener, open_listeners
from .lock import StateLock


def main(arguments: list[str] | None = None) -> int:
    """Run the daemon in the foreground; answers its exit status."""
    chosen = _parse(arguments)
    try:
        path = chosen.config.absolute() if chosen.config else places.find_path()
        load = partial(_load, path, chosen.socket)
        settings = load()
        telemetry.configure(settings.log.level, settings.log.format)
        return _serve(Engine(settings, config_path=path, load=load))
    except MirrordError as error:
        _explain(error)
        return error.exit_status
    except OSError as error:
        if (problem := host_error(error, "start the daemon")) is None:
            raise
        _explain(problem)
        return problem.exit_status


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mirrord.daemon", description="The mirrord daemon, in the foreground."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file")
    parser.add_argument(
        "--socket", type=Path, metavar="PATH", help="listen here, whatever the configuration says"
    )
    return parser.parse_args(arguments)


def _load(path: Path | None, socket: Path | None) -> config.Settings:
    settings = config.load(path)
    return settings.model_copy(update={"socket": socket.absolute()}) if socket else settings


def _serve(engine: Engine) -> int:
    notifier = Notifier.from_environment()
    engine.layout.make_root()
    with StateLock(engine.layout.root):
        listeners = open_listeners(engine.settings().socket)
        try:
            engine.layout.make()
            return asyncio.run(Daemon(engine, listeners, notifier).run())
        finally:
            for listener in listeners:
                listener.remove()


def _explain(error: MirrordError) -> None:
    priority = telemetry.priority("error", sys.stderr)
    told = [f"mirrord: {error.message}", *([f"hint: {error.hint}"] if error.hint else [])]
    for line in "\n".join(told).splitlines():
        print(f"{priority}{line}", file=sys.stderr)  # noqa: T201


log = structlog.get_logger()

OPERATIONS_DRAIN = timedelta(seconds=1)
REQUESTS_DRAIN = timedelta(seconds=10)
ENGINE_BOUND = timedelta(seconds=20)


class Daemon:
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
