"""Primitives that differ between asyncio and threads: those for threads. Loads no asyncio."""

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T], cancel: Callable[[], object] | None = None) -> T:
    """Work here: only a task can be cancelled."""
    return work()


def pause(seconds: float) -> None:
    time.sleep(seconds)


def receive(connected: socket.socket, most: int, timeout: float | None) -> bytes:
    """The next bytes of a non-blocking socket; empty at the end; TimeoutError after `timeout` s."""
    readable(connected, timeout)
    return connected.recv(most)


def readable(connected: socket.socket, timeout: float | None) -> None:
    """Wait until a non-blocking socket has bytes or has ended; TimeoutError after `timeout` s."""
    _wait_for(connected, select.POLLIN, timeout)


def send(connected: socket.socket, data: bytes | memoryview, timeout: float | None) -> None:
    """Write all to a non-blocking socket; TimeoutError when the peer stalls for `timeout` s."""
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


def pieces(content: Iterable[bytes], sent: Callable[[int], None]) -> Iterator[bytes]:
    """The pieces of `content`; `sent` gets how many bytes went out."""
    done = 0
    for piece in content:
        yield piece
        done += len(piece)
        sent(done)


def write(path: Path, content: Iterator[bytes], written: Callable[[int], object]) -> int:
    """Write to a private file that appears under its name when it is whole; returns its size."""
    done = 0
    with whole_file(path) as file:
        for chunk in content:
            file.write(chunk)
            done += len(chunk)
            written(done)
    return done


@contextmanager
def whole_file(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A file beside `path`, renamed to it at the end; gone when the block raises."""
    # tempfile loads bz2, lzma and hashlib: 8 ms of a verb.
    name = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        name.replace(path)
    except BaseException:
        name.unlink()
        raise


class Worker:
    """A daemon thread, and an event that ends its pauses."""

    def __init__(self, work: "Callable[[Worker], None]") -> None:
        self._bell = threading.Event()
        self._thread = threading.Thread(
            target=work, args=(self,), name="mirrord-renewal", daemon=True
        )
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def ring(self) -> None:
        self._bell.set()

    def end(self) -> None:
        """Waits for a request that is under way, but not for a daemon that hangs."""
        self._bell.set()
        self._thread.join(1.0)

    def wait(self, seconds: float) -> None:
        self._bell.wait(seconds)
        self._bell.clear()
