"""What came back over the socket, or did not, as messages of the protocol or as errors. Pure: reads, never sends."""

from __future__ import annotations

import errno
import json
import socket
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from ..errors import AccessError, DeadlineError, InvalidRequestError, MirrordError, NoDaemonError, UsageError, from_problem

A = TypeVar("A", bound=BaseModel)

_START = "start it with `mirrord serve` or `systemctl start mirrord`, or name its socket with --socket or MIRRORD_SOCKET"


def message(model: type[A], **fields: Any) -> A:
    """A message to the daemon; raises InvalidRequestError, as the daemon would, for what it cannot be made of."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise InvalidRequestError(f"cannot ask the daemon: {faults}", hint="see the method's signature") from error


def read_one(response: httpx.Response, model: type[A]) -> A:
    """The answer as one message; raises NoDaemonError where something else than mirrord speaks."""
    try:
        return model.model_validate_json(response.content)
    except ValidationError as error:
        raise _not_mirrord(response, str(error)) from error


def read_list(response: httpx.Response, model: type[A]) -> list[A]:
    """The answer as a bare array of messages."""
    try:
        items = json.loads(response.content)
        return [model.model_validate(item) for item in items]
    except (ValueError, TypeError) as error:
        raise _not_mirrord(response, str(error)) from error


def is_error(response: httpx.Response, accepted: tuple[int, ...]) -> bool:
    """Whether it is to be raised: 503 is also how a degraded daemon answers with its health, which is no problem document."""
    if response.status_code < httpx.codes.BAD_REQUEST:
        return False
    return response.status_code not in accepted or response.headers.get("content-type", "").startswith("application/problem+json")


def problem_of(response: httpx.Response) -> MirrordError:
    """The error an answer of 400 and above carries, as the class that the daemon raised."""
    try:
        problem = json.loads(response.content)
    except ValueError as error:
        return _not_mirrord(response, str(error))
    if not isinstance(problem, dict) or "code" not in problem:
        return _not_mirrord(response, "an error without a code")
    return from_problem({"status": response.status_code, **problem})


def _not_mirrord(response: httpx.Response, why: str) -> NoDaemonError:
    return NoDaemonError(
        f"cannot read the answer to {_asked(response.request)}: status {response.status_code} and not a message of mirrord",
        hint="is it mirrord that listens at this socket, and of the same version as this client?",
        reason=why[:500],
    )


def failure_of(error: httpx.TransportError, request: httpx.Request, path: Path) -> MirrordError:
    """Why no answer came, as an error whose hint says what to do."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return _unreachable(_os_error(error), path)
    if isinstance(error, httpx.TimeoutException):
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
    """The system's own error: httpx and httpcore each wrap it once."""
    chain: BaseException | None = error
    while chain is not None and not isinstance(chain, OSError):
        chain = chain.__cause__ or chain.__context__
    return chain


def _asked(request: httpx.Request) -> str:
    return f"{request.method} {request.url.raw_path.decode('ascii', 'replace')}"


def close_leaked(error: httpx.TransportError) -> None:
    """Close the socket of a failed connect, which httpcore 1.0's synchronous backend leaves to the garbage collector.

    May go when `connect_unix_socket` there closes it itself.
    """
    cause = _os_error(error)
    for frame, _ in traceback.walk_tb(cause.__traceback__ if cause else None):
        leaked = frame.f_locals.get("sock")
        if isinstance(leaked, socket.socket):
            leaked.close()


def is_unsent(error: httpx.TransportError) -> bool:
    """True where the request never left this process, so that sending it again cannot do it twice."""
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)


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


def query_of(**members: Any) -> dict[str, str]:
    """Query parameters, without those that were not given."""
    shown = {True: "true", False: "false"}
    return {
        name: shown.get(value, str(value)) if isinstance(value, bool) else str(value)
        for name, value in members.items()
        if value is not None
    }
