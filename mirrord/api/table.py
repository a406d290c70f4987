"""The endpoints: one table, from which routes, the OpenAPI document, the access checks and the tests are made.

The order is the order of the documents. A path without parameters wins over one that would match it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ..errors import (
    AccessError,
    ConflictError,
    IntegrityError,
    InternalError,
    MirrordError,
    NotFoundError,
    ResourceError,
    UpstreamError,
    UsageError,
    iter_errors,
)
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
from .handlers import checkouts, daemon, datasets, mirrors
from .handlers import daemon as operations
from .handlers import mirrors as audits
from .handlers import mirrors as bundles
from .handlers import mirrors as pins
from .request import (
    ApplyQuery,
    AuditsQuery,
    BundleQuery,
    Call,
    EventsQuery,
    ImportBundleQuery,
    ImportQuery,
    InstanceQuery,
    InstancesQuery,
    NoQuery,
    PinsQuery,
    Query,
    RefsDiffQuery,
    UnpinQuery,
)

OPEN, OWNER, MEMBER, ADMIN = Role


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`answer` is a model, a list of one, a media type for anything that is not JSON, or None for no content.

    `body` is a model that the JSON body is read into, or a media type for a body that the handler streams.
    `early` endpoints answer before the engine is open, and go on when it is not. `interruptible` ones end with their client, as
    all do that only read; what else was asked for is done, whoever hangs up.
    """

    method: str
    path: str
    access: Role
    handler: Callable[[Call], Awaitable[Any]]
    answer: Any
    status: int = 200
    body: type[Request] | str | None = None
    query: type[Query] = NoQuery
    early: bool = False
    interruptible: bool = False

    @property
    def name(self) -> str:
        return self.handler.__name__

    @property
    def ends_with_client(self) -> bool:
        return self.interruptible or self.method == "GET"

    @property
    def summary(self) -> str:
        return self.name.replace("_", " ").capitalize()

    @property
    def noun(self) -> str:
        """What the path is about: its first component behind the version."""
        return self.path.removeprefix(f"{API}/").strip("/").split("/")[0]

    @property
    def parameters(self) -> list[str]:
        return re.findall(r"\{(\w+)\}", self.path)

    @property
    def json_body(self) -> type[Request] | None:
        return self.body if isinstance(self.body, type) else None

    @property
    def errors(self) -> list[type[MirrordError]]:
        """What it may answer instead: whole families, without what speaks of another noun's things."""
        families: list[type[MirrordError]] = [
            UsageError,
            ResourceError,
            IntegrityError,
            InternalError,
        ]
        if self.access is not Role.STRANGER:
            families.append(AccessError)
        if self.parameters or self.body or self.query is not NoQuery:
            families.append(NotFoundError)
        if self.method != "GET" or self.noun == "checkouts":
            families.append(ConflictError)
        if self.method != "GET" and self.noun in {"mirrors", "pins", "bundles"}:
            families.append(UpstreamError)
        foreign = _SUBJECTS - _SPEAKS_OF.get(self.noun, set())
        return [
            error
            for family in families
            for error in iter_errors(family)
            if foreign.isdisjoint(error.code.split("-"))
        ]

    @property
    def model(self) -> type[Message] | None:
        """The model of the answer, or of one item of it."""
        item = getattr(self.answer, "__args__", [self.answer])[0]
        return item if isinstance(item, type) and issubclass(item, Message) else None


_SPEAKS_OF: dict[str, set[str]] = {
    "reload": {"config"},
    "mirrors": {"mirror", "name", "url", "commit", "bundle"},
    "bundles": {"mirror", "name", "commit", "bundle", "dataset"},
    "pins": {"mirror", "name", "commit", "pin", "url"},
    "datasets": {"dataset", "name", "mirror", "url"},
    "instances": {"instance", "dataset", "name"},
    "audits": {"audit", "mirror", "dataset", "name"},
    "heals": {"mirror", "name"},
    "checkouts": {
        "checkout", "checkouts", "instance", "dataset", "mirror", "name", "commit", "path", "patch", "tree", "diff", "ttl",
        "process",
    },
    "operations": {"operation"},
}  # fmt: skip
_SUBJECTS = {"already", "new", "method"}.union(*_SPEAKS_OF.values())
"""Words of codes that not every endpoint can answer with; of the first three, none that is in the table."""

_MIRROR, _DATASET, _CHECKOUT = (
    f"{API}/mirrors/{{name}}",
    f"{API}/datasets/{{name}}",
    f"{API}/checkouts/{{id}}",
)
_FILE, _PATCH = "application/octet-stream", "text/x-diff"

ENDPOINTS = (
    Endpoint("GET", f"{API}/health", OPEN, daemon.health, Health, early=True),
    Endpoint("GET", f"{API}/status", MEMBER, daemon.get_status, Status),
    Endpoint("GET", f"{API}/config", ADMIN, daemon.get_configuration, Configuration),
    Endpoint("POST", f"{API}/reload", ADMIN, daemon.reload_configuration, ReloadAnswer),
    Endpoint("GET", f"{API}/mirrors", MEMBER, mirrors.list_mirrors, list[Mirror]),
    Endpoint("POST", f"{API}/mirrors", ADMIN, mirrors.add_mirror, Operation, 202, body=AddMirror),
    Endpoint("GET", _MIRROR, MEMBER, mirrors.get_mirror, Mirror),
    Endpoint("DELETE", _MIRROR, ADMIN, mirrors.remove_mirror, None, 204),
    Endpoint(
        "POST", f"{_MIRROR}/sync", ADMIN, mirrors.sync_mirror, Operation, 202, body=SyncMirror
    ),
    Endpoint("GET", f"{_MIRROR}/refs/log", ADMIN, mirrors.log_refs, list[RefRecord]),
    Endpoint("GET", f"{_MIRROR}/refs/diff", ADMIN, mirrors.diff_refs, RefDiff, query=RefsDiffQuery),
    Endpoint(
        "POST",
        f"{_MIRROR}/refs/restore",
        ADMIN,
        mirrors.restore_refs,
        Operation,
        202,
        body=RestoreRefs,
    ),
    Endpoint("GET", f"{_MIRROR}/bundle", ADMIN, bundles.create_bundle, _FILE, query=BundleQuery),
    Endpoint(
        "POST",
        f"{API}/bundles",
        ADMIN,
        bundles.import_bundle,
        Operation,
        202,
        body=_FILE,
        query=ImportBundleQuery,
    ),
    Endpoint("GET", f"{API}/pins", ADMIN, pins.list_pins, list[Pin], query=PinsQuery),
    Endpoint("POST", f"{API}/pins", ADMIN, pins.add_pin, Pin, 201, body=AddPin),
    Endpoint(
        "DELETE",
        f"{API}/pins/{{name}}/{{commit}}",
        ADMIN,
        pins.remove_pin,
        None,
        204,
        query=UnpinQuery,
    ),
    Endpoint("GET", f"{API}/datasets", MEMBER, datasets.list_datasets, list[Dataset]),
    Endpoint(
        "POST",
        f"{API}/datasets",
        ADMIN,
        datasets.import_dataset,
        Operation,
        202,
        body=_FILE,
        query=ImportQuery,
    ),
    Endpoint("GET", f"{API}/datasets/formats", MEMBER, datasets.list_formats, list[FormatInfo]),
    Endpoint("GET", _DATASET, MEMBER, datasets.get_dataset, Dataset),
    Endpoint("DELETE", _DATASET, ADMIN, datasets.remove_dataset, None, 204),
    Endpoint(
        "GET",
        f"{API}/instances",
        ADMIN,
        datasets.list_instances,
        list[InstanceName],
        query=InstancesQuery,
    ),
    Endpoint(
        "GET",
        f"{API}/instances/{{id}}",
        MEMBER,
        datasets.get_instance,
        Instance,
        query=InstanceQuery,
    ),
    Endpoint("GET", f"{API}/audits", ADMIN, audits.list_audits, list[Audit], query=AuditsQuery),
    Endpoint("POST", f"{API}/audits", ADMIN, audits.start_audit, Operation, 202, body=StartAudit),
    Endpoint("GET", f"{API}/audits/{{id}}", ADMIN, audits.get_audit, Audit),
    Endpoint("POST", f"{API}/heals", ADMIN, audits.start_heal, Operation, 202, body=StartHeal),
    Endpoint("POST", f"{_MIRROR}/heal", ADMIN, audits.heal_with_bundle, Operation, 202, body=_FILE),
    Endpoint("GET", f"{API}/checkouts", OWNER, checkouts.list_checkouts, list[Checkout]),
    Endpoint(
        "POST",
        f"{API}/checkouts",
        MEMBER,
        checkouts.start_checkout,
        Checkout,
        201,
        body=StartCheckout,
        interruptible=True,
    ),
    Endpoint("GET", _CHECKOUT, OWNER, checkouts.get_checkout, Checkout),
    Endpoint("DELETE", _CHECKOUT, OWNER, checkouts.release_checkout, None, 204),
    Endpoint(
        "POST",
        f"{_CHECKOUT}/reset",
        OWNER,
        checkouts.reset_checkout,
        ResetAnswer,
        body=ResetCheckout,
        interruptible=True,
    ),
    Endpoint(
        "POST", f"{_CHECKOUT}/renew", OWNER, checkouts.renew_checkout, Checkout, body=RenewCheckout
    ),
    Endpoint("GET", f"{_CHECKOUT}/diff", OWNER, checkouts.diff_checkout, _PATCH),
    Endpoint(
        "POST",
        f"{_CHECKOUT}/apply",
        OWNER,
        checkouts.apply_patch,
        Checkout,
        body=_FILE,
        query=ApplyQuery,
        interruptible=True,
    ),
    Endpoint(
        "POST",
        f"{_CHECKOUT}/restore",
        ADMIN,
        checkouts.restore_paths,
        RestoreAnswer,
        body=RestorePaths,
        interruptible=True,
    ),
    Endpoint("GET", f"{API}/operations", MEMBER, operations.list_operations, list[Operation]),
    Endpoint("GET", f"{API}/operations/{{id}}", MEMBER, operations.get_operation, Operation),
    Endpoint("DELETE", f"{API}/operations/{{id}}", MEMBER, operations.cancel_operation, Operation),
    Endpoint(
        "GET",
        f"{API}/events",
        MEMBER,
        operations.stream_events,
        "text/event-stream",
        query=EventsQuery,
    ),
    Endpoint("GET", f"{API}/openapi.json", MEMBER, daemon.get_openapi, "application/json"),
    Endpoint("GET", "/metrics", MEMBER, daemon.get_metrics, "text/plain"),
)
