"""Queries about audits, of which the newest are kept, and the last judgement of each mirror."""

from __future__ import annotations

from sqlalchemy import Connection, delete, select

from ..model import AuditLevel
from ..protocol import Audit, AuditPart
from .database import upsert
from .schema import JudgementRow, audits, judgements


def put_audit(connection: Connection, audit: Audit) -> None:
    """Record an audit; delete old ones that no judgement belongs to."""
    row = {"id": audit.id, "finished_at": audit.finished_at, "document": audit.to_json()}
    upsert(connection, audits, [row])
    # 200: a daily audit of everything, and some by hand, for about half a year
    newest = select(audits.c.id).order_by(audits.c.finished_at.desc(), audits.c.id).limit(200)
    kept = {
        *connection.execute(newest).scalars(),
        *connection.execute(select(judgements.c.audit_id)).scalars(),
    }
    connection.execute(delete(audits).where(audits.c.id.not_in(kept)))


def find_audit(connection: Connection, identity: str) -> Audit | None:
    document = connection.execute(select(audits.c.document).where(audits.c.id == identity)).scalar()
    return Audit.from_json(document) if document else None


def list_audits(connection: Connection, limit: int = 50) -> list[Audit]:
    """The newest first."""
    query = select(audits.c.document).order_by(audits.c.finished_at.desc(), audits.c.id)
    documents = connection.execute(query.limit(limit)).scalars()
    return [Audit.from_json(document) for document in documents]


def put_judgement(connection: Connection, row: JudgementRow) -> None:
    """Replace the mirror's judgement at this level."""
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
    """The last judgement of each mirror by an audit of everything at `level`, the oldest first."""
    query = select(judgements).where(judgements.c.level == level)
    query = query.order_by(judgements.c.judged_at, judgements.c.mirror_key)
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
