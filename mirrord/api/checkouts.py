"""Handlers of checkouts, snapshots, prepared layers, grades and receipts."""

import json
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

from pydantic import Field
from starlette.responses import Response

from .. import protocol
from ..errors import CheckoutNotFoundError, InvalidPatchError, InvalidRequestError
from ..grading.prepare import ModelPatch
from ..host.files import opened
from ..host.peers import Process, process_of
from ..model import ApplyStrategy, Backend, Bind, DiffFormat, History, View
from ..protocol.codec import EnvironmentName, Label, LayerName
from ..telemetry import log
from .request import Call, Query, read_patch, stream_file, text_response

C = TypeVar("C", bound=protocol.Checkout)


async def start_checkout(call: Call, body: protocol.StartCheckout) -> protocol.Checkout:
    process = bound_process(call, body.bind)
    return await _release_if_abandoned(
        call, call.engine.checkouts.checkout(body, call.peer, process)
    )


async def fork_checkout(call: Call, body: protocol.ForkCheckout) -> protocol.Fork:
    process = bound_process(call, body.bind)
    forking = call.engine.checkouts.fork(call.path["id"], body, call.peer, process)
    return await _release_if_abandoned(call, forking)


def bound_process(call: Call, bind: Bind) -> Process | None:
    """Return the process that a lease ends with, if it is bound to one."""
    if bind is Bind.LEASE:
        return None
    return process_of(call.connection.transport.get_extra_info("socket"), call.peer)


async def _release_if_abandoned(call: Call, making: Awaitable[C]) -> C:
    """Return the new checkout; release it if its client hangs up before it reads the answer."""
    checkout = await making

    async def release() -> None:
        with suppress(CheckoutNotFoundError):
            await call.engine.checkouts.release(checkout.id, call.peer)
            log.info("checkout.abandoned", checkout=checkout.id, uid=call.peer.uid)

    if call.connection.is_lost:
        await release()
    else:
        call.connection.undo_if_unread(release)
    return checkout


async def make_snapshot(call: Call, body: protocol.MakeSnapshot) -> protocol.Snapshot:
    return await call.engine.checkouts.snapshot(call.path["id"], body, call.peer)


async def list_snapshots(call: Call) -> list[protocol.Snapshot]:
    return await call.engine.checkouts.list_snapshots(call.path["id"], call.peer)


async def remove_snapshot(call: Call) -> None:
    await call.engine.checkouts.remove_snapshot(call.path["id"], call.path["name"], call.peer)


async def save_layer(call: Call, body: protocol.SaveLayer) -> protocol.PreparedLayer:
    """Save the changes of a checkout as a prepared layer for other checkouts of its commit."""
    return await call.engine.checkouts.save(call.path["id"], body, call.peer)


class LayersQuery(Query):
    mirror: str | None = Field(None, min_length=1, max_length=400)


async def list_layers(call: Call, query: LayersQuery) -> list[protocol.PreparedLayer]:
    """List the prepared layers that the caller may use; all of them for an administrator."""
    return await call.engine.checkouts.list_layers(query.mirror, call.peer)


async def remove_layer(call: Call) -> None:
    await call.engine.checkouts.remove_layer(call.path["id"], call.peer)


class CheckoutsQuery(Query):
    label: Label | None = None


async def list_checkouts(call: Call, query: CheckoutsQuery) -> list[protocol.Checkout]:
    return await call.engine.checkouts.list(call.peer, query.label)


async def get_checkout(call: Call) -> protocol.Checkout:
    return await call.engine.checkouts.get(call.path["id"], call.peer)


async def release_checkout(call: Call) -> None:
    await call.engine.checkouts.release(call.path["id"], call.peer)


async def reset_checkout(call: Call, body: protocol.ResetCheckout) -> protocol.ResetAnswer:
    return await call.engine.checkouts.reset(call.path["id"], body, call.peer)


async def renew_checkout(call: Call, body: protocol.RenewCheckout) -> protocol.Checkout:
    return await call.engine.checkouts.renew(call.path["id"], body, call.peer)


async def attach_checkout(call: Call, body: protocol.AttachCheckout) -> protocol.Attachment:
    """Send a mount of the checkout, for `move_mount` in the peer's own mount namespace.

    Its file descriptor is sent by SCM_RIGHTS with an interim response before the answer.
    """
    answer, mount = await call.engine.checkouts.attach(call.path["id"], body, call.peer)
    with opened(mount):
        # the message refers to the open file itself, so this end may be closed
        call.connection.send_descriptor(mount)
    return answer


class DiffQuery(Query):
    format: DiffFormat = DiffFormat.PATCH


_DIFF = "text/x-diff"


async def diff_checkout(call: Call, query: DiffQuery) -> Response:
    """Return the changes since the base commit, as `git diff` prints them.

    A long patch is streamed from an unlinked file. The header x-mirrord-diff-by says `libgit2`, or
    `git` with the reason why libgit2 could not print it. The header x-mirrord-diff-notes has a JSON
    list of sentences: what no patch records, and which paths are below a submodule.
    """
    content, made_by, notes = await call.engine.checkouts.diff(
        call.path["id"], call.peer, query.format
    )
    headers = {
        "content-type": _DIFF if query.format is DiffFormat.PATCH else "text/plain",
        "x-mirrord-diff-by": made_by,
    }
    if notes:
        headers["x-mirrord-diff-notes"] = json.dumps(notes)
    if isinstance(content, bytes):
        return Response(content, headers=headers)
    try:
        return stream_file(content, headers)
    finally:
        content.unlink()


async def get_seal(call: Call) -> protocol.SealReport:
    return await call.engine.checkouts.seal(call.path["id"], call.peer)


async def get_receipt(call: Call) -> Response:
    """Return what the checkout is and how it was verified, as canonical JSON (RFC 8785)."""
    receipt = await call.engine.checkouts.receipt(call.path["id"], call.peer)
    return text_response(receipt.canonical(), "application/json")


class ReceiptQuery(Query):
    sha256: str | None = Field(
        None,
        pattern="^[0-9a-f]{64}$",
        description="digest of the receipt without its signature; default: that of the body",
    )


async def verify_receipt(
    call: Call, body: protocol.Receipt, query: ReceiptQuery
) -> protocol.ReceiptReport:
    """Compare a receipt with the mirror that it names, and look it up among the issued ones.

    The signature is not verified. With `sha256` the body may leave the grade out.
    """
    return await call.engine.checkouts.verify_receipt(body, query.sha256, call.peer)


class ApplyQuery(Query):
    reverse: bool = False
    strategy: ApplyStrategy | None = None
    named: str | None = Field(None, pattern="^@(patch|test_patch)$")


async def apply_patch(call: Call, query: ApplyQuery) -> protocol.ApplyAnswer:
    """Apply the patch in the body, or a named one. Access is checked before the body is read."""
    identity = call.path["id"]
    call.engine.checkouts.must_be_usable(identity, call.peer)
    async with read_patch(call.request, call.engine.mirrors.quarantine) as patch:
        if patch and query.named:
            raise InvalidRequestError(
                "cannot read the patch of the request: the body and `named` both give one",
                hint="send the patch as the body, or ?named=@test_patch or @patch with no body",
            )
        if not patch and not query.named:
            hint = "give the output of `git diff`, or the name @test_patch or @patch"
            raise InvalidPatchError("cannot apply the patch: it is empty", hint=hint)
        return await call.engine.checkouts.apply(
            identity,
            call.peer,
            patch=patch or None,
            named=query.named,
            reverse=query.reverse,
            strategy=query.strategy,
        )


async def grade_checkout(call: Call, body: protocol.StartGrade) -> protocol.Grade:
    """Make a grader's checkout with the changes of a checkout and the instance's tests."""
    process, grading = bound_process(call, body.bind), call.engine.grading
    making = grading.grade(call.path["id"], body, call.peer, process)
    return await _release_if_abandoned(call, making)


class GradeQuery(Query):
    instance: str = Field(min_length=1, max_length=500)
    dataset: str | None = Field(None, min_length=1, max_length=500)
    strategy: ApplyStrategy = ApplyStrategy.TOLERANT
    policy: str | None = Field(None, min_length=1, max_length=500)
    history: History | None = None
    backend: Backend | None = None
    ttl: float | None = Field(None, gt=0, le=366 * 86400, description="seconds")
    # the last one is (uid_t)-1, by which chown(2) leaves the owner as it is
    owner: int | None = Field(None, ge=0, lt=2**32 - 1)
    bind: Bind = Bind.LEASE
    attach: bool = False
    sandbox: bool = False
    layer: LayerName | None = None
    environment: EnvironmentName | None = None
    label: Label | None = None


async def grade_patch(call: Call, query: GradeQuery) -> protocol.Grade:
    """Make a grader's checkout: an instance's base commit, the patch in the body, and the tests.

    `instance` may be NAME@COMMITISH, which has no tests.
    """
    choices = query.model_dump(exclude={"strategy", "policy"})
    start = protocol.StartCheckout(view=View.GRADER, **choices)
    process, grading = bound_process(call, query.bind), call.engine.grading
    async with read_patch(call.request, call.engine.mirrors.quarantine) as patch:
        source = ModelPatch(patch, query.strategy)
        making = grading.grade_patch(start, source, query.policy, call.peer, process)
        return await _release_if_abandoned(call, making)


async def restore_paths(call: Call, body: protocol.RestorePaths) -> protocol.RestoreAnswer:
    return await call.engine.checkouts.restore(call.path["id"], call.peer, body)
