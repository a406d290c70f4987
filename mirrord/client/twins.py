"""The few things in which the two clients differ by more than `async` and `await`, each written twice, side by side."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Generic, TypeVar

_CHUNK_BYTES = 256 * 1024
_RELEASE_SECONDS = 30

T = TypeVar("T")
H = TypeVar("H", bound=AbstractAsyncContextManager[object])


class Pending(Generic[H]):
    """A request not sent yet: `await` it for the handle, or enter it with `async with`, which ends in the handle's exit."""

    def __init__(self, awaitable: Awaitable[H]) -> None:
        self._awaitable = awaitable
        self._handle: H | None = None

    def __await__(self) -> Generator[object, None, H]:
        return self._awaitable.__await__()

    async def __aenter__(self) -> H:
        self._handle = await self._awaitable
        return self._handle

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handle is not None:
            await self._handle.__aexit__(kind, error, traceback)


async def async_pause(seconds: float) -> None:
    await asyncio.sleep(seconds)


def pause(seconds: float) -> None:
    time.sleep(seconds)


async def async_receive(connected: socket.socket, most: int, timeout: float | None) -> bytes:
    """What a non-blocking socket has, or comes next; empty at the end. Raises TimeoutError after `timeout` seconds of nothing."""
    async with asyncio.timeout(timeout):
        return await asyncio.get_running_loop().sock_recv(connected, most)


def receive(connected: socket.socket, most: int, timeout: float | None) -> bytes:
    """What a non-blocking socket has, or comes next; empty at the end. Raises TimeoutError after `timeout` seconds of nothing."""
    _wait_for(connected, select.POLLIN, timeout)
    return connected.recv(most)


async def async_send(connected: socket.socket, data: bytes | memoryview, timeout: float | None) -> None:
    """Write all to a non-blocking socket. Raises TimeoutError when that takes longer than `timeout` seconds."""
    async with asyncio.timeout(timeout):
        await asyncio.get_running_loop().sock_sendall(connected, data)


def send(connected: socket.socket, data: bytes | memoryview, timeout: float | None) -> None:
    """Write all to a non-blocking socket. Raises TimeoutError when the peer takes nothing for `timeout` seconds."""
    rest = memoryview(data)
    while rest:
        with suppress(BlockingIOError):
            rest = rest[connected.send(rest) :]
            continue
        _wait_for(connected, select.POLLOUT, timeout)


def _wait_for(connected: socket.socket, event: int, timeout: float | None) -> None:
    poll = select.poll()
    poll.register(connected, event)
    if not poll.poll(None if timeout is None else timeout * 1000):
        raise TimeoutError


async def async_to_end(work: Coroutine[object, object, T]) -> T:
    """Finish a release although the task around it is cancelled, also again and again.

    Bounded in time; the cancellation goes on afterwards.
    """
    task = asyncio.ensure_future(asyncio.wait_for(work, _RELEASE_SECONDS))
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()


async def async_chunks(path: Path, sent: Callable[[int], None]) -> AsyncIterator[bytes]:
    """The bytes of a file in pieces; `sent` hears how many went out so far."""
    with await asyncio.to_thread(path.open, "rb") as file:
        done = 0
        while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
            yield chunk
            done += len(chunk)
            sent(done)


async def async_write(path: Path, content: AsyncIterator[bytes], written: Callable[[int], object]) -> int:
    """Write what comes into a private file that appears under its name when it is whole; answers its size."""
    done = 0
    with whole_file(path) as file:
        async for chunk in content:
            await asyncio.to_thread(file.write, chunk)
            done += len(chunk)
            written(done)
    return done


def write(path: Path, content: Iterator[bytes], written: Callable[[int], object]) -> int:
    """Write what comes into a private file that appears under its name when it is whole; answers its size."""
    done = 0
    with whole_file(path) as file:
        for chunk in content:
            file.write(chunk)
            done += len(chunk)
            written(done)
    return done


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A new file beside `path`, of mode 0600, flushed and renamed to it at the end; gone when the block raises."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink()
        raise


def chunks(path: Path, sent: Callable[[int], None]) -> Iterator[bytes]:
    """The bytes of a file in pieces; `sent` hears how many went out so far."""
    with path.open("rb") as file:
        done = 0
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
            done += len(chunk)
            sent(done)
