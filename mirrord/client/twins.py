"""The few things in which the two clients differ by more than `async` and `await`, each written twice, side by side."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Generic, TypeVar

import anyio
import anyio.to_thread

_CHUNK_BYTES = 256 * 1024
_RELEASE_SECONDS = 30

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
    await anyio.sleep(seconds)


def pause(seconds: float) -> None:
    time.sleep(seconds)


def async_shield() -> anyio.CancelScope:
    """Lets a release finish although the task around it was cancelled, for a bounded time."""
    return anyio.move_on_after(_RELEASE_SECONDS, shield=True)


def shield() -> AbstractContextManager[None]:
    return contextlib.nullcontext()


async def async_chunks(path: Path, sent: Callable[[int], None]) -> AsyncIterator[bytes]:
    """The bytes of a file in pieces; `sent` hears how many went out so far."""
    async with await anyio.open_file(path, "rb") as file:
        done = 0
        while chunk := await file.read(_CHUNK_BYTES):
            yield chunk
            done += len(chunk)
            sent(done)


async def async_write(path: Path, content: AsyncIterator[bytes], written: Callable[[int], object]) -> int:
    """Write what comes into a private file that appears under its name when it is whole; answers its size."""
    done = 0
    with whole_file(path) as file:
        async for chunk in content:
            await anyio.to_thread.run_sync(file.write, chunk)
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


@contextlib.contextmanager
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
