"""What goes over the socket and what comes back, or does not: messages of the protocol, or errors. Pure: reads, never sends."""

from __future__ import annotations

import errno
import json
import socket
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlencode

import httpcore
from pydantic import BaseModel, ValidationError

from ..errors import AccessError, DeadlineError, MirrordError, NoDaemonError, UsageError, from_problem
from ..protocol import API

A = TypeVar("A", bound=BaseModel)
Failure = httpcore.TimeoutException | httpcore.NetworkError | httpcore.ProtocolError
FAILURES = (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError)
"""Why there is no answer."""

ERRORS_FROM = 400

_START = "start it with `mirrord serve` or `systemctl start mirrord`, or name its socket with --socket or MIRRORD_SOCKET"


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. `asked` is the request in words; names of headers are in lower case."""

    asked: str
    status: int
    headers: Mapping[str, str]
    content: bytes


def reply_of(request: httpcore.Request, response: httpcore.Response, content: bytes) -> Reply:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
    return Reply(_asked(request), response.status, headers, content)


def read_one(reply: Reply, model: type[A]) -> A:
    """The answer as one message; raises NoDaemonError where something else than mirrord speaks."""
    try:
        return model.model_validate_json(reply.content)
    except ValidationError as error:
        raise _not_mirrord(reply, str(error)) from error


def read_list(reply: Reply, model: type[A]) -> list[A]:
    """The answer as a bare array of messages."""
    try:
        items = json.loads(reply.content)
        return [model.model_validate(item) for item in items]
    except (ValueError, TypeError) as error:
        raise _not_mirrord(reply, str(error)) from error


def is_error(reply: Reply, accepted: tuple[int, ...]) -> bool:
    """Whether it is to be raised: 503 is also how a degraded daemon answers with its health, which is no problem document."""
    if reply.status < ERRORS_FROM:
        return False
    return reply.status not in accepted or reply.headers.get("content-type", "").startswith("application/problem+json")


def problem_of(reply: Reply) -> MirrordError:
    """The error an answer of 400 and above carries, as the class that the daemon raised."""
    try:
        problem = json.loads(reply.content)
    except ValueError as error:
        return _not_mirrord(reply, str(error))
    if not isinstance(problem, dict) or "code" not in problem:
        return _not_mirrord(reply, "an error without a code")
    return from_problem({"status": reply.status, **problem})


def _not_mirrord(reply: Reply, why: str) -> NoDaemonError:
    return NoDaemonError(
        f"cannot read the answer to {reply.asked}: status {reply.status} and not a message of mirrord",
        hint="is it mirrord that listens at this socket, and of the same version as this client?",
        reason=why[:500],
    )


def failure_of(error: Failure, request: httpcore.Request, path: Path) -> MirrordError:
    """Why no answer came, as an error whose hint says what to do."""
    if isinstance(error, httpcore.ConnectError | httpcore.ConnectTimeout):
        return _unreachable(_os_error(error), path)
    if isinstance(error, httpcore.TimeoutException):
        return DeadlineError(
            f"cannot wait for the answer to {_asked(request)}: the daemon at {path} took longer than this client allows",
            hint="give the client a longer timeout; what was asked for may still be done",
        )
    return NoDaemonError(
        f"cannot read the answer to {_asked(request)}: the daemon at {path} closed the connection",
        hint="it stopped or crashed, see its log; what was asked for may or may not have been done",
    )


def _unreachable(cause: OSError | None, path: Path) -> MirrordError:
    if cause is not None and cause.errno in (errno.EACCES, errno.EPERM):
        return AccessError(
            f"cannot connect to {path}: permission denied",
            hint="only root, the daemon's user and members of the group in [access] may; see `id` and config.toml",
            socket=str(path),
        )
    if (
        isinstance(cause, OSError) and cause.errno is None and "too long" in str(cause)
    ):  # raised by CPython before the kernel is asked
        return UsageError(f"cannot connect to {path}: the path is longer than 107 bytes", hint="choose a shorter socket path")
    return NoDaemonError(f"cannot reach the daemon at {path}: {_reason(cause)}", hint=_START, socket=str(path))


def _reason(cause: OSError | None) -> str:
    if cause is None:
        return "no answer"
    known = {errno.ENOENT: "there is no such socket", errno.ECONNREFUSED: "nobody listens there", errno.ENOTSOCK: "not a socket"}
    return known.get(cause.errno or 0) or cause.strerror or str(cause)


def _os_error(error: BaseException) -> OSError | None:
    """The system's own error, which httpcore wraps."""
    chain: BaseException | None = error
    while chain is not None and not isinstance(chain, OSError):
        chain = chain.__cause__ or chain.__context__
    return chain


def _asked(request: httpcore.Request) -> str:
    return f"{request.method.decode()} {request.url.target.decode()}"


def close_leaked(error: Failure) -> None:
    """Close the socket of a failed connect, which httpcore 1.0's synchronous backend leaves to the garbage collector.

    May go when `connect_unix_socket` there closes it itself.
    """
    cause = _os_error(error)
    for frame, _ in traceback.walk_tb(cause.__traceback__ if cause else None):
        leaked = frame.f_locals.get("sock")
        if isinstance(leaked, socket.socket):
            leaked.close()


def is_unsent(error: Failure) -> bool:
    """True where the request never left this process, so that sending it again cannot do it twice."""
    return isinstance(error, httpcore.ConnectError | httpcore.ConnectTimeout)


def retry_pauses(patience_seconds: float) -> Iterator[float]:
    """Seconds to wait before each further try, growing, `patience_seconds` in all."""
    pause, left = 0.02, patience_seconds
    while left > 0:
        yield min(pause, left)
        left -= pause
        pause = min(pause * 1.6, 0.5)


def body_of(request: BaseModel) -> bytes | None:
    """A request's JSON, without the members that were not given; None where none was: an absent body is one system call less."""
    body = request.model_dump_json(exclude_none=True)
    return None if body == "{}" else body.encode()


def target_of(path: str, query: Mapping[str, object]) -> bytes:
    """What the request line names: a path below the version, or from the root, with the parameters that were given."""
    given = {name: str(value).lower() if isinstance(value, bool) else value for name, value in query.items() if value is not None}
    place = path if path.startswith("/") else f"{API}/{path}"
    return f"{place}?{urlencode(given, errors='surrogateescape')}".encode() if given else place.encode()


def headers_of(content: object, kind: str) -> dict[str, str]:
    """What every request says, and of its body, if it has one: of bytes the length, of anything else that it comes in chunks."""
    headers = {"host": "mirrord"}
    if content is not None:
        headers["content-type"] = kind
    if isinstance(content, bytes):
        headers["content-length"] = str(len(content))
    elif content is not None:
        headers["transfer-encoding"] = "chunked"
    return headers
