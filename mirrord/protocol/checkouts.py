"""Checkouts: what is asked for, what is leased, and what proves it."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from ..model import Backend, Bind, History, View
from ..units import parse_duration
from .messages import Answer, Bounds, Repo, Request


class _Seconds(Bounds):
    """A duration as the configuration spells it is a number of seconds too."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        number = super().__get_pydantic_core_schema__(source, handler)
        return {
            "type": "function-before",
            "function": {"type": "no-info", "function": self._read},
            "schema": number,
        }

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        number = super().__get_pydantic_json_schema__(schema, handler)
        return {"anyOf": [number, {"type": "string"}], "description": number.pop("description")}

    @staticmethod
    def _read(value: object) -> object:
        return parse_duration(value).total_seconds() if isinstance(value, str) else value


Ttl = Annotated[
    float,
    _Seconds(
        strict=True, gt=0, le=366 * 86400,
        description="how long the lease lives unless renewed: seconds, or a duration such as 90s, 30m or 2h",
    ),
]  # fmt: skip


OwnerUid = Annotated[
    int,
    Bounds(
        strict=True, ge=0, lt=2**32 - 1,
        description="the uid whose checkout it is, where the asker may ask for that one; default: the asker's own",
    ),
]  # fmt: skip


_Word = Annotated[str, Bounds(min_length=1, max_length=500)]


class StartCheckout(Request):
    """What to check out: `instance` (an instance id, or NAME@COMMITISH), or `mirror` with `commit`.

    `dataset` says whose instance, where several record the id differently.
    `bind` "process": it ends with the process that made the connection, not with the connection.
    """

    instance: _Word | None = None
    mirror: Repo | None = None
    commit: _Word | None = None
    dataset: _Word | None = None
    history: History | None = None
    view: View = View.AGENT
    backend: Backend | None = None
    ttl: Ttl | None = None
    owner: OwnerUid | None = None
    bind: Bind = Bind.LEASE


class ResetCheckout(Request):
    """Neither: clean, at the commit it is at. `instance` or `commit`: on to that one, of the same mirror."""

    instance: _Word | None = None
    commit: _Word | None = None
    dataset: _Word | None = None


class RenewCheckout(Request):
    ttl: Ttl | None = None


class RestorePaths(Request):
    commit: str
    paths: Annotated[
        list[Annotated[str, Bounds(min_length=1, max_length=4096)]],
        Bounds(min_length=1, max_length=10000),
    ]


class Checkout(Answer):
    """`commit` is the base commit, `tree` its verified tree; `timings` are seconds per step.

    `path` is `directory/tree`. `directory` holds nothing else; mounted elsewhere with `rslave`, it follows
    every reset. `taken_by` is the uid that asked for it. It and `owner_uid` may use it and give it back.
    """

    id: str
    path: str
    directory: str
    mirror: str
    commit: str
    tree: str
    instance: str | None = None
    history: History
    view: View
    backend: Backend
    owner_uid: int
    owner_gid: int
    taken_by: int
    bind: Bind = Bind.LEASE
    created_at: datetime
    expires_at: datetime
    timings: dict[str, float] = {}


class Proof(Answer):
    """What a reset checked, and the hashes it saw.

    The counts are null where files were not looked at one by one: an overlay reset throws the client's layer away unread, and
    what it shows instead was verified when the template was built.
    """

    head: str
    tree: str
    index: str
    control_files: int
    files_checked: int | None
    files_restored: int | None
    files_removed: int | None
    refs: list[str] = []
    packs: list[str] = []
    method: str


class ResetAnswer(Checkout):
    proof: Proof


class RestoreAnswer(Answer):
    paths: list[str]


class SealLeak(Answer):
    kind: str
    detail: str


class SealReport(Answer):
    """What `verify-seal` says of a repository. `sealed` is true when there are no leaks."""

    path: str
    base: str
    sealed: bool
    head: str | None = None
    objects_present: int = 0
    objects_in_closure: int = 0
    leaks: list[SealLeak] = []
    checked: list[str] = []
