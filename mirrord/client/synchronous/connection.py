# Generated from ../asynchronous/connection.py by tests/support/unasync.py: edit that file, then run it.
"""Requests to one daemon at one socket, and their answers or errors.

Sends a request again only where that cannot do anything twice: when it never left, or when it is a GET and the daemon went away
under it. Only a client that reached its daemon once waits for it to come back; the first refusal is raised at once.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

from ... import protocol
from ...errors import StoppingError
from ...protocol import API
from ..answers import body_of, failure_of, is_error, problem_of, retry_pauses
from ..http import BrokenError, Head, LateError, RefusedError, Request, Response, target
from ..twins_sync import pause
from .channel import Channel

_KEEP_SECONDS = (
    60.0  # less than the daemon's 75, so that we never write into a connection that it is closing
)
_KEEP_MOST = 256
_ERROR = 400


class Connection:
    """`timeout` bounds the silence of the daemon within one answer, `patience` how long its restart is waited for.

    Idle channels are a list: the last one back is the first one out, so what a burst opened grows old and is closed. Both ends of
    the list are atomic, so threads share it without a lock.
    """

    def __init__(self, socket: Path, *, timeout: timedelta, patience: timedelta) -> None:
        self.socket = socket
        self._timeout = timeout.total_seconds()
        self._patience_seconds = patience.total_seconds()
        self._reached = False
        self._idle: list[Channel] = []
        self._pid = os.getpid()

    def close(self) -> None:
        """Close the idle channels; the client may be used again and then opens new ones."""
        while self._idle:
            self._idle.pop().close()

    def request(
        self,
        method: str,
        path: str,
        *,
        body: protocol.Request | None = None,
        content: bytes | Iterator[bytes] | None = None,
        accepted: tuple[int, ...] = (),
        **query: object,
    ) -> Response:
        """Send and read the whole answer; an error is raised. A status of 400 and above that is `accepted` is none."""
        kind = "application/octet-stream" if body is None else "application/json"
        headers = {} if body is None and content is None else {"content-type": kind}
        request = _request(method, path, query, headers)
        sent = content if body is None else body_of(body)
        pauses = retry_pauses(self._patience_seconds)
        while True:
            try:
                response = self._exchange(request, sent)
                if is_error(response, accepted):
                    raise problem_of(response)
                return response
            except StoppingError:
                if method != "GET" or (seconds := next(pauses, None)) is None:
                    raise
            except BrokenError as error:
                if not self._may_retry(request, error) or (seconds := next(pauses, None)) is None:
                    raise failure_of(error, request, self.socket) from error
            pause(seconds)

    @contextlib.contextmanager
    def stream(
        self, path: str, *, headers: dict[str, str] | None = None, **query: object
    ) -> Generator[tuple[Head, Generator[bytes, None, None]], None, None]:
        """The head of an answer, and its body while it comes, however slowly; one try."""
        request = _request("GET", path, query, headers or {})
        channel = None
        try:
            channel = self._take()
            channel.send(request, None, None)
            head = channel.read_head(request)
            self._reached = True
            if head.status >= _ERROR:
                raise problem_of(channel.read_rest(head))
            yield head, channel.iter_body(head)
        except BrokenError as error:
            raise failure_of(error, request, self.socket) from error
        finally:
            if channel is not None:
                channel.close()

    def _exchange(self, request: Request, body: bytes | Iterator[bytes] | None) -> Response:
        channel = self._take()
        try:
            channel.send(request, body, self._timeout)
            response = channel.read_rest(channel.read_head(request))
        except BaseException:
            channel.close()
            raise
        self._reached = True
        self._give_back(channel, response.head)
        return response

    def _take(self) -> Channel:
        if self._pid != os.getpid():  # a fork: the parent reads these
            self._pid, self._idle = os.getpid(), []
        oldest = time.monotonic() - _KEEP_SECONDS
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread took the last one
                channel = self._idle.pop()
                if channel.idle_since > oldest and not channel.is_stale():
                    return channel
                channel.close()
        return Channel.open(self.socket)

    def _give_back(self, channel: Channel, head: Head) -> None:
        if channel.is_reusable(head) and len(self._idle) < _KEEP_MOST:
            channel.idle_since = time.monotonic()
            self._idle.append(channel)
        else:
            channel.close()

    def _may_retry(self, request: Request, error: BrokenError) -> bool:
        if not self._reached or isinstance(error, LateError):
            return False
        return request.method == "GET" or isinstance(error, RefusedError)


def _request(
    method: str, path: str, query: Mapping[str, object], headers: Mapping[str, str]
) -> Request:
    return Request(
        method, target(path if path.startswith("/") else f"{API}/{path}", query), headers
    )
