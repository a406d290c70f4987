"""Operations and events: an administrator sees all, everybody else their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.responses import Response, StreamingResponse

from ...jobs.events import Events
from ...protocol import Event, Operation
from ..call import Call
from ..queries import EventsQuery

HEARTBEAT_S = 15.0
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
        frames = _follow(events, events.position(seen), call.own_uid)
    else:
        frames = _remembered(events, events.position(seen) if seen else 0, call.own_uid)
    return StreamingResponse(frames, media_type="text/event-stream", headers=_HEADERS)


async def _remembered(events: Events, after: int, uid: int | None) -> AsyncIterator[bytes]:
    for event in events.remembered(after):
        if _is_shown(event, uid):
            yield _frame(event)


async def _follow(events: Events, after: int, uid: int | None) -> AsyncIterator[bytes]:
    """A comment at once, so that a client knows that it is heard, and one in every silence, so that it knows we live."""
    yield b": following\n\n"
    stream = events.subscribe(after)
    upcoming = asyncio.ensure_future(anext(stream, None))
    try:
        while True:
            done, _ = await asyncio.wait([upcoming], timeout=HEARTBEAT_S)
            if not done:
                yield b": still here\n\n"
                continue
            if (event := upcoming.result()) is None:
                return
            upcoming = asyncio.ensure_future(anext(stream, None))
            if _is_shown(event, uid):
                yield _frame(event)
    finally:
        upcoming.cancel()


def _is_shown(event: Event, uid: int | None) -> bool:
    users = (None, event.fields.get("owner_uid"), event.fields.get("taken_by"))
    return uid in users or event.name == "events.dropped"


def _frame(event: Event) -> bytes:
    return b"id: %b:%d\nevent: %b\ndata: %b\n\n" % (
        event.boot.encode(),
        event.id,
        event.name.encode(),
        event.model_dump_json().encode(),
    )
