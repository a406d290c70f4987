"""Queries about audits: each is one document, the newest are kept. Sync functions on one connection."""

from __future__ import annotations

from sqlalchemy import Connection, delete, select

from ..protocol import Audit
from .database import upsert
from .schema import audits

KEPT = 200
"""A daily audit of everything, and some asked for by hand, for about half a year."""


def put_audit(connection: Connection, audit: Audit) -> None:
    """Record an audit and forget the oldest beyond KEPT."""
    document = audit.model_dump(mode="json")
    upsert(connection, audits, [{"id": audit.id, "finished_at": audit.finished_at, "document": document}])
    newest = select(audits.c.id).order_by(audits.c.finished_at.desc(), audits.c.id).limit(KEPT)
    kept = list(connection.execute(newest).scalars())
    connection.execute(delete(audits).where(audits.c.id.not_in(kept)))


def find_audit(connection: Connection, identity: str) -> Audit | None:
    document = connection.execute(select(audits.c.document).where(audits.c.id == identity)).scalar()
    return Audit.model_validate(document) if document else None


def list_audits(connection: Connection, limit: int) -> list[Audit]:
    """The newest first."""
    query = select(audits.c.document).order_by(audits.c.finished_at.desc(), audits.c.id).limit(limit)
    return [Audit.model_validate(document) for document in connection.execute(query).scalars()]
