"""The OpenAPI document, from the endpoint table and pydantic's JSON schemas of the messages."""

from __future__ import annotations

import inspect
import json
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from .. import __version__
from ..protocol import RESULTS, Health, Problem
from .problems import MEDIA_TYPE

if TYPE_CHECKING:
    from .table import Endpoint

_SCHEMAS = "#/components/schemas/"
_PROBLEM = {MEDIA_TYPE: {"schema": {"$ref": f"{_SCHEMAS}Problem"}}}
_BYTES = {"schema": {"type": "string", "format": "binary"}}
_CONTENT = {
    "application/json": {"schema": {"type": "object"}},
    "application/octet-stream": _BYTES,
    "text/x-diff": _BYTES,
}


@cache
def document(endpoints: tuple[Endpoint, ...]) -> str:
    """The document as JSON. The first call takes a tenth of a second."""
    bodies = {each.json_body for each in endpoints if each.json_body}
    answers = [each.returned for each in endpoints if each.model]
    modes: dict[Any, JsonSchemaMode] = dict.fromkeys(bodies, "validation")
    modes |= dict.fromkeys([*answers, *RESULTS.values(), Problem], "serialization")
    made, definitions = TypeAdapter.json_schemas(
        [(str(kind), mode, TypeAdapter(kind)) for kind, mode in modes.items()],
        ref_template=f"{_SCHEMAS}{{model}}",
    )
    schemas = definitions["$defs"]
    references = {kind: made[str(kind), mode] for kind, mode in modes.items()}
    del schemas["Problem"]["properties"]["facts"]  # facts stand beside the other members
    schemas["Problem"]["additionalProperties"] = True
    results = sorted({references[message]["$ref"] for message in RESULTS.values()})
    schemas["Operation"]["properties"]["result"] = {
        "oneOf": [*({"$ref": reference} for reference in results), {"type": "null"}],
        "description": "by kind: "
        + ", ".join(f"{kind}: {message.__name__}" for kind, message in RESULTS.items()),
    }
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        schemas |= _query_schema(endpoint).get("$defs", {})
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _described(
            endpoint, references
        )
    info = {
        "title": "mirrord",
        "summary": "Git-native mirrors and sealed checkouts, over a Unix socket",
        "version": __version__,
    }
    return json.dumps(
        {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}
    )


def _described(endpoint: Endpoint, references: dict[Any, Any]) -> dict[str, Any]:
    query = _query_schema(endpoint)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in endpoint.parameters
    ] + [
        {
            "name": name,
            "in": "query",
            "required": name in query.get("required", ()),
            "schema": schema,
        }
        for name, schema in query.get("properties", {}).items()
    ]
    described: dict[str, Any] = {
        "tags": [endpoint.noun],
        "summary": endpoint.name.replace("_", " ").capitalize(),
        "operationId": endpoint.name,
        "responses": _answers(endpoint, references),
        "x-access": endpoint.access.name.lower(),
    }
    if text := inspect.getdoc(endpoint.handler):
        described["description"] = text
    if parameters:
        described["parameters"] = parameters
    if endpoint.json_body:
        content = {"application/json": {"schema": references[endpoint.json_body]}}
        described["requestBody"] = {"content": content, "required": True}
    elif endpoint.upload:  # taken as bytes, whatever media type is sent
        described["requestBody"] = {"content": {endpoint.upload: _BYTES}}
    return described


def _query_schema(endpoint: Endpoint) -> dict[str, Any]:
    return endpoint.query.model_json_schema(ref_template=f"{_SCHEMAS}{{model}}")


def _answers(endpoint: Endpoint, references: dict[Any, Any]) -> dict[str, Any]:
    good: dict[str, Any] = {"description": "Successful Response"}
    if endpoint.model:
        good["content"] = {"application/json": {"schema": references[endpoint.returned]}}
    elif endpoint.answer:
        text = {"schema": {"type": "string"}}
        good["content"] = {endpoint.answer: _CONTENT.get(endpoint.answer, text)}
    answers: dict[str, Any] = {
        str(endpoint.status): good,
        "default": {"description": "A problem", "content": _PROBLEM},
    }
    for status in sorted({error.http_status for error in endpoint.errors}):
        codes = sorted(error.code for error in endpoint.errors if error.http_status == status)
        answers[str(status)] = {
            "description": f"Problem: {', '.join(codes)}",
            "content": _PROBLEM,
            "x-codes": codes,
        }
    if endpoint.answer is Health:  # a degraded daemon answers with its health too
        answers["503"]["content"] = {**_PROBLEM, **good["content"]}
    return answers
