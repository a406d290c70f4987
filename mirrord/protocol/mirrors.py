"""Mirrors, their refs, pins and bundles."""

from datetime import datetime
from typing import Annotated, Literal

from .codec import Answer, Bounds, Problem, Repo, Request, Text


class AddMirror(Request):
    repo: Repo
    url: Annotated[str, Bounds(max_length=4000)] | None = None


class SyncMirror(Request):
    """`accept_loss` follows an upstream that lost most of its refs, or its whole history."""

    accept_loss: bool = False


class RestoreRefs(Request):
    at: Annotated[
        str,
        Bounds(min_length=1, max_length=100, description="id of a ref record, or ISO 8601 time"),
    ]


class AddPin(Request):
    mirror: Repo
    commit: str
    reason: Text = ""


class RefFault(Answer):
    """A ref that upstream offers and the mirror could not take."""

    ref: str
    commit: str
    reason: str


class Mirror(Answer):
    """`url` has no secrets. `state` is `empty` until the first sync has ended."""

    name: str
    repo: str
    url: str
    state: Literal["empty", "ready", "failed"]
    default_branch: str | None = None
    ref_count: int | None = None
    pin_count: int = 0
    kept_count: int | None = None
    size_bytes: int | None = None
    synced_at: datetime | None = None
    attempted_at: datetime | None = None
    error: Problem | None = None
    ref_faults: list[RefFault] = []


class RefChange(Answer):
    """`kind` says what upstream did; `kept` is true where a kept ref holds the old tip."""

    ref: str
    kind: Literal["created", "forwarded", "forced", "deleted"]
    old: str | None = None
    new: str | None = None
    kept: bool = False


class RefRecord(Answer):
    """One entry of a mirror's ref history."""

    id: str
    at: datetime
    ref_count: int
    summary: str


class RefDiff(Answer):
    mirror: str
    a: str
    b: str
    changes: list[RefChange]


class Pin(Answer):
    """`owner` is `dataset/NAME` or `person/UID`."""

    mirror: str
    commit: str
    owner: str
    reason: str = ""
    created_at: datetime | None = None


class BundleFile(Answer):
    """A finished bundle. `record` is its newest ref record; a later bundle can start `since` it."""

    mirror: str
    file: str
    size_bytes: int
    record: str | None = None
    since: str | None = None
