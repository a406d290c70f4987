"""One request as a handler sees it: who asks, for what, with everything already checked."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import anyio
import anyio.to_thread
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive

from ..engine import Engine
from ..errors import BodyTooLargeError, DiskFullError, InvalidRequestError, LimitReachedError
from ..host.peers import Peer, Role
from ..mirrors.quarantine import Quarantine
from ..model import View
from ..protocol import Repo
from .connections import Connection
from .metrics import Metrics


@dataclass(frozen=True, slots=True)
class Call:
    """`query` and `body` are of the models that the endpoint's row in the table names; `path` holds the path's parameters."""

    engine: Engine
    metrics: Metrics
    peer: Peer
    role: Role
    request: Request
    path: dict[str, str]
    query: Any = None
    body: Any = None

    @property
    def is_admin(self) -> bool:
        return self.role >= Role.ADMIN

    @property
    def own_uid(self) -> int | None:
        """For filters that show everybody their own: None, which is everything, for an administrator."""
        return None if self.is_admin else self.peer.uid

    @property
    def is_abandoned(self) -> bool:
        """Whether the client hung up meanwhile."""
        return self.connection.is_lost

    @property
    def connection(self) -> Connection:
        connection: Connection = self.request.state.connection
        return connection


def text_response(content: bytes | str, media_type: str) -> Response:
    """Bytes as they are: starlette would declare every `text/` to be UTF-8, and a patch need not be."""
    return Response(content, headers={"content-type": media_type})


_Name = Annotated[str, Field(min_length=1, max_length=100)]
_RefRecord = Annotated[
    str,
    Field(min_length=1, max_length=100, description="a ref record: its id, or a time in ISO 8601"),
]


class Query(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NoQuery(Query):
    pass


class RefsDiffQuery(Query):
    a: _RefRecord
    b: _RefRecord


class BundleQuery(Query):
    since: _RefRecord | None = None


class ImportBundleQuery(Query):
    mirror: Repo | None = None


class PinsQuery(Query):
    mirror: Repo | None = None


class UnpinQuery(Query):
    owner: (
        Annotated[
            str,
            Field(max_length=200, description="dataset/NAME or person/UID; administrators only"),
        ]
        | None
    ) = None


class ImportQuery(Query):
    filename: (
        Annotated[
            str,
            Field(
                min_length=1, max_length=255, description="what faults are told of; default: name"
            ),
        ]
        | None
    ) = None
    name: (
        Annotated[_Name, Field(description="of the dataset; default: filename without its endings")]
        | None
    ) = None
    format: _Name | None = None


class InstancesQuery(Query):
    dataset: _Name | None = None


class InstanceQuery(Query):
    view: View = View.AGENT
    dataset: str | None = None


class AuditsQuery(Query):
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class ApplyQuery(Query):
    reverse: bool = False
    named: Annotated[str, Field(pattern="^@(patch|test_patch)$")] | None = None


class EventsQuery(Query):
    after: (
        Annotated[str, Field(max_length=64, description="as Last-Event-ID: BOOT:ID, or ID")] | None
    ) = None
    follow: bool = True


JSON_LIMIT_BYTES = 1024**2
PATCH_LIMIT_BYTES = 64 * 1024**2
DATASET_LIMIT_BYTES = 4 * 1024**3
BUNDLE_LIMIT_BYTES = 256 * 1024**3
SILENCE_LIMIT_S = 30.0
USER_BODIES_BYTES = 256 * 1024**2
ALL_BODIES_BYTES = 1024**3
DRAIN_LIMIT_BYTES = 1024**2
DRAIN_LIMIT_S = 1.0

_WRITE_BYTES = 1024**2
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Bodies:
    """The bytes of bodies that are here. Belongs to one event loop."""

    def __init__(self) -> None:
        self._of: Counter[int] = Counter()

    def take(self, user: int, size: int, *, is_admin: bool) -> None:
        """Count bytes that a user sent; raises LimitReachedError. The total never keeps an administrator out."""
        if self._of[user] + size > USER_BODIES_BYTES or (
            not is_admin and self._of.total() + size > ALL_BODIES_BYTES
        ):
            raise LimitReachedError(
                "cannot take the request's body: too many bytes of other requests wait for their answers",
                hint="send fewer large requests at a time",
                retry_after=1,
            )
        self._of[user] += size

    def give_back(self, user: int, size: int) -> None:
        self._of -= Counter({user: size})


class Body:
    """The body of one request: what of it is here, and whether anything is still to come."""

    def __init__(self, receive: Receive, bodies: Bodies) -> None:
        self.user = -1
        self.is_admin = False
        self._receive = receive
        self._bodies = bodies
        self._has_ended = False
        self._taken = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self._taken:
            self._bodies.give_back(self.user, self._taken)

    async def receive(self) -> Message:
        message = await self._receive()
        self._has_ended = not message.get("more_body", False)
        return message

    def keep(self, size: int) -> None:
        """Count bytes that stay here until the answer; raises LimitReachedError."""
        self._bodies.take(self.user, size, is_admin=self.is_admin)
        self._taken += size

    async def is_drained(self, headers: Headers) -> bool:
        """Read the rest of a short body that nobody wanted: who writes into a connection that we close never reads the answer."""
        length = headers.get("content-length", "0" if "transfer-encoding" not in headers else None)
        if self._has_ended or length == "0":
            return True
        if "expect" in headers or (length and int(length) > DRAIN_LIMIT_BYTES):
            return False
        left = DRAIN_LIMIT_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_LIMIT_S):
                while left >= 0 and not self._has_ended:
                    left -= len((await self.receive()).get("body", b""))
        return self._has_ended


@asynccontextmanager
async def read_patch(request: Request, quarantine: Quarantine) -> AsyncIterator[bytes | Path]:
    """The body inside the block: a long one, or one of unknown length, is a file in the quarantine."""
    if (
        int(request.headers.get("content-length", "0")) <= JSON_LIMIT_BYTES
        and "transfer-encoding" not in request.headers
    ):
        yield await read_body(request, JSON_LIMIT_BYTES)
        return
    path = await spool_body(request, quarantine, PATCH_LIMIT_BYTES, keep=request.state.body.keep)
    try:
        yield path if await anyio.to_thread.run_sync(os.path.getsize, path) else b""
    finally:
        with anyio.CancelScope(shield=True):
            await quarantine.remove(path)


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLargeError before more than `limit_bytes` were kept."""
    _must_fit(request, limit_bytes)
    incoming: Body = request.state.body
    body, more = bytearray(), True
    with _ends_named():
        async with asyncio.timeout(SILENCE_LIMIT_S) as silence:
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                silence.reschedule(asyncio.get_running_loop().time() + SILENCE_LIMIT_S)
                body += message["body"]
                incoming.keep(len(message["body"]))
                more = message["more_body"]
                if len(body) > limit_bytes:
                    raise _too_large(limit_bytes)
    return bytes(body)


async def spool_body(
    request: Request,
    quarantine: Quarantine,
    limit_bytes: int,
    *,
    keep: Callable[[int], None] = lambda _: None,
) -> Path:
    """The body as a private file in the quarantine, which is the caller's to remove. `keep` is told of each piece."""
    descriptor, name = await anyio.to_thread.run_sync(
        partial(tempfile.mkstemp, prefix="upload-", dir=quarantine.root)
    )
    path = Path(name)
    try:
        await _spool(request, descriptor, limit_bytes, keep)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await quarantine.remove(path)
        raise
    finally:
        os.close(descriptor)
    return path


async def _spool(
    request: Request, descriptor: int, limit_bytes: int, keep: Callable[[int], None]
) -> None:
    pending: list[bytes] = []
    size = 0
    async for chunk in _iter_bounded(request, limit_bytes):
        keep(len(chunk))
        pending.append(chunk)
        size += len(chunk)
        if size >= _WRITE_BYTES:
            await anyio.to_thread.run_sync(_write, descriptor, b"".join(pending))
            pending, size = [], 0
    await anyio.to_thread.run_sync(_write, descriptor, b"".join(pending))


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise DiskFullError(
                "cannot store the request's body: the disk is full", hint="make room in state_dir"
            ) from error
        raise


async def _iter_bounded(request: Request, limit_bytes: int) -> AsyncIterator[bytes]:
    _must_fit(request, limit_bytes)
    size = 0
    stream = request.stream()
    with _ends_named():
        while True:
            async with asyncio.timeout(SILENCE_LIMIT_S):
                chunk = await anext(stream, None)
            if chunk is None:
                return
            size += len(chunk)
            if size > limit_bytes:
                raise _too_large(limit_bytes)
            if chunk:
                yield chunk


def _must_fit(request: Request, limit_bytes: int) -> None:
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit_bytes:
        raise _too_large(limit_bytes)


@contextmanager
def _ends_named() -> Iterator[None]:
    """Say what a body that does not come to its end was cut off by."""
    try:
        yield
    except TimeoutError as error:
        raise InvalidRequestError(
            f"cannot read the request's body: nothing came for {SILENCE_LIMIT_S:g} s"
        ) from error
    except ClientDisconnect as error:
        raise InvalidRequestError(
            "cannot read the request's body: the client hung up in the middle"
        ) from error


def _too_large(limit_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"cannot read the request's body: it is larger than {limit_bytes} bytes",
        hint="JSON may have 1 MiB, a patch 64 MiB, a dataset file 4 GiB, a bundle 256 GiB",
        limit_bytes=limit_bytes,
    )
