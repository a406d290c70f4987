"""What differs between the clients, for threads. Does not load asyncio."""

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
    """Run `work` in this thread: only tasks can be cancelled."""
    return work()


def pause(seconds: float) -> None:
    time.sleep(seconds)


def receive(connected: socket.socket, limit: int, timeout: float | None) -> bytes:
    """Return up to `limit` bytes of a non-blocking socket, empty at its end.

    Raises TimeoutError after `timeout` seconds.
    """
    readable(connected, timeout)
    return connected.recv(limit)


def readable(connected: socket.socket, timeout: float | None) -> None:
    """Wait until a socket has bytes or ended; raises TimeoutError after `timeout` seconds."""
    _wait_for(connected, select.POLLIN, timeout)


def send(connected: socket.socket, data: bytes | memoryview, timeout: float | None) -> None:
    """Write to a non-blocking socket; raises TimeoutError if the peer stalls `timeout` seconds."""
    unsent = memoryview(data)
    while unsent:
        with suppress(BlockingIOError):
            unsent = unsent[connected.send(unsent) :]
            continue
        _wait_for(connected, select.POLLOUT, timeout)


def _wait_for(connected: socket.socket, event: int, timeout: float | None) -> None:
    poll = select.poll()
    poll.register(connected, event)
    if not poll.poll(None if timeout is None else timeout * 1000):
        raise TimeoutError


def pieces(content: Iterable[bytes], sent: Callable[[int], None]) -> Iterator[bytes]:
    """Yield `content`; `sent` is called with the number of bytes so far."""
    done = 0
    for piece in content:
        yield piece
        done += len(piece)
        sent(done)


def write(path: Path, content: Iterator[bytes], written: Callable[[int], object]) -> int:
    """Write a file of mode 0600, which appears once it is complete; returns its size."""
    done = 0
    with whole_file(path) as file:
        for chunk in content:
            file.write(chunk)
            done += len(chunk)
            written(done)
    return done


@contextmanager
def whole_file(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Yield a file beside `path`, renamed to it at the end, removed if the block raises."""
    # tempfile loads bz2, lzma and hashlib, which takes 8 ms.
    name = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            # open(2) takes away what the umask does
            os.fchmod(descriptor, mode)
            yield file
            # before it gets its name: after a power cut it could be there, and empty
            file.flush()
            os.fsync(file.fileno())
        name.replace(path)
    except BaseException:
        name.unlink()
        raise


class Worker:
    """A daemon thread, and an event that ends its waits."""

    def __init__(self, work: "Callable[[Worker], None]") -> None:
        self._wakeup = threading.Event()
        self._thread = threading.Thread(
            target=work, args=(self,), name="mirrord-renewal", daemon=True
        )
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wake(self) -> None:
        self._wakeup.set()

    def end(self) -> None:
        """End the thread; waits for a request in progress, at most a second."""
        self._wakeup.set()
        self._thread.join(1.0)

    def wait(self, seconds: float) -> None:
        self._wakeup.wait(seconds)
        self._wakeup.clear()
