"""Primitives that differ between asyncio and threads; `primitives_sync` has those for threads."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from .primitives_sync import whole_file

_RELEASE_SECONDS = 30

T = TypeVar("T")
H = TypeVar("H", bound=AbstractAsyncContextManager[object])


class Pending(Generic[H]):
    """A request not sent yet: `await` it for the handle, or enter the handle with `async with`."""

    def __init__(self, awaitable: Awaitable[H]) -> None:
        self._awaitable = awaitable
        self._handle: H | None = None

    def __await__(self) -> Generator[object, None, H]:
        return self._awaitable.__await__()

    async def __aenter__(self) -> H:
        self._handle = await self._awaitable
        return self._handle

    async def __aexit__(self, *raised: Any) -> None:
        if self._handle is not None:
            await self._handle.__aexit__(*raised)


async def async_in_thread(work: Callable[[], T], cancel: Callable[[], object] | None = None) -> T:
    """Work in a thread of its own: one that waits keeps no other from its turn.

    A cancelled task calls `cancel`, and ends when the work has.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001
            future.set_exception(error)

    threading.Thread(target=run, name="mirrord-sandbox", daemon=True).start()
    waiting = asyncio.wrap_future(future)
    cancelled = None
    while not waiting.done():
        try:
            await asyncio.wait({waiting})
        except asyncio.CancelledError as error:
            if cancelled is None and cancel is not None:
                cancel()
            cancelled = error
    if cancelled is not None:
        waiting.exception()  # seen
        raise cancelled
    return waiting.result()


async def async_pause(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def async_receive(connected: socket.socket, most: int, timeout: float | None) -> bytes:
    """The next bytes of a non-blocking socket; empty at the end; TimeoutError after `timeout` s."""
    async with asyncio.timeout(timeout):
        return await asyncio.get_running_loop().sock_recv(connected, most)


async def async_readable(connected: socket.socket, timeout: float | None) -> None:
    """Wait until a non-blocking socket has bytes or has ended; TimeoutError after `timeout` s."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connected, ready.set)
    try:
        async with asyncio.timeout(timeout):
            await ready.wait()
    finally:
        loop.remove_reader(connected)


async def async_send(
    connected: socket.socket, data: bytes | memoryview, timeout: float | None
) -> None:
    """Write all to a non-blocking socket; raises TimeoutError after `timeout` seconds."""
    async with asyncio.timeout(timeout):
        await asyncio.get_running_loop().sock_sendall(connected, data)


async def async_to_end(work: Coroutine[object, object, T]) -> T:
    """Finish a release although its task is cancelled, even repeatedly; then raise that.

    Bounded in time.
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


async def async_pieces(
    content: Iterable[bytes], sent: Callable[[int], None]
) -> AsyncIterator[bytes]:
    """The pieces of `content`, each made in a thread; `sent` gets how many bytes went out."""
    done, pieces = 0, iter(content)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece
        done += len(piece)
        sent(done)


async def async_write(
    path: Path, content: AsyncIterator[bytes], written: Callable[[int], object]
) -> int:
    """Write to a private file that appears under its name when it is whole; returns its size."""
    done = 0
    with whole_file(path) as file:
        async for chunk in content:
            await asyncio.to_thread(file.write, chunk)
            done += len(chunk)
            written(done)
    return done


class AsyncWorker:
    """A task beside the caller's, and a bell that ends its pauses."""

    def __init__(self, work: "Callable[[AsyncWorker], Coroutine[object, object, None]]") -> None:
        self._bell = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(work(self), name="mirrord-renewal")

    @property
    def is_running(self) -> bool:
        return not self._task.done()

    def ring(self) -> None:
        self._bell.set()

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._bell.wait(), seconds)
        self._bell.clear()
