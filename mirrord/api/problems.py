"""Errors on their way out: RFC 9457 problems."""

import json
from math import ceil
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from ..errors import InternalError, InvalidRequestError, MirrordError, TooManyFilesError
from ..host.files import host_error
from ..telemetry import Seldom, log, masked

_seldom = Seldom()

MEDIA_TYPE = "application/problem+json"


class MethodNotAllowedError(InvalidRequestError):
    code, title, http_status = "method-not-allowed", "Method not allowed", 405


def problem_body(error: MirrordError) -> bytes:
    """Secrets in URLs are masked, whichever code wrote the message."""
    return masked(json.dumps(error.problem(), default=str)).encode()


def problem_headers(error: MirrordError) -> dict[str, str]:
    headers = {"content-type": MEDIA_TYPE}
    if isinstance(error, MethodNotAllowedError):
        headers["allow"] = error.facts["allow"]
    if retry_after := error.facts.get("retry_after"):
        headers["retry-after"] = str(ceil(float(retry_after)))
    return headers


def problem_response(error: Exception) -> Response:
    """The answer to any exception. An unexpected one is logged, here only, and not shown."""
    found = error if isinstance(error, MirrordError) else host_error(error, "answer the request")
    if isinstance(found, TooManyFilesError):
        if count := _seldom.count("files"):
            log.error("files.exhausted", detail=found.message, count=count)
    elif found is not None and found is not error:
        log.error("disk.failed", detail=found.message)
    elif found is None or found.exit_status == InternalError.exit_status:
        log.error("request.crashed", detail=found.message if found else None, exc_info=error)
    problem = found or InternalError(
        "cannot answer the request: an unexpected error",
        hint="this is a bug; the daemon's log has the details",
    )
    return Response(problem_body(problem), problem.http_status, problem_headers(problem))


def invalid_request(part: str, error: ValidationError) -> InvalidRequestError:
    """All faults that pydantic found in the query or the body."""
    faults: list[dict[str, Any]] = [
        {
            "key": ".".join(map(str, fault["loc"])),
            "message": fault["msg"].removeprefix("Value error, "),
        }
        for fault in error.errors(include_url=False, include_context=False)
    ]
    listing = "; ".join(
        f"{fault['key']}: {fault['message']}" if fault["key"] else fault["message"]
        for fault in faults
    )
    return InvalidRequestError(
        f"cannot read the {part} of the request: {listing}",
        hint="see GET /v1/openapi.json for what it takes",
        faults=faults,
    )
