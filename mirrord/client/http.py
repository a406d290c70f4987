"""Requests as bytes and answers as messages or errors, over HTTP/1.1.

In place of httpx: httpcore's pool (1.0) walks all its connections for each request, and 64 tasks
over one client made 49 requests a second.
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
from ..protocol import API, Answer, Event, MalformedError, Request
from ..units import parse_duration

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


def target(path: Sequence[str], query: Mapping[str, object]) -> str:
    """The segments of a path below the API's, or one absolute path; the query without Nones."""
    is_absolute = path[0].startswith("/")
    where = path[0] if is_absolute else "/".join((API, *(quote(each, safe="") for each in path)))
    pairs = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in query.items()
        if value is not None
    }
    return f"{where}?{urlencode(pairs, errors='surrogateescape')}" if pairs else where


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


A = TypeVar("A", bound=Answer)
Q = TypeVar("Q", bound=Request)

_REFUSALS = {
    errno.ENOENT: "there is no such socket",
    errno.ECONNREFUSED: "nobody listens there",
    errno.ENOTSOCK: "not a socket",
    errno.EAGAIN: "it does not accept connections",
    errno.EPIPE: "it closed the connection",
}


def message(kind: type[Q], **fields: Any) -> Q:
    """A message to the daemon; raises InvalidRequestError, as the daemon would."""
    try:
        return kind.from_json(fields)
    except MalformedError as error:
        hint = "see the method's signature"
        raise errors.InvalidRequestError(f"cannot ask the daemon: {error}", hint=hint) from error


def read_one(response: Response, kind: type[A]) -> A:
    """The answer as one message; raises NoDaemonError for an answer that is not mirrord's."""
    try:
        return kind.from_json(json.loads(response.body))
    except ValueError as error:
        raise _not_mirrord(response, str(error)) from error


def read_list(response: Response, kind: type[A]) -> list[A]:
    """The answer as a bare array of messages."""
    try:
        items = json.loads(response.body)
        if not isinstance(items, list):
            raise MalformedError("Input should be an array")
        return [kind.from_json(item) for item in items]
    except ValueError as error:
        raise _not_mirrord(response, str(error)) from error


def is_error(response: Response, accepted: tuple[int, ...]) -> bool:
    """Whether to raise it. A degraded daemon's health is a 503 too, but no problem document."""
    kind = response.head.headers.get("content-type", "")
    is_problem = kind.startswith("application/problem+json")
    return response.status >= 400 and (is_problem or response.status not in accepted)


def problem_of(response: Response) -> errors.MirrordError:
    """The error of an answer of 400 and above, as the class that the daemon raised."""
    try:
        problem = json.loads(response.body)
    except ValueError as error:
        return _not_mirrord(response, str(error))
    if not isinstance(problem, dict) or "code" not in problem:
        return _not_mirrord(response, "an error without a code")
    return errors.from_problem({"status": response.status, **problem})


def _not_mirrord(response: Response, why: str) -> errors.NoDaemonError:
    fact = f"status {response.status} and not a message of mirrord"
    return _garbled(response.head.request, fact, why)


def _garbled(request: HttpRequest, fact: str, why: str) -> errors.NoDaemonError:
    return errors.NoDaemonError(
        f"cannot read the answer to {request}: {fact}",
        hint="does mirrord listen at this socket, in the same version as this client?",
        reason=why[:500],
    )


def failure_of(error: BrokenError, request: HttpRequest, path: Path) -> errors.MirrordError:
    """The error for an answer that did not come."""
    if isinstance(error, RefusedError):
        return _unreachable(error.__cause__, path)
    if isinstance(error, LateError):
        return errors.DeadlineError(
            f"cannot wait for the answer to {request}: the daemon at {path} took longer than this "
            "client allows",
            hint="give the client a longer timeout; the request may still succeed",
        )
    if isinstance(error, GarbledError):
        return _garbled(request, "it is not HTTP/1.1", str(error))
    return errors.NoDaemonError(
        f"cannot read the answer to {request}: the daemon at {path} closed the connection",
        hint="it stopped or crashed, see its log; the request may or may not have succeeded",
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
    return errors.NoDaemonError(
        f"cannot reach the daemon at {path}: {_REFUSALS.get(number or 0) or cause}",
        hint="start it with `mirrord serve` or `systemctl start mirrord`, or name its socket with"
        " --socket or MIRRORD_SOCKET",
        socket=str(path),
    )


def retry_pauses(patience_seconds: float) -> Iterator[float]:
    """Growing pauses before each retry, `patience_seconds` in all."""
    pause, left = 0.02, patience_seconds
    while left > 0:
        yield min(pause, left)
        left -= pause
        pause = min(pause * 1.6, 0.5)


_NOT_BEGUN = (errors.TooManyRequestsError, errors.OverloadedError, errors.TooManyConnectionsError)


@dataclass
class Refusals:
    """How one request that the daemon did not begin is sent again, as late as the daemon asks.

    At most `retries` times, and within `timeout_s` in all. Those who were refused at once come
    again at different times.
    """

    retries: int | None
    timeout_s: float
    count: int = 0
    began_at: float = field(default_factory=time.monotonic)

    def pause_s(self, error: errors.MirrordError) -> float | None:
        """How long to wait before the next time; None to give up."""
        asked_s = error.facts.get("retry_after")
        if not isinstance(error, _NOT_BEGUN) or not isinstance(asked_s, int | float):
            return None
        pause_s = asked_s * (1 + random.random())  # noqa: S311  nobody gains by guessing it
        is_late = time.monotonic() + pause_s > self.began_at + self.timeout_s
        if is_late or self.count == self.retries:
            return None
        self.count += 1
        return pause_s


def body_of(request: Request) -> bytes | None:
    """A request's JSON without absent members; None, which saves a system call, without any."""
    given = {name: value for name, value in request.to_json().items() if value is not None}
    return json.dumps(given, separators=(",", ":")).encode() if given else None


def seconds_of(duration: timedelta | float | str | None) -> float | None:
    """A ttl in seconds; raises UsageError."""
    try:
        read = parse_duration(duration) if isinstance(duration, str) else duration
    except ValueError as error:
        raise errors.UsageError(f"cannot read a ttl: {error}") from error
    return read.total_seconds() if isinstance(read, timedelta) else read


def label_of(label: str | None) -> str | None:
    """The label of a new checkout: this one, else that of MIRRORD_LABEL, which schedulers set."""
    return os.environ.get("MIRRORD_LABEL") or None if label is None else label


def patch_bytes(patch: bytes | str) -> bytes:
    return patch.encode("utf-8", "surrogateescape") if isinstance(patch, str) else patch


def policy_text(policy: str | Mapping[str, str] | None) -> str | None:
    """A policy as requests spell it: `drop`, `tests=report,git=drop`."""
    if policy is None or isinstance(policy, str):
        return policy if policy is None else str(policy)
    return ",".join(f"{kind}={each}" for kind, each in policy.items())


def iter_file(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(256 * 1024):
            yield piece


class EventReader:
    """Reads events from pieces of a `text/event-stream`; skips comments, the heartbeat."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[Event]:
        """The events that `piece` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            if not line and self._data:
                data, self._data = b"\n".join(self._data), []
                yield _read(data)


def _read(data: bytes) -> Event:
    try:
        return Event.from_json(json.loads(data))
    except ValueError as error:
        raise errors.NoDaemonError(
            "cannot read an event: not a message of mirrord",
            hint="use a client of the daemon's version",
            reason=str(error)[:500],
        ) from error
