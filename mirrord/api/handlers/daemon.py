"""The daemon itself: health, status, reload, metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from importlib import import_module

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ...jobs.events import Events
from ...protocol import Configuration, Event, Operation, ReloadAnswer, Status
from ..metrics import MEDIA_TYPE
from ..request import Call, EventsQuery, text_response
from .mirrors import shown_mirror

_DOCUMENT_TIMEOUT = timedelta(seconds=60)


async def health(call: Call) -> Response:
    """Answered from prepared bytes: load balancers and waiting clients ask often."""
    report = call.engine.health.report()
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


def _document() -> str:
    text: str = import_module("mirrord.api.openapi").openapi()
    return text


async def get_openapi(call: Call) -> Response:
    """Written in a worker, which the daemon's size is spared."""
    document = await call.engine.workers.run(_document, timeout=_DOCUMENT_TIMEOUT)
    return text_response(document, "application/json")


HEARTBEAT = timedelta(seconds=15)
_MEDIA_TYPE = "text/event-stream"
_HEADERS = {"cache-control": "no-store"}


async def list_operations(call: Call) -> list[Operation]:
    return call.engine.operations.list(owner_uid=call.own_uid)


async def get_operation(call: Call) -> Operation:
    return call.engine.operations.get(call.path["id"], owner_uid=call.own_uid)


async def cancel_operation(call: Call) -> Operation:
    return await call.engine.operations.cancel(call.path["id"], owner_uid=call.own_uid)


async def stream_events(call: Call) -> Response:
    """Server-sent events from `Last-Event-ID` or `after` on; without either, new ones, or all where none is awaited.

    The last id of one boot means nothing to the next.
    """
    query: EventsQuery = call.query
    events = call.engine.events
    seen = call.request.headers.get("last-event-id") or query.after
    if query.follow:
        user = call.engine.access.user_of(call.peer.uid)
        return _Followed(events, events.position(seen), call.own_uid, user)
    shown = (
        event
        for event in events.remembered(events.position(seen) if seen else 0)
        if _is_shown(event, call.own_uid)
    )
    return Response(
        b"".join(event.frame for event in shown), media_type=_MEDIA_TYPE, headers=_HEADERS
    )


class _Followed(StreamingResponse):
    """Counts as a follower from its start to its end."""

    def __init__(self, events: Events, after: int, uid: int | None, user: int) -> None:
        super().__init__(_follow(events, after, uid), media_type=_MEDIA_TYPE, headers=_HEADERS)
        self._events, self._user = events, user
        events.add_follower(user)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._events.remove_follower(self._user)


async def _follow(events: Events, after: int, uid: int | None) -> AsyncIterator[bytes]:
    """A comment at once, so that a client knows that it is heard, and one in every silence, so that it knows we live."""
    yield b": following\n\n"
    async for some in events.subscribe(after, silence=HEARTBEAT):
        if not some:
            yield b": still here\n\n"
        elif frames := b"".join(event.frame for event in some if _is_shown(event, uid)):
            yield frames


def _is_shown(event: Event, uid: int | None) -> bool:
    users = (None, event.fields.get("owner_uid"), event.fields.get("taken_by"))
    return uid in users or event.name == "events.dropped"
