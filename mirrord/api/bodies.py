"""Bodies on their way in, each within its bound: JSON into memory, files into the quarantine directory.

A body that is too large, too slow, or cut off in the middle is an error and leaves nothing behind. What a daemon killed in the
middle of a spool leaves is in the quarantine directory, which is emptied at the start.
"""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
from starlette.requests import ClientDisconnect, Request

from ..errors import BodyTooLargeError, DiskFullError, InvalidRequestError
from ..mirrors.quarantine import Quarantine

JSON_LIMIT_BYTES = 1024**2
PATCH_LIMIT_BYTES = 64 * 1024**2
DATASET_LIMIT_BYTES = 4 * 1024**3
BUNDLE_LIMIT_BYTES = 256 * 1024**3
SILENCE_LIMIT_S = 30.0

_WRITE_BYTES = 1024**2
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLargeError before more than `limit_bytes` were kept."""
    _must_fit(request, limit_bytes)
    body, more = bytearray(), True
    with _ends_named():
        async with asyncio.timeout(SILENCE_LIMIT_S) as silence:
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                silence.reschedule(asyncio.get_running_loop().time() + SILENCE_LIMIT_S)
                body += message["body"]
                more = message["more_body"]
                if len(body) > limit_bytes:
                    raise _too_large(limit_bytes)
    return bytes(body)


async def spool_body(request: Request, quarantine: Quarantine, limit_bytes: int) -> Path:
    """The body as a private file in the quarantine, which is the caller's to remove."""
    descriptor, name = await anyio.to_thread.run_sync(partial(tempfile.mkstemp, prefix="upload-", dir=quarantine.root))
    path = Path(name)
    try:
        await _spool(request, descriptor, limit_bytes)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await quarantine.remove(path)
        raise
    finally:
        os.close(descriptor)
    return path


async def _spool(request: Request, descriptor: int, limit_bytes: int) -> None:
    pending: list[bytes] = []
    size = 0
    async for chunk in _iter_bounded(request, limit_bytes):
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
            raise DiskFullError("cannot store the request's body: the disk is full", hint="make room in state_dir") from error
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
        raise InvalidRequestError(f"cannot read the request's body: nothing came for {SILENCE_LIMIT_S:g} s") from error
    except ClientDisconnect as error:
        raise InvalidRequestError("cannot read the request's body: the client hung up in the middle") from error


def _too_large(limit_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"cannot read the request's body: it is larger than {limit_bytes} bytes",
        hint="JSON may have 1 MiB, a patch 64 MiB, a dataset file 4 GiB, a bundle 256 GiB",
        limit_bytes=limit_bytes,
    )
