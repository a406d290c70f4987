"""The OpenAPI document, written by FastAPI from the endpoint table.

Runs in a worker: FastAPI costs a quarter of a second and 15 MB to load, and three times the handling of a warm checkout to serve
with, so the daemon serves from the same table without it. Nothing here answers a request.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI, Query
from pydantic import TypeAdapter

from .. import __version__
from ..protocol import RESULTS, Health, Problem
from .problems import MEDIA_TYPE
from .request import NoQuery
from .table import ENDPOINTS, Endpoint

_TEXT = {"schema": {"type": "string"}}
_BYTES = {"schema": {"type": "string", "format": "binary"}}
_SCHEMAS = "#/components/schemas"


def openapi() -> str:
    """The document as JSON."""
    application = FastAPI(
        title="mirrord",
        version=__version__,
        summary="Git-native mirrors and sealed checkouts, over a Unix socket",
    )
    for endpoint in ENDPOINTS:
        application.add_api_route(
            endpoint.path,
            _documented(endpoint),
            methods=[endpoint.method],
            operation_id=endpoint.name,
            summary=endpoint.summary,
            status_code=endpoint.status,
            tags=[endpoint.noun],
            response_model=endpoint.answer if endpoint.model else None,
            responses=_answers(endpoint),
            openapi_extra=_extra(endpoint),
        )
    document = application.openapi()
    _describe(document["components"]["schemas"])
    return json.dumps(document)


def _describe(schemas: dict[str, Any]) -> None:
    """What the classes do not say: the facts of a problem stand beside its members, and a result is as its operation's kind."""
    for message in {*RESULTS.values(), Problem}:
        made = TypeAdapter(message).json_schema(ref_template=f"{_SCHEMAS}/{{model}}")
        for name, inner in {**made.pop("$defs", {}), message.__name__: made}.items():
            schemas.setdefault(name, inner)
    del schemas["Problem"]["properties"]["facts"]
    schemas["Problem"]["additionalProperties"] = True
    kinds = {kind: {"$ref": f"{_SCHEMAS}/{message.__name__}"} for kind, message in RESULTS.items()}
    results = sorted({reference["$ref"] for reference in kinds.values()})
    schemas["Operation"]["properties"]["result"] = {
        "oneOf": [*({"$ref": reference} for reference in results), {"type": "null"}],
        "description": "by kind: "
        + ", ".join(f"{kind}: {message.__name__}" for kind, message in RESULTS.items()),
    }


def _documented(endpoint: Endpoint) -> Callable[..., Any]:
    """A function whose signature says what the endpoint takes."""

    def signature_only() -> None:
        """Documented, never called."""

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, kind, annotation=str) for name in endpoint.parameters]
    if endpoint.query is not NoQuery:
        parameters.append(
            inspect.Parameter("query", kind, annotation=Annotated[endpoint.query, Query()])
        )
    if endpoint.json_body:
        parameters.append(inspect.Parameter("body", kind, annotation=endpoint.json_body))
    signature_only.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    signature_only.__doc__ = endpoint.handler.__doc__
    return signature_only


def _answers(endpoint: Endpoint) -> dict[int | str, dict[str, Any]]:
    problem = {MEDIA_TYPE: {"schema": {"$ref": f"{_SCHEMAS}/Problem"}}}
    answers: dict[int | str, dict[str, Any]] = {
        "default": {"description": "A problem", "content": problem}
    }
    for status in sorted({error.http_status for error in endpoint.errors}):
        codes = sorted(error.code for error in endpoint.errors if error.http_status == status)
        answers[status] = {
            "description": f"Problem: {', '.join(codes)}",
            "content": problem,
            "x-codes": codes,
        }
    if endpoint.answer is Health:  # a degraded daemon answers with its health too
        answers[503]["content"] = {
            **problem,
            "application/json": {"schema": {"$ref": f"{_SCHEMAS}/Health"}},
        }
    if isinstance(endpoint.answer, str):
        answers[200] = {
            "description": "Successful Response",
            "content": {endpoint.answer: _content(endpoint.answer)},
        }
    return answers


def _content(media_type: str) -> dict[str, Any]:
    if media_type == "application/json":
        return {"schema": {"type": "object"}}
    return _BYTES if media_type in {"application/octet-stream", "text/x-diff"} else _TEXT


def _extra(endpoint: Endpoint) -> dict[str, Any]:
    """Bytes are taken under any media type; the one that generators know is named."""
    extra: dict[str, Any] = {"x-access": endpoint.access.name.lower()}
    if isinstance(endpoint.body, str):
        extra["requestBody"] = {"content": {endpoint.body: _BYTES}}
    return extra
