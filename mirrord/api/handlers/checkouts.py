"""Checkouts: the hot path of the daemon, so that nothing here waits for more than the checkouts themselves."""

from __future__ import annotations

from pathlib import Path

import structlog
from starlette.background import BackgroundTask
from starlette.responses import FileResponse, Response

from ...errors import AccessError, CheckoutNotFoundError, InvalidRequestError
from ...model import CheckoutId, History, View, parse_checkout_id
from ...protocol import Checkout, RenewCheckout, ResetAnswer, ResetCheckout, RestoreAnswer, RestorePaths, StartCheckout
from ..bodies import PATCH_LIMIT_BYTES, read_body
from ..call import Call, text_response
from ..queries import ApplyQuery

log = structlog.get_logger()

_DIFF = "text/x-diff"


async def start_checkout(call: Call) -> Checkout:
    body: StartCheckout = call.body
    _refuse_untrusted(call, body)
    checkout = await call.engine.checkouts.checkout(body, call.peer)
    if call.is_abandoned:
        await _take_back(call, checkout)
    return checkout


async def list_checkouts(call: Call) -> list[Checkout]:
    return await call.engine.checkouts.list(call.peer)


async def get_checkout(call: Call) -> Checkout:
    return await call.engine.checkouts.get(_id(call), call.peer)


async def release_checkout(call: Call) -> None:
    await call.engine.checkouts.release(_id(call), call.peer)


async def reset_checkout(call: Call) -> ResetAnswer:
    body: ResetCheckout = call.body
    return await call.engine.checkouts.reset(_id(call), body, call.peer)


async def renew_checkout(call: Call) -> Checkout:
    body: RenewCheckout = call.body
    return await call.engine.checkouts.renew(_id(call), body, call.peer)


async def diff_checkout(call: Call) -> Response:
    patch = await call.engine.checkouts.diff(_id(call), call.peer)
    if isinstance(patch, Path):
        return FileResponse(patch, media_type=_DIFF, background=BackgroundTask(patch.unlink, missing_ok=True))
    return text_response(patch, _DIFF)


async def apply_patch(call: Call) -> Checkout:
    query: ApplyQuery = call.query
    patch = await read_body(call.request, PATCH_LIMIT_BYTES)
    if bool(patch) == bool(query.named):
        raise InvalidRequestError(
            "cannot read the patch of the request: it is either the body or `named`",
            hint="send the patch as the body, or ?named=@test_patch or @patch with no body",
        )
    return await call.engine.checkouts.apply(_id(call), call.peer, patch=patch or None, named=query.named, reverse=query.reverse)


async def restore_paths(call: Call) -> RestoreAnswer:
    body: RestorePaths = call.body
    return await call.engine.checkouts.restore(_id(call), call.peer, body)


def _id(call: Call) -> CheckoutId:
    return parse_checkout_id(call.path["id"])


def _refuse_untrusted(call: Call, body: StartCheckout) -> None:
    """The grader view holds the answer, and a linked history the whole mirror."""
    wanted = "the grader view" if body.view is View.GRADER else "a linked history" if body.history is History.LINKED else None
    if wanted and not call.is_admin:
        raise AccessError(
            f"cannot check out with {wanted}: only an administrator may", hint="see [access] admins in the configuration"
        )


async def _take_back(call: Call, checkout: Checkout) -> None:
    """Nobody is left to release it."""
    try:
        await call.engine.checkouts.release(parse_checkout_id(checkout.id), call.peer)
    except CheckoutNotFoundError:
        return
    log.info("checkout.abandoned", checkout=checkout.id, uid=call.peer.uid)
