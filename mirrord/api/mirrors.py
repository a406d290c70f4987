"""Handlers of mirrors, their refs, pins and bundles, and of audits and heals.

Members see neither commit ids nor error texts of a mirror. Pins are for administrators, because a
list of them can reveal which commit is the answer, and a pin fetches any commit from upstream.
"""

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Annotated

from pydantic import Field
from starlette.responses import Response

from .. import protocol
from ..errors import CommitNotFoundError, CommitUnservableError, NotFoundError
from ..model import AuditLevel, CommitId, MirrorName, parse_commit
from .request import BUNDLE_LIMIT_BYTES, Call, OwnedStream, Query, spool_body

_RefRecord = Annotated[
    str,
    Field(
        min_length=1,
        max_length=100,
        description="a record of the ref history: its id, or a time in ISO 8601",
    ),
]


class RefsDiffQuery(Query):
    a: _RefRecord
    b: _RefRecord


class BundleQuery(Query):
    since: _RefRecord | None = None


class MirrorQuery(Query):
    mirror: protocol.Repo | None = None


class UnpinQuery(Query):
    owner: str | None = Field(
        None, max_length=200, description="dataset/NAME or person/UID; administrators only"
    )


class AuditsQuery(Query):
    limit: int = Field(100, ge=1, le=1000)


async def list_mirrors(call: Call) -> list[protocol.Mirror]:
    return [visible_mirror(call, mirror) for mirror in await call.engine.mirrors.list_mirrors()]


async def add_mirror(call: Call, body: protocol.AddMirror) -> protocol.Operation:
    return await call.engine.work.add_mirror(body.repo, body.url, owner_uid=call.peer.uid)


async def get_mirror(call: Call) -> protocol.Mirror:
    return visible_mirror(call, await call.engine.mirrors.describe(await _mirror_name(call)))


def visible_mirror(call: Call, mirror: protocol.Mirror) -> protocol.Mirror:
    return mirror if call.is_admin else replace(mirror, error=None, ref_faults=[])


async def _mirror_name(call: Call) -> MirrorName:
    return (await call.engine.mirrors.get(call.path["name"])).name


async def remove_mirror(call: Call) -> protocol.Operation | None:
    """Remove a mirror; while another daemon or the store has it, as an operation."""
    name = await _mirror_name(call)
    return await call.engine.work.remove_mirror(name, owner_uid=call.peer.uid)


async def set_url(call: Call, body: protocol.SetUrl) -> protocol.Operation:
    return call.engine.work.set_url(
        await _mirror_name(call), body.url, accept_loss=body.accept_loss, owner_uid=call.peer.uid
    )


async def sync_mirror(call: Call, body: protocol.SyncMirror) -> protocol.Operation:
    return call.engine.work.sync(
        await _mirror_name(call),
        accept_loss=body.accept_loss,
        retry_faults=body.retry_faults,
        owner_uid=call.peer.uid,
    )


async def check_credential(call: Call, body: protocol.CheckCredential) -> protocol.CredentialCheck:
    return await call.engine.mirrors.check_credential(body.url)


async def log_refs(call: Call) -> list[protocol.RefRecord]:
    return await call.engine.mirrors.refs_log(await _mirror_name(call))


async def diff_refs(call: Call, query: RefsDiffQuery) -> protocol.RefDiff:
    return await call.engine.mirrors.refs_diff(await _mirror_name(call), query.a, query.b)


async def restore_refs(call: Call, body: protocol.RestoreRefs) -> protocol.Operation:
    name = await _mirror_name(call)
    return call.engine.work.restore_refs(name, body.at, owner_uid=call.peer.uid)


async def create_bundle(call: Call, query: BundleQuery) -> Response:
    """Stream the mirror as one file. The stream ends early if the mirror is damaged."""
    bundle = await call.engine.bundles.create(call.path["name"], query.since)
    owned = AsyncExitStack()
    owned.push_async_callback(bundle.content.aclose)
    headers = {
        "cache-control": "no-store",
        "content-type": "application/octet-stream",
        "x-mirrord-mirror": str(bundle.mirror),
        "x-mirrord-record": bundle.record or "",
    }
    return OwnedStream(bundle.content, headers, owned)


async def import_bundle(call: Call, query: MirrorQuery) -> protocol.Operation:
    """Receive a bundle; the operation verifies and imports it."""
    await call.engine.room.ensure("import the bundle")
    path = await spool_body(call.request, call.engine.mirrors.quarantine, BUNDLE_LIMIT_BYTES)
    return await call.engine.work.import_bundle(path, mirror=query.mirror, owner_uid=call.peer.uid)


async def start_restore(call: Call, body: protocol.StartRestore) -> protocol.Operation:
    """Restore mirrors of the store with their pins and rows, then audit them."""
    return await call.engine.work.restore(body.mirrors, owner_uid=call.peer.uid)


async def list_pins(call: Call, query: MirrorQuery) -> list[protocol.Pin]:
    mirrors, text = call.engine.mirrors, query.mirror
    return await mirrors.list_pins((await mirrors.get(text)).name if text else None)


async def add_pin(call: Call, body: protocol.AddPin) -> protocol.Pin | protocol.Operation:
    """Fetch a commit where it is missing, and pin it once its closure is verified.

    What takes long, for an upstream or a store that is slow, is answered with 202 and an operation.
    """
    commit = parse_commit(body.commit)
    name = (await call.engine.mirrors.get(body.mirror)).name
    return await call.engine.operations.patiently(
        "pin.add",
        str(name),
        lambda progress: _pin(call, name, commit, body.reason, progress),
        owner_uid=call.peer.uid,
    )


async def _pin(
    call: Call,
    name: MirrorName,
    commit: CommitId,
    reason: str,
    progress: protocol.ProgressSink,
) -> protocol.Pin:
    mirrors = call.engine.mirrors
    progress(protocol.Progress(total=1, unit="pins", note="look for the commit"))
    if missing := await mirrors.ensure_commits(name, [commit], progress):
        raise CommitNotFoundError(
            f"cannot pin {commit} of {name}: {missing[commit]}",
            hint="check the id, or sync the mirror",
            mirror=str(name),
            commit=commit,
        )
    peeled = (await mirrors.resolve(name, commit)).commit
    if peeled != commit:
        raise CommitNotFoundError(
            f"cannot pin {commit} of {name}: it is a tag, not a commit", hint=f"pin {peeled}"
        )
    owner = f"person/{call.peer.uid}"
    note = "verify the commit and publish it" if call.engine.fleet else "verify the commit"
    progress(protocol.Progress(total=1, unit="pins", note=note))
    if refused := await mirrors.pin(name, [commit], owner=owner, reason=reason):
        raise CommitUnservableError(
            f"cannot pin {commit} of {name}: {refused[commit]}",
            hint=f"sync or audit {name}",
            mirror=str(name),
            commit=commit,
        )
    return await _get_pin(call, name, commit, owner)


async def remove_pin(call: Call, query: UnpinQuery) -> protocol.Operation | None:
    """Remove a pin; while other work on its mirror waits for a slow store, as an operation."""
    owner = query.owner or f"person/{call.peer.uid}"
    commit = parse_commit(call.path["commit"])
    name = await _mirror_name(call)
    await _get_pin(call, name, commit, owner)

    async def unpin(progress: protocol.ProgressSink) -> None:
        progress(protocol.Progress(total=1, unit="pins", note=f"wait for other work on {name}"))
        await call.engine.mirrors.unpin(name, [commit], owner=owner)

    operations, owner_uid = call.engine.operations, call.peer.uid
    return await operations.patiently("pin.remove", str(name), unpin, owner_uid=owner_uid)


async def _get_pin(call: Call, name: MirrorName, commit: CommitId, owner: str) -> protocol.Pin:
    for pin in await call.engine.mirrors.list_pins(name):
        if pin.commit == commit and pin.owner == owner:
            return pin
    raise NotFoundError(
        f"cannot find a pin of {owner} on {commit} in {name}: no such pin",
        hint=f"see `mirrord pin list {name}`",
        kind="pin",
    )


async def start_audit(call: Call, body: protocol.StartAudit) -> protocol.Operation:
    return await call.engine.work.audit(body, owner_uid=call.peer.uid)


async def list_audits(call: Call, query: AuditsQuery) -> list[protocol.Audit]:
    return await call.engine.audits.list_audits(query.limit)


async def get_audit(call: Call) -> protocol.Audit:
    return await call.engine.audits.get(call.path["id"])


async def start_heal(call: Call, body: protocol.StartHeal) -> protocol.Operation:
    """Audit all content, repair the findings, and audit the repairs."""
    request = protocol.StartAudit(mirrors=body.mirrors, level=AuditLevel.CONTENT, heal=True)
    return await call.engine.work.audit(request, kind="heal", owner_uid=call.peer.uid)


async def heal_with_bundle(call: Call) -> protocol.Operation:
    """Heal one mirror, with the bundle in the body as an additional donor."""
    await call.engine.room.ensure("receive the bundle")
    path = await spool_body(call.request, call.engine.mirrors.quarantine, BUNDLE_LIMIT_BYTES)
    return await call.engine.work.heal_with(path, call.path["name"], owner_uid=call.peer.uid)
