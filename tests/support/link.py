"""A TCP connection that can be cut and slowed, for what is behind a port of loopback.

One to an S3 may also answer what is written as a store without room does.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_FULL = b"<Error><Code>XMinioStorageFull</Code><Message>It has no room.</Message></Error>"


class Link:
    """Listens at `port` and passes bytes on. Set `delay_s` at any time; `cut` closes everything.

    While `is_silent`, bytes wait. While `is_full`, requests that write at least `full_from` bytes get 507 in the place of the
    server's answer. `on_data` sees data before it is passed on: the connection, whether it goes to the server, the bytes.
    """

    on_data: Callable[[int, bool, bytes], None]

    def __init__(self, target: int) -> None:
        self.target = target
        self.delay_s = 0.0
        self.is_silent = False
        self.is_full = False
        self.full_from = 0
        self.on_data = lambda *_: None
        self._is_cut = False
        self._changing = threading.Lock()  # a connection is cut, or refused, or known
        self._pairs: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        with self._changing:
            self._is_cut = True
            for one in list(self._pairs):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with self._changing:
                try:
                    if self._is_cut:
                        raise ConnectionRefusedError
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    near.close()
                    continue
                self._pairs |= {near, far}
            for pair in ((near, far, near), (far, near, near)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                time.sleep(self.delay_s)
                self.on_data(id(client), source is client, data)
                while self.is_silent and not self._is_cut:
                    time.sleep(0.05)
                if self.is_full and _written(data) >= self.full_from:
                    _refuse(source, data)
                else:
                    sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
        with self._changing:
            self._pairs.discard(source)
            if sink not in self._pairs:
                source.close()
                sink.close()


def _written(data: bytes) -> int:
    """The bytes that the head of a request announces; -1 where it is none that writes."""
    if not data.startswith((b"PUT ", b"POST ")):
        return -1
    found = re.search(rb"(?i)\ncontent-length: (\d+)", data)
    return int(found[1]) if found else 1 << 62


def _refuse(client: socket.socket, data: bytes) -> None:
    """Answer a request once it is read."""
    head, _, body = data.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)content-length: (\d+)", head)
    left = int(found[1]) - len(body) if found else 0
    while left > 0 and (more := client.recv(65536)):
        left -= len(more)
    head = b"HTTP/1.1 507 Insufficient Storage\r\ncontent-length: %d\r\n\r\n" % len(_FULL)
    client.sendall(head + _FULL)


@contextmanager
def to(port: int) -> Iterator[Link]:
    made = Link(port)
    try:
        yield made
    finally:
        made.close()
