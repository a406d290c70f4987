"""Audits and heals."""

from __future__ import annotations

from ...model import AuditLevel
from ...protocol import Audit, Operation, StartAudit, StartHeal
from ..bodies import BUNDLE_LIMIT_BYTES, spool_body
from ..call import Call
from ..queries import AuditsQuery


async def start_audit(call: Call) -> Operation:
    body: StartAudit = call.body
    return await call.engine.work.audit(body, owner_uid=call.peer.uid)


async def list_audits(call: Call) -> list[Audit]:
    query: AuditsQuery = call.query
    return await call.engine.audits.list(query.limit)


async def get_audit(call: Call) -> Audit:
    return await call.engine.audits.get(call.path["id"])


async def start_heal(call: Call) -> Operation:
    """A heal is an audit of all content that repairs what it finds, and judges again what it repaired."""
    body: StartHeal = call.body
    request = StartAudit(mirrors=body.mirrors, level=AuditLevel.CONTENT, heal=True)
    return await call.engine.work.audit(request, kind="heal", owner_uid=call.peer.uid)


async def heal_with_bundle(call: Call) -> Operation:
    """A heal of one mirror that may also take objects from the bundle in the body, which is forgotten afterwards."""
    path = await spool_body(call.request, call.engine.mirrors.quarantine, BUNDLE_LIMIT_BYTES)
    return await call.engine.work.heal_with(path, call.path["name"], owner_uid=call.peer.uid)
