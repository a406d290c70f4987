"""The table of endpoints, for routes, access checks, the OpenAPI document and tests.

A path without parameters takes precedence over a pattern that matches it too.
"""

import inspect
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from types import UnionType
from typing import Any, get_args, get_type_hints

import anyio.to_thread
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode
from starlette.responses import Response

from .. import __version__, errors
from ..host.peers import Role
from ..protocol import API, RESULTS, Health, Message, Operation, Problem, Receipt, Request
from . import checkouts, daemon, datasets, mirrors, turns
from .request import MEDIA_TYPE, Call, Query, text_response

OPEN, OWNER, MEMBER, ADMIN = Role


# about the daemon itself; `status` and `health` say that the state directory is gone
_STATELESS = {"health", "status", "activity", "config", "reload", "operations", "events"}
_STATELESS |= {"openapi.json", "metrics"}


@dataclass(frozen=True)
class Endpoint:
    """One endpoint.

    The handler's annotations define the request and the answer: `query` and `body` are parsed into
    their classes, a message or a list of messages is encoded as JSON, and None means no content.
    `answer` documents a handler that builds its response itself; `upload` is the media type of a
    body that it streams. `early` endpoints answer before the engine is open; others wait for it.
    `interruptible` ones, and every GET, are cancelled when their client hangs up; others finish.
    """

    method: str
    path: str
    access: Role
    handler: Callable[..., Awaitable[Any]]
    status: int = 200
    answer: Any = None
    upload: str | None = None
    early: bool = False
    interruptible: bool = False

    @cached_property
    def _annotations(self) -> dict[str, Any]:
        return get_type_hints(self.handler)

    @cached_property
    def json_body(self) -> type[Request] | None:
        return self._annotations.get("body")

    @cached_property
    def query(self) -> type[Query]:
        """The class of the query; `Query` itself if there are no parameters."""
        declared: type[Query] = self._annotations.get("query", Query)
        return declared

    @cached_property
    def returned(self) -> Any:
        """A message, a list of messages, a media type, or None; without the operation."""
        declared = self.answer or self._annotations["return"]
        if self.may_take_long:
            (declared,) = {*get_args(declared)} - {Operation}
        return declared

    @cached_property
    def model(self) -> type[Message] | None:
        """The class of the answer's message, or of its items."""
        item = getattr(self.returned, "__args__", [self.returned])[0]
        return item if isinstance(item, type) and issubclass(item, Message) else None

    @property
    def name(self) -> str:
        return self.handler.__name__

    @cached_property
    def may_take_long(self) -> bool:
        """True if it may answer with 202 and an operation that goes on."""
        declared = self._annotations["return"]
        return isinstance(declared, UnionType) and Operation in get_args(declared)

    @property
    def ends_with_client(self) -> bool:
        return self.interruptible or self.method == "GET"

    @property
    def needs_state(self) -> bool:
        """True if its answer is about the state directory, which must be there then."""
        return self.noun not in _STATELESS

    @property
    def noun(self) -> str:
        """The path's first component after the version."""
        return self.path.removeprefix(f"{API}/").strip("/").split("/")[0]

    @property
    def parameters(self) -> list[str]:
        return re.findall(r"\{(\w+)\}", self.path)

    @property
    def errors(self) -> list[type[errors.MirrordError]]:
        """The families of errors that it may return, with all their codes."""
        families: list[type[errors.MirrordError]] = [
            *(errors.UsageError, errors.ResourceError),
            *(errors.IntegrityError, errors.InternalError),
        ]
        if self.access is not Role.STRANGER:
            families.append(errors.AccessError)
        if self.parameters or self.json_body or self.upload or self.query is not Query:
            families.append(errors.NotFoundError)
        if self.method != "GET" or self.noun == "checkouts":
            families.append(errors.ConflictError)
        if self.method != "GET" and self.noun in {"mirrors", "pins", "bundles"}:
            families.append(errors.UpstreamError)
        return [error for family in families for error in errors.iter_errors(family)]


async def get_openapi(_: Call) -> Response:
    """Return this document."""
    document = await anyio.to_thread.run_sync(openapi_document, ENDPOINTS)
    return text_response(document, "application/json")


_MIRROR, _DATASET = f"{API}/mirrors/{{name}}", f"{API}/datasets/{{name}}"
_CHECKOUT, _OPERATION = f"{API}/checkouts/{{id}}", f"{API}/operations/{{id}}"
_ENVIRONMENT = f"{API}/environments/{{key}}"
_FILE, _PATCH, _TOML = "application/octet-stream", "text/x-diff", "application/toml"

_get, _post, _delete = (partial(Endpoint, method) for method in ("GET", "POST", "DELETE"))

# fmt: off
ENDPOINTS = (
    _get(f"{API}/health", OPEN, daemon.health, answer=Health, early=True),
    _get(f"{API}/status", MEMBER, daemon.get_status),
    _get(f"{API}/activity", MEMBER, daemon.get_activity),
    _get(f"{API}/config", ADMIN, daemon.get_configuration),
    _post(f"{API}/reload", ADMIN, daemon.reload_configuration),
    _get(f"{API}/usage", OWNER, daemon.get_usage),
    _post(f"{API}/gc", ADMIN, daemon.collect_garbage),

    _get(f"{API}/mirrors", MEMBER, mirrors.list_mirrors),
    _post(f"{API}/mirrors", ADMIN, mirrors.add_mirror, 202),
    _get(_MIRROR, MEMBER, mirrors.get_mirror),
    _delete(_MIRROR, ADMIN, mirrors.remove_mirror, 204),
    _post(f"{_MIRROR}/sync", ADMIN, mirrors.sync_mirror, 202),
    _post(f"{_MIRROR}/url", ADMIN, mirrors.set_url, 202),
    _post(f"{API}/credentials/check", ADMIN, mirrors.check_credential, interruptible=True),
    _get(f"{_MIRROR}/refs/log", ADMIN, mirrors.log_refs),
    _get(f"{_MIRROR}/refs/diff", ADMIN, mirrors.diff_refs),
    _post(f"{_MIRROR}/refs/restore", ADMIN, mirrors.restore_refs, 202),
    _get(f"{_MIRROR}/bundle", ADMIN, mirrors.create_bundle, answer=_FILE),
    _post(f"{API}/bundles", ADMIN, mirrors.import_bundle, 202, upload=_FILE),
    _post(f"{API}/restores", ADMIN, mirrors.start_restore, 202),
    _get(f"{API}/pins", ADMIN, mirrors.list_pins),
    _post(f"{API}/pins", ADMIN, mirrors.add_pin, 201),
    _delete(f"{API}/pins/{{name}}/{{commit}}", ADMIN, mirrors.remove_pin, 204),

    _get(f"{API}/datasets", MEMBER, datasets.list_datasets),
    _post(f"{API}/datasets", ADMIN, datasets.import_dataset, 202, upload=_FILE),
    _get(f"{API}/datasets/formats", MEMBER, datasets.list_formats),
    _get(_DATASET, MEMBER, datasets.get_dataset),
    _delete(_DATASET, ADMIN, datasets.remove_dataset, 204),
    _post(f"{_DATASET}/prepare", MEMBER, datasets.prepare_dataset, 202),
    _get(f"{_DATASET}/diff", ADMIN, datasets.diff_datasets),
    _get(f"{_DATASET}/export", ADMIN, datasets.export_dataset, answer="application/jsonl"),
    _get(f"{API}/instances", ADMIN, datasets.list_instances),
    _get(f"{API}/instances/{{id}}", MEMBER, datasets.get_instance),

    _get(f"{API}/environments", MEMBER, datasets.list_environments),
    _post(f"{API}/environments", ADMIN, datasets.build_environments, 202),
    _post(f"{API}/environments/recipes", ADMIN, datasets.import_recipes, 201, upload=_TOML),
    _post(f"{API}/environments/images", ADMIN, datasets.import_image, 202, upload=_FILE),
    _get(_ENVIRONMENT, MEMBER, datasets.get_environment),
    _delete(_ENVIRONMENT, ADMIN, datasets.remove_environment, 204),
    _get(f"{_ENVIRONMENT}/log", MEMBER, datasets.get_log, answer="text/plain"),

    _get(f"{API}/audits", ADMIN, mirrors.list_audits),
    _post(f"{API}/audits", ADMIN, mirrors.start_audit, 202),
    _get(f"{API}/audits/{{id}}", ADMIN, mirrors.get_audit),
    _get(f"{API}/reports", ADMIN, daemon.list_reports),
    _post(f"{API}/reports", ADMIN, daemon.add_report, 201),
    _post(f"{API}/heals", ADMIN, mirrors.start_heal, 202),
    _post(f"{_MIRROR}/heal", ADMIN, mirrors.heal_with_bundle, 202, upload=_FILE),

    _get(f"{API}/checkouts", OWNER, checkouts.list_checkouts),
    _post(f"{API}/checkouts", MEMBER, checkouts.start_checkout, 201, interruptible=True),
    _get(_CHECKOUT, OWNER, checkouts.get_checkout),
    _delete(_CHECKOUT, OWNER, checkouts.release_checkout, 204),
    _post(f"{_CHECKOUT}/reset", OWNER, checkouts.reset_checkout, interruptible=True),
    _post(f"{_CHECKOUT}/fork", MEMBER, checkouts.fork_checkout, 201, interruptible=True),
    _get(f"{_CHECKOUT}/snapshots", OWNER, checkouts.list_snapshots),
    _post(f"{_CHECKOUT}/snapshots", OWNER, checkouts.make_snapshot, 201, interruptible=True),
    _delete(f"{_CHECKOUT}/snapshots/{{name}}", OWNER, checkouts.remove_snapshot, 204),
    _post(f"{_CHECKOUT}/layers", MEMBER, checkouts.save_layer, 201, interruptible=True),
    _get(f"{API}/layers", MEMBER, checkouts.list_layers),
    _delete(f"{API}/layers/{{id}}", MEMBER, checkouts.remove_layer, 204),
    _post(f"{_CHECKOUT}/renew", OWNER, checkouts.renew_checkout),
    _post(f"{_CHECKOUT}/attach", OWNER, checkouts.attach_checkout),
    _get(f"{_CHECKOUT}/diff", OWNER, checkouts.diff_checkout, answer=_PATCH),
    _get(f"{_CHECKOUT}/seal", ADMIN, checkouts.get_seal),
    _get(f"{_CHECKOUT}/receipt", OWNER, checkouts.get_receipt, answer=Receipt),
    _post(f"{_CHECKOUT}/apply", OWNER, checkouts.apply_patch, upload=_FILE, interruptible=True),
    _post(f"{_CHECKOUT}/restore", ADMIN, checkouts.restore_paths, interruptible=True),
    _post(f"{_CHECKOUT}/grade", ADMIN, checkouts.grade_checkout, 201, interruptible=True),
    _post(f"{API}/grades", ADMIN, checkouts.grade_patch, 201, upload=_FILE, interruptible=True),
    _post(f"{API}/turns", OWNER, turns.take_turns),
    _post(f"{API}/receipts/verify", MEMBER, checkouts.verify_receipt, interruptible=True),

    _get(f"{API}/operations", MEMBER, daemon.list_operations),
    _get(_OPERATION, MEMBER, daemon.get_operation),
    _delete(_OPERATION, MEMBER, daemon.cancel_operation),
    _get(f"{API}/events", MEMBER, daemon.stream_events, answer="text/event-stream"),
    _get(f"{API}/openapi.json", MEMBER, get_openapi, answer="application/json"),
    _get("/metrics", MEMBER, daemon.get_metrics, answer="text/plain"),
)
# fmt: on


# -- the OpenAPI document -------------------

_SCHEMAS = "#/components/schemas/"
_PROBLEM = {MEDIA_TYPE: {"schema": {"$ref": f"{_SCHEMAS}Problem"}}}
_BYTES = {"schema": {"type": "string", "format": "binary"}}
_CONTENT = {
    "application/json": {"schema": {"type": "object"}},
    "application/octet-stream": _BYTES,
    "text/x-diff": _BYTES,
}


@cache
def openapi_document(endpoints: tuple[Endpoint, ...]) -> str:
    """Return the OpenAPI document as JSON. The first call takes 0.1 s."""
    bodies = {endpoint.json_body for endpoint in endpoints if endpoint.json_body}
    answers = [endpoint.returned for endpoint in endpoints if endpoint.model]
    modes: dict[Any, JsonSchemaMode] = dict.fromkeys(bodies, "validation")
    modes |= dict.fromkeys([*answers, *RESULTS.values(), Problem], "serialization")
    made, definitions = TypeAdapter.json_schemas(
        [(str(kind), mode, TypeAdapter(kind)) for kind, mode in modes.items()],
        ref_template=f"{_SCHEMAS}{{model}}",
    )
    schemas = definitions["$defs"]
    references = {kind: made[str(kind), mode] for kind, mode in modes.items()}
    del schemas["Problem"]["properties"]["facts"]  # facts are members of the problem itself
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
        "summary": "Git mirrors and sealed checkouts over a Unix socket",
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
    elif endpoint.upload:  # read as bytes, whatever its media type
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
    if endpoint.may_take_long:
        content = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}Operation"}}}
        answers["202"] = {"description": "It goes on as an operation", "content": content}
    for status in sorted({error.http_status for error in endpoint.errors}):
        codes = sorted(error.code for error in endpoint.errors if error.http_status == status)
        answers[str(status)] = {
            "description": "A problem with one of the codes in x-codes",
            "content": _PROBLEM,
            "x-codes": codes,
        }
    if endpoint.answer is Health:  # a degraded daemon answers 503 with its health
        answers["503"]["content"] = {**_PROBLEM, **good["content"]}
    return answers
