# Generated from ../asynchronous/channel.py by tests/support/unasync.py: edit that file, then run it.
"""One connection to the daemon, which carries one exchange at a time.

Waits on the bare socket, not on a stream of the event loop: a connection belongs to no loop, and
both clients see the kernel's own errors. A Unix socket refuses bytes as soon as its peer is
closed, so a first write that fails has sent nothing.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Self

from ..http import (
    HEAD_LIMIT_BYTES,
    BrokenError,
    GarbledError,
    Head,
    LateError,
    RefusedError,
    Request,
    Response,
    read_head,
)
from ..twins_sync import pause, receive, send

_CONNECT_SECONDS = 10.0
_BACKLOG_PAUSE_SECONDS = 0.01
_READ_BYTES = 256 * 1024


class Channel:
    """Close it after any error, a cancellation included: what is left of the answer would be read as the next one."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._buffer = bytearray()
        self._is_sent_whole = False
        self._is_read_whole = False
        self._timeout: float | None = None
        self.idle_since = 0.0

    @classmethod
    def open(cls, path: Path) -> Self:
        """Connect; raises RefusedError."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.setblocking(False)
            deadline = time.monotonic() + _CONNECT_SECONDS
            while True:
                try:
                    connected.connect(str(path))
                    return cls(connected)
                except (
                    BlockingIOError
                ):  # EAGAIN: the backlog is full; a Unix socket never connects later
                    if time.monotonic() > deadline:
                        raise
                    pause(_BACKLOG_PAUSE_SECONDS)
        except BaseException as error:
            connected.close()
            if isinstance(error, OSError):
                raise RefusedError from error
            raise

    def close(self) -> None:
        self._socket.close()

    def is_stale(self) -> bool:
        """Whether the daemon closed it while it was idle; nothing else can have come."""
        return self._is_readable()

    def is_reusable(self, head: Head) -> bool:
        return self._is_sent_whole and self._is_read_whole and not head.is_last and not self._buffer

    # -- the request --------------------------------------------------------------------------------------------------

    def send(
        self, request: Request, body: bytes | Iterator[bytes] | None, timeout: float | None
    ) -> None:
        """Send a request. Ends early, without an error, where the daemon answers or hangs up before it has all of it.

        `timeout` bounds each wait for the daemon in this exchange.
        """
        self._timeout = timeout
        self._is_sent_whole = self._is_read_whole = False
        if body is None or isinstance(body, bytes):
            framing = "" if body is None else f"content-length: {len(body)}\r\n"
            rest = self._begin(request.head(framing) + (body or b""))
            self._is_sent_whole = not rest or self._went_out(rest)
            return
        if rest := self._begin(request.head("transfer-encoding: chunked\r\n")):
            self._went_out(rest)
        for chunk in body:
            if self._is_readable() or not self._went_out(b"%x\r\n%b\r\n" % (len(chunk), chunk)):
                return
        self._is_sent_whole = self._went_out(b"0\r\n\r\n")

    def _begin(self, data: bytes) -> memoryview:
        """Write what the empty buffer of the socket takes, and answer the rest. An error means that nothing was sent."""
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise RefusedError from error
        return memoryview(data)[sent:]

    def _went_out(self, data: bytes | memoryview) -> bool:
        try:
            send(self._socket, data, self._timeout)
        except (BrokenPipeError, ConnectionResetError):
            return False  # the daemon's reason may have come before
        except TimeoutError as error:
            raise LateError from error
        return True

    def _is_readable(self) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    # -- the answer ---------------------------------------------------------------------------------------------------

    def read_head(self, request: Request) -> Head:
        """The head of the answer to a request that was sent."""
        while True:
            head = read_head(request, self._until(b"\r\n\r\n"))
            if head.status >= 200:  # 1xx announce the real one
                return head

    def read_rest(self, head: Head) -> Response:
        """The whole answer, after its head."""
        if head.length is not None:
            while len(self._buffer) < head.length:
                self._fill()
            self._is_read_whole = True
            return Response(head, self._taken(head.length))
        return Response(head, b"".join(self.iter_body(head)))

    def iter_body(self, head: Head) -> Generator[bytes, None, None]:
        """The pieces of the body, as they come."""
        if head.is_chunked:
            while size := _size(self._until(b"\r\n")):
                for piece in self._iter_exactly(size):
                    yield piece
                self._until(b"\r\n")
            while self._until(b"\r\n"):
                """Trailers."""
        elif head.length is not None:
            for piece in self._iter_exactly(head.length):
                yield piece
        else:
            with contextlib.suppress(BrokenError):
                while True:
                    yield self._some(_READ_BYTES)
        self._is_read_whole = True

    def _iter_exactly(self, size: int) -> Generator[bytes, None, None]:
        while size:
            piece = self._some(size)
            size -= len(piece)
            yield piece

    def _some(self, most: int) -> bytes:
        if not self._buffer:
            self._fill()
        return self._taken(most)

    def _taken(self, most: int) -> bytes:
        piece = bytes(self._buffer[:most])
        del self._buffer[:most]
        return piece

    def _until(self, end: bytes) -> bytes:
        while (at := self._buffer.find(end)) < 0:
            if len(self._buffer) > HEAD_LIMIT_BYTES:
                raise GarbledError(f"a head of more than {HEAD_LIMIT_BYTES} bytes")
            self._fill()
        found = bytes(self._buffer[:at])
        del self._buffer[: at + len(end)]
        return found

    def _fill(self) -> None:
        try:
            piece = receive(self._socket, _READ_BYTES, self._timeout)
        except (ConnectionResetError, BrokenPipeError) as error:
            raise BrokenError from error
        except TimeoutError as error:
            raise LateError from error
        if not piece:
            raise BrokenError
        self._buffer += piece


def _size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError as error:
        raise GarbledError(f"a chunk of {line[:40]!r} bytes") from error
