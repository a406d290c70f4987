"""Queries about audits: each is one document, the newest are kept; and the last judgement of each mirror at each level.

Sync functions on one connection.
"""

from __future__ import annotations

from sqlalchemy import Connection, delete, select

from ..model import AuditLevel
from ..protocol import Audit, AuditPart
from .database import upsert
from .schema import JudgementRow, audits, judgements

KEPT = 200
"""A daily audit of everything, and some asked for by hand, for about half a year."""


def put_audit(connection: Connection, audit: Audit) -> None:
    """Record an audit and forget the oldest beyond KEPT, but for those that judgements belong to."""
    document = audit.to_json()
    upsert(
        connection,
        audits,
        [{"id": audit.id, "finished_at": audit.finished_at, "document": document}],
    )
    newest = select(audits.c.id).order_by(audits.c.finished_at.desc(), audits.c.id).limit(KEPT)
    kept = {
        *connection.execute(newest).scalars(),
        *connection.execute(select(judgements.c.audit_id)).scalars(),
    }
    connection.execute(delete(audits).where(audits.c.id.not_in(kept)))


def find_audit(connection: Connection, identity: str) -> Audit | None:
    document = connection.execute(select(audits.c.document).where(audits.c.id == identity)).scalar()
    return Audit.from_json(document) if document else None


def list_audits(connection: Connection, limit: int) -> list[Audit]:
    """The newest first."""
    query = (
        select(audits.c.document).order_by(audits.c.finished_at.desc(), audits.c.id).limit(limit)
    )
    return [Audit.from_json(document) for document in connection.execute(query).scalars()]


def put_judgement(connection: Connection, row: JudgementRow) -> None:
    """Record a judgement in the place of the one before."""
    value = {
        "mirror_key": row.key,
        "level": row.level,
        "audit_id": row.audit_id,
        "started_at": row.started_at,
        "judged_at": row.judged_at,
        "document": row.part.to_json(),
    }
    upsert(connection, judgements, [value])


def list_judgements(connection: Connection, level: AuditLevel) -> list[JudgementRow]:
    """The oldest first."""
    query = (
        select(judgements)
        .where(judgements.c.level == level)
        .order_by(judgements.c.judged_at, judgements.c.mirror_key)
    )
    return [
        JudgementRow(
            key=row["mirror_key"],
            level=AuditLevel(row["level"]),
            audit_id=row["audit_id"],
            started_at=row["started_at"],
            judged_at=row["judged_at"],
            part=AuditPart.from_json(row["document"]),
        )
        for row in connection.execute(query).mappings()
    ]
