"""The daemon itself: health, status, reload, metrics."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from starlette.responses import Response

from ...protocol import Configuration, ReloadAnswer, Status
from ..call import Call, text_response
from ..metrics import MEDIA_TYPE
from .mirrors import shown_mirror

_DOCUMENT = "mirrord.api.document:openapi"
_DOCUMENT_TIMEOUT = timedelta(seconds=60)


async def health(call: Call) -> Response:
    """Answered from prepared bytes: load balancers and waiting clients ask often."""
    report = call.engine.health()
    return Response(report.body, 503 if report.is_degraded else 200, media_type="application/json")


async def get_status(call: Call) -> Status:
    """A member sees no commit ids: no errors of mirrors and jobs."""
    status = await call.engine.status()
    if call.is_admin:
        return status
    mirrors = [shown_mirror(call, mirror) for mirror in status.mirrors]
    jobs = [replace(job, last_error=None) for job in status.jobs]
    return replace(status, mirrors=mirrors, jobs=jobs)


async def get_configuration(call: Call) -> Configuration:
    return call.engine.configuration()


async def reload_configuration(call: Call) -> ReloadAnswer:
    return await call.engine.reload()


async def get_metrics(call: Call) -> Response:
    body = await call.metrics.text(call.engine)
    return text_response(body, MEDIA_TYPE)


async def get_openapi(call: Call) -> Response:
    """Written in a worker, which the daemon's size is spared."""
    document = await call.engine.workers.call(_DOCUMENT, timeout=_DOCUMENT_TIMEOUT)
    return text_response(document, "application/json")
