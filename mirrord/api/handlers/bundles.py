"""Bundles: a mirror streamed out as one file, and such a file taken in."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ...protocol import Operation
from ..bodies import BUNDLE_LIMIT_BYTES, spool_body
from ..call import Call
from ..queries import BundleQuery, ImportBundleQuery

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
