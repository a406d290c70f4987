"""Mirrors, their syncs, their ref history. Members see of a mirror neither commit ids nor what its errors say."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ...errors import CommitNotFoundError, CommitUnservableError, PinNotFoundError
from ...model import AuditLevel, CommitId, MirrorName, parse_commit
from ...protocol import (
    AddMirror,
    AddPin,
    Audit,
    Mirror,
    Operation,
    Pin,
    RefDiff,
    RefRecord,
    RestoreRefs,
    StartAudit,
    StartHeal,
    SyncMirror,
)
from ..request import (
    BUNDLE_LIMIT_BYTES,
    AuditsQuery,
    BundleQuery,
    Call,
    ImportBundleQuery,
    PinsQuery,
    RefsDiffQuery,
    UnpinQuery,
    spool_body,
)


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


async def list_pins(call: Call) -> list[Pin]:
    query: PinsQuery = call.query
    name = (await call.engine.mirrors.get(query.mirror)).name if query.mirror else None
    return await call.engine.mirrors.list_pins(name)


async def add_pin(call: Call) -> Pin:
    body: AddPin = call.body
    commit = parse_commit(body.commit)
    mirrors = call.engine.mirrors
    name = (await mirrors.get(body.mirror)).name
    missing = await mirrors.ensure_commits(name, [commit])
    if missing:
        raise CommitNotFoundError(
            f"cannot pin {commit} of {name}: {missing[commit]}",
            hint="check the id, or sync the mirror",
            mirror=str(name),
            commit=commit,
        )
    named = (await mirrors.resolve(name, commit)).commit
    if named != commit:
        raise CommitNotFoundError(
            f"cannot pin {commit} of {name}: it is a tag, not a commit", hint=f"pin {named}"
        )
    if refused := await mirrors.pin(name, [commit], owner=_own(call), reason=body.reason):
        raise CommitUnservableError(
            f"cannot pin {commit} of {name}: {refused[commit]}",
            hint=f"sync or audit {name}",
            mirror=str(name),
            commit=commit,
        )
    return await _get_pin(call, name, commit, _own(call))


async def remove_pin(call: Call) -> None:
    query: UnpinQuery = call.query
    owner = query.owner or _own(call)
    commit = parse_commit(call.path["commit"])
    name = (await call.engine.mirrors.get(call.path["name"])).name
    await _get_pin(call, name, commit, owner)
    await call.engine.mirrors.unpin(name, [commit], owner=owner)


async def _get_pin(call: Call, name: MirrorName, commit: CommitId, owner: str) -> Pin:
    for pin in await call.engine.mirrors.list_pins(name):
        if pin.commit == commit and pin.owner == owner:
            return pin
    raise PinNotFoundError(
        f"cannot find a pin of {owner} on {commit} in {name}: there is none",
        hint=f"see `mirrord pins {name}`",
    )


def _own(call: Call) -> str:
    return f"person/{call.peer.uid}"


_MEDIA_TYPE = "application/octet-stream"


async def create_bundle(call: Call) -> Response:
    """The file as it is made: nothing of it is stored here. Cut off in the middle where the mirror turns out to be damaged."""
    query: BundleQuery = call.query
    bundle = await call.engine.bundles.create(call.path["name"], query.since)
    headers = {
        "cache-control": "no-store",
        "x-mirrord-mirror": str(bundle.mirror),
        "x-mirrord-record": bundle.record or "",
    }
    return _ClosedStream(bundle.content, headers)


async def import_bundle(call: Call) -> Operation:
    """The file is taken whole before the answer; checking it and what follows are the operation."""
    query: ImportBundleQuery = call.query
    path = await spool_body(call.request, call.engine.mirrors.quarantine, BUNDLE_LIMIT_BYTES)
    return await call.engine.work.import_bundle(path, mirror=query.mirror, owner_uid=call.peer.uid)


class _ClosedStream(StreamingResponse):
    """Ends its source when the client hangs up, and not when Python comes to it."""

    def __init__(self, content: AsyncGenerator[bytes], headers: dict[str, str]) -> None:
        super().__init__(content, headers=headers, media_type=_MEDIA_TYPE)
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._content.aclose()


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
