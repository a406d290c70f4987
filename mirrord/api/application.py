"""The ASGI application: routing, access checks, decoding of requests, encoding of answers.

It serves every endpoint of the table without a web framework. Every error is answered with a
problem, and every answer has `X-Request-Id`.
"""

import re
from collections import Counter
from contextlib import nullcontext
from time import perf_counter
from typing import Any
from urllib.parse import unquote_to_bytes

from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from .. import errors, protocol
from ..engine.engine import Engine
from ..host.peers import Peer, Role
from ..jobs.operations import answering
from ..telemetry import bind_request, new_request_id, usable_request_id
from ..workers.turns import Askers
from .connections import Connections
from .request import (
    JSON_LIMIT_BYTES,
    Body,
    Call,
    MethodNotAllowedError,
    Query,
    invalid_request,
    problem_response,
    read_body,
)
from .table import ENDPOINTS, Endpoint

# what a client may repeat later: too many, unavailable, and no room on the disk
_REFUSALS = {429, 503, 507}
_HINT = "GET /v1/openapi.json lists all paths"


# FastAPI took 250 µs of processor time for the request of a warm checkout, and this takes 104
class Routes:
    """Finds endpoints. A path without parameters, like the frequent ones, costs one look-up.

    HEAD is answered like GET if the answer is JSON. The path is matched as sent and each parameter
    unquoted separately, so a parameter may contain any character, even a slash.
    """

    def __init__(self) -> None:
        self._plain: dict[str, dict[str, Endpoint]] = {}
        self._patterns: dict[re.Pattern[str], dict[str, Endpoint]] = {}
        for endpoint in ENDPOINTS:
            # re.escape writes {name} as \{name\}
            pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(endpoint.path))
            methods = (
                self._patterns.setdefault(re.compile(pattern), {})
                if endpoint.parameters
                else self._plain.setdefault(endpoint.path, {})
            )
            methods[endpoint.method] = endpoint
            if endpoint.method == "GET" and endpoint.model:
                methods["HEAD"] = endpoint

    def find(self, method: str, raw_path: bytes) -> tuple[Endpoint, dict[str, str]]:
        """Return the endpoint and its path parameters.

        Raises NotFoundError and MethodNotAllowedError.
        """
        path = raw_path.decode("ascii", "replace")
        methods, quoted = self._plain.get(path), {}
        if methods is None:
            for pattern, candidates in self._patterns.items():
                if match := pattern.fullmatch(path):
                    methods, quoted = candidates, match.groupdict()
                    break
            else:
                raise errors.NotFoundError("cannot answer the request: no such path", hint=_HINT)
        if method not in methods:
            allowed = ", ".join(sorted(methods))
            raise MethodNotAllowedError(
                f"cannot answer the request: the path accepts {allowed}, not {method}",
                hint=_HINT,
                allow=allowed,
            )
        try:
            parameters = {name: unquote_to_bytes(v).decode() for name, v in quoted.items()}
        except UnicodeDecodeError as error:  # no object has such a name; SQLite refuses them
            raise errors.NotFoundError(
                "cannot answer the request: no such path", hint=_HINT
            ) from error
        return methods[method], parameters


# made once: each builds a validator of its own
_BODIES = {
    endpoint.json_body: TypeAdapter(endpoint.json_body)
    for endpoint in ENDPOINTS
    if endpoint.json_body
}


class Application:
    """The ASGI application of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.connections = Connections(self._role, engine.access.user_of, engine.traffic)
        engine.health.warn_by(lambda: self.connections.warnings)
        self._body_bytes: Counter[int] = Counter()  # of unanswered requests, by user
        self._routes = Routes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, engine = perf_counter(), self._engine
        given_id = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given_id if usable_request_id(given_id) else new_request_id()
        bind_request(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        scope["state"]["body"] = body = Body(receive, self._body_bytes)
        request = Request(scope, body.receive)
        name = "none"
        try:
            with answering():
                try:
                    # not `path`, in which %2F is a slash already
                    endpoint, parameters = self._routes.find(request.method, scope["raw_path"])
                    name = endpoint.name
                    response = await self._respond(endpoint, request, parameters, body)
                except Exception as error:  # noqa: BLE001  # problem_response logs bugs
                    if isinstance(error, errors.CorruptCatalogError):
                        engine.health.note("catalog", error.message)
                    response = problem_response(error)
                    if response.status_code in _REFUSALS and isinstance(error, errors.MirrordError):
                        engine.traffic.refusals[error.code] += 1
                    if not await body.is_drained(request.headers):
                        response.headers["connection"] = "close"
                # before it is sent: the time of a client that reads slowly is its own
                engine.traffic.observe(name, response.status_code, perf_counter() - started)
                # a stream's body may come much later, and HEAD has none
                if type(response) is Response and request.method != "HEAD":
                    request.state.connection.join_head()
                await response(scope, receive, send_with_id)
        finally:
            body.release()

    async def _respond(
        self, endpoint: Endpoint, request: Request, parameters: dict[str, str], body: Body
    ) -> Response:
        connection = request.state.connection
        peer: Peer = connection.peer
        role = self._role(peer)
        user = self._engine.access.user_of(peer.uid)
        Askers(user).bind()
        body.user, body.is_admin = user, role is Role.ADMIN
        if role is Role.STRANGER and endpoint.access is Role.OWNER:
            await self._engine.wait_until_open()  # owners of checkouts are known from then on
            role = self._role(peer)
        if role < endpoint.access:
            group = self._engine.settings().access.group
            raise errors.AccessError(
                f"cannot {endpoint.name.replace('_', ' ')}: not allowed for this user",
                hint="only root, the daemon's user and [access] admins of the configuration may"
                if endpoint.access is Role.ADMIN
                else f"only members of the group {group} may; "
                "a new membership takes effect at the next login",
            )
        if not endpoint.early:
            await self._engine.wait_until_open()
        if endpoint.needs_state:
            self._engine.room.must_be_here()
        gate, is_admin = self._engine.gate, role is Role.ADMIN
        async with gate.entered(user, is_admin=is_admin):
            call = Call(self._engine, peer, role, request, parameters)
            return await gate.metered(user, self._answer(endpoint, call))

    async def _answer(self, endpoint: Endpoint, call: Call) -> Response:
        request, connection = call.request, call.connection
        arguments: dict[str, Any] = {}
        if request.scope["query_string"] or endpoint.query is not Query:
            items = request.query_params.multi_items()
            if len(dict(items)) < len(items):
                raise errors.InvalidRequestError(
                    "cannot read the query of the request: a parameter is given twice",
                    hint="name each parameter once",
                )
            try:
                query = endpoint.query.model_validate(dict(items))
            except ValidationError as error:
                raise invalid_request("query", error) from error
            if endpoint.query is not Query:
                arguments["query"] = query
        if endpoint.json_body:
            content = (
                await read_body(request, JSON_LIMIT_BYTES) or b"{}"
            )  # all members may be optional
            try:
                arguments["body"] = _BODIES[endpoint.json_body].validate_json(content)
            except ValidationError as error:
                raise invalid_request("body", error) from error
        if endpoint.status == 202 and not call.is_admin:  # it starts an operation
            self._engine.operations.admit_member(call.peer.uid)
        with connection.ending_with_client() if endpoint.ends_with_client else nullcontext():
            answer = await endpoint.handler(call, **arguments)
        if isinstance(answer, Response):
            return answer
        if answer is None:
            return Response(status_code=204)
        goes_on = isinstance(answer, protocol.Operation) and endpoint.may_take_long
        status = 202 if goes_on else endpoint.status
        return Response(protocol.to_bytes(answer), status, media_type="application/json")

    def _role(self, peer: Peer) -> Role:
        role = self._engine.access.role(peer)
        if role is Role.STRANGER and self._engine.is_open:
            return Role.OWNER if self._engine.checkouts.leases.held_by[peer.uid] else role
        return role
