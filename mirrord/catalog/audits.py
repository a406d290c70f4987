"""Queries about audits, judgements, reports and receipts, on one connection."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, RowMapping, and_, delete, select

from ..model import AuditLevel
from ..protocol import Audit, AuditPart, Receipt, Report
from .database import lock, upsert
from .mirrors import M
from .schema import JudgementRow, ReceiptRow, audits, judgements, receipts, reports

KEPT = 200  # newest audits, reports and receipts; daily audits of half a year


def put_audit(connection: Connection, audit: Audit, node: str = "") -> None:
    """Record a node's audit. Delete its old ones, except those with a current judgement."""
    row = {"id": audit.id, "finished_at": audit.finished_at, "document": audit.to_json()}
    upsert(connection, audits, [row | {"node": node}])
    newest = select(audits.c.id).where(audits.c.node == node)
    newest = newest.order_by(audits.c.finished_at.desc(), audits.c.id).limit(KEPT)
    judged = select(judgements.c.audit_id).where(judgements.c.node == node)
    kept = {*connection.execute(newest).scalars(), *connection.execute(judged).scalars()}
    old = and_(audits.c.node == node, audits.c.id.not_in(kept))
    connection.execute(delete(audits).where(old))


def find_audit(connection: Connection, identity: str) -> Audit | None:
    query = select(audits.c.document).where(audits.c.id == identity)
    return next(_documents(connection, query, Audit), None)


def list_audits(connection: Connection, limit: int = 50, node: str | None = None) -> list[Audit]:
    """List audits of one node or of all, newest first."""
    query = select(audits.c.document).order_by(audits.c.finished_at.desc(), audits.c.id)
    if node is not None:
        query = query.where(audits.c.node == node)
    return list(_documents(connection, query.limit(limit), Audit))


def _documents(connection: Connection, query: sa.Select[Any], kind: type[M]) -> Iterator[M]:
    return map(kind.from_json, connection.execute(query).scalars())


_JUDGEMENT = ("level", "audit_id", "started_at", "judged_at", "node")


def put_judgement(connection: Connection, row: JudgementRow) -> None:
    """Replace the mirror's judgement at this level."""
    values = {name: getattr(row, name) for name in _JUDGEMENT}
    values |= {"mirror_key": row.key, "document": row.part.to_json()}
    upsert(connection, judgements, [values])


def list_judgements(
    connection: Connection, level: AuditLevel, node: str = ""
) -> list[JudgementRow]:
    """List each mirror's last judgement by an audit of everything at `level`, oldest first."""
    query = select(judgements).where(judgements.c.level == level, judgements.c.node == node)
    query = query.order_by(judgements.c.judged_at, judgements.c.mirror_key)
    return [_judgement_row(row) for row in connection.execute(query).mappings()]


def _judgement_row(row: RowMapping) -> JudgementRow:
    values = {name: row[name] for name in _JUDGEMENT} | {"level": AuditLevel(row["level"])}
    return JudgementRow(row["mirror_key"], part=AuditPart.from_json(row["document"]), **values)


def put_report(connection: Connection, report: Report) -> None:
    # audits are dropped by node; of reports and receipts each node drops those of all
    lock(connection, "reports")
    row = {"id": report.id, "received_at": report.at, "document": report.to_json()}
    upsert(connection, reports, [row])
    _drop_old(connection, reports, reports.c.received_at)


def _drop_old(connection: Connection, table: sa.Table, column: sa.Column[datetime]) -> None:
    newest = select(table.c.id).order_by(column.desc(), table.c.id).limit(KEPT)
    kept = connection.execute(newest).scalars().all()
    connection.execute(delete(table).where(table.c.id.not_in(kept)))


def find_report(connection: Connection, identity: str) -> Report | None:
    query = select(reports.c.document).where(reports.c.id == identity)
    return next(_documents(connection, query, Report), None)


def list_reports(connection: Connection, limit: int = 200) -> list[Report]:
    """List reports, newest first."""
    query = select(reports.c.document).order_by(reports.c.received_at.desc(), reports.c.id)
    return list(_documents(connection, query.limit(limit), Report))


def put_receipts(connection: Connection, rows: Sequence[ReceiptRow]) -> None:
    lock(connection, "receipts")
    values = [
        {name: getattr(row, name) for name in _RECEIPT}
        | {"document": row.receipt.to_json(), "issued_at": row.receipt.issued_at}
        for row in rows
    ]
    upsert(connection, receipts, values)
    _drop_old(connection, receipts, receipts.c.issued_at)


def find_receipt(connection: Connection, identity: str) -> ReceiptRow | None:
    rows = connection.execute(select(receipts).where(receipts.c.id == identity)).mappings()
    return next(map(_receipt_row, rows), None)


def list_receipts(connection: Connection) -> list[ReceiptRow]:
    """List receipts, newest first."""
    query = select(receipts).order_by(receipts.c.issued_at.desc(), receipts.c.id)
    return [_receipt_row(row) for row in connection.execute(query).mappings()]


_RECEIPT = ("id", "node", "node_name", "owner_uid", "is_grader")


def _receipt_row(row: RowMapping) -> ReceiptRow:
    values = {name: row[name] for name in _RECEIPT}
    return ReceiptRow(**values, receipt=Receipt.from_json(row["document"]))
