"""From a request to a handler and from its answer to bytes.

Every endpoint is served by one function: who asks, may they, what do they ask, do it, encode it once. Nothing stands between the
wire and that function, no middleware, no dependency solving, no second validation of answers: a warm checkout takes about a
millisecond, and a framework would cost a tenth of it. Every error leaves as a problem; every answer has `X-Request-Id`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from time import perf_counter
from typing import Any
from urllib.parse import unquote_to_bytes

import structlog
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from .. import protocol
from ..checkouts.deferred import answering
from ..engine import Engine
from ..errors import CorruptCatalogError, InvalidRequestError, NotFoundError
from ..git.turns import Askers
from ..host.peers import Peer, Role
from ..telemetry import bind_request, new_request_id, usable_request_id
from .connections import Connections
from .metrics import Metrics
from .problems import (
    MethodNotAllowedError,
    as_mirrord_error,
    invalid_request,
    not_allowed,
    problem_response,
)
from .request import JSON_LIMIT_BYTES, Bodies, Body, Call, NoQuery, read_body
from .table import ENDPOINTS, Endpoint

log = structlog.get_logger()


class Application:
    """The ASGI application of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.connections = Connections(self._role, engine.access.user_of)
        engine.health.warn_by(lambda: self.connections.warnings)
        self._metrics = Metrics()
        self._bodies = Bodies()
        self._routes = Routes(ENDPOINTS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = perf_counter()
        identity = _request_id(scope)
        bind_request(identity)

        async def send_identified(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", identity.encode())]
            await send(message)

        scope["state"]["body"] = body = Body(receive, self._bodies)
        with body, answering():
            name, response = await self._answer(Request(scope, body.receive), body)
            self._metrics.observe_request(name, response.status_code, perf_counter() - started)
            await response(scope, receive, send_identified)

    async def _answer(self, request: Request, body: Body) -> tuple[str, Response]:
        """The answer, whatever happens, and the name to count it under."""
        name = "none"
        try:
            endpoint, parameters = self._routes.find(request.method, request.scope["raw_path"])
            name = endpoint.name
            return name, await self._respond(endpoint, request, parameters, body)
        except Exception as error:  # noqa: BLE001  # the last line of defence; logged where it is turned into a problem
            if isinstance(error, CorruptCatalogError):
                self._engine.health.note("catalog", error.message)
            response = problem_response(as_mirrord_error(error))
            if not await body.is_drained(request.headers):
                response.headers["connection"] = "close"
            return name, response

    async def _respond(
        self, endpoint: Endpoint, request: Request, parameters: dict[str, str], body: Body
    ) -> Response:
        peer: Peer = request.state.connection.peer
        role = self._role(peer)
        user = self._engine.access.user_of(peer.uid)
        Askers(user).bind()
        body.user, body.is_admin = user, role is Role.ADMIN
        if role is Role.STRANGER and endpoint.access is Role.OWNER:
            await self._engine.wait_until_open()
            role = self._role(peer)
        if role < endpoint.access:
            raise not_allowed(endpoint.name.replace("_", " "), self._hint(endpoint))
        if not endpoint.early:
            await self._engine.wait_until_open()
        query = _query(endpoint, request)
        model = await _json_body(endpoint.json_body, request) if endpoint.json_body else None
        call = Call(self._engine, self._metrics, peer, role, request, parameters, query, model)
        with call.connection.ending_with_client() if endpoint.ends_with_client else nullcontext():
            return _encode(endpoint, await endpoint.handler(call))

    def _role(self, peer: Peer) -> Role:
        role = self._engine.access.role(peer)
        if role is Role.STRANGER and self._engine.is_open:
            return Role.OWNER if self._engine.checkouts.has_checkout(peer.uid) else role
        return role

    def _hint(self, endpoint: Endpoint) -> str:
        group = self._engine.settings().access.group
        if endpoint.access is Role.ADMIN:
            return "only root, the daemon's user and [access] admins of the configuration may"
        return f"only members of the group {group} may; a new membership counts from the next login"


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            own: str = value.decode("latin-1")
            return own if usable_request_id(own) else new_request_id()
    return new_request_id()


def _query(endpoint: Endpoint, request: Request) -> Any:
    if not request.scope["query_string"] and endpoint.query is NoQuery:
        return None
    items = request.query_params.multi_items()
    if len({name for name, _ in items}) < len(items):
        raise InvalidRequestError("cannot read the query of the request: a name is given twice")
    try:
        return endpoint.query.model_validate(dict(items))
    except ValidationError as error:
        raise invalid_request(
            "query", error.errors(include_url=False, include_context=False)
        ) from error


_BODIES: dict[type[protocol.Request], TypeAdapter[protocol.Request]] = {
    endpoint.json_body: TypeAdapter(endpoint.json_body)
    for endpoint in ENDPOINTS
    if endpoint.json_body
}


async def _json_body(message: type[protocol.Request], request: Request) -> protocol.Request:
    """An absent body is an empty one: all members may be optional."""
    try:
        return _BODIES[message].validate_json(await read_body(request, JSON_LIMIT_BYTES) or b"{}")
    except ValidationError as error:
        raise invalid_request(
            "body", error.errors(include_url=False, include_context=False)
        ) from error


def _encode(endpoint: Endpoint, answer: Any) -> Response:
    if isinstance(answer, Response):
        return answer
    if answer is None:
        return Response(status_code=204)
    return Response(protocol.to_bytes(answer), endpoint.status, media_type="application/json")


_HINT = "GET /v1/openapi.json lists all"


class Routes:
    """Finds endpoints. Raises NotFoundError and MethodNotAllowedError."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._exact: dict[str, dict[str, Endpoint]] = {}
        self._patterns: dict[str, tuple[re.Pattern[str], dict[str, Endpoint]]] = {}
        for endpoint in endpoints:
            self._add(endpoint)

    def find(self, method: str, raw_path: bytes) -> tuple[Endpoint, dict[str, str]]:
        """The endpoint, and the parameters of the path."""
        path = raw_path.decode("ascii", "replace")
        if methods := self._exact.get(path):
            return _of_method(methods, method), {}
        for pattern, methods in self._patterns.values():
            if found := pattern.fullmatch(path):
                return _of_method(methods, method), dict(_iter_unquoted(found.groupdict()))
        raise NotFoundError("cannot answer the request: no such path", hint=_HINT)

    def _add(self, endpoint: Endpoint) -> None:
        methods = (
            [endpoint.method, "HEAD"]
            if endpoint.method == "GET" and endpoint.model
            else [endpoint.method]
        )
        rows = dict.fromkeys(methods, endpoint)
        if not endpoint.parameters:
            self._exact.setdefault(endpoint.path, {}).update(rows)
            return
        pattern = re.compile(
            re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", endpoint.path.replace(".", r"\."))
        )
        self._patterns.setdefault(endpoint.path, (pattern, {}))[1].update(rows)


def _of_method(methods: dict[str, Endpoint], method: str) -> Endpoint:
    if endpoint := methods.get(method):
        return endpoint
    allowed = ", ".join(sorted(methods))
    raise MethodNotAllowedError(
        f"cannot answer the request: the path takes {allowed}, not {method}",
        hint=_HINT,
        allow=allowed,
    )


def _iter_unquoted(parameters: dict[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in parameters.items():
        yield name, unquote_to_bytes(value).decode("utf-8", "surrogateescape")
