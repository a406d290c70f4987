"""Checkouts: the hot path of the daemon, so that nothing here waits for more than the checkouts themselves."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import anyio.to_thread
import structlog
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ...errors import CheckoutNotFoundError, InvalidPatchError, InvalidRequestError
from ...host.pidfds import process_of
from ...model import Bind
from ...protocol import (
    Checkout,
    RenewCheckout,
    ResetAnswer,
    ResetCheckout,
    RestoreAnswer,
    RestorePaths,
    StartCheckout,
)
from ..request import ApplyQuery, Call, read_patch, text_response

log = structlog.get_logger()

_DIFF = "text/x-diff"
_PIECE_BYTES = 1024**2


async def start_checkout(call: Call) -> Checkout:
    body: StartCheckout = call.body
    process = None
    if body.bind is Bind.PROCESS:
        process = process_of(call.connection.transport.get_extra_info("socket"), call.peer)
    checkout = await call.engine.checkouts.checkout(body, call.peer, process)
    if call.is_abandoned:
        await _take_back(call, checkout)
    return checkout


async def list_checkouts(call: Call) -> list[Checkout]:
    return await call.engine.checkouts.list(call.peer)


async def get_checkout(call: Call) -> Checkout:
    return await call.engine.checkouts.get(call.path["id"], call.peer)


async def release_checkout(call: Call) -> None:
    await call.engine.checkouts.release(call.path["id"], call.peer)


async def reset_checkout(call: Call) -> ResetAnswer:
    body: ResetCheckout = call.body
    return await call.engine.checkouts.reset(call.path["id"], body, call.peer)


async def renew_checkout(call: Call) -> Checkout:
    body: RenewCheckout = call.body
    return await call.engine.checkouts.renew(call.path["id"], body, call.peer)


async def diff_checkout(call: Call) -> Response:
    """A long patch is never in memory here: it is a file, which loses its name before it is sent."""
    patch = await call.engine.checkouts.diff(call.path["id"], call.peer)
    if isinstance(patch, bytes):
        return text_response(patch, _DIFF)
    try:
        return _Spooled(patch)
    finally:
        patch.unlink()


class _Spooled(StreamingResponse):
    """A file, open from now on, closed when it was sent or its client hung up."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        headers = {
            "content-type": _DIFF,
            "content-length": str(os.fstat(self._file.fileno()).st_size),
        }
        super().__init__(self._pieces(), headers=headers)

    async def _pieces(self) -> AsyncIterator[bytes]:
        while piece := await anyio.to_thread.run_sync(self._file.read, _PIECE_BYTES):
            yield piece

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


async def apply_patch(call: Call) -> Checkout:
    """Who may not, or has no such checkout, is told so before the patch is read."""
    call.engine.checkouts.must_be_usable(call.path["id"], call.peer)
    async with read_patch(call.request, call.engine.mirrors.quarantine) as patch:
        return await _apply(call, patch)


async def _apply(call: Call, patch: bytes | Path) -> Checkout:
    query: ApplyQuery = call.query
    hint = "send the patch as the body, or ?named=@test_patch or @patch with no body"
    if patch and query.named:
        raise InvalidRequestError(
            "cannot read the patch of the request: there are two, the body and `named`", hint=hint
        )
    if not patch and not query.named:
        raise InvalidPatchError("cannot apply the patch: it is empty", hint=hint)
    return await call.engine.checkouts.apply(
        call.path["id"], call.peer, patch=patch or None, named=query.named, reverse=query.reverse
    )


async def restore_paths(call: Call) -> RestoreAnswer:
    body: RestorePaths = call.body
    return await call.engine.checkouts.restore(call.path["id"], call.peer, body)


async def _take_back(call: Call, checkout: Checkout) -> None:
    """Nobody is left to release it."""
    try:
        await call.engine.checkouts.release(checkout.id, call.peer)
    except CheckoutNotFoundError:
        return
    log.info("checkout.abandoned", checkout=checkout.id, uid=call.peer.uid)
