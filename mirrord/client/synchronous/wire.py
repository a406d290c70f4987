"""The socket as httpcore sees it: the head of a request and the first of its body leave in one write.

httpcore 1.0 writes them one by one, and the daemon would wake up for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httpcore


class Backend(httpcore.SyncBackend):
    """Connects as the one above does."""

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        return Stream(super().connect_unix_socket(path, timeout, socket_options))


class Stream(httpcore.NetworkStream):
    """One connection. The end of a request is a write too, of nothing, so that no head is kept for ever."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream
        self._head: bytes | None = None

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        self._head = None  # what is written next begins another request
        return self._stream.read(max_bytes, timeout)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if self._head is None:
            self._head = buffer
            return
        head, self._head = self._head, b""
        self._stream.write(head + buffer, timeout)

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
