"""Requests to one daemon at one socket, and their answers or errors.

Sends a request again only where that cannot do anything twice: when it never left, or when it is a GET and the daemon went away
under it. Only a client that reached its daemon once waits for it to come back; the first refusal is told at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import httpcore
from pydantic import BaseModel

from ...errors import StoppingError
from ..answers import (
    ERRORS_FROM,
    FAILURES,
    Failure,
    Reply,
    body_of,
    close_leaked,
    failure_of,
    headers_of,
    is_error,
    is_unsent,
    problem_of,
    reply_of,
    retry_pauses,
    target_of,
)
from ..twins import pause
from .wire import Backend

_KEEP_SECONDS = 60.0  # less than the daemon's 75, so that we never write into a connection that it is closing
_KEEP_CONNECTIONS = 64
_CONNECT_SECONDS = 10.0


class Connection:
    """`timeout` bounds the silence of the daemon within one answer, `patience` how long its restart is waited for."""

    def __init__(self, socket: Path, *, timeout: timedelta, patience: timedelta) -> None:
        self.socket = socket
        self._pool = httpcore.ConnectionPool(
            uds=str(socket),
            network_backend=Backend(),
            max_connections=None,
            max_keepalive_connections=_KEEP_CONNECTIONS,
            keepalive_expiry=_KEEP_SECONDS,
        )
        self._patience_seconds = patience.total_seconds()
        silence = timeout.total_seconds()
        self._timeout = {"connect": _CONNECT_SECONDS, "read": silence, "write": silence, "pool": silence}
        self._reached = False

    def close(self) -> None:
        self._pool.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        content: bytes | Iterator[bytes] | None = None,
        accepted: tuple[int, ...] = (),
        **query: object,
    ) -> Reply:
        """Send and read the whole answer; an error is raised. A status of 400 and above that is `accepted` is none."""
        kind = "application/octet-stream" if body is None else "application/json"
        sent = content if body is None else body_of(body)
        request = self._build(method, target_of(path, query), headers_of(sent, kind), sent)
        pauses = retry_pauses(self._patience_seconds)
        while True:
            try:
                return self._send(request, accepted)
            except StoppingError:
                if method != "GET" or (seconds := next(pauses, None)) is None:
                    raise
            except FAILURES as error:
                if not self._may_retry(request, error) or (seconds := next(pauses, None)) is None:
                    raise failure_of(error, request, self.socket) from error
            pause(seconds)

    @contextlib.contextmanager
    def stream(
        self, path: str, *, headers: dict[str, str] | None = None, **query: object
    ) -> Iterator[tuple[Mapping[str, str], Iterator[bytes]]]:
        """The headers of an answer, and its body, that is read while it comes, however slowly; one try."""
        request = self._build("GET", target_of(path, query), headers_of(None, "") | (headers or {}))
        request.extensions["timeout"] = {**self._timeout, "read": None}
        try:
            response = self._open(request)
            try:
                if response.status >= ERRORS_FROM:
                    raise problem_of(reply_of(request, response, response.read()))
                yield reply_of(request, response, b"").headers, response.iter_stream()
            finally:
                response.close()
        except FAILURES as error:
            raise failure_of(error, request, self.socket) from error

    def _build(
        self, method: str, target: bytes, headers: dict[str, str], content: bytes | Iterator[bytes] | None = None
    ) -> httpcore.Request:
        url = httpcore.URL(scheme=b"http", host=b"mirrord", target=target)
        return httpcore.Request(
            method, url, headers=list(headers.items()), content=content, extensions={"timeout": self._timeout}
        )

    def _send(self, request: httpcore.Request, accepted: tuple[int, ...]) -> Reply:
        response = self._open(request)
        try:
            reply = reply_of(request, response, response.read())
        finally:
            response.close()
        if is_error(reply, accepted):
            raise problem_of(reply)
        return reply

    def _open(self, request: httpcore.Request) -> httpcore.Response:
        try:
            response = self._pool.handle_request(request)
        except httpcore.ConnectError as error:
            close_leaked(error)
            raise
        self._reached = True
        return response

    def _may_retry(self, request: httpcore.Request, error: Failure) -> bool:
        if not self._reached or isinstance(error, httpcore.TimeoutException):
            return False
        return request.method == b"GET" or is_unsent(error)
