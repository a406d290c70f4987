"""The read-only web page: its listener, its HTTP rules and its cache of rendered pages.

Visitors are anonymous, because TCP has no peer credentials. They have few connections, with the
limits of `api/server.py`. Only GET and HEAD are accepted. Pages are rendered one at a time in a
thread and cached. A page that cannot be served is a warning of `health` and never stops the daemon.
"""

import asyncio
import importlib
import time
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl

import anyio.to_thread
from cachetools import LRUCache
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..api import metrics
from ..api.server import HttpConnection, Server
from ..engine.engine import Engine
from ..errors import TooManyConnectionsError
from ..host.peers import Peer
from ..quoting import as_utf8
from ..telemetry import Seldom, log

if TYPE_CHECKING:
    from .pages import Pages

# Everybody who reaches the port is a stranger: the page has bounds of its own, so that it takes
# nothing from the socket.
MAX_CONNECTIONS = 128
KEEP_ALIVE_S = 5
CLOSE_TIMEOUT = timedelta(seconds=1)
QUERY_LIMIT_BYTES = 1024
# one page is made at a time; who waits longer gets 503
WAIT_LIMIT_S = 15.0
# by path and query; strangers choose both
CACHED_PAGES = 64


class WebServer:
    """Serves the page at `[web] listen`, which a reload may set, change or clear."""

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
        """Listen at the configured address; if that fails, listen at the previous one again."""
        async with self._applying:
            listen, previous, old = self._engine.settings().web.listen, self._listen, self._server
            self._fault = None
            if listen == previous:
                return
            if old:  # first, because addresses of one port can overlap, such as 0.0.0.0
                old.stop_accepting()
            failure = await self._open(listen)
            if failure:
                is_kept = previous and await self._open(previous) is None
                kept = f"; it is still served at {previous}" if is_kept else ""
                self._fault = f"the web page cannot listen at {listen}: {failure}{kept}"
                self._fault += "; free that address or change [web] listen, then reload"
            else:
                log.info("web.moved", listen=listen)
            if old:
                await old.close(CLOSE_TIMEOUT)

    async def _open(self, listen: str) -> str | None:
        """Replace the server by one at `listen`, or by none if that is empty.

        Returns the reason for a failure, after which there is no server.
        """
        self._server, self._listen = None, ""
        if not listen:
            return None
        host, _, port = listen.rpartition(":")
        server = Server(
            self._application, self._visitors, kind=PageConnection, keep_alive_s=KEEP_ALIVE_S
        )
        try:
            await self._application.load()
            await server.listen_at(host.strip("[]"), int(port))
        except OSError as error:
            # asyncio puts "error while attempting to bind on address …: " before the reason
            reason = (error.strerror or str(error)).rpartition(": ")[2]
            log.warning("web.failed", listen=listen, reason=reason)
            return reason
        except Exception:  # a bug in the page must not stop the daemon
            log.exception("web.failed", listen=listen)
            return "this is a bug"
        self._server, self._listen = server, listen
        return None

    def stop_accepting(self) -> None:
        if self._server:
            self._server.stop_accepting()

    async def close(self, drain: timedelta) -> None:
        """Let running requests end within `drain`."""
        if self._server:
            await self._server.close(drain)


_ANONYMOUS = Peer(uid=-1, gid=-1, pid=0)


class PageConnection(HttpConnection):
    """A visitor's connection."""

    def identify(self) -> None:
        self.peer = _ANONYMOUS


class Visitors:
    """The connections to the page. Belongs to one event loop."""

    def __init__(self) -> None:
        self._connections: dict[HttpConnection, None] = {}  # oldest first
        self._refusals = Seldom()

    def add(self, connection: HttpConnection) -> None:
        """Count a connection, closing an idle one if necessary. Raises TooManyConnectionsError."""
        if len(self._connections) >= MAX_CONNECTIONS:
            idle = next((visitor for visitor in self._connections if visitor.is_idle), None)
            if idle is None:
                if count := self._refusals.count("web"):
                    log.warning("visitor.refused", count=count, connections=len(self._connections))
                fact = "cannot accept another connection to the page: too many are open"
                raise TooManyConnectionsError(fact, hint="retry later", retry_after=1)
            self.remove(idle)
            idle.evict()
        self._connections[connection] = None

    def remove(self, connection: HttpConnection) -> None:
        """Stop counting a connection. Does nothing if it is not counted."""
        self._connections.pop(connection, None)


class PageResponse(NamedTuple):
    status: int
    media_type: str
    body: bytes


_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class WebApplication:
    """The ASGI application of the page. Belongs to one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pages: Pages | None = None
        self._rendering = asyncio.Lock()
        self._cache: LRUCache[tuple[str, bytes], tuple[float, PageResponse]] = LRUCache(
            CACHED_PAGES
        )

    async def load(self) -> None:
        """Load jinja2 and the templates, which a daemon without a page does not need."""
        if self._pages is None:
            module = await anyio.to_thread.run_sync(importlib.import_module, "mirrord.web.pages")
            pages: Pages = module.Pages(self._engine)
            self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(_HEADERS)
        fields = scope["headers"]
        if {b"content-length", b"transfer-encoding"} & {name for name, _ in fields}:
            headers["connection"] = "close"  # the body is not read
        hosts = [value for name, value in fields if name == b"host"]
        query = scope["query_string"]
        if scope["method"] not in {"GET", "HEAD"}:
            headers["allow"] = "GET, HEAD"
            answer = _plain(405, "This page is read-only: use GET or HEAD.")
        elif len(hosts) != 1 or len(query) > QUERY_LIMIT_BYTES:
            answer = _plain(400, "Send one Host header and a query of at most 1 KiB.")
        elif not self._is_own_host(hosts[0].decode("latin-1"), scope["server"][0]):
            answer = _plain(421, "Unknown host. Add it to [web] hosts in the configuration.")
        else:
            answer = await self._answer(scope["path"], query)
        if answer.status == 503:
            headers["retry-after"] = "2"
        response = Response(answer.body, answer.status, headers, answer.media_type)
        await response(scope, receive, send)

    def _is_own_host(self, host: str, address: str) -> bool:
        """Return whether a Host header names the address of the connection or a configured name.

        The port is ignored, because it differs behind a tunnel or a proxy.
        """
        # a page of another site whose name leads to this address (DNS rebinding) says its own name
        name = host.lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        else:
            # a full name may end with the dot of the root
            name = name.partition(":")[0].removesuffix(".")
        web = self._engine.settings().web
        names = {web.listen.rpartition(":")[0].strip("[]"), *web.hosts}
        own_address = ip_address(address)
        if own_address.is_loopback:
            names.add("localhost")
        try:
            return name in names or ip_address(name) == own_address
        except ValueError:
            return False

    async def _answer(self, path: str, query: bytes) -> PageResponse:
        try:
            async with asyncio.timeout(WAIT_LIMIT_S), self._rendering:
                expires, answer = self._cache.get((path, query), (0.0, None))
                if answer and time.monotonic() < expires:
                    return answer
                return await self._render_and_cache(path, query)
        except TimeoutError:
            return _plain(503, "Too many requests are waiting; retry later.")

    async def _render_and_cache(self, path: str, query: bytes) -> PageResponse:
        began = time.monotonic()
        try:
            answer = await self._render(path, query)
        except Exception:
            log.exception("page.crashed", path=path)
            return _plain(500, "An unexpected error. This is a bug; the daemon's log has details.")
        # visitors choose paths: those that name nothing must not push out pages
        if answer.status == 200:
            now = time.monotonic()
            # ten times as long as it took: visitors hardly slow down other clients
            self._cache[path, query] = now + max(1.0, 10 * (now - began)), answer
        return answer

    async def _render(self, path: str, query: bytes) -> PageResponse:
        assert self._pages is not None
        if path in self._pages.files:
            return PageResponse(200, *self._pages.files[path])
        if not self._engine.is_open:
            return _plain(503, "The daemon is still opening its state directory.")
        if path == "/metrics":
            text, media_type = await metrics.answer(self._engine)
            return PageResponse(200, media_type, text)
        try:
            # pages know seven; parse_qsl takes any number otherwise
            values = dict(parse_qsl(query.decode("ascii", "replace"), max_num_fields=16))
        except ValueError:
            return _plain(400, "The query has too many parameters.")
        status, page = await self._pages.render(path, values)
        return PageResponse(status, "text/html; charset=utf-8", as_utf8(page).encode())


def _plain(status: int, text: str) -> PageResponse:
    return PageResponse(status, "text/plain; charset=utf-8", f"{text}\n".encode())
