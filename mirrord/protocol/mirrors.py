"""Mirrors and what holds their commits: refs, their history, pins, bundles."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from .messages import Answer, Bounds, Problem, Repo, Request, Text


class AddMirror(Request):
    repo: Repo
    url: Annotated[str, Bounds(max_length=4000)] | None = None


class SyncMirror(Request):
    """`accept_loss` follows an upstream that lost most of its refs, or its whole history; what it had is kept."""

    accept_loss: bool = False


class RestoreRefs(Request):
    at: Annotated[
        str,
        Bounds(
            min_length=1, max_length=100, description="a ref record: its id, or a time in ISO 8601"
        ),
    ]


class AddPin(Request):
    mirror: Repo
    commit: str
    reason: Text = ""


class RefFault(Answer):
    """A ref that upstream offers and we could not take."""

    ref: str
    commit: str
    reason: str


class Mirror(Answer):
    """`url` has no secrets. `state` is `empty` until the first sync ended."""

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
    """`kind` says what upstream did; `kept` is true where the old tip is held by a kept ref."""

    ref: str
    kind: Literal["created", "forwarded", "forced", "deleted"]
    old: str | None = None
    new: str | None = None
    kept: bool = False


class RefRecord(Answer):
    """One entry of a mirror's ref history; `was` are ids it had before a bundle was merged below it, which name it still."""

    id: str
    at: datetime
    ref_count: int
    summary: str
    was: list[str] = []


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
    """A bundle that was written. `record` is its newest ref record: what a later one may be made `since`."""

    mirror: str
    file: str
    size_bytes: int
    record: str | None = None
    since: str | None = None
