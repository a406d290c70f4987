"""What differs between the clients, for asyncio; `primitives_sync` has it for threads."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from .primitives_sync import whole_file

T = TypeVar("T")
H = TypeVar("H", bound=AbstractAsyncContextManager[object])


class Pending(Generic[H]):
    """A request that is not sent yet: await it for its handle, or use it in `async with`."""

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
    """Run `work` in a new thread, so that it never waits for another's.

    If the task is cancelled, it calls `cancel` and waits for the end of the work.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        # whatever it is, the awaiting task raises it
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
        waiting.exception()  # mark it as retrieved
        raise cancelled
    return waiting.result()


async def async_pause(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def async_receive(connected: socket.socket, limit: int, timeout: float | None) -> bytes:
    """Return up to `limit` bytes of a non-blocking socket, empty at its end.

    Raises TimeoutError after `timeout` seconds.
    """
    async with asyncio.timeout(timeout):
        return await asyncio.get_running_loop().sock_recv(connected, limit)


async def async_readable(connected: socket.socket, timeout: float | None) -> None:
    """Wait until a socket has bytes or ended; raises TimeoutError after `timeout` seconds."""
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
    """Write to a non-blocking socket; raises TimeoutError after `timeout` seconds."""
    async with asyncio.timeout(timeout):
        await asyncio.get_running_loop().sock_sendall(connected, data)


# then the wait ends; the lease's expiry ends the checkout
_RELEASE_SECONDS = 30


async def async_to_end(work: Coroutine[object, object, T]) -> T:
    """Finish a release even if the task is cancelled, then raise CancelledError.

    Raises TimeoutError after 30 seconds.
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
    """Yield `content`, read in threads; `sent` is called with the number of bytes so far."""
    done, pieces = 0, iter(content)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece
        done += len(piece)
        sent(done)


async def async_write(
    path: Path, content: AsyncIterator[bytes], written: Callable[[int], object]
) -> int:
    """Write a file of mode 0600, which appears once it is complete; returns its size."""
    done = 0
    with whole_file(path) as file:
        async for chunk in content:
            await asyncio.to_thread(file.write, chunk)
            done += len(chunk)
            written(done)
    return done


class AsyncWorker:
    """A background task, and an event that ends its waits."""

    def __init__(self, work: "Callable[[AsyncWorker], Coroutine[object, object, None]]") -> None:
        self._wakeup = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(work(self), name="mirrord-renewal")

    @property
    def is_running(self) -> bool:
        return not self._task.done()

    def wake(self) -> None:
        self._wakeup.set()

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wakeup.wait(), seconds)
        self._wakeup.clear()
