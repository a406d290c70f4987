"""Errors on their way out: RFC 9457 problems, whatever went wrong and whoever noticed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import structlog
from starlette.responses import Response

from ..errors import AccessError, InternalError, InvalidRequestError, MirrordError, UpstreamThrottledError
from ..host.files import disk_error
from ..telemetry import masked

log = structlog.get_logger()

MEDIA_TYPE = "application/problem+json"


class MethodNotAllowedError(InvalidRequestError):
    code, title, http_status = "method-not-allowed", "Method not allowed", 405


def problem_response(error: MirrordError) -> Response:
    """Secrets of URLs are masked whoever wrote the message."""
    body = masked(json.dumps(error.problem(), default=str))
    response = Response(body, error.http_status, media_type=MEDIA_TYPE)
    if isinstance(error, MethodNotAllowedError):
        response.headers["allow"] = error.facts["allow"]
    retry_after = error.facts.get("retry_after")
    if isinstance(error, UpstreamThrottledError) and retry_after:
        response.headers["retry-after"] = str(round(float(retry_after)))
    return response


def as_mirrord_error(error: Exception) -> MirrordError:
    """What to answer for any exception; one that nobody raised on purpose is logged here, once, and told nothing of."""
    if isinstance(error, MirrordError):
        if error.exit_status == InternalError.exit_status:
            log.error("request.crashed", detail=error.message, exc_info=error)
        return error
    if found := disk_error(error, "answer the request"):
        log.error("disk.failed", detail=found.message)
        return found
    log.error("request.crashed", exc_info=error)
    return InternalError("cannot answer the request: an unexpected error", hint="this is a bug; the daemon's log has the details")


def invalid_request(place: str, errors: Sequence[Any]) -> InvalidRequestError:
    """All faults pydantic found in one part of a request."""
    faults = [{"key": ".".join(map(str, e["loc"])), "message": e["msg"].removeprefix("Value error, ")} for e in errors]
    listing = "; ".join(f"{fault['key']}: {fault['message']}" if fault["key"] else fault["message"] for fault in faults)
    return InvalidRequestError(
        f"cannot read the {place} of the request: {listing}", hint="see GET /v1/openapi.json for what it takes", faults=faults
    )


def not_allowed(doing: str, hint: str) -> AccessError:
    return AccessError(f"cannot {doing}: not allowed for this user", hint=hint)
