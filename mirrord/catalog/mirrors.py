"""Queries about mirrors and pins, on one connection."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict
from datetime import datetime
from itertools import islice
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection, RowMapping, delete, func, select, update

from ..model import CommitId, MirrorName
from ..protocol import Message
from .changes import MIRROR, note_changes
from .database import upsert
from .schema import MirrorRow, PinRow, claims, datasets, judgements, mirrors, pins, recorded

T = TypeVar("T")
M = TypeVar("M", bound=Message)
# prefix of a mirror's key in the topic of changes of its pins
PINS = "pins/"


def in_batches(values: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(values)
    while batch := list(islice(iterator, 500)):  # SQLite takes 32766 variables a statement
        yield batch


def put_mirror(connection: Connection, row: MirrorRow) -> None:
    upsert(connection, mirrors, [asdict(row) | {"key": row.name.key, "name": str(row.name)}])
    note_changes(connection, "mirrors")


def find_mirror(connection: Connection, key: str) -> MirrorRow | None:
    query = select(mirrors).where(mirrors.c.key == key.lower())
    row = connection.execute(query).mappings().first()
    return _mirror_row(row) if row else None


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


def record_unchanged(connection: Connection, keys: Collection[str], synced_at: datetime) -> None:
    """Record syncs that found nothing new, in one statement."""
    values = {"synced_at": synced_at, "attempted_at": synced_at, "error": None}
    connection.execute(update(mirrors).where(mirrors.c.key.in_(list(keys))).values(values))


def list_synced(connection: Connection, keys: Collection[str]) -> list[str]:
    """Return those of the mirrors whose last sync succeeded."""
    rows = (
        row
        for batch in in_batches(keys)
        for row in connection.execute(
            select(mirrors.c.key, mirrors.c.error).where(mirrors.c.key.in_(batch))
        )
    )
    return [row.key for row in rows if not row.error]


def _mirror_row(row: RowMapping) -> MirrorRow:
    values = {name: row[name] for name in row if name != "key"}
    return MirrorRow(**values | {"name": MirrorName.parse(row["name"])})


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
    keys: dict[str, set[tuple[str, CommitId]]] = {}
    query = select(pins.c.mirror_key, pins.c.owner, pins.c.commit_id)
    for key, owner, commit in connection.execute(query):
        keys.setdefault(key, set()).add((owner, commit))
    return keys


def list_named(connection: Connection, key: str) -> set[CommitId]:
    """Return the commits of a mirror that a dataset or a pin names."""
    queries = (
        select(table.c.commit_id).where(table.c.mirror_key == key.lower())
        for table in (recorded, pins)
    )
    return {CommitId(commit) for commit in connection.execute(sa.union(*queries)).scalars()}


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
