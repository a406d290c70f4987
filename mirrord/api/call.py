"""One request as a handler sees it: who asks, for what, with everything already checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..engine import Engine
from ..host.peers import Peer, Role
from .connections import Connection
from .metrics import Metrics


@dataclass(frozen=True, slots=True)
class Call:
    """`query` and `body` are of the models that the endpoint's row in the table names; `path` holds the path's parameters."""

    engine: Engine
    metrics: Metrics
    peer: Peer
    role: Role
    request: Request
    path: dict[str, str]
    query: Any = None
    body: Any = None

    @property
    def is_admin(self) -> bool:
        return self.role >= Role.ADMIN

    @property
    def own_uid(self) -> int | None:
        """For filters that show everybody their own: None, which is everything, for an administrator."""
        return None if self.is_admin else self.peer.uid

    @property
    def is_abandoned(self) -> bool:
        """Whether the client hung up meanwhile."""
        return self.connection.is_lost

    @property
    def connection(self) -> Connection:
        connection: Connection = self.request.state.connection
        return connection


def text_response(content: bytes | str, media_type: str) -> Response:
    """Bytes as they are: starlette would declare every `text/` to be UTF-8, and a patch need not be."""
    return Response(content, headers={"content-type": media_type})
