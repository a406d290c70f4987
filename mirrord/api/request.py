"""Requests as handlers see them: the caller, the query, the body; streams and problems as
answers.

Short bodies are read into memory, long ones into files in the quarantine, which the start empties.
A body that is too large, too slow or incomplete is an error and leaves no file.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from .. import errors
from ..engine.engine import Engine
from ..errors import full_disk_named, host_error
from ..host.files import write_all
from ..host.peers import Peer, Role
from ..jsontext import dumps
from ..mirrors.quarantine import Quarantine
from ..telemetry import Seldom, log, masked

if TYPE_CHECKING:
    from .server import HttpConnection

# A larger body is refused with 413 `body-too-large`. JSON is held and parsed in memory;
# patches, datasets and bundles are files below the state directory.
JSON_LIMIT_BYTES = 1024**2
PATCH_LIMIT_BYTES = 64 * 1024**2
DATASET_LIMIT_BYTES = 4 * 1024**3
BUNDLE_LIMIT_BYTES = 256 * 1024**3
# between two pieces of a body; a long upload is fine as long as it moves
SILENCE_LIMIT_S = 30.0
# of bodies whose answer is not sent; above it 503 `limit-reached`
USER_BODIES_BYTES = 256 * 1024**2
ALL_BODIES_BYTES = 1024**3

# of a body on its way to a file, so that a hop to a thread pays off
_WRITE_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class Call:
    """A request whose access was checked. `path` contains the path parameters."""

    engine: Engine
    peer: Peer
    role: Role
    request: Request
    path: dict[str, str]

    @property
    def is_admin(self) -> bool:
        return self.role >= Role.ADMIN

    @property
    def own_uid(self) -> int | None:
        """The uid by which answers are filtered, or None for an administrator, who sees all."""
        return None if self.is_admin else self.peer.uid

    @property
    def connection(self) -> HttpConnection:
        connection: HttpConnection = self.request.state.connection
        return connection


class Query(BaseModel):
    """The query parameters of an endpoint. Unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def text_response(content: bytes | str, media_type: str) -> Response:
    """Answer with text without a charset: Starlette would add UTF-8, which a patch need not be."""
    return Response(content, headers={"content-type": media_type})


class OwnedStream(StreamingResponse):
    """A stream with resources that are closed when it was sent or its client hung up."""

    def __init__(
        self, content: AsyncIterator[bytes], headers: dict[str, str], owned: AsyncExitStack
    ) -> None:
        super().__init__(content, headers=headers)
        self._owned = owned

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._owned:
            await super().__call__(scope, receive, send)


def stream_file(path: Path, headers: dict[str, str]) -> OwnedStream:
    """Answer with a file. It is opened immediately and may be removed after this call."""
    owned = AsyncExitStack()
    # a buffer of Python's would only copy pieces of this size
    file = owned.enter_context(path.open("rb", buffering=0))

    async def pieces() -> AsyncIterator[bytes]:
        while piece := await anyio.to_thread.run_sync(file.read, _WRITE_BYTES):
            yield piece

    length = {"content-length": str(os.fstat(file.fileno()).st_size)}
    return OwnedStream(pieces(), headers | length, owned)


# -- bodies ---------------------------------------------------------------------------------------


# An answer before the end of the body: the rest is read, so that the connection can be used
# again, but not more than this, after which closing it is cheaper.
_DRAIN_LIMIT_BYTES = 1024**2
_DRAIN_LIMIT_S = 1.0


class Body:
    """The body of a request. `held` counts the bytes of all unanswered requests by user."""

    def __init__(self, receive: Receive, held: Counter[int]) -> None:
        self.user = -1
        self.is_admin = False
        self._receive = receive
        self._held = held
        self._kept = 0
        self._has_ended = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._has_ended = not message.get("more_body", False)
        return message

    def keep(self, size: int) -> None:
        """Count bytes that are held until the answer. Raises LimitReachedError.

        The limit of all users together does not apply to administrators.
        """
        if self._held[self.user] + size > USER_BODIES_BYTES or (
            not self.is_admin and self._held.total() + size > ALL_BODIES_BYTES
        ):
            raise errors.LimitReachedError(
                "cannot read the request's body: too many bytes of unanswered requests",
                hint="send fewer large requests at a time",
                retry_after=1,
            )
        self._held[self.user] += size
        self._kept += size

    def release(self) -> None:
        if self._kept:
            self._held -= Counter({self.user: self._kept})  # in place

    async def is_drained(self, headers: Headers) -> bool:
        """Read the rest of a short body and return whether it ended.

        A client that writes into a closed connection does not read its answer.
        """
        length = headers.get("content-length", "0" if "transfer-encoding" not in headers else None)
        if self._has_ended or length == "0":
            return True
        # who waits for `100 Continue` has sent nothing, and reads the refusal
        if "expect" in headers or (length and int(length) > _DRAIN_LIMIT_BYTES):
            return False
        left = _DRAIN_LIMIT_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_LIMIT_S):
                while left >= 0 and not self._has_ended:
                    left -= len((await self.receive()).get("body", b""))
        return self._has_ended


async def _iter_pieces(request: Request, limit_bytes: int) -> AsyncIterator[bytes]:
    """Yield the body in pieces. Raises BodyTooLargeError instead of exceeding the limit."""
    too_large = partial(
        errors.BodyTooLargeError,
        f"cannot read the request's body: it is larger than {limit_bytes} bytes",
        hint="limits: JSON 1 MiB, a patch 64 MiB, a dataset 4 GiB, a bundle 256 GiB",
        limit_bytes=limit_bytes,
    )
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit_bytes:
        raise too_large()
    size, more = 0, True
    while more:
        try:
            async with asyncio.timeout(SILENCE_LIMIT_S):
                message = await request.receive()
        except TimeoutError as error:
            raise errors.InvalidRequestError(
                f"cannot read the request's body: no data for {SILENCE_LIMIT_S:g} s"
            ) from error
        if message["type"] == "http.disconnect":
            raise errors.InvalidRequestError(
                "cannot read the request's body: the client hung up before its end"
            )
        more = message.get("more_body", False)
        if piece := message.get("body", b""):
            size += len(piece)
            if size > limit_bytes:
                raise too_large()
            yield piece


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Read the body into memory. Raises BodyTooLargeError and LimitReachedError."""
    body = bytearray()
    async for piece in _iter_pieces(request, limit_bytes):
        request.state.body.keep(len(piece))
        body += piece
    return bytes(body)


async def spool_body(
    request: Request,
    quarantine: Quarantine,
    limit_bytes: int,
    *,
    keep: Callable[[int], None] = lambda _: None,
) -> Path:
    """Write the body to a private file in the quarantine, which the caller removes.

    Calls `keep` with the size of each piece. Raises BodyTooLargeError and DiskFullError.
    """
    make = partial(tempfile.mkstemp, prefix="upload-", dir=quarantine.root)
    descriptor, name = await anyio.to_thread.run_sync(make)
    pending = bytearray()
    try:
        with full_disk_named("the request's body"):
            async for piece in _iter_pieces(request, limit_bytes):
                keep(len(piece))
                pending += piece
                if len(pending) >= _WRITE_BYTES:
                    await anyio.to_thread.run_sync(write_all, descriptor, bytes(pending))
                    pending.clear()
            await anyio.to_thread.run_sync(write_all, descriptor, bytes(pending))
    except BaseException:
        with anyio.CancelScope(shield=True):
            await quarantine.remove(Path(name))
        raise
    finally:
        os.close(descriptor)
    return Path(name)


@asynccontextmanager
async def read_patch(request: Request, quarantine: Quarantine) -> AsyncIterator[bytes | Path]:
    """Read a patch; inside the block, a long one or one of unknown length is a file."""
    length = int(request.headers.get("content-length", "0"))
    if length <= JSON_LIMIT_BYTES and "transfer-encoding" not in request.headers:
        yield await read_body(request, JSON_LIMIT_BYTES)
        return
    path = await spool_body(request, quarantine, PATCH_LIMIT_BYTES, keep=request.state.body.keep)
    try:
        yield path if await anyio.to_thread.run_sync(os.path.getsize, path) else b""
    finally:
        with anyio.CancelScope(shield=True):
            await quarantine.remove(path)


# -- problems (RFC 9457) ---------------------------------------------------

_seldom = Seldom()

MEDIA_TYPE = "application/problem+json"


class MethodNotAllowedError(errors.InvalidRequestError, title="Method not allowed", status=405): ...


def problem_body(error: errors.MirrordError) -> bytes:
    """Encode a problem, with secrets in URLs masked."""
    return masked(dumps(error.problem(), default=str)).encode()


def problem_headers(error: errors.MirrordError) -> dict[str, str]:
    headers = {"content-type": MEDIA_TYPE}
    if isinstance(error, MethodNotAllowedError):
        headers["allow"] = error.facts["allow"]
    if retry_after := error.facts.get("retry_after"):
        # whole seconds (RFC 9110)
        headers["retry-after"] = str(ceil(float(retry_after)))
    return headers


def problem_response(error: Exception) -> Response:
    problem = error_of(error)
    return Response(problem_body(problem), problem.http_status, problem_headers(problem))


def error_of(error: Exception) -> errors.MirrordError:
    """Return the error to answer an exception with. Unexpected ones are logged, but not shown."""
    problem = (
        error if isinstance(error, errors.MirrordError) else host_error(error, "answer the request")
    )
    if isinstance(problem, errors.TooManyFilesError):
        if count := _seldom.count("files"):
            log.error("files.exhausted", detail=problem.message, count=count)
    elif problem is not None and problem is not error:
        log.error("disk.failed", detail=problem.message)
    elif problem is None or problem.exit_status == errors.InternalError.exit_status:
        log.error("request.crashed", detail=problem.message if problem else None, exc_info=error)
    return problem or errors.InternalError(
        "cannot answer the request: an unexpected error",
        hint="this is a bug; the daemon's log has the details",
    )


def invalid_request(part: str, error: ValidationError) -> errors.InvalidRequestError:
    """Return an error with all faults that pydantic found in the query or the body."""
    faults: list[dict[str, Any]] = [
        {
            "key": ".".join(map(str, fault["loc"])),
            "message": fault["msg"].removeprefix("Value error, "),
        }
        for fault in error.errors(include_url=False, include_context=False)
    ]
    listing = "; ".join(
        f"{fault['key']}: {fault['message']}" if fault["key"] else fault["message"]
        for fault in faults
    )
    return errors.InvalidRequestError(
        f"cannot read the {part} of the request: {listing}",
        hint="see GET /v1/openapi.json for its members",
        faults=faults,
    )
