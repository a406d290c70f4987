"""From a request to a handler and from its answer to bytes. FastAPI holds the routes and writes the OpenAPI document.

Every endpoint is served by one function: who asks, may they, what do they ask, do it, encode it once. FastAPI's own machinery
between route and handler (dependency solving, response validation) is bypassed: it costs three times what a warm checkout needs.
Paths without parameters do not even search the routes. Every error leaves as a problem; every answer has `X-Request-Id`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Annotated, Any

import structlog
from fastapi import FastAPI, Query
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from .. import __version__
from ..engine import Engine
from ..errors import InvalidRequestError
from ..host.peers import Peer
from ..protocol import Problem
from ..telemetry import bind_request, new_request_id, usable_request_id
from .bodies import JSON_LIMIT_BYTES, read_body
from .call import Call
from .metrics import Metrics
from .problems import MEDIA_TYPE, as_mirrord_error, invalid_request, not_allowed, problem_response
from .queries import NoQuery
from .table import ENDPOINTS, Endpoint

log = structlog.get_logger()


class Application:
    """The ASGI application of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._metrics = Metrics()
        self._exact = {(e.method, e.path): e for e in ENDPOINTS if not e.parameters}
        self._routes = FastAPI(title="mirrord", version=__version__, openapi_url=None, docs_url=None, redoc_url=None)
        self._routes.router.redirect_slashes = False
        self._routes.router.routes[:] = [_Route(endpoint, self.serve) for endpoint in ENDPOINTS]
        self._routes.add_exception_handler(HTTPException, _answer_problem)
        self._document = cache(lambda: json.dumps(self._routes.openapi()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        identity = _request_id(scope)
        bind_request(identity)

        async def send_identified(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", identity.encode())]
            await send(message)

        endpoint = self._exact.get((scope["method"], scope["path"]))
        if endpoint is not None:
            await self.serve(endpoint, scope, receive, send_identified)
        else:
            await self._routes(scope, receive, send_identified)

    async def serve(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request to an endpoint, whatever happens."""
        started = perf_counter()
        request = Request(scope, receive, send)
        try:
            response = await self._respond(endpoint, request)
        except Exception as error:  # noqa: BLE001  # the last line of defence; logged where it is turned into a problem
            response = problem_response(as_mirrord_error(error))
            if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
                response.headers["connection"] = "close"  # what is left of the body is not worth reading
        self._metrics.observe_request(endpoint.name, response.status_code, perf_counter() - started)
        await response(scope, receive, send)

    async def _respond(self, endpoint: Endpoint, request: Request) -> Response:
        peer: Peer = request.state.peer
        role = self._engine.access.role(peer)
        if role < endpoint.access:
            raise not_allowed(endpoint.name.replace("_", " "), self._hint(endpoint))
        if not endpoint.early:
            await self._engine.wait_until_open()
        query = _query(endpoint, request)
        body = await _json_body(endpoint.json_body, request) if endpoint.json_body else None
        request.state.metrics, request.state.document = self._metrics, self._document
        call = Call(self._engine, peer, role, request, request.path_params, query, body)
        return _encode(endpoint, await endpoint.handler(call))

    def _hint(self, endpoint: Endpoint) -> str:
        group = self._engine.settings().access.group
        if endpoint.access is endpoint.access.ADMIN:
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
        raise invalid_request("query", error.errors(include_url=False, include_context=False)) from error


async def _json_body(model: type[BaseModel], request: Request) -> BaseModel:
    """An absent body is an empty one: all members may be optional."""
    try:
        return model.model_validate_json(await read_body(request, JSON_LIMIT_BYTES) or b"{}")
    except ValidationError as error:
        raise invalid_request("body", error.errors(include_url=False, include_context=False)) from error


def _encode(endpoint: Endpoint, answer: Any) -> Response:
    if isinstance(answer, Response):
        return answer
    if answer is None:
        return Response(status_code=204)
    return Response(_json(answer), endpoint.status, media_type="application/json")


def _json(answer: Any) -> bytes:
    if isinstance(answer, list):
        return b"[" + b",".join(map(_json, answer)) + b"]"
    encoded: bytes = answer.__pydantic_serializer__.to_json(answer)
    return encoded


async def _answer_problem(_request: Request, error: Exception) -> Response:
    return problem_response(as_mirrord_error(error))


# -- routes ------------------------------------------------------------------------------------------------------------

_Serve = Callable[[Endpoint, Scope, Receive, Send], Any]


class _Route(APIRoute):
    """FastAPI matches it and documents it; we serve it."""

    def __init__(self, endpoint: Endpoint, serve: _Serve) -> None:
        super().__init__(
            endpoint.path,
            _documented(endpoint),
            methods=[endpoint.method],
            name=endpoint.name,
            operation_id=endpoint.name,
            summary=endpoint.summary,
            status_code=endpoint.status,
            tags=[endpoint.path.removeprefix("/v1/").split("/")[0].strip("/")],
            response_model=endpoint.answer if endpoint.model else None,
            responses=_documented_answers(endpoint),
            openapi_extra=_documented_body(endpoint),
        )
        self._row, self._serve = endpoint, serve

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            raise HTTPException(405)
        await self._serve(self._row, scope, receive, send)


def _documented(endpoint: Endpoint) -> Callable[..., Any]:
    """A function whose signature says what the endpoint takes; FastAPI reads it and never calls it."""

    def signature_only() -> None:
        """Documented, not called."""

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, kind, annotation=str) for name in endpoint.parameters]
    if endpoint.query is not NoQuery:
        parameters.append(inspect.Parameter("query", kind, annotation=Annotated[endpoint.query, Query()]))
    if endpoint.json_body:
        parameters.append(inspect.Parameter("body", kind, annotation=endpoint.json_body))
    signature_only.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    signature_only.__doc__ = endpoint.handler.__doc__
    return signature_only


def _documented_answers(endpoint: Endpoint) -> dict[int | str, dict[str, Any]]:
    problem: dict[str, Any] = {"description": "A problem", "model": Problem, "content": {MEDIA_TYPE: {}}}
    answers: dict[int | str, dict[str, Any]] = {"default": problem}
    if isinstance(endpoint.answer, str):
        answers[200] = {"description": "Successful Response", "content": {endpoint.answer: {}}}
    return answers


def _documented_body(endpoint: Endpoint) -> dict[str, Any] | None:
    if not isinstance(endpoint.body, str):
        return None
    return {"requestBody": {"content": {endpoint.body: {"schema": {"type": "string", "format": "binary"}}}}}
