"""The page as an ASGI application: who may ask, what is answered from memory, and the headers.

GET and HEAD alone; nothing here changes anything. A request must name a host that is ours, so that
no other site's name leads a browser here (DNS rebinding). Pages are made one at a time, in a
thread, and kept for as long as ten times their making took, at least a second: however many people
look, the daemon's other clients notice little.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections import OrderedDict
from ipaddress import ip_address
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl

import anyio.to_thread
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..api import metrics
from ..engine import Engine
from ..telemetry import log

if TYPE_CHECKING:
    from .pages import Pages

QUERY_LIMIT_BYTES = 1024
WAIT_S = 15.0
KEPT_PAGES = 64

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


class Made(NamedTuple):
    status: int
    media_type: str
    body: bytes


class WebApplication:
    """Belongs to one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pages: Pages | None = None
        self._making = asyncio.Lock()
        self._kept: OrderedDict[tuple[str, bytes], tuple[float, Made]] = OrderedDict()

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
            headers["connection"] = "close"  # a body that nobody reads
        hosts = [value for name, value in fields if name == b"host"]
        query = scope["query_string"]
        if scope["method"] not in {"GET", "HEAD"}:
            headers["allow"] = "GET, HEAD"
            made = _plain(405, "This page is for reading: GET and HEAD alone.")
        elif len(hosts) != 1 or len(query) > QUERY_LIMIT_BYTES:
            made = _plain(400, "The request needs one Host header, and a query of at most 1 KiB.")
        elif not self._is_ours(hosts[0].decode("latin-1"), scope["server"][0]):
            said = "This host is not served here. [web] hosts of the configuration names others."
            made = _plain(421, said)
        else:
            made = await self._answer(scope["path"], query)
        if made.status == 503:
            headers["retry-after"] = "2"
        await Response(made.body, made.status, headers, made.media_type)(scope, receive, send)

    def _is_ours(self, host: str, reached_at: str) -> bool:
        """Whether a Host header names the address that was reached, or a name of the settings.

        Its port is not compared: it is another one behind a tunnel or a proxy.
        """
        name = host.lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        else:
            name = name.partition(":")[0].removesuffix(".")
        web = self._engine.settings().web
        named = {web.listen.rpartition(":")[0].strip("[]"), *web.hosts}
        reached = ip_address(reached_at)
        if reached.is_loopback:
            named.add("localhost")
        try:
            return name in named or ip_address(name) == reached
        except ValueError:
            return False

    async def _answer(self, path: str, query: bytes) -> Made:
        """From memory where it is fresh, else made when it is this request's turn."""
        if found := self._fresh(path, query):
            return found
        try:
            async with asyncio.timeout(WAIT_S), self._making:
                return self._fresh(path, query) or await self._make(path, query)
        except TimeoutError:
            return _plain(503, "Too many people look at once; ask again.")

    def _fresh(self, path: str, query: bytes) -> Made | None:
        until, made = self._kept.get((path, query), (0.0, None))
        return made if time.monotonic() < until else None

    async def _make(self, path: str, query: bytes) -> Made:
        began = time.monotonic()
        try:
            made = await self._made(path, query)
        except Exception:
            log.exception("page.crashed", path=path)
            return _plain(500, "An unexpected error. This is a bug; the daemon's log has details.")
        if made.status == 200:
            now = time.monotonic()
            self._kept[path, query] = now + max(1.0, 10 * (now - began)), made
            self._kept.move_to_end((path, query))
            if len(self._kept) > KEPT_PAGES:
                self._kept.popitem(last=False)
        return made

    async def _made(self, path: str, query: bytes) -> Made:
        assert self._pages is not None
        if path in self._pages.files:
            return Made(200, *self._pages.files[path])
        if not self._engine.is_open:
            return _plain(503, "The daemon is still opening its state directory.")
        if path == "/metrics":
            text, media_type = await metrics.answer(self._engine)
            return Made(200, media_type, text)
        try:
            values = dict(parse_qsl(query.decode("ascii", "replace"), max_num_fields=16))
        except ValueError:
            return _plain(400, "The query has too many parameters.")
        status, page = await self._pages.make(path, values)
        return Made(status, "text/html; charset=utf-8", page.encode("utf-8", "replace"))


def _plain(status: int, text: str) -> Made:
    return Made(status, "text/plain; charset=utf-8", f"{text}\n".encode())
