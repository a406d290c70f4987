"""Answers as messages of the protocol or as errors; requests as bytes. Pure: no I/O."""

import errno
import json
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from .. import errors
from ..protocol import Answer, Event, MalformedError, Request
from ..units import parse_duration
from .http import BrokenError, GarbledError, HttpRequest, LateError, RefusedError, Response

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


def policy_text(policy: str | Mapping[str, str] | None) -> str | None:
    """A policy as requests spell it: `drop`, `tests=report,git=drop`."""
    if policy is None or isinstance(policy, str):
        return policy if policy is None else str(policy)
    return ",".join(f"{kind}={each}" for kind, each in policy.items())


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
