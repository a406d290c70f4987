"""The page's own listener, opened and closed as the configuration says.

Visitors are strangers: nothing here knows a uid. They have few connections, each with the limits of
`api/server.py`; when all are taken, a new one takes the place of an idle one. A page that cannot be
served is a warning of `health`, and never stops the daemon.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from ..api.server import HttpConnection, Server
from ..engine import Engine
from ..errors import TooManyConnectionsError
from ..host.peers import Peer
from ..telemetry import Seldom, log
from .application import WebApplication

MAX_CONNECTIONS = 128
KEEP_ALIVE_S = 5

_NOBODY = Peer(uid=-1, gid=-1, pid=0)


class PageConnection(HttpConnection):
    """A visitor's connection: TCP has no credentials."""

    def identify(self) -> None:
        self.peer = _NOBODY


class Visitors:
    """The connections to the page. Belongs to one event loop."""

    def __init__(self) -> None:
        self._known: dict[HttpConnection, None] = {}  # the oldest first
        self._refusals = Seldom()

    def add(self, connection: HttpConnection) -> None:
        """Count a connection. Raises TooManyConnectionsError where all others are at work."""
        if len(self._known) >= MAX_CONNECTIONS:
            idle = next((each for each in self._known if each.is_idle), None)
            if idle is None:
                if count := self._refusals.count("web"):
                    log.warning("visitor.refused", count=count, connections=len(self._known))
                fact = "cannot take another connection to the page: too many are open"
                raise TooManyConnectionsError(fact, hint="ask again", retry_after=1)
            self.remove(idle)
            idle.shed()
        self._known[connection] = None

    def remove(self, connection: HttpConnection) -> None:
        """Stop counting a connection; again is fine."""
        self._known.pop(connection, None)


class WebServer:
    """Serves the page at `[web] listen`, which a reload may change, set or empty."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._application = WebApplication(engine)
        self._visitors = Visitors()
        self._listen = ""
        self._server: Server | None = None
        self._fault: str | None = None
        self._applying = asyncio.Lock()
        engine.health.warn_by(lambda: [self._fault] if self._fault else [])

    async def apply(self) -> None:
        """Listen where the settings say: at the new address before the old one is closed."""
        async with self._applying:
            wanted = self._engine.settings().web.listen
            self._fault = None
            if wanted == self._listen:
                return
            try:
                opened = await self._move(wanted)
            except Exception as error:  # whatever it is, the daemon serves
                is_known = isinstance(error, OSError)
                said = getattr(error, "strerror", None) or str(error)
                reason = said.rpartition(": ")[2] if is_known else "this is a bug"
                kept = f"; it is still served at {self._listen}" if self._listen else ""
                self._fault = f"the web page cannot listen at {wanted}: {reason}{kept}"
                self._fault += "; free that address or change [web] listen, then reload"
                log.warning("web.failed", listen=wanted, exc_info=None if is_known else error)
                return
            former, self._server, self._listen = self._server, opened, wanted
            if former:
                await former.close(timedelta(seconds=1))
            log.info("web.moved", listen=wanted)

    async def _move(self, wanted: str) -> Server | None:
        """Raises OSError, and then listens where it did before."""
        if not wanted:
            return None
        await self._application.load()
        try:
            return await self._open(wanted)
        except OSError:
            if not self._server or _port(wanted) != _port(self._listen):
                raise
        # one address of a port may cover another, such as 0.0.0.0: only one of them can listen
        self._server.stop_accepting()
        try:
            return await self._open(wanted)
        except OSError:
            former, self._listen, self._server = self._listen, "", None
            self._server = await self._open(former)
            self._listen = former
            raise

    async def _open(self, listen: str) -> Server:
        server = Server(
            self._application, self._visitors, kind=PageConnection, keep_alive_s=KEEP_ALIVE_S
        )
        await server.listen_at(listen.rpartition(":")[0].strip("[]"), _port(listen))
        return server

    def stop_accepting(self) -> None:
        if self._server:
            self._server.stop_accepting()

    async def close(self, drain: timedelta) -> None:
        """Let answers that are under way end within `drain`."""
        if self._server:
            await self._server.close(drain)


def _port(listen: str) -> int:
    return int(listen.rpartition(":")[2])
