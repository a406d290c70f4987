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

from .. import __version__
from ..protocol import Problem
from .problems import MEDIA_TYPE
from .queries import NoQuery
from .table import ENDPOINTS, Endpoint


def openapi() -> str:
    """The document as JSON."""
    application = FastAPI(
        title="mirrord", version=__version__, summary="Git-native mirrors and sealed checkouts, over a Unix socket"
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
    return json.dumps(application.openapi())


def _documented(endpoint: Endpoint) -> Callable[..., Any]:
    """A function whose signature says what the endpoint takes."""

    def signature_only() -> None:
        """Documented, never called."""

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, kind, annotation=str) for name in endpoint.parameters]
    if endpoint.query is not NoQuery:
        parameters.append(inspect.Parameter("query", kind, annotation=Annotated[endpoint.query, Query()]))
    if endpoint.json_body:
        parameters.append(inspect.Parameter("body", kind, annotation=endpoint.json_body))
    signature_only.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    signature_only.__doc__ = endpoint.handler.__doc__
    return signature_only


def _answers(endpoint: Endpoint) -> dict[int | str, dict[str, Any]]:
    problem: dict[str, Any] = {"description": "A problem", "model": Problem, "content": {MEDIA_TYPE: {}}}
    answers: dict[int | str, dict[str, Any]] = {"default": problem}
    if isinstance(endpoint.answer, str):
        answers[200] = {"description": "Successful Response", "content": {endpoint.answer: {}}}
    return answers


def _extra(endpoint: Endpoint) -> dict[str, Any]:
    extra: dict[str, Any] = {"x-access": endpoint.access.name.lower()}
    if isinstance(endpoint.body, str):
        extra["requestBody"] = {"content": {endpoint.body: {"schema": {"type": "string", "format": "binary"}}}}
    return extra
