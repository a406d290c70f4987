"""A TCP connection that can be cut and slowed, for what is behind a port of loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Link:
    """Listens at `port` and passes bytes on. Set `delay_s` at any time; `cut` closes everything."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.delay_s = 0.0
        self._is_cut = False
        self._pairs: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
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
            if self._is_cut:
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        self._pairs.add(source)
        with suppress(OSError):
            while data := source.recv(65536):
                time.sleep(self.delay_s)
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
        self._pairs.discard(source)
        if sink not in self._pairs:
            source.close()
            sink.close()


@contextmanager
def to(port: int) -> Iterator[Link]:
    made = Link(port)
    try:
        yield made
    finally:
        made.close()
