"""Errors on their way out: RFC 9457 problems, whatever went wrong and whoever noticed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import structlog
from starlette.responses import Response

from ..errors import (
    AccessError,
    InternalError,
    InvalidRequestError,
    MirrordError,
    TooManyFilesError,
)
from ..host.files import host_error
from ..telemetry import Seldom, masked

log = structlog.get_logger()

_seldom = Seldom()

MEDIA_TYPE = "application/problem+json"


class MethodNotAllowedError(InvalidRequestError):
    code, title, http_status = "method-not-allowed", "Method not allowed", 405


def problem_response(error: MirrordError) -> Response:
    """Secrets of URLs are masked whoever wrote the message."""
    body = masked(json.dumps(error.problem(), default=str))
    return Response(body, error.http_status, headers=problem_headers(error))


def problem_headers(error: MirrordError) -> dict[str, str]:
    headers = {"content-type": MEDIA_TYPE}
    if isinstance(error, MethodNotAllowedError):
        headers["allow"] = error.facts["allow"]
    if retry_after := error.facts.get("retry_after"):
        headers["retry-after"] = str(round(float(retry_after)))
    return headers


def as_mirrord_error(error: Exception) -> MirrordError:
    """What to answer for any exception; one that nobody raised on purpose is logged here, once, and told nothing of."""
    found = error if isinstance(error, MirrordError) else host_error(error, "answer the request")
    if isinstance(found, TooManyFilesError):
        if count := _seldom.count("files"):
            log.error("files.exhausted", detail=found.message, count=count)
    elif found is not None and found is not error:
        log.error("disk.failed", detail=found.message)
    elif found is None or found.exit_status == InternalError.exit_status:
        log.error("request.crashed", detail=found.message if found else None, exc_info=error)
    hint = "this is a bug; the daemon's log has the details"
    return found or InternalError("cannot answer the request: an unexpected error", hint=hint)


def invalid_request(place: str, errors: Sequence[Any]) -> InvalidRequestError:
    """All faults pydantic found in one part of a request."""
    faults = [
        {"key": ".".join(map(str, e["loc"])), "message": e["msg"].removeprefix("Value error, ")}
        for e in errors
    ]
    listing = "; ".join(
        f"{fault['key']}: {fault['message']}" if fault["key"] else fault["message"]
        for fault in faults
    )
    return InvalidRequestError(
        f"cannot read the {place} of the request: {listing}",
        hint="see GET /v1/openapi.json for what it takes",
        faults=faults,
    )


def not_allowed(doing: str, hint: str) -> AccessError:
    return AccessError(f"cannot {doing}: not allowed for this user", hint=hint)
