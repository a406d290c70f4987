"""HTTP/1.1 as a client of one daemon needs it. Pure: bytes, no I/O.

In place of httpx: httpcore's pool (1.0) walks all its connections for each request, and 64 tasks
over one client made 49 requests a second.
"""

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlencode

from ..protocol import API

HEAD_LIMIT_BYTES = 64 * 1024


class BrokenError(Exception):
    """The connection ended within an exchange."""


class RefusedError(BrokenError):
    """Nothing was sent: a retry cannot act twice. Its cause is the system's error."""


class LateError(BrokenError):
    """The daemon was silent for longer than the client allows."""


class GarbledError(BrokenError):
    """The answer is not HTTP/1.1."""


class HttpRequest(NamedTuple):
    """A request before its body. `target` is quoted already."""

    method: str
    target: str
    headers: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.method} {self.target}"

    def head(self, framing: str) -> bytes:
        """`framing` is the header that tells the length of the body."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        text = f"{self.method} {self.target} HTTP/1.1\r\nhost: mirrord\r\n{lines}{framing}\r\n"
        return text.encode("ascii")


class Head(NamedTuple):
    """The head of an answer. `length` is None for a body in chunks or to the connection's end."""

    request: HttpRequest
    status: int
    headers: Mapping[str, str]
    length: int | None
    is_chunked: bool
    is_last: bool
    """Whether the connection can carry no further request."""


class Response(NamedTuple):
    """A whole answer."""

    head: Head
    body: bytes

    @property
    def status(self) -> int:
        return self.head.status


def target(path: str, query: Mapping[str, object]) -> str:
    """A path below the API's, unless it is absolute; and its query, without what is None."""
    path = path if path.startswith("/") else f"{API}/{path}"
    pairs = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in query.items()
        if value is not None
    }
    return f"{path}?{urlencode(pairs, errors='surrogateescape')}" if pairs else path


def read_head(request: HttpRequest, data: bytes) -> Head:
    """The head of an answer from its bytes, without the empty line; raises GarbledError."""
    first, *lines = data.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise GarbledError(f"it begins with {first[:40]!r}")
    status = int(rest[:3])
    pairs = (line.partition(":") for line in lines)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    is_chunked = headers.get("transfer-encoding", "").lower() == "chunked"
    has_body = request.method != "HEAD" and status not in {204, 304} and status >= 200
    declared = headers.get("content-length")
    if has_body and not is_chunked and declared is not None and not declared.isdigit():
        raise GarbledError(f"a body of length {declared[:40]!r}")
    length = None if is_chunked or declared is None else int(declared)
    length = length if has_body else 0
    connection = headers.get("connection", "").lower()
    is_last = connection == "close" or version != "HTTP/1.1" or (length is None and not is_chunked)
    return Head(request, status, headers, length, is_chunked and has_body, is_last)


def chunk_size(line: bytes) -> int:
    """The size of a chunk from its first line."""
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError as error:
        raise GarbledError(f"a chunk of {line[:40]!r} bytes") from error
