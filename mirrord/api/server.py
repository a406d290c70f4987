"""Listening sockets and connections: uvicorn's HTTP protocol with peer credentials and our limits.

Only uvicorn's protocol class is used: `uvicorn.Server` wakes up ten times a second and binds
sockets itself. Bounded are the number of connections, the size of a request's head, and the time
for a head, for the next request, and for reading an answer.

Each user has a share of the connections, strangers a small one, administrators room of their own.
At a bound, a user with fewer connections than another takes the place of an idle one of theirs, so
that idle connections keep nobody out. Each connection is an open file: a low RLIMIT_NOFILE lowers
the bounds, so that requests can still open files.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from .. import errors
from ..activity import Traffic
from ..host.peers import Peer, Role, peer_of
from ..telemetry import Seldom, log
from .request import problem_body, problem_headers

MAX_CONNECTIONS = 4096
RESERVED_CONNECTIONS = 64
"""Of all, for root, the daemon's user and administrators."""
CONNECTIONS_OF = {Role.STRANGER: 16, Role.OWNER: 256, Role.MEMBER: 1024}
"""Of one user, with all subordinate uids."""
ALL_STRANGERS_CONNECTIONS = 128

_FILES_LEFT = 128  # at least: of an idle daemon, its workers, and a few requests


class Connections:
    """All connections of a daemon. Belongs to one event loop."""

    def __init__(
        self,
        role: Callable[[Peer], Role],
        user_of: Callable[[int], int],
        traffic: Traffic,
    ) -> None:
        self._role = role
        self._traffic = traffic
        traffic.connections = self.by_user
        self._user_of = user_of
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        allowed = files - max(_FILES_LEFT, files // 4)
        self._most = max(RESERVED_CONNECTIONS + 1, min(MAX_CONNECTIONS, allowed))
        self._of: dict[int, dict[HttpConnection, None]] = {}  # the oldest first
        self._strangers: set[int] = set()
        self._users: dict[HttpConnection, int] = {}
        self._refusals = Seldom()

    @property
    def warnings(self) -> list[str]:
        if self._most == MAX_CONNECTIONS:
            return []
        fact = f"the limit on open files is low: at most {self._most} connections are taken"
        return [f"{fact}; raise LimitNOFILE= of the unit, or ulimit -n"]

    def by_user(self) -> dict[int, int]:
        """How many are open."""
        return {uid: len(connections) for uid, connections in self._of.items()}

    def add(self, connection: HttpConnection) -> None:
        """Count a connection. Raises TooManyConnectionsError; logs a line per user and minute."""
        uid, role = self._user_of(connection.peer.uid), self._role(connection.peer)
        if not self._has_room(uid, role):
            self._traffic.refusals[errors.TooManyConnectionsError.code] += 1
            if count := self._refusals.count(uid):
                log.warning(
                    "connection.refused", uid=uid, count=count, connections=len(self._users)
                )
            raise errors.TooManyConnectionsError(
                f"cannot take another connection of uid {uid}: too many are open",
                hint="use connections again, and close those that are idle",
                retry_after=1,
            )
        self._of.setdefault(uid, {})[connection] = None
        self._users[connection] = uid
        (self._strangers.add if role is Role.STRANGER else self._strangers.discard)(uid)

    def remove(self, connection: HttpConnection) -> None:
        """Stop counting a connection; again is fine."""
        uid = self._users.pop(connection, None)
        if uid is not None:
            del self._of[uid][connection]
            if not self._of[uid]:
                del self._of[uid]
                self._strangers.discard(uid)

    def _has_room(self, uid: int, role: Role) -> bool:
        own = len(self._of.get(uid, ()))
        if role is Role.ADMIN:
            return len(self._users) < self._most or self._shed(self._of, 0)
        if own >= CONNECTIONS_OF[role]:
            return False
        if role is Role.STRANGER:
            strangers = sum(len(self._of.get(each, ())) for each in self._strangers)
            limit = min(ALL_STRANGERS_CONNECTIONS, self._most // 8)
            if strangers >= limit and not self._shed(self._strangers, own + 1):
                return False
        return len(self._users) < self._most - RESERVED_CONNECTIONS or self._shed(self._of, own + 1)

    def _shed(self, uids: Iterable[int], more_than: int) -> bool:
        """Close the oldest idle connection of the user with most connections, over `more_than`."""
        for uid in sorted(uids, key=lambda uid: len(self._of.get(uid, ())), reverse=True):
            connections = self._of.get(uid, {})
            if len(connections) <= more_than:
                return False
            if idle := next((each for each in connections if each.is_idle), None):
                self.remove(idle)
                idle.shed()
                return True
        return False


HEAD_LIMIT_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 15.0
KEEP_ALIVE_S = 75
STALLED_READER_S = 60.0
LINGER_S = 1.0
LINGER_BYTES = 64 * 1024
MAX_LINGERING = 64
_BACKLOG = 2048
_ACCEPTED_AT_ONCE = 16  # in one turn of the loop: a crowd delays no answer
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
# A loop reads up to 256 KiB at once, the end of the last body included.
_UNFINISHED_LIMIT_BYTES = HEAD_LIMIT_BYTES + 256 * 1024


class Counted(Protocol):
    """Who counts the connections of a server, and refuses one too many."""

    def add(self, connection: HttpConnection) -> None: ...
    def remove(self, connection: HttpConnection) -> None: ...


class Server:
    """Serves one application on any number of listening sockets."""

    def __init__(
        self,
        application: ASGIApp,
        connections: Counted,
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
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=keep_alive_s,
        )
        self._config.load()
        self._state = ServerState()
        self._listeners: list[asyncio.Server] = []
        self.connections = connections
        self.lingering = 0

    async def listen(self, listener: socket.socket) -> None:
        """Accept connections from a bound Unix socket."""
        loop = asyncio.get_running_loop()
        # asyncio accepts up to `backlog` connections in one turn of the loop
        self._listeners.append(
            await loop.create_unix_server(self._connect, sock=listener, backlog=_ACCEPTED_AT_ONCE)
        )
        listener.listen(_BACKLOG)

    async def listen_at(self, host: str, port: int) -> None:
        """Accept connections at all addresses of a host. Raises OSError."""
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
        """Let running requests end within `drain`, then cut them off."""
        self.stop_accepting()
        for connection in list(self._state.connections):
            connection.shutdown()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + drain.total_seconds()
        while self._state.tasks and loop.time() < deadline:
            await asyncio.wait(list(self._state.tasks), timeout=max(0.0, deadline - loop.time()))
        while self._state.connections and loop.time() < deadline:  # noqa: ASYNC110  # they tell nobody
            await asyncio.sleep(0.01)
        if tasks := list(self._state.tasks):
            log.warning("requests.cancelled", count=len(tasks))
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=2.0)
            for connection in list(self._state.connections):
                connection.transport.abort()


class HttpConnection(HttpToolsProtocol):
    """One client's connection; requests find it as `request.state.connection`."""

    peer: Peer

    def __init__(self, server: Server, config: Config, state: ServerState) -> None:
        super().__init__(config, state, {})
        self._server = server
        self._is_lingering = False
        self._linger_bytes = LINGER_BYTES
        self._working: asyncio.Task[Any] | None = None
        self._head_bytes = 0
        self._unfinished_bytes = 0
        self._in_head = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None

    # -- the connection ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        try:
            self.identify()
            self._server.connections.add(self)
        except OSError as error:  # the client hung up before its credentials were read
            log.debug("connection.lost", reason=str(error))
            transport.abort()
            return
        except errors.TooManyConnectionsError as error:
            self._refuse(error)
            return
        self.app_state = {**self.app_state, "connection": self}
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up_on_head)

    def identify(self) -> None:
        """Learn who is at the other end. Raises OSError where nobody is any more."""
        self.peer = peer_of(self.transport.get_extra_info("socket"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self._cancel_reader_timer()
        self._server.connections.remove(self)
        if self._is_lingering:
            self._server.lingering -= 1
        super().connection_lost(exc)
        if self._working is not None:
            self._working.cancel()

    @property
    def is_idle(self) -> bool:
        """Whether no request on it is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    @property
    def is_lost(self) -> bool:
        """Whether the client hung up meanwhile."""
        return self.transport.is_closing()

    def shed(self) -> None:
        """Close it, to give its place to another user."""
        log.debug("connection.shed", uid=self.peer.uid)
        self.transport.abort()

    @contextmanager
    def ending_with_client(self) -> Iterator[None]:
        """Cancel the work inside when the client hangs up, as our CancelledError."""
        task = self._working = asyncio.current_task()
        assert task is not None
        try:
            yield
        except asyncio.CancelledError as error:
            if not self.is_lost or task.uncancel():  # the server is stopping
                raise
            log.info("request.abandoned", uid=self.peer.uid)
            raise errors.CancelledError("cannot answer the request: the client hung up") from error
        finally:
            self._working = None

    def send_descriptor(self, descriptor: int) -> None:
        """Send a descriptor with an interim response, ahead of the answer to this request.

        It goes past the transport, which knows no ancillary data, and so only while nothing waits
        in the transport's buffer. A descriptor that is never read goes with the connection.
        """
        plain = self.transport.get_extra_info("socket")
        try:
            if self.transport.get_write_buffer_size():
                raise BlockingIOError(errno.EAGAIN, "it reads no answers")
            with socket.socket(fileno=os.dup(plain.fileno())) as same:
                socket.send_fds(same, [_INTERIM], [descriptor])
        except OSError as error:  # ETOOMANYREFS: more are on their way than files may be open
            raise errors.LimitReachedError(
                f"cannot send a descriptor to the client: {error.strerror}",
                hint="read the answers to earlier requests",
                retry_after=1,
            ) from error

    # -- the head of a request --------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_lingering:
            self._linger_bytes -= len(data)
            if self._linger_bytes < 0:
                self.transport.abort()
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
        """Raise to stop the parser: httptools makes an HttpParserError of it."""
        self._head_bytes += size
        if self._head_bytes > HEAD_LIMIT_BYTES:
            raise OverflowError

    def send_400_response(self, msg: str) -> None:
        """Answer a parser error as a problem, and hang up."""
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

    def _give_up_on_head(self) -> None:
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
        """Answer outside a request, and hang up a little later: a client may still be writing."""
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
        self._reader_timer = self.loop.call_later(STALLED_READER_S, self._drop_stalled_reader)

    def resume_writing(self) -> None:
        self._cancel_reader_timer()
        super().resume_writing()

    def _drop_stalled_reader(self) -> None:
        log.info("connection.stalled", uid=self.peer.uid)
        self.transport.abort()

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _cancel_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
