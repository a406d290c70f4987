"""Checkouts: the hot path of the daemon, so that nothing here waits for more than the checkouts themselves."""

from __future__ import annotations

import structlog
from starlette.responses import Response

from ...errors import CheckoutNotFoundError, InvalidPatchError, InvalidRequestError
from ...host.lifelines import process_of
from ...model import Bind
from ...protocol import Checkout, RenewCheckout, ResetAnswer, ResetCheckout, RestoreAnswer, RestorePaths, StartCheckout
from ..bodies import PATCH_LIMIT_BYTES, read_body
from ..call import Call, text_response
from ..queries import ApplyQuery

log = structlog.get_logger()

_DIFF = "text/x-diff"


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
    return text_response(await call.engine.checkouts.diff(call.path["id"], call.peer), _DIFF)


async def apply_patch(call: Call) -> Checkout:
    query: ApplyQuery = call.query
    patch = await read_body(call.request, PATCH_LIMIT_BYTES)
    hint = "send the patch as the body, or ?named=@test_patch or @patch with no body"
    if patch and query.named:
        raise InvalidRequestError("cannot read the patch of the request: there are two, the body and `named`", hint=hint)
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
