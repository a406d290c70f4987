"""HTTP/1.1: requests as bytes, answers as messages or errors.

Replaces httpx: the pool of httpcore 1.0 scans all connections for each request, which limited 64
tasks over one client to 49 requests a second.
"""

import errno
import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

from .. import errors
from ..jsontext import loads
from ..protocol import API, Answer, Event, MalformedError, Request
from ..units import parse_duration

# as the daemon's, for an answer
HEAD_LIMIT_BYTES = 64 * 1024


class BrokenError(Exception):
    """The connection ended during an exchange."""


class RefusedError(BrokenError):
    """Nothing was sent, so a retry cannot act twice. The cause is an OSError."""


class LateError(BrokenError):
    """The daemon was silent for longer than the timeout."""


class GarbledError(BrokenError):
    """The answer is not HTTP/1.1."""


class HttpRequest(NamedTuple):
    """A request without its body; `target` is quoted."""

    method: str
    target: str
    headers: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.method} {self.target}"

    def head(self, framing: str) -> bytes:
        """Return the bytes of the head; `framing` is the header for the body's length."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        text = f"{self.method} {self.target} HTTP/1.1\r\nhost: mirrord\r\n{lines}{framing}\r\n"
        return text.encode("ascii")


class Head(NamedTuple):
    """The head of an answer. `length` is None for a body in chunks or until the connection ends."""

    request: HttpRequest
    status: int
    headers: Mapping[str, str]
    length: int | None
    is_chunked: bool
    is_last: bool
    """True if the connection carries no further request."""


class Response(NamedTuple):
    """A whole answer."""

    head: Head
    body: bytes

    @property
    def status(self) -> int:
        return self.head.status


def target(path: Sequence[str], query: Mapping[str, object]) -> str:
    """Return the target for segments of a path below the API, or an absolute path."""
    is_absolute = path[0].startswith("/")
    where = path[0] if is_absolute else "/".join((API, *(quote(part, safe="") for part in path)))
    pairs = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in query.items()
        if value is not None
    }
    # bytes of a name of git that are not UTF-8 arrive as they are
    return f"{where}?{urlencode(pairs, errors='surrogateescape')}" if pairs else where


def read_head(request: HttpRequest, data: bytes) -> Head:
    """Parse the head of an answer, given without its empty line; raises GarbledError."""
    # latin-1 takes any bytes: what is no HTTP is told as such, not as an error of decoding
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
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError as error:
        raise GarbledError(f"a chunk of {line[:40]!r} bytes") from error


A = TypeVar("A", bound=Answer)
Q = TypeVar("Q", bound=Request)

# of connect(2); EPIPE is of a write to a server that closed the connection
_REFUSALS = {
    errno.ENOENT: "there is no such socket",
    # the file of a socket outlives a listener that was killed
    errno.ECONNREFUSED: "no process listens there",
    errno.ENOTSOCK: "not a socket",
    # the backlog is full, for which a non-blocking connect(2) does not wait
    errno.EAGAIN: "it does not accept connections",
    errno.EPIPE: "it closed the connection",
}


def message(kind: type[Q], **fields: Any) -> Q:
    """Return a request; raises InvalidRequestError, as the daemon would."""
    try:
        return kind.of(**fields)
    except MalformedError as error:
        hint = "see the method's signature"
        raise errors.InvalidRequestError(f"cannot ask the daemon: {error}", hint=hint) from error


def read_one(response: Response, kind: type[A]) -> A:
    """Parse an answer; raises NoDaemonError if it is not mirrord's."""
    try:
        return kind.from_json(loads(response.body))
    except ValueError as error:
        raise _not_mirrord(response, str(error)) from error


def read_list(response: Response, kind: type[A]) -> list[A]:
    """Parse an answer that is an array."""
    try:
        items = loads(response.body)
        if not isinstance(items, list):
            raise MalformedError("Input should be an array")
        return [kind.from_json(item) for item in items]
    except ValueError as error:
        raise _not_mirrord(response, str(error)) from error


def is_error(response: Response, accepted: tuple[int, ...]) -> bool:
    """True for an error. The health of a degraded daemon is a 503 without a problem document."""
    kind = response.head.headers.get("content-type", "")
    is_problem = kind.startswith("application/problem+json")
    return response.status >= 400 and (is_problem or response.status not in accepted)


def problem_of(response: Response) -> errors.MirrordError:
    """Return the error that the daemon raised, in its class."""
    try:
        problem = loads(response.body)
    except ValueError as error:
        return _not_mirrord(response, str(error))
    if not isinstance(problem, dict) or "code" not in problem:
        return _not_mirrord(response, "an error without a code")
    return errors.from_problem({"status": response.status, **problem})


def _not_mirrord(response: Response, why: str) -> errors.NoDaemonError:
    fact = f"status {response.status}, not a message of mirrord"
    return _garbled(response.head.request, fact, why)


def _garbled(request: HttpRequest, fact: str, why: str) -> errors.NoDaemonError:
    return errors.NoDaemonError(
        f"cannot read the answer to {request}: {fact}",
        hint="does mirrord listen at this socket, in the same version as this client?",
        reason=why[:500],
    )


def failure_of(error: BrokenError, request: HttpRequest, path: Path) -> errors.MirrordError:
    """Return the error for a missing answer."""
    if isinstance(error, RefusedError):
        return _unreachable(error.__cause__, path)
    if isinstance(error, LateError):
        return errors.DeadlineError(
            f"cannot wait for the answer to {request}: the daemon at {path} took longer than the "
            "client's timeout",
            hint="use a longer timeout; the request may still succeed",
        )
    if isinstance(error, GarbledError):
        return _garbled(request, "it is not HTTP/1.1", str(error))
    return errors.NoDaemonError(
        f"cannot read the answer to {request}: the daemon at {path} closed the connection",
        hint="it stopped or crashed, see its log; the request may have succeeded",
    )


def _unreachable(cause: BaseException | None, path: Path) -> errors.MirrordError:
    number = cause.errno if isinstance(cause, OSError) else None
    if number in (errno.EACCES, errno.EPERM):
        return errors.AccessError(
            f"cannot connect to {path}: permission denied",
            hint="only root, the daemon's user and members of the group in [access] may; see `id` "
            "and config.toml",
            socket=str(path),
        )
    if number is None and "too long" in str(cause):  # raised by CPython before the kernel is asked
        return errors.UsageError(
            f"cannot connect to {path}: the path is longer than 107 bytes",
            hint="choose a shorter socket path",
        )
    start = "`mirrord serve` or `systemctl start mirrord`"
    if os.geteuid() and path.parent != Path("/run/mirrord"):  # of an ordinary user's own daemon
        start = "`mirrord serve --detach` or `systemctl --user start mirrord`"
    return errors.NoDaemonError(
        f"cannot reach the daemon at {path}: {_REFUSALS.get(number or 0) or cause}",
        hint=f"start it with {start}, or name its socket with --socket or MIRRORD_SOCKET",
        socket=str(path),
    )


def retry_pauses(patience_seconds: float) -> Iterator[float]:
    """Yield growing pauses before retries, `patience_seconds` in total."""
    pause, left = 0.02, patience_seconds
    while left > 0:
        yield min(pause, left)
        left -= pause
        pause = min(pause * 1.6, 0.5)


_BUSY_ERRORS = (errors.TooManyRequestsError, errors.OverloadedError)


@dataclass
class Refusals:
    """The retries of a request that a busy daemon did not begin, after the pause that it asks for.

    There are at most `retries`, within `timeout_s` in total. Pauses are random, so that clients
    that were refused together do not return together.
    """

    retries: int | None
    timeout_s: float
    count: int = 0
    began_at: float = field(default_factory=time.monotonic)

    def pause_s(self, error: errors.MirrordError) -> float | None:
        """Return the pause before the next retry in seconds, None to give up."""
        retry_after_s = error.facts.get("retry_after")
        if not isinstance(error, _BUSY_ERRORS) or not isinstance(retry_after_s, int | float):
            return None
        pause_s = retry_after_s * (1 + random.random())  # noqa: S311  (not a secret)
        is_late = time.monotonic() + pause_s > self.began_at + self.timeout_s
        if is_late or self.count == self.retries:
            return None
        self.count += 1
        return pause_s


def body_of(request: Request) -> bytes | None:
    """Return the JSON of a request without None members; None, which saves a write, if empty."""
    given = {name: value for name, value in request.to_json().items() if value is not None}
    return json.dumps(given, separators=(",", ":")).encode() if given else None


def seconds_of(duration: timedelta | float | str | None) -> float | None:
    """Return a ttl in seconds; raises UsageError."""
    try:
        read = parse_duration(duration) if isinstance(duration, str) else duration
    except ValueError as error:
        raise errors.UsageError(f"cannot read a ttl: {error}") from error
    return read.total_seconds() if isinstance(read, timedelta) else read


def label_of(label: str | None) -> str | None:
    """Return the label, by default that of MIRRORD_LABEL, which schedulers set."""
    return os.environ.get("MIRRORD_LABEL") or None if label is None else label


def patch_bytes(patch: bytes | str) -> bytes:
    return patch.encode("utf-8", "surrogateescape") if isinstance(patch, str) else patch


def policy_text(policy: str | Mapping[str, str] | None) -> str | None:
    """Return a policy as in requests, such as `drop` or `tests=report,git=drop`."""
    if policy is None or isinstance(policy, str):
        return policy if policy is None else str(policy)
    return ",".join(f"{kind}={action}" for kind, action in policy.items())


def iter_file(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(256 * 1024):
            yield piece


class EventReader:
    """Parses events from pieces of a `text/event-stream`; comments are heartbeats."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[Event]:
        """Yield the events that `piece` completes."""
        # at line feeds alone: splitlines would end an event at a separator of Unicode within it
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            if not line and self._data:
                data, self._data = b"\n".join(self._data), []
                yield _read(data)


def _read(data: bytes) -> Event:
    try:
        return Event.from_json(loads(data))
    except ValueError as error:
        raise errors.NoDaemonError(
            "cannot read an event: not a message of mirrord",
            hint="use a client of the daemon's version",
            reason=str(error)[:500],
        ) from error
