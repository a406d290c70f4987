"""Listening sockets and connections: uvicorn's HTTP protocol with peer credentials and our limits.

Only uvicorn's protocol class is used: `uvicorn.Server` wakes up ten times a second and binds
sockets itself. There are limits on the size of a request's head, and on the time for a head, for
the next request, and for reading an answer.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from .. import errors
from ..host.peers import Peer, peer_of
from ..telemetry import log
from .request import problem_body, problem_headers

# a head beyond these is answered with 400 and the connection closed
HEAD_LIMIT_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 15.0
# of an idle connection; when there are too many it is closed earlier
KEEP_ALIVE_S = 75
# an answer that nobody reads holds its buffers and its user's turn
STALLED_READER_S = 60.0
# Closing a socket with unread bytes resets it, and the peer loses the answer (RFC 9112, 9.6): it
# is read a while longer, for a bounded number of connections.
LINGER_S = 1.0
LINGER_BYTES = 64 * 1024
MAX_LINGERING = 64
# as Backlog= of mirrord.socket; Linux cuts it to net.core.somaxconn, 4,096 since 5.4
_BACKLOG = 2048
_ACCEPTED_AT_ONCE = 16  # in one turn of the loop, so that many clients do not delay answers
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


class ConnectionCounter(Protocol):
    """Counts the connections of a server. `add` raises TooManyConnectionsError."""

    def add(self, connection: HttpConnection) -> None: ...
    def remove(self, connection: HttpConnection) -> None: ...


class Server:
    """Serves one application on any number of listening sockets."""

    def __init__(
        self,
        application: ASGIApp,
        connections: ConnectionCounter,
        *,
        kind: type[HttpConnection] | None = None,
        keep_alive_s: int = KEEP_ALIVE_S,
    ) -> None:
        self._kind = kind or HttpConnection
        self._config = Config(
            application,
            http=self._kind,
            ws="none",
            lifespan="off",
            # uvicorn would set up the logging of the process
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            # by default it believes X-Forwarded-For
            proxy_headers=False,
            timeout_keep_alive=keep_alive_s,
        )
        self._config.load()
        self._state = ServerState()
        self._listeners: list[asyncio.Server] = []
        self.connections = connections
        self.lingering = 0

    async def listen(self, listener: socket.socket) -> None:
        """Accept connections on a bound Unix socket."""
        loop = asyncio.get_running_loop()
        # asyncio accepts up to `backlog` connections in one turn of the loop
        self._listeners.append(
            await loop.create_unix_server(self._connect, sock=listener, backlog=_ACCEPTED_AT_ONCE)
        )
        # again: asyncio has just called it with the small number
        listener.listen(_BACKLOG)

    async def listen_at(self, host: str, port: int) -> None:
        """Accept connections on all addresses of a host. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._listeners.append(
            await loop.create_server(self._connect, host, port, backlog=_BACKLOG)
        )

    def _connect(self) -> HttpConnection:
        return self._kind(self, self._config, self._state)

    def stop_accepting(self) -> None:
        for listener in self._listeners:
            listener.close()

    async def close(self, drain: timedelta) -> None:
        """Let running requests end within `drain`, then cancel them."""
        self.stop_accepting()
        for connection in list(self._state.connections):
            # uvicorn closes an idle one now, and others after their answer
            connection.shutdown()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + drain.total_seconds()
        while self._state.tasks and loop.time() < deadline:
            await asyncio.wait(list(self._state.tasks), timeout=max(0.0, deadline - loop.time()))
        # uvicorn has no event for it
        while self._state.connections and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if tasks := list(self._state.tasks):
            log.warning("requests.cancelled", count=len(tasks))
            for task in tasks:
                task.cancel()
            # what is cancelled ends its gits, which have 2 s between SIGTERM and SIGKILL
            await asyncio.wait(tasks, timeout=2.0)
            for connection in list(self._state.connections):
                connection.transport.abort()


class _Joining:
    """A transport that keeps the head of an answer for the first piece of its body.

    One system call instead of two, and the client wakes up once.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        self._is_head_next = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def join_head(self) -> None:
        """Keep the next write for the one after it."""
        self._is_head_next = True

    def write(self, data: bytes) -> None:
        if self._is_head_next:
            self._head, self._is_head_next = data, False
            return
        head, self._head = self._head, b""
        self._transport.write(head + data if head else data)

    def close(self) -> None:
        if self._head:
            self.write(b"")
        self._transport.close()


# asyncio reads up to 256 KiB at once, including the end of the previous body
_UNFINISHED_LIMIT_BYTES = HEAD_LIMIT_BYTES + 256 * 1024


class HttpConnection(HttpToolsProtocol):
    """A client's connection, available to requests as `request.state.connection`."""

    peer: Peer

    def __init__(self, server: Server, config: Config, state: ServerState) -> None:
        super().__init__(config, state, {})
        self._server = server
        self._is_lingering = False
        self._linger_bytes = LINGER_BYTES
        self._working: asyncio.Task[Any] | None = None
        self._undo_unread: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._head_bytes = 0
        self._unfinished_bytes = 0
        self._in_head = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None

    # -- the connection ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._joining = _Joining(transport)
        super().connection_made(self._joining)  # type: ignore[arg-type]
        try:
            self.identify()
            self._server.connections.add(self)
        except OSError as error:  # the client closed it before its credentials were read
            log.debug("connection.lost", reason=str(error))
            transport.abort()
            return
        except errors.TooManyConnectionsError as error:
            self._refuse(error)
            return
        # a scope of uvicorn has no peer credentials: requests read them from here
        self.app_state = {**self.app_state, "connection": self}
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_head_timeout)

    def identify(self) -> None:
        """Set `peer`. Raises OSError if the client has closed the connection."""
        self.peer = peer_of(self.transport.get_extra_info("socket"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self._cancel_reader_timer()
        self._server.connections.remove(self)
        if self._is_lingering:
            self._server.lingering -= 1
        # a client that closes before it has read all of an answer resets the connection
        is_unread = exc is not None or not self.is_idle
        super().connection_lost(exc)
        if self._working is not None:
            self._working.cancel()
        if self._undo_unread is not None and is_unread:
            task = self.loop.create_task(self._undo_unread())
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def undo_if_unread(self, undo: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `undo` if the client closes the connection before it reads the coming answer."""
        self._undo_unread = undo

    @property
    def is_idle(self) -> bool:
        """True if no request is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    @property
    def is_lost(self) -> bool:
        """True if the client closed the connection."""
        return self.transport.is_closing()

    def join_head(self) -> None:
        """Send the head of the coming answer with its body, which must follow at once."""
        self._joining.join_head()

    def evict(self) -> None:
        """Close an idle connection to make room for another."""
        log.debug("connection.evicted", uid=self.peer.uid)
        self.transport.abort()

    @contextmanager
    def ending_with_client(self) -> Iterator[None]:
        """Cancel the enclosed work when the client hangs up. Raises our CancelledError then."""
        task = self._working = asyncio.current_task()
        assert task is not None
        try:
            yield
        except asyncio.CancelledError as error:
            if not self.is_lost or task.uncancel():  # cancelled because the server stops
                raise
            log.info("request.abandoned", uid=self.peer.uid)
            raise errors.CancelledError("cannot answer the request: the client hung up") from error
        finally:
            self._working = None

    def send_descriptor(self, descriptor: int) -> None:
        """Send a descriptor with an interim response, before the answer to this request.

        It bypasses the transport, which does not support ancillary data, so the transport's buffer
        must be empty. The kernel closes a descriptor that is never received with the connection.
        """
        plain = self.transport.get_extra_info("socket")
        try:
            if self.transport.get_write_buffer_size():
                raise BlockingIOError(errno.EAGAIN, "it does not read its answers")
            # the transport's socket has no sendmsg, and closing this one must leave it open
            with socket.socket(fileno=os.dup(plain.fileno())) as same:
                socket.send_fds(same, [_INTERIM], [descriptor])
        except OSError as error:  # ETOOMANYREFS: more in flight than RLIMIT_NOFILE
            raise errors.LimitReachedError(
                f"cannot send a descriptor to the client: {error.strerror}",
                hint="read the answers to earlier requests",
                retry_after=1,
            ) from error

    # -- the head of a request --------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._undo_unread = None  # a client that sends its next request has read the answer
        if self._is_lingering:
            self._linger_bytes -= len(data)
            if self._linger_bytes < 0:
                self.transport.abort()
            return
        super().data_received(data)
        if self._in_head and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_head_timeout)
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
        """Raise to stop the parser; httptools turns that into an HttpParserError."""
        self._head_bytes += size
        if self._head_bytes > HEAD_LIMIT_BYTES:
            raise OverflowError

    def send_400_response(self, msg: str) -> None:
        """Answer a parser error with a problem, and close the connection."""
        fact = (
            f"its head is larger than {HEAD_LIMIT_BYTES} bytes"
            if self._head_bytes > HEAD_LIMIT_BYTES
            else "it is not HTTP/1.1"
        )
        self._refuse(
            errors.InvalidRequestError(
                f"cannot read the request: {fact}", hint="see GET /v1/openapi.json"
            )
        )

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self._in_head:
            self._refuse(
                errors.InvalidRequestError(
                    f"cannot read the request: its head took longer than {HEAD_TIMEOUT_S:g} s"
                )
            )
        else:
            self.transport.close()

    def _refuse(self, error: errors.MirrordError) -> None:
        """Answer outside a request, and close a little later: the client may still be writing.

        Closing a socket with unread data resets the connection, and the client may lose the answer.
        """
        body = problem_body(error)
        lines = {**problem_headers(error), "content-length": str(len(body)), "connection": "close"}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.transport.write(STATUS_LINE[error.http_status] + f"{head}\r\n".encode() + body)
        if self._server.lingering >= MAX_LINGERING:
            self.transport.close()
            return
        self._server.lingering += 1
        self._is_lingering = True
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    # -- clients that do not read their answer ----------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader_timer = self.loop.call_later(STALLED_READER_S, self._on_stalled_reader)

    def resume_writing(self) -> None:
        self._cancel_reader_timer()
        super().resume_writing()

    def _on_stalled_reader(self) -> None:
        log.info("connection.stalled", uid=self.peer.uid)
        self.transport.abort()

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _cancel_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
