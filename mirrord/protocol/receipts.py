"""Receipts: what a checkout is and how that was proven."""

from datetime import datetime
from typing import Literal

from .. import model
from .codec import Answer, Request, canonical

RECEIPT_FORMAT: Literal["mirrord-receipt/1"] = "mirrord-receipt/1"


class Closure(Answer):
    """The objects of a sealed store. `sha256` is of their ids, sorted, each with a line feed."""

    objects: int
    sha256: str


class Proven(Answer):
    """How something was proven, and when."""

    method: str
    at: datetime


class Digest(Answer):
    bytes: int
    sha256: str


class LayerFacts(Answer):
    """The prepared layer of a checkout: `tree` is git's of the commit with what it changed."""

    id: str
    name: str
    saved_by: int
    tree: str


class GradeFacts(Answer):
    """How a grade was made. `dropped` is cut at a thousand; `dropped_count` counts all."""

    policy: str
    strategy: str | None = None
    dropped: list[str] = []
    dropped_count: int


class Receipt(Answer, Request):
    """What a checkout is, and how that was proven. docs/receipts.md defines every member.

    A receipt is also a request, to be verified: the daemon refuses members that it does not know.
    """

    format: Literal["mirrord-receipt/1"]
    version: str
    issued_at: datetime
    checkout: str
    parent: str | None = None
    instance: str | None = None
    dataset: str | None = None
    mirror: str
    upstream: str | None = None
    commit: str
    tree: str
    head: str
    history: model.History
    view: model.View
    backend: model.Backend
    created_at: datetime
    expires_at: datetime
    resets: int
    closure: Closure | None = None
    seal: Proven | None = None
    template: Proven | None = None
    clean: Proven | None = None
    layer: LayerFacts | None = None
    environment: str | None = None
    grade: GradeFacts | None = None
    diff: Digest
    signature: str | None = None

    def canonical(self) -> bytes:
        """The file to keep: canonical JSON (RFC 8785), without members that are None."""
        return canonical(self)

    def signed_bytes(self) -> bytes:
        """What a signature is of: the canonical form of all members but `signature`."""
        return canonical({**self.to_json(), "signature": None})


class Mismatch(Answer):
    """A member of a receipt that does not hold; `found` is None where nothing was found."""

    member: str
    stated: str | None
    found: str | None


class ReceiptReport(Answer):
    """The answer of `receipt --verify`; `checked` are the members that were compared."""

    holds: bool
    mismatches: list[Mismatch] = []
    checked: list[str] = []
