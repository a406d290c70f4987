"""A small real HTTP server on a Unix socket, for what a daemon does not do on demand: die in the middle, be slow."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

Route = Callable[["Handler"], None]


class Seen(NamedTuple):
    """One request as it came."""

    command: str
    path: str
    headers: Message
    body: bytes


class Handler(BaseHTTPRequestHandler):
    """One connection, a request at a time."""

    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        self.server.connections.append(self.request)
        super().setup()

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def answer(self, value: Any, status: int = 200, media_type: str = "application/json") -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", media_type)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def problem(self, status: int, code: str, **facts: Any) -> None:
        self.answer(
            {"status": status, "code": code, "detail": f"cannot: {code}", "hint": "try", **facts},
            status,
            "application/problem+json",
        )

    def die(self, sent: bytes = b"") -> None:
        """Hang up after `sent`."""
        self.wfile.write(sent)
        self.wfile.flush()
        self.connection.close()
        self.close_connection = True

    def serve(self) -> None:
        self.server.seen.append(Seen(self.command, self.path, self.headers, self._read_body()))
        path = self.path.partition("?")[0]
        route = self.server.routes.get((self.command, path))
        if route is None:
            self.problem(404, "not-found")
        else:
            route(self)

    do_GET = do_POST = do_DELETE = serve

    def _read_body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def log_message(self, *args: Any) -> None:
        return

    def address_string(self) -> str:
        return "client"


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, path: Path, routes: dict[tuple[str, str], Route]) -> None:
        self.routes = routes
        self.seen: list[Seen] = []
        self.connections: list[socket.socket] = []
        super().__init__(str(path), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        return

    @property
    def asked(self) -> list[tuple[str, str]]:
        return [(request.command, request.path) for request in self.seen]


@contextmanager
def serving(path: Path, routes: dict[tuple[str, str], Route]) -> Iterator[Server]:
    """Serve until the end of the block; then the socket is gone, as after a daemon's end."""
    server = Server(path, routes)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        path.unlink(missing_ok=True)
        for connection in server.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
