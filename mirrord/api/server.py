"""The wire: connections on Unix sockets, spoken to by uvicorn's HTTP parser, with the peer's credentials and our limits.

Owns listening, accepting, and ending connections. It is not `uvicorn.Server`, which wakes up ten times a second for ever and
binds sockets as it likes; only uvicorn's protocol class is used, and the tests hold the pinned version to what is relied on here.
Bounded: connections in all and of one user, the size of a request's head, the time a client may take for a head, for the next
request, and for reading an answer.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import structlog
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ..errors import InvalidRequestError, MirrordError
from ..host.peers import Peer, peer_of
from .application import Application

log = structlog.get_logger()

HEAD_LIMIT_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 15.0
KEEP_ALIVE_S = 75
STALLED_READER_S = 60.0
MAX_CONNECTIONS = 4096
MAX_CONNECTIONS_OF_USER = 1024
_BACKLOG = 2048
_UNFINISHED_LIMIT_BYTES = HEAD_LIMIT_BYTES + 256 * 1024  # uvloop reads up to 256 KiB at once, the end of the last body included


class Server:
    """Serves one application on any number of listening sockets."""

    def __init__(self, application: Application) -> None:
        self._config = Config(
            application,
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._config.load()
        self._state = ServerState()
        self._listeners: list[asyncio.Server] = []
        self.users: Counter[int] = Counter()

    async def listen(self, listener: socket.socket) -> None:
        """Accept connections from a bound Unix socket from now on."""
        loop = asyncio.get_running_loop()
        self._listeners.append(await loop.create_unix_server(self._protocol, sock=listener, backlog=_BACKLOG))

    def _protocol(self) -> Protocol:
        return Protocol(self, self._config, self._state)

    def stop_accepting(self) -> None:
        for listener in self._listeners:
            listener.close()

    async def close(self, drain: timedelta) -> None:
        """Let requests that run end within `drain`, then cut them off."""
        self.stop_accepting()
        for connection in list(self._state.connections):
            connection.shutdown()
        if not await self._is_quiet_within(drain):
            log.warning("requests.cancelled", count=len(self._state.tasks))
            await self.abort()

    async def abort(self) -> None:
        """Cut off every request and connection."""
        tasks = list(self._state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2.0)
        for connection in list(self._state.connections):
            connection.transport.abort()

    async def _is_quiet_within(self, bound: timedelta) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + bound.total_seconds()
        while self._state.tasks and loop.time() < deadline:
            await asyncio.wait(list(self._state.tasks), timeout=max(0.0, deadline - loop.time()))
        while self._state.connections and loop.time() < deadline:  # noqa: ASYNC110  # answers are on their way out; nobody tells
            await asyncio.sleep(0.01)
        return not self._state.tasks


class Protocol(HttpToolsProtocol):
    """One connection. `request.state.peer` is who is at its other end, `.transport` is closing once that one hung up."""

    def __init__(self, server: Server, config: Config, state: ServerState) -> None:
        super().__init__(config, state, {})
        self._server = server
        self._peer: Peer | None = None
        self._head_bytes = 0
        self._unfinished_bytes = 0
        self._in_head = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None

    # -- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        try:
            self._peer = peer_of(transport.get_extra_info("socket"))
        except OSError as error:  # it hung up before we looked
            log.debug("connection.lost", reason=str(error))
            transport.abort()
            return
        users = self._server.users
        users[self._peer.uid] += 1
        if users[self._peer.uid] > MAX_CONNECTIONS_OF_USER or len(self.connections) > MAX_CONNECTIONS:
            log.warning("connection.refused", uid=self._peer.uid, count=users[self._peer.uid])
            transport.abort()
            return
        self.app_state = {**self.app_state, "peer": self._peer, "transport": transport}
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up_on_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self._cancel_reader_timer()
        if self._peer is not None:
            users = self._server.users
            users[self._peer.uid] -= 1
            if not users[self._peer.uid]:
                del users[self._peer.uid]
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        answer = _Answer(cycle.transport, cycle.on_response)
        cycle.transport, cycle.on_response = answer, answer.complete  # type: ignore[assignment]
        super()._start_asgi_task(cycle, app)

    # -- the head of a request ----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._in_head and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up_on_head)
        if self._in_head:
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > _UNFINISHED_LIMIT_BYTES:
                self._head_bytes = self._unfinished_bytes
                self.send_400_response("")

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._unfinished_bytes = 0
        self._cancel_head_timer()
        super().on_headers_complete()

    def _count_head(self, size: int) -> None:
        """Raising makes the parser stop: httptools turns it into an HttpParserError."""
        self._head_bytes += size
        if self._head_bytes > HEAD_LIMIT_BYTES:
            raise OverflowError

    def send_400_response(self, msg: str) -> None:
        """The parser gave up: answer as every other error is answered, and hang up."""
        fact = (
            f"its head is larger than {HEAD_LIMIT_BYTES} bytes" if self._head_bytes > HEAD_LIMIT_BYTES else "it is not HTTP/1.1"
        )
        self._refuse(InvalidRequestError(f"cannot read the request: {fact}", hint="see GET /v1/openapi.json"))

    def _give_up_on_head(self) -> None:
        self._head_timer = None
        if self._in_head:
            self._refuse(InvalidRequestError(f"cannot read the request: its head took longer than {HEAD_TIMEOUT_S:g} s"))
        else:
            self.transport.close()

    def _refuse(self, error: MirrordError) -> None:
        body = json.dumps(error.problem()).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/problem+json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """An upgrade that is ignored needs no line in the log."""

    # -- clients that do not read their answer ------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader_timer = self.loop.call_later(STALLED_READER_S, self._drop_stalled_reader)

    def resume_writing(self) -> None:
        self._cancel_reader_timer()
        super().resume_writing()

    def _drop_stalled_reader(self) -> None:
        log.info("connection.stalled", uid=self._peer.uid if self._peer else None)
        self.transport.abort()

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _cancel_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None


class _Answer:
    """The transport as one answer sees it: the head waits for the first of the body, and both leave in one write."""

    def __init__(self, transport: asyncio.Transport, on_complete: Callable[[], None]) -> None:
        self._transport = transport
        self._on_complete = on_complete
        self._head = b""
        self._has_begun = False
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if self._has_begun:
            self._transport.write(self._head + data)
            self._head = b""
        elif data.startswith(b"HTTP/1.1 100 "):  # the client waits for it
            self._transport.write(data)
        else:
            self._has_begun, self._head = True, data

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def complete(self) -> None:
        self._flush()
        self._on_complete()

    def _flush(self) -> None:
        if self._head:
            self.write(b"")
