"""The endpoints: one table for routes, access checks, the OpenAPI document and the tests.

A path without parameters wins over one with them that would match it too.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio.to_thread
from starlette.responses import Response

from .. import errors
from ..host.peers import Role
from ..protocol import (
    API,
    AddMirror,
    AddPin,
    Audit,
    Checkout,
    Configuration,
    Dataset,
    FormatInfo,
    Health,
    Instance,
    InstanceName,
    Message,
    Mirror,
    Operation,
    Pin,
    RefDiff,
    RefRecord,
    ReloadAnswer,
    RenewCheckout,
    Request,
    ResetAnswer,
    ResetCheckout,
    RestoreAnswer,
    RestorePaths,
    RestoreRefs,
    StartAudit,
    StartCheckout,
    StartHeal,
    Status,
    SyncMirror,
)
from . import openapi
from .handlers import checkouts, daemon, datasets, mirrors
from .request import (
    ApplyQuery,
    AuditsQuery,
    BundleQuery,
    Call,
    EventsQuery,
    ImportQuery,
    InstanceQuery,
    InstancesQuery,
    MirrorQuery,
    NoQuery,
    RefsDiffQuery,
    UnpinQuery,
    text_response,
)

OPEN, OWNER, MEMBER, ADMIN = Role


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row of the table.

    `answer` is a message, a list of one, a media type where the answer is not JSON, or None for no
    content. `body` is the message that a JSON body is read into, or the media type of a body that
    the handler streams. `early` endpoints answer before the engine is open, the others wait for it.
    `interruptible` ones are cancelled when their client hangs up, as every GET is; the rest are
    finished all the same.
    """

    method: str
    path: str
    access: Role
    handler: Callable[[Call], Awaitable[Any]]
    answer: Any
    status: int = 200
    body: type[Request] | str | None = None
    query: type[NoQuery] = NoQuery
    early: bool = False
    interruptible: bool = False

    @property
    def name(self) -> str:
        return self.handler.__name__

    @property
    def ends_with_client(self) -> bool:
        return self.interruptible or self.method == "GET"

    @property
    def noun(self) -> str:
        """The path's first component after the version."""
        return self.path.removeprefix(f"{API}/").strip("/").split("/")[0]

    @property
    def parameters(self) -> list[str]:
        return re.findall(r"\{(\w+)\}", self.path)

    @property
    def json_body(self) -> type[Request] | None:
        return self.body if isinstance(self.body, type) else None

    @property
    def model(self) -> type[Message] | None:
        """The message of the answer, or of one item of it."""
        item = getattr(self.answer, "__args__", [self.answer])[0]
        return item if isinstance(item, type) and issubclass(item, Message) else None

    @property
    def errors(self) -> list[type[errors.MirrordError]]:
        """What it may answer instead: whole families, without codes about other nouns."""
        families: list[type[errors.MirrordError]] = [
            *(errors.UsageError, errors.ResourceError),
            *(errors.IntegrityError, errors.InternalError),
        ]
        if self.access is not Role.STRANGER:
            families.append(errors.AccessError)
        if self.parameters or self.body or self.query is not NoQuery:
            families.append(errors.NotFoundError)
        if self.method != "GET" or self.noun == "checkouts":
            families.append(errors.ConflictError)
        if self.method != "GET" and self.noun in {"mirrors", "pins", "bundles"}:
            families.append(errors.UpstreamError)
        foreign = _SUBJECTS - _SUBJECTS_OF.get(self.noun, set())
        return [
            error
            for family in families
            for error in errors.iter_errors(family)
            if foreign.isdisjoint(error.code.split("-"))
        ]


_SUBJECTS_OF: dict[str, set[str]] = {
    "reload": {"config"},
    "mirrors": {"mirror", "name", "url", "commit", "bundle"},
    "bundles": {"mirror", "name", "commit", "bundle", "dataset"},
    "pins": {"mirror", "name", "commit", "pin", "url"},
    "datasets": {"dataset", "name", "mirror", "url"},
    "instances": {"instance", "dataset", "name"},
    "audits": {"audit", "mirror", "dataset", "name"},
    "heals": {"mirror", "name"},
    "checkouts": {
        "checkout", "checkouts", "instance", "dataset", "mirror", "name", "commit", "path", "patch",
        "tree", "diff", "ttl", "process",
    },
    "operations": {"operation"},
}  # fmt: skip
"""Words in error codes, by the noun whose endpoints answer with them."""
_SUBJECTS = {"already", "new", "method"}.union(*_SUBJECTS_OF.values())


async def get_openapi(_: Call) -> Response:
    """This document."""
    document = await anyio.to_thread.run_sync(openapi.document, ENDPOINTS)
    return text_response(document, "application/json")


_MIRROR, _DATASET = f"{API}/mirrors/{{name}}", f"{API}/datasets/{{name}}"
_CHECKOUT, _OPERATION = f"{API}/checkouts/{{id}}", f"{API}/operations/{{id}}"
_FILE, _PATCH = "application/octet-stream", "text/x-diff"

_get, _post, _delete = (partial(Endpoint, method) for method in ("GET", "POST", "DELETE"))

# fmt: off
ENDPOINTS = (
    _get(f"{API}/health", OPEN, daemon.health, Health, early=True),
    _get(f"{API}/status", MEMBER, daemon.get_status, Status),
    _get(f"{API}/config", ADMIN, daemon.get_configuration, Configuration),
    _post(f"{API}/reload", ADMIN, daemon.reload_configuration, ReloadAnswer),

    _get(f"{API}/mirrors", MEMBER, mirrors.list_mirrors, list[Mirror]),
    _post(f"{API}/mirrors", ADMIN, mirrors.add_mirror, Operation, 202, body=AddMirror),
    _get(_MIRROR, MEMBER, mirrors.get_mirror, Mirror),
    _delete(_MIRROR, ADMIN, mirrors.remove_mirror, None, 204),
    _post(f"{_MIRROR}/sync", ADMIN, mirrors.sync_mirror, Operation, 202, body=SyncMirror),
    _get(f"{_MIRROR}/refs/log", ADMIN, mirrors.log_refs, list[RefRecord]),
    _get(f"{_MIRROR}/refs/diff", ADMIN, mirrors.diff_refs, RefDiff, query=RefsDiffQuery),
    _post(f"{_MIRROR}/refs/restore", ADMIN, mirrors.restore_refs, Operation, 202, body=RestoreRefs),
    _get(f"{_MIRROR}/bundle", ADMIN, mirrors.create_bundle, _FILE, query=BundleQuery),
    _post(f"{API}/bundles", ADMIN, mirrors.import_bundle, Operation, 202, body=_FILE,
          query=MirrorQuery),
    _get(f"{API}/pins", ADMIN, mirrors.list_pins, list[Pin], query=MirrorQuery),
    _post(f"{API}/pins", ADMIN, mirrors.add_pin, Pin, 201, body=AddPin),
    _delete(f"{API}/pins/{{name}}/{{commit}}", ADMIN, mirrors.remove_pin, None, 204,
            query=UnpinQuery),

    _get(f"{API}/datasets", MEMBER, datasets.list_datasets, list[Dataset]),
    _post(f"{API}/datasets", ADMIN, datasets.import_dataset, Operation, 202, body=_FILE,
          query=ImportQuery),
    _get(f"{API}/datasets/formats", MEMBER, datasets.list_formats, list[FormatInfo]),
    _get(_DATASET, MEMBER, datasets.get_dataset, Dataset),
    _delete(_DATASET, ADMIN, datasets.remove_dataset, None, 204),
    _get(f"{API}/instances", ADMIN, datasets.list_instances, list[InstanceName],
         query=InstancesQuery),
    _get(f"{API}/instances/{{id}}", MEMBER, datasets.get_instance, Instance, query=InstanceQuery),

    _get(f"{API}/audits", ADMIN, mirrors.list_audits, list[Audit], query=AuditsQuery),
    _post(f"{API}/audits", ADMIN, mirrors.start_audit, Operation, 202, body=StartAudit),
    _get(f"{API}/audits/{{id}}", ADMIN, mirrors.get_audit, Audit),
    _post(f"{API}/heals", ADMIN, mirrors.start_heal, Operation, 202, body=StartHeal),
    _post(f"{_MIRROR}/heal", ADMIN, mirrors.heal_with_bundle, Operation, 202, body=_FILE),

    _get(f"{API}/checkouts", OWNER, checkouts.list_checkouts, list[Checkout]),
    _post(f"{API}/checkouts", MEMBER, checkouts.start_checkout, Checkout, 201, body=StartCheckout,
          interruptible=True),
    _get(_CHECKOUT, OWNER, checkouts.get_checkout, Checkout),
    _delete(_CHECKOUT, OWNER, checkouts.release_checkout, None, 204),
    _post(f"{_CHECKOUT}/reset", OWNER, checkouts.reset_checkout, ResetAnswer, body=ResetCheckout,
          interruptible=True),
    _post(f"{_CHECKOUT}/renew", OWNER, checkouts.renew_checkout, Checkout, body=RenewCheckout),
    _get(f"{_CHECKOUT}/diff", OWNER, checkouts.diff_checkout, _PATCH),
    _post(f"{_CHECKOUT}/apply", OWNER, checkouts.apply_patch, Checkout, body=_FILE,
          query=ApplyQuery, interruptible=True),
    _post(f"{_CHECKOUT}/restore", ADMIN, checkouts.restore_paths, RestoreAnswer, body=RestorePaths,
          interruptible=True),

    _get(f"{API}/operations", MEMBER, daemon.list_operations, list[Operation]),
    _get(_OPERATION, MEMBER, daemon.get_operation, Operation),
    _delete(_OPERATION, MEMBER, daemon.cancel_operation, Operation),
    _get(f"{API}/events", MEMBER, daemon.stream_events, "text/event-stream", query=EventsQuery),
    _get(f"{API}/openapi.json", MEMBER, get_openapi, "application/json"),
    _get("/metrics", MEMBER, daemon.get_metrics, "text/plain"),
)
# fmt: on
