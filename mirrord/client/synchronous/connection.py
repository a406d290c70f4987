"""Requests to one daemon at one socket, and their answers or errors.

Sends a request again only where that cannot do anything twice: when it never left, or when it is a GET and the daemon went away
under it. Only a client that reached its daemon once waits for it to come back; the first refusal is told at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import httpx
from pydantic import BaseModel

from ...errors import StoppingError
from ...protocol import API
from ..answers import body_of, close_leaked, failure_of, is_error, is_unsent, problem_of, query_of, retry_pauses
from ..twins import pause

_KEEP_SECONDS = 60.0  # less than the daemon's 75, so that we never write into a connection that it is closing
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=_KEEP_SECONDS)
_CONNECT_SECONDS = 10.0


class Connection:
    """`timeout` bounds the silence of the daemon within one answer, `patience` how long its restart is waited for."""

    def __init__(self, socket: Path, *, timeout: timedelta, patience: timedelta) -> None:
        self.socket = socket
        # `verify`, although nobody speaks TLS here: httpx would read the machine's certificates for each client, 55 ms
        self._transport = httpx.HTTPTransport(uds=str(socket), limits=_LIMITS, verify=False)
        self._patience_seconds = patience.total_seconds()
        self._timeout = httpx.Timeout(timeout.total_seconds(), connect=_CONNECT_SECONDS).as_dict()
        self._reached = False

    def close(self) -> None:
        self._transport.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        content: bytes | Iterator[bytes] | None = None,
        accepted: tuple[int, ...] = (),
        **query: object,
    ) -> httpx.Response:
        """Send and read the whole answer; an error is raised. A status of 400 and above that is `accepted` is none."""
        kind = "application/octet-stream" if body is None else "application/json"
        headers = {} if body is None and content is None else {"content-type": kind}
        request = self._build(method, path, content if body is None else body_of(body), query, headers)
        pauses = retry_pauses(self._patience_seconds)
        while True:
            try:
                return self._send(request, accepted)
            except StoppingError:
                if request.method != "GET" or (seconds := next(pauses, None)) is None:
                    raise
            except httpx.TransportError as error:
                if not self._may_retry(request, error) or (seconds := next(pauses, None)) is None:
                    raise failure_of(error, request, self.socket) from error
            pause(seconds)

    @contextlib.contextmanager
    def stream(self, path: str, *, headers: dict[str, str] | None = None, **query: object) -> Iterator[httpx.Response]:
        """An answer that is read while it comes, however slowly; one try."""
        request = self._build("GET", path, None, query, headers)
        request.extensions["timeout"] = {**self._timeout, "read": None}
        try:
            response = self._open(request)
            try:
                if response.status_code >= httpx.codes.BAD_REQUEST:
                    response.read()
                    raise problem_of(response)
                yield response
            finally:
                response.close()
        except httpx.TransportError as error:
            raise failure_of(error, request, self.socket) from error

    def _build(
        self,
        method: str,
        path: str,
        content: bytes | Iterator[bytes] | None,
        query: dict[str, object],
        headers: dict[str, str] | None = None,
    ) -> httpx.Request:
        return httpx.Request(
            method,
            f"http://mirrord{path if path.startswith('/') else f'{API}/{path}'}",
            params=query_of(**query) or None,
            content=content,
            headers=headers,
            extensions={"timeout": self._timeout},
        )

    def _send(self, request: httpx.Request, accepted: tuple[int, ...]) -> httpx.Response:
        response = self._open(request)
        response.read()
        if is_error(response, accepted):
            raise problem_of(response)
        return response

    def _open(self, request: httpx.Request) -> httpx.Response:
        try:
            response = self._transport.handle_request(request)
        except httpx.ConnectError as error:
            close_leaked(error)
            raise
        response.request = request
        self._reached = True
        return response

    def _may_retry(self, request: httpx.Request, error: httpx.TransportError) -> bool:
        if not self._reached or isinstance(error, httpx.TimeoutException):
            return False
        return request.method == "GET" or is_unsent(error)
