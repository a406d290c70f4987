"""The daemon process: configuration, state lock, sockets, signals, watchdog and shutdown.

An error before the daemon serves is printed to stderr and sets the exit status; later ones are
logged. Sockets are served before the engine is open: health answers, other requests wait.
"""

import argparse
import asyncio
import contextlib
import errno
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread

from .. import config, errors, telemetry
from ..api.application import Application
from ..api.server import Server
from ..api.volumes import VolumeDriver
from ..engine.engine import Engine
from ..errors import host_error
from ..host.files import opened
from ..host.namespaces import home
from ..host.systemd import Notifier
from ..model import utc_now
from ..telemetry import log
from ..web.server import WebServer
from .listeners import Listeners, comes_true, listen_for_docker, open_listeners
from .start import config_path, load_settings

# The steps of a stop, one after the other. Together they are below TimeoutStopSec=60s of the unit,
# after which systemd kills; what is cut off is repaired at the next start.
OPERATIONS_DRAIN = timedelta(seconds=1)
REQUESTS_DRAIN = timedelta(seconds=10)
ENGINE_CLOSE_TIMEOUT = timedelta(seconds=20)
THREADS_DRAIN = timedelta(seconds=5)


def main(options: argparse.Namespace, settings: config.Settings | None = None) -> int:
    """Run the daemon in the foreground and return its exit status.

    `settings` were read already, where the start needed them.
    """
    load = partial(load_settings, options)
    try:
        settings = settings or load()
        telemetry.configure(settings.log.level, settings.log.format, buffered=True)
        engine = Engine(settings, config_path=config_path(options), load=load)
        engine.layout.make_root()
        with state_lock(engine.layout.root):
            engine.layout.check_version()
            if settings.socket.parent == engine.layout.run:
                engine.layout.make_run()
            listeners = open_listeners(settings.socket)
            try:
                engine.layout.make()
                # asyncio's own loop: with uvloop 16 clients were no faster
                asyncio.run(Daemon(engine, listeners, Notifier()).run())
                if home.is_inside() and not engine.layout.has_leases():
                    home.end(engine.layout.root)
            finally:
                listeners.remove()
    except (errors.MirrordError, OSError) as error:
        problem = host_error(error, "start the daemon") if isinstance(error, OSError) else error
        if problem is None:
            raise
        priority = telemetry.priority("error", sys.stderr)
        hint = f"\nhint: {problem.hint}" if problem.hint else ""
        # the lines of the log first, which a thread writes a little later
        telemetry.flush()
        for line in f"mirrord: {problem.message}{hint}".splitlines():
            print(f"{priority}{line}", file=sys.stderr)  # noqa: T201
        return problem.exit_status
    return 0


@contextlib.contextmanager
def state_lock(state_dir: Path) -> Iterator[None]:
    """Hold the lock of a state directory. Raises ConflictError.

    The kernel releases the lock when its holder ends. The file contains facts about the holder for
    error messages only. It is never removed, because a lock on a removed file excludes nobody.
    """
    path, flags = state_dir / "daemon.lock", os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
        except OSError as error:
            # ext4 after a failed disk: the daemon starts all the same, and serves from its caches
            if error.errno != errno.EROFS:
                raise
            lock = os.open(path, os.O_RDONLY | flags)  # a read-only lock file is enough
    except OSError as error:
        fact = f"cannot lock state directory {state_dir}: {error.strerror}"
        raise errors.ResourceError(fact, hint="check its owner") from error
    with opened(lock):
        if not comes_true(partial(_try_lock, lock)):
            identity = _read_holder(lock)
            holder = "process {pid} of uid {uid}, started {started_at}" if identity else ""
            holder = holder.format(**identity) or "a starting daemon"
            raise errors.ConflictError(
                f"cannot start a daemon on {state_dir}: {holder} uses it",
                hint="stop that daemon, or use another state_dir",
                state_dir=str(state_dir),
                **identity,
            )
        started_at = utc_now().isoformat(timespec="seconds")
        identity = {"pid": os.getpid(), "uid": os.geteuid(), "started_at": started_at}
        with contextlib.suppress(OSError):  # a full disk does not affect the lock
            os.ftruncate(lock, 0)
            os.pwrite(lock, json.dumps(identity).encode() + b"\n", 0)
        yield


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_holder(lock: int) -> dict[str, Any]:
    """Return facts about the holder, or nothing if it has not written them yet."""
    try:
        written = json.loads(os.pread(lock, 4096, 0))
        started_at = datetime.fromisoformat(written["started_at"]).isoformat(timespec="seconds")
        return {"pid": int(written["pid"]), "uid": int(written["uid"]), "started_at": started_at}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


class Daemon:
    """Runs an engine on listening sockets until a signal stops it."""

    def __init__(self, engine: Engine, listeners: Listeners, notifier: Notifier) -> None:
        self._engine = engine
        self._listeners = listeners
        self._notifier = notifier
        self._serving = f"serving {listeners.api[0].path}"
        self._volumes_fault: str | None = None
        engine.health.warn_by(lambda: [self._volumes_fault] if self._volumes_fault else [])
        self._lost_home: list[str] = []
        engine.health.degrade_by(lambda: self._lost_home)
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until a signal. Raises the MirrordError of an engine that cannot open."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop_signal, number)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._spawn(self._reload()))
        application = Application(self._engine)
        server = Server(application, application.connections)
        for listener in self._listeners.api:
            await server.listen(listener.socket)
        driver = Server(VolumeDriver(self._engine), application.connections)
        for listener in self._listeners.volumes:
            await driver.listen(listener.socket)
        await self._serve_volumes(driver)
        self._engine.on_reload(partial(self._serve_volumes, driver))
        web = WebServer(self._engine)
        self._engine.on_reload(web.apply)
        self._notifier.status("opening")
        try:
            if await self._open(web):
                self._spawn(self._notify_watchdog())
                self._spawn(self._keep_home())
                await self._stop.wait()
        finally:
            await self._shut_down([server, driver, web])

    async def _open(self, web: WebServer) -> bool:
        """Open the engine and the web page. Returns False if a signal comes first."""
        await web.apply()
        opening = asyncio.ensure_future(self._engine.open())
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([opening, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not opening.done():
            opening.cancel()
            await asyncio.wait([opening])
            return False
        opening.result()
        self._notifier.ready(self._serving)
        sockets = [str(listener.path) for listener in self._listeners.all]
        log.info("daemon.started", pid=os.getpid(), sockets=sockets)
        return True

    async def _serve_volumes(self, driver: Server) -> None:
        """Open or close our docker socket as configured.

        A socket passed by systemd stays open; the driver refuses its calls if disabled.
        """
        volumes, self._volumes_fault = self._listeners.volumes, None
        if not self._engine.settings().docker.volumes:
            for listener in [bound for bound in volumes if bound.inode is not None]:
                driver.stop_accepting()
                listener.remove()
                volumes.remove(listener)
        elif not volumes:
            try:
                volumes.append(await anyio.to_thread.run_sync(listen_for_docker))
                await driver.listen(volumes[0].socket)
            except errors.MirrordError as error:
                self._volumes_fault = f"volumes are not served: {error.message}; {error.hint}"

    async def _shut_down(self, servers: Sequence[Server | WebServer]) -> None:
        """Stop accepting, end operations and requests, close the engine, each with a timeout."""
        self._notifier.stopping("stopping")
        log.info("daemon.stopping")
        self._end_within(OPERATIONS_DRAIN + REQUESTS_DRAIN + ENGINE_CLOSE_TIMEOUT + THREADS_DRAIN)
        for server in servers:
            server.stop_accepting()
        for task in self._tasks:
            task.cancel()
        await self._engine.operations.close(OPERATIONS_DRAIN)
        # after the operations, whose ends are events; with it the streams of followers end
        self._engine.events.close()
        await asyncio.gather(*(server.close(REQUESTS_DRAIN) for server in servers))
        try:
            async with asyncio.timeout(ENGINE_CLOSE_TIMEOUT.total_seconds()):
                await self._engine.close()
        except TimeoutError:
            log.exception("daemon.stop_timed_out", bound_s=ENGINE_CLOSE_TIMEOUT.total_seconds())
        log.info("daemon.stopped")
        self._end_within(THREADS_DRAIN)

    def _end_within(self, bound: timedelta) -> None:
        """End the process after `bound` even if a thread is stuck in a system call.

        Python waits for each thread at its end, and a file system that hangs may never answer. The
        end is as safe as a power cut.
        """

        def end() -> None:
            time.sleep(bound.total_seconds())
            self._exit(0, lambda: log.warning("daemon.threads_left", bound_s=bound.total_seconds()))

        # a daemon thread, because Python would wait for another at its end
        threading.Thread(target=end, name="end", daemon=True).start()

    def _exit(self, status: int, say: Callable[[], None] = lambda: None) -> None:
        """Exit without Python's end. What reads the log may be what hangs, so it has a second."""

        def write() -> None:
            say()
            telemetry.flush()

        self._listeners.remove()
        writing = threading.Thread(target=write, name="last lines", daemon=True)
        writing.start()
        writing.join(1.0)
        os._exit(status)

    def _on_stop_signal(self, number: signal.Signals) -> None:
        """Stop the daemon; a second signal exits immediately, which is as safe as a power cut."""
        if self._stop.is_set():
            self._exit(128 + number)  # workers and git processes end with the daemon
        log.info("signal.received", signal=number.name)
        self._stop.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload(self) -> None:
        self._notifier.reloading()
        with contextlib.suppress(errors.MirrordError):  # the engine logs it and keeps the settings
            await self._engine.reload()
        self._notifier.ready(self._serving)

    async def _keep_home(self) -> None:
        """Replace the holder of the home when it ends; degrade the daemon where that fails."""
        loop = asyncio.get_running_loop()
        while (holder := home.holder()) is not None:
            ended = asyncio.Event()
            loop.add_reader(holder, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(holder)
            try:
                await anyio.to_thread.run_sync(home.replace_holder, self._engine.layout.root)
            except (errors.MirrordError, OSError):
                log.exception("holder.lost")
                fact = "the holder of the daemon's namespaces was killed, and cannot be replaced"
                effect = "mounts end with this daemon, and `mirrord enter` finds none"
                self._lost_home = [f"{fact}: {effect} until it is restarted"]
                return
            log.warning("holder.replaced")

    async def _notify_watchdog(self) -> None:
        """Notify systemd from the event loop, so that a hanging loop is noticed."""
        interval = self._notifier.watchdog_interval
        while interval:
            self._notifier.alive()
            await asyncio.sleep(interval.total_seconds())
