"""Requests to a daemon at a socket: idle channels, retries, and the exchange on a channel.

Channels use bare sockets instead of asyncio's streams: they belong to no event loop, and both
clients see the kernel's errors. A Unix socket refuses bytes as soon as its peer is closed, so a
first write that fails has sent nothing.
"""

import contextlib
import os
import select
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Self

from ... import protocol
from ...errors import ResourceError, StoppingError
from ...units import in_seconds
from .. import http
from ..primitives_async import async_pause, async_readable, async_receive, async_send

# Less than the daemon's 75 s, so that no request goes to a connection that it is closing.
_IDLE_SECONDS = 60.0
# connections kept for reuse; those beyond it are closed after their answer
_IDLE_MAX = 256


class AsyncConnection:
    """Sends requests. `timeout` limits the daemon's silence, `patience` the wait for its restart.

    A request is sent again only if that cannot act twice: it was never sent, it is a GET and the
    daemon stopped, or, at most `retries` times, the daemon was too busy to begin it. A client that
    never reached its daemon does not wait for it. Idle channels are used last in, first out, so
    those of a burst grow old and are closed. `append` and `pop` of a list are atomic: threads need
    no lock.
    """

    def __init__(
        self,
        socket: Path,
        *,
        timeout: timedelta | float,
        patience: timedelta | float,
        retries: int | None = None,
    ) -> None:
        self.socket = socket
        self._retries = retries
        self._timeout = in_seconds(timeout)
        self._patience_seconds = in_seconds(patience)
        self._reached = False
        # httpcore's pool looks at each for each request: 64 tasks on one client made 49 a second
        self._idle: list[AsyncChannel] = []
        self._pid = os.getpid()

    async def close(self) -> None:
        """Close the idle channels; later requests open new ones."""
        while self._idle:
            self._idle.pop().close()

    async def request(
        self,
        method: str,
        *path: str,
        body: protocol.Request | None = None,
        content: bytes | AsyncIterator[bytes] | None = None,
        accepted: tuple[int, ...] = (),
        descriptors: list[int] | None = None,
        **query: object,
    ) -> http.Response:
        """Send a request and read the answer; raises its error unless its status is `accepted`.

        Descriptors that come with the answer are appended to `descriptors`, even before an error.
        """
        kind = "application/octet-stream" if body is None else "application/json"
        headers = {} if body is None and content is None else {"content-type": kind}
        request = http.HttpRequest(method, http.target(path, query), headers)
        sent = content if body is None else http.body_of(body)
        pauses = http.retry_pauses(self._patience_seconds)
        refusals = http.Refusals(self._retries, self._timeout)
        while True:
            try:
                response = await self._exchange(request, sent, descriptors)
                if http.is_error(response, accepted):
                    raise http.problem_of(response)
                return response
            except StoppingError:
                if method != "GET" or (seconds := next(pauses, None)) is None:
                    raise
            except ResourceError as error:
                pause_s = refusals.pause_s(error)
                # a stream is used up, and cannot be sent again
                if pause_s is None or isinstance(content, AsyncIterator):
                    raise
                seconds = pause_s
            except http.BrokenError as error:
                is_safe = method == "GET" or isinstance(error, http.RefusedError)
                may_retry = self._reached and is_safe and not isinstance(error, http.LateError)
                if not may_retry or (seconds := next(pauses, None)) is None:
                    raise http.failure_of(error, request, self.socket) from error
            await async_pause(seconds)

    @contextlib.asynccontextmanager
    async def stream(
        self, *path: str, headers: dict[str, str] | None = None, **query: object
    ) -> AsyncGenerator[tuple[http.Head, AsyncGenerator[bytes]]]:
        """Yield the head of an answer, and its body as it arrives, without a timeout.

        A request is sent again only if the daemon was too busy to begin it.
        """
        request = http.HttpRequest("GET", http.target(path, query), headers or {})
        refusals = http.Refusals(self._retries, self._timeout)
        channel = None
        try:
            while True:
                channel = await self._take()
                await channel.send(request, None, None)
                head = await channel.read_head(request)
                self._reached = True
                if head.status < 400:
                    break
                error = http.problem_of(await channel.read_rest(head))
                if (seconds := refusals.pause_s(error)) is None:
                    raise error
                channel.close()
                await async_pause(seconds)
            yield head, channel.iter_body(head)
        except http.BrokenError as error:
            raise http.failure_of(error, request, self.socket) from error
        finally:
            # never used again: the reader may have broken off within a body
            if channel is not None:
                channel.close()

    async def _exchange(
        self,
        request: http.HttpRequest,
        body: bytes | AsyncIterator[bytes] | None,
        descriptors: list[int] | None,
    ) -> http.Response:
        channel = await self._take()
        channel.descriptors = descriptors
        try:
            await channel.send(request, body, self._timeout)
            response = await channel.read_rest(await channel.read_head(request))
        except BaseException:
            channel.close()
            raise
        self._reached = True
        if channel.is_reusable(response.head) and len(self._idle) < _IDLE_MAX:
            channel.idle_since = time.monotonic()
            self._idle.append(channel)
        else:
            channel.close()
        return response

    async def _take(self) -> "AsyncChannel":
        if self._pid != os.getpid():  # after a fork the channels are the parent's
            self._pid, self._idle = os.getpid(), []
        oldest = time.monotonic() - _IDLE_SECONDS
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread took the last one
                channel = self._idle.pop()
                # readable without a request: the daemon has closed it
                if channel.idle_since > oldest and not channel.is_readable():
                    return channel
                channel.close()
        return await AsyncChannel.open(self.socket)


# A Unix socket whose backlog is full refuses with EAGAIN instead of waiting (connect(2)): the
# client asks again until then.
_CONNECT_SECONDS = 10.0
_BACKLOG_PAUSE_SECONDS = 0.01
# what asyncio reads at once, too
_READ_BYTES = 256 * 1024


class AsyncChannel:
    """A connection, which carries one exchange at a time.

    Close it after any error or cancellation: the rest of an answer would be read as the next one.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._buffer = bytearray()
        self._is_sent_whole = False
        self._is_read_whole = False
        self._timeout: float | None = None
        self.descriptors: list[int] | None = None
        self.idle_since = 0.0

    @classmethod
    async def open(cls, path: Path) -> Self:
        """Connect to a socket; raises RefusedError."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.setblocking(False)
            deadline = time.monotonic() + _CONNECT_SECONDS
            while True:
                try:
                    connected.connect(str(path))
                    return cls(connected)
                except BlockingIOError:
                    # EAGAIN: the backlog is full. A Unix socket does not connect later by itself.
                    if time.monotonic() > deadline:
                        raise
                    await async_pause(_BACKLOG_PAUSE_SECONDS)
        except BaseException as error:
            connected.close()
            if isinstance(error, OSError):
                raise http.RefusedError from error
            raise

    def close(self) -> None:
        self._socket.close()

    def is_reusable(self, head: http.Head) -> bool:
        return self._is_sent_whole and self._is_read_whole and not head.is_last and not self._buffer

    # -- the request

    async def send(
        self,
        request: http.HttpRequest,
        body: bytes | AsyncIterator[bytes] | None,
        timeout: float | None,
    ) -> None:
        """Send a request; returns early, without error, if the daemon answers or hangs up before.

        `timeout` limits each wait for the daemon in this exchange.
        """
        self._timeout = timeout
        self._is_sent_whole = self._is_read_whole = False
        if body is None or isinstance(body, bytes):
            framing = "" if body is None else f"content-length: {len(body)}\r\n"
            # head and body in one write: the daemon wakes once
            unsent = await self._begin(request.head(framing) + (body or b""))
            self._is_sent_whole = not unsent or await self._send_all(unsent)
            return
        if unsent := await self._begin(request.head("transfer-encoding: chunked\r\n")):
            await self._send_all(unsent)
        async for chunk in body:
            if not chunk:  # an empty chunk would end the body
                continue
            framed = b"%x\r\n%b\r\n" % (len(chunk), chunk)
            if self.is_readable() or not await self._send_all(framed):
                return
        self._is_sent_whole = await self._send_all(b"0\r\n\r\n")

    async def _begin(self, data: bytes) -> memoryview:
        """Write what the socket takes; returns the rest. After an error nothing was sent."""
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise http.RefusedError from error
        return memoryview(data)[sent:]

    async def _send_all(self, data: bytes | memoryview) -> bool:
        try:
            await async_send(self._socket, data, self._timeout)
        except (BrokenPipeError, ConnectionResetError):
            return False  # the daemon may have answered why
        except TimeoutError as error:
            raise http.LateError from error
        return True

    def is_readable(self) -> bool:
        """True if an answer arrived or the daemon closed the connection."""
        # not select(2), which takes no descriptor above 1,023
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    # -- the answer

    async def read_head(self, request: http.HttpRequest) -> http.Head:
        while True:
            head = http.read_head(request, await self._until(b"\r\n\r\n"))
            if head.status >= 200:  # 1xx precede the answer
                return head

    async def read_rest(self, head: http.Head) -> http.Response:
        if head.length is not None:
            # not by iter_body: nested generators cost a tenth of a request's processor time
            while len(self._buffer) < head.length:
                await self._fill()
            self._is_read_whole = True
            return http.Response(head, self._take_buffered(head.length))
        return http.Response(head, b"".join([piece async for piece in self.iter_body(head)]))

    async def iter_body(self, head: http.Head) -> AsyncGenerator[bytes]:
        if head.is_chunked:
            while size := http.chunk_size(await self._until(b"\r\n")):
                async for piece in self._iter_exactly(size):
                    yield piece
                await self._until(b"\r\n")
            while await self._until(b"\r\n"):
                pass  # trailers
        elif head.length is not None:
            async for piece in self._iter_exactly(head.length):
                yield piece
        else:
            # neither length nor chunks: such a body ends with its connection (RFC 9112)
            with contextlib.suppress(http.BrokenError):
                while True:
                    yield await self._read_some(_READ_BYTES)
        self._is_read_whole = True

    async def _iter_exactly(self, size: int) -> AsyncGenerator[bytes]:
        while size:
            piece = await self._read_some(size)
            size -= len(piece)
            yield piece

    async def _read_some(self, limit: int) -> bytes:
        if not self._buffer:
            await self._fill()
        return self._take_buffered(limit)

    def _take_buffered(self, limit: int) -> bytes:
        piece = bytes(self._buffer[:limit])
        del self._buffer[:limit]
        return piece

    async def _until(self, end: bytes) -> bytes:
        while (index := self._buffer.find(end)) < 0:
            if len(self._buffer) > http.HEAD_LIMIT_BYTES:
                raise http.GarbledError(f"a head of more than {http.HEAD_LIMIT_BYTES} bytes")
            await self._fill()
        return self._take_buffered(index + len(end))[:index]

    async def _fill(self) -> None:
        try:
            if self.descriptors is None:
                piece = await async_receive(self._socket, _READ_BYTES, self._timeout)
            else:
                # a plain read would drop the descriptors: wait, then take them with the bytes
                await async_readable(self._socket, self._timeout)
                # else a program that another thread starts now would keep the mount
                flags = socket.MSG_CMSG_CLOEXEC
                piece, passed, _, _ = socket.recv_fds(self._socket, _READ_BYTES, 1, flags)
                self.descriptors += passed
        except (ConnectionResetError, BrokenPipeError) as error:
            raise http.BrokenError from error
        except TimeoutError as error:
            raise http.LateError from error
        if not piece:
            raise http.BrokenError
        self._buffer += piece
