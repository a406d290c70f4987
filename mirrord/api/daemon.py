"""Handlers of health, status, configuration, disk use, metrics, reports, operations and events.

Administrators see all operations and events, other users their own.
"""

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta

from pydantic import Field
from starlette.responses import Response

from .. import protocol
from ..host.peers import Role
from ..model import utc_now
from . import metrics
from .mirrors import visible_mirror
from .request import Call, OwnedStream, Query, text_response

# an empty comment to a follower without events, so that both ends notice a dead connection
HEARTBEAT = timedelta(seconds=15)
_STREAM = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}


async def health(call: Call) -> Response:
    """Return a cached answer: load balancers and waiting clients ask often."""
    report = await call.engine.current_health()
    if call.role is Role.STRANGER and report.is_degraded and call.engine.is_open:
        reasons = call.engine.readiness.without_mirrors(report.health.reasons)
        report = report._replace(body=protocol.to_bytes(replace(report.health, reasons=reasons)))
    return Response(report.body, 503 if report.is_degraded else 200, media_type="application/json")


async def get_status(call: Call) -> protocol.Status:
    """Return the state of the daemon. Members see no error texts, which can contain commit ids."""
    status = await call.engine.status()
    if call.engine.fleet:
        status = replace(status, fleet=await call.engine.fleet.status())
    if call.is_admin:
        return status
    mirrors = [visible_mirror(call, mirror) for mirror in status.mirrors]
    jobs = [replace(job, last_error=None) for job in status.jobs]
    return replace(status, mirrors=mirrors, jobs=jobs)


async def get_configuration(call: Call) -> protocol.Configuration:
    return call.engine.configuration()


async def reload_configuration(call: Call) -> protocol.ReloadAnswer | protocol.Operation:
    """Apply the settings; as an operation while the store is asked for new mirrors and is slow."""
    return await call.engine.operations.patiently(
        "config.reload", "the configuration", call.engine.reload, owner_uid=call.peer.uid
    )


class UsageQuery(Query):
    verbose: bool = Field(False, description="with a row for each item")


async def get_usage(call: Call, query: UsageQuery) -> protocol.Usage:
    return await call.engine.storage.usage(call.peer, is_admin=call.is_admin, verbose=query.verbose)


async def collect_garbage(call: Call, body: protocol.CollectGarbage) -> protocol.Garbage:
    return await call.engine.storage.collect(dry_run=body.dry_run)


class ActivityQuery(Query):
    history: bool = Field(False, description="with a point for each minute of the last day")


async def get_activity(call: Call, query: ActivityQuery) -> protocol.Activity:
    return call.engine.activity(call.own_uid, history=query.history)


async def get_metrics(call: Call) -> Response:
    accept = call.request.headers.get("accept", "")
    return text_response(*await metrics.answer(call.engine, accept, uid=call.own_uid))


async def list_reports(call: Call) -> list[protocol.Report]:
    """List the newest 200 reports, newest first."""
    return await call.engine.catalog.list_reports()


async def add_report(call: Call, body: protocol.AddReport) -> protocol.Report:
    """Store the results of a rehearsal or grading for the web page."""
    report = protocol.Report(id=secrets.token_hex(8), at=utc_now(), **vars(body))
    await call.engine.catalog.put_report(report)
    return report


async def list_operations(call: Call) -> list[protocol.Operation]:
    return call.engine.operations.list(owner_uid=call.own_uid)


async def get_operation(call: Call) -> protocol.Operation:
    return call.engine.operations.get(call.path["id"], owner_uid=call.own_uid)


async def cancel_operation(call: Call) -> protocol.Operation:
    return await call.engine.operations.cancel(call.path["id"], owner_uid=call.own_uid)


class EventsQuery(Query):
    after: str | None = Field(
        None, max_length=64, description="as Last-Event-ID: BOOT:ID, or ID alone"
    )
    follow: bool = True


async def stream_events(call: Call, query: EventsQuery) -> Response:
    """Stream server-sent events after `Last-Event-ID` or `after`.

    Without either: new events, or with `follow=false` all remembered ones. An id from before the
    daemon's last start means all remembered ones.
    """
    events, uid = call.engine.events, call.own_uid
    seen = call.request.headers.get("last-event-id") or query.after
    if not query.follow:
        remembered = events.remembered(events.position(seen) if seen else 0)
        frames = (event.frame for event in remembered if _is_visible(event, uid))
        return Response(b"".join(frames), headers=_STREAM)
    user = call.engine.access.user_of(call.peer.uid)
    after = events.position(seen)
    events.add_follower(user)
    owned = AsyncExitStack()
    owned.callback(events.remove_follower, user)

    async def follow() -> AsyncIterator[bytes]:
        yield b": following\n\n"  # immediately, so that the client knows that it is connected
        async for some in events.subscribe(after, silence=HEARTBEAT):
            if not some:
                yield b": still here\n\n"
            elif frames := b"".join(event.frame for event in some if _is_visible(event, uid)):
                yield frames

    return OwnedStream(follow(), _STREAM, owned)


def _is_visible(event: protocol.Event, uid: int | None) -> bool:
    users = (None, event.fields.get("owner_uid"), event.fields.get("taken_by"))
    return uid in users or event.name == "events.dropped"
