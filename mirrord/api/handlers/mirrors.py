"""Mirrors, their syncs, their ref history. Members see of a mirror neither commit ids nor what its errors say."""

from __future__ import annotations

from dataclasses import replace

from ...protocol import AddMirror, Mirror, Operation, RefDiff, RefRecord, RestoreRefs, SyncMirror
from ..call import Call
from ..queries import RefsDiffQuery


async def list_mirrors(call: Call) -> list[Mirror]:
    return [shown_mirror(call, mirror) for mirror in await call.engine.mirrors.list()]


async def add_mirror(call: Call) -> Operation:
    body: AddMirror = call.body
    return await call.engine.work.add_mirror(body.repo, body.url, owner_uid=call.peer.uid)


async def get_mirror(call: Call) -> Mirror:
    row = await call.engine.mirrors.get(call.path["name"])
    return shown_mirror(call, await call.engine.mirrors.describe(row.name))


def shown_mirror(call: Call, mirror: Mirror) -> Mirror:
    return mirror if call.is_admin else replace(mirror, error=None, ref_faults=[])


async def remove_mirror(call: Call) -> None:
    row = await call.engine.mirrors.get(call.path["name"])
    await call.engine.work.remove_mirror(row.name)


async def sync_mirror(call: Call) -> Operation:
    body: SyncMirror = call.body
    row = await call.engine.mirrors.get(call.path["name"])
    return call.engine.work.sync(row.name, accept_loss=body.accept_loss, owner_uid=call.peer.uid)


async def log_refs(call: Call) -> list[RefRecord]:
    row = await call.engine.mirrors.get(call.path["name"])
    return await call.engine.mirrors.refs_log(row.name)


async def diff_refs(call: Call) -> RefDiff:
    query: RefsDiffQuery = call.query
    row = await call.engine.mirrors.get(call.path["name"])
    return await call.engine.mirrors.refs_diff(row.name, query.a, query.b)


async def restore_refs(call: Call) -> Operation:
    body: RestoreRefs = call.body
    row = await call.engine.mirrors.get(call.path["name"])
    return call.engine.work.restore_refs(row.name, body.at, owner_uid=call.peer.uid)
