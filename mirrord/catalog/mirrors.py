"""Queries about mirrors, pins, audits, reports and receipts, on one connection."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict
from datetime import datetime
from itertools import islice
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection, RowMapping, and_, delete, func, select, update

from ..model import AuditLevel, CommitId, MirrorName
from ..protocol import Audit, AuditPart, Message, Receipt, Report
from .database import lock, upsert
from .fleet import MIRROR, note_changes
from .schema import (
    JudgementRow,
    MirrorRow,
    PinRow,
    ReceiptRow,
    audits,
    claims,
    datasets,
    judgements,
    mirrors,
    pins,
    receipts,
    recorded,
    reports,
)

T = TypeVar("T")
M = TypeVar("M", bound=Message)
PINS = "pins/"
"""Prefix of a mirror's key in the topic of changes of its pins."""


def in_batches(values: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(values)
    while batch := list(islice(iterator, 500)):  # SQLite takes 32766 variables a statement
        yield batch


def put_mirror(connection: Connection, row: MirrorRow) -> None:
    upsert(connection, mirrors, [asdict(row) | {"key": row.name.key, "name": str(row.name)}])
    note_changes(connection, "mirrors")


def find_mirror(connection: Connection, key: str) -> MirrorRow | None:
    query = select(mirrors).where(mirrors.c.key == key.lower())
    found = connection.execute(query).mappings().first()
    return _mirror_row(found) if found else None


def list_mirrors(connection: Connection) -> list[MirrorRow]:
    query = select(mirrors).order_by(mirrors.c.key)
    return [_mirror_row(row) for row in connection.execute(query).mappings()]


def update_mirror(connection: Connection, /, key: str, **columns: Any) -> bool:
    """Set columns of a mirror. Return whether it exists."""
    query = update(mirrors).where(mirrors.c.key == key.lower()).values(columns)
    return connection.execute(query).rowcount > 0


def delete_mirror(connection: Connection, key: str) -> bool:
    """Delete a mirror, its pins and its judgements. Recorded commits stay, without a pin."""
    connection.execute(delete(judgements).where(judgements.c.mirror_key == key.lower()))
    existed = connection.execute(delete(mirrors).where(mirrors.c.key == key.lower())).rowcount > 0
    # its claim stays, so that epochs keep growing if the mirror is added again
    is_its_claim = claims.c.key == f"{MIRROR}{key.lower()}"
    connection.execute(update(claims).where(is_its_claim).values(due_ms=None))
    note_changes(connection, "mirrors")
    return existed


def record_unchanged(connection: Connection, keys: Collection[str], at: datetime) -> None:
    """Record syncs that found nothing new, in one statement."""
    values = {"synced_at": at, "attempted_at": at, "error": None}
    connection.execute(update(mirrors).where(mirrors.c.key.in_(list(keys))).values(values))


def _mirror_row(row: RowMapping) -> MirrorRow:
    values = {name: row[name] for name in row if name != "key"}
    return MirrorRow(**values | {"name": MirrorName.parse(row["name"])})


# -- pins -----------------------------------------------------------------------------------------


def put_pins(connection: Connection, rows: Collection[PinRow]) -> None:
    for batch in in_batches(rows):
        values = [
            {
                "mirror_key": row.mirror.key,
                "commit_id": row.commit,
                "owner": row.owner,
                "reason": row.reason,
                "created_at": row.created_at,
            }
            for row in batch
        ]
        upsert(connection, pins, values)
    note_changes(connection, *{f"{PINS}{row.mirror.key}" for row in rows})


def delete_pins(
    connection: Connection, key: str, commits: Collection[CommitId], owner: str
) -> None:
    is_owned = (pins.c.mirror_key == key.lower(), pins.c.owner == owner)
    for batch in in_batches(commits):
        connection.execute(delete(pins).where(*is_owned, pins.c.commit_id.in_(batch)))
    note_changes(connection, f"{PINS}{key.lower()}")


def list_pins(
    connection: Connection,
    key: str | None = None,
    commit: CommitId | None = None,
    owner: str | None = None,
) -> list[PinRow]:
    query = select(pins, mirrors.c.name).join(mirrors)
    if key is not None:
        query = query.where(pins.c.mirror_key == key.lower())
    if commit is not None:
        query = query.where(pins.c.commit_id == commit)
    if owner is not None:
        query = query.where(pins.c.owner == owner)
    query = query.order_by(pins.c.mirror_key, pins.c.commit_id, pins.c.owner)
    return [_pin_row(row) for row in connection.execute(query).mappings()]


def list_pin_keys(connection: Connection) -> dict[str, set[tuple[str, CommitId]]]:
    """Return owner and commit of every pin, by mirror key."""
    found: dict[str, set[tuple[str, CommitId]]] = {}
    query = select(pins.c.mirror_key, pins.c.owner, pins.c.commit_id)
    for key, owner, commit in connection.execute(query):
        found.setdefault(key, set()).add((owner, commit))
    return found


def count_pins(connection: Connection) -> dict[str, int]:
    count = func.count(pins.c.commit_id.distinct())
    query = select(pins.c.mirror_key, count).group_by(pins.c.mirror_key)
    return {row.mirror_key: row[1] for row in connection.execute(query)}


def list_stale_pins(connection: Connection, key: str | None = None) -> list[PinRow]:
    """List pins of datasets that do not record their commit, or do not exist."""
    is_recorded = sa.exists().where(
        recorded.c.mirror_key == pins.c.mirror_key,
        recorded.c.commit_id == pins.c.commit_id,
        recorded.c.dataset_id == datasets.c.id,
        "dataset/" + datasets.c.name == pins.c.owner,
    )
    query = select(pins, mirrors.c.name).join(mirrors)
    query = query.where(pins.c.owner.like("dataset/%"), ~is_recorded)
    if key is not None:
        query = query.where(pins.c.mirror_key == key.lower())
    return [_pin_row(row) for row in connection.execute(query).mappings()]


def _pin_row(row: RowMapping) -> PinRow:
    name = MirrorName.parse(row["name"])
    return PinRow(name, CommitId(row["commit_id"]), row["owner"], row["reason"], row["created_at"])


# -- audits ----------------------------------------------------------------------------------------

_KEPT = 200  # newest audits, reports and receipts; daily audits of half a year


def put_audit(connection: Connection, audit: Audit, node: str = "") -> None:
    """Record a node's audit. Delete its old ones, except those with a current judgement."""
    row = {"id": audit.id, "finished_at": audit.finished_at, "document": audit.to_json()}
    upsert(connection, audits, [row | {"node": node}])
    newest = select(audits.c.id).where(audits.c.node == node)
    newest = newest.order_by(audits.c.finished_at.desc(), audits.c.id).limit(_KEPT)
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


# -- reports and receipts --------------------------------------------------------------------------


def put_report(connection: Connection, report: Report) -> None:
    lock(connection, "reports")
    row = {"id": report.id, "received_at": report.at, "document": report.to_json()}
    upsert(connection, reports, [row])
    _drop_old(connection, reports, reports.c.received_at)


def _drop_old(connection: Connection, table: sa.Table, at: sa.Column[datetime]) -> None:
    newest = select(table.c.id).order_by(at.desc(), table.c.id).limit(_KEPT)
    kept = connection.execute(newest).scalars().all()
    connection.execute(delete(table).where(table.c.id.not_in(kept)))


def find_report(connection: Connection, identity: str) -> Report | None:
    query = select(reports.c.document).where(reports.c.id == identity)
    return next(_documents(connection, query, Report), None)


def list_reports(connection: Connection, limit: int = 200) -> list[Report]:
    """List reports, newest first."""
    query = select(reports.c.document).order_by(reports.c.received_at.desc(), reports.c.id)
    return list(_documents(connection, query.limit(limit), Report))


def put_receipt(connection: Connection, row: ReceiptRow) -> None:
    lock(connection, "receipts")
    values = {name: getattr(row, name) for name in _RECEIPT}
    document = {"document": row.receipt.to_json(), "issued_at": row.receipt.issued_at}
    upsert(connection, receipts, [values | document])
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
