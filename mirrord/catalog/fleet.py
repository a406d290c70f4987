"""Queries of a fleet: generations, closure packs and nodes, on one connection.

Each decision between nodes is one transaction with no state outside it, so it works through a
pooler.
"""

from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy import ColumnElement, Connection, delete, or_, select, update

from .changes import MIRROR, note_changes
from .claims import new_claim
from .clock import clock_ms, to_ms
from .database import insert_of, lock
from .schema import Generation, NodeRow, claims, closures, generations, mirrors, nodes

# a node that was silent for a month is no longer listed; it comes back with its next poll
_NODE_TTL_MS = 30 * 24 * 3600 * 1000


def publish_generation(
    connection: Connection,
    node: str,
    key: str,
    new: Generation,
    previous: Generation | None,
) -> bool:
    """Publish `new` as the generation of a mirror. Return whether it was published.

    It is not if another node has claimed the mirror, or published after `previous`.
    """
    own_claim = select(claims.c.key).where(
        claims.c.key == f"{MIRROR}{key}", claims.c.node == node, claims.c.epoch == new.epoch
    )
    # the row stays locked until the commit, so no other node can take the claim before that
    if connection.execute(own_claim.with_for_update()).first() is None:
        return False
    values = {**new._asdict(), "node": node, "published_ms": clock_ms()}
    if previous is None:
        statement = insert_of(connection, generations).values(mirror_key=key, **values)
        change = statement.on_conflict_do_nothing()
    else:
        change = (
            update(generations)
            .values(values)
            .where(
                generations.c.mirror_key == key,
                generations.c.epoch == previous.epoch,
                generations.c.number == previous.number,
            )
        )
    if connection.execute(change.returning(generations.c.number)).first() is None:
        return False
    note_changes(connection, f"{MIRROR}{key}")
    return True


def adopt_generation(
    connection: Connection, node: str, key: str, generation: Generation, epoch: int = 0
) -> None:
    """Record a generation found in the store as a mirror's newest, unless a newer one is known.

    Later claims get an epoch above both its own and `epoch`. A held claim with a lower epoch is
    lost and can publish nothing.
    """
    lock(connection, "claims")
    last = max(generation.epoch, epoch)
    mirror = insert_of(connection, claims).values(new_claim(f"{MIRROR}{key}") | {"epoch": last})
    raised = {"epoch": last, "node": None, "expires_ms": 0}
    connection.execute(
        mirror.on_conflict_do_update(
            index_elements=["key"], set_=raised, where=claims.c.epoch < last
        )
    )
    row = {**generation._asdict(), "node": node, "published_ms": clock_ms()}
    new_generation = insert_of(connection, generations).values(mirror_key=key, **row)
    newest = sa.tuple_(generations.c.epoch, generations.c.number)
    connection.execute(
        new_generation.on_conflict_do_update(
            index_elements=["mirror_key"],
            set_=row,
            where=newest < (generation.epoch, generation.number),
        )
    )
    note_changes(connection, f"{MIRROR}{key}")


def list_generations(
    connection: Connection, keys: Collection[str] | None = None
) -> dict[str, Generation]:
    """Return the generations of these mirrors, or of all, by key."""
    columns = (generations.c.mirror_key, generations.c.epoch, generations.c.number)
    query = select(*columns, generations.c.manifest)
    if keys is not None:
        query = query.where(generations.c.mirror_key.in_(list(keys)))
    return {key: Generation(*values) for key, *values in connection.execute(query)}


def put_closure(connection: Connection, key: str, commit: str, document: Mapping[str, Any]) -> None:
    """Record a shared closure pack, unless the commit has one or the mirror was removed."""
    mirror = select(mirrors.c.key).where(mirrors.c.key == key)
    if connection.execute(mirror).first():
        row = {"mirror_key": key, "commit_id": commit, "document": dict(document)}
        statement = insert_of(connection, closures).values(**row, used_ms=clock_ms())
        connection.execute(statement.on_conflict_do_nothing())


def list_closures(connection: Connection, key: str) -> dict[str, Mapping[str, Any]]:
    """Return the documents of a mirror's shared closure packs, by commit."""
    query = select(closures.c.commit_id, closures.c.document).where(closures.c.mirror_key == key)
    return {row.commit_id: row.document for row in connection.execute(query)}


def use_closures(
    connection: Connection, key: str, commits: Collection[str]
) -> dict[str, Mapping[str, Any]]:
    """Return the documents of these commits, and record their use."""
    query = update(closures).where(
        closures.c.mirror_key == key, closures.c.commit_id.in_(list(commits))
    )
    query = query.values(used_ms=clock_ms())
    rows = connection.execute(query.returning(closures.c.commit_id, closures.c.document))
    return {row.commit_id: row.document for row in rows}


def drop_closures(
    connection: Connection,
    key: str,
    *,
    commits: Collection[str] = (),
    unused: timedelta | None = None,
) -> None:
    """Delete the records of these shared closure packs, and of those `unused` for that long."""
    gone: ColumnElement[bool] = closures.c.commit_id.in_(list(commits))
    if unused is not None:
        gone = or_(gone, closures.c.used_ms < clock_ms() - to_ms(unused))
    connection.execute(delete(closures).where(closures.c.mirror_key == key, gone))


def put_node(
    connection: Connection, identity: str, name: str, version: str, document: Mapping[str, Any]
) -> None:
    """Record that a node is alive, with its state."""
    values = {"name": name, "version": version, "seen_ms": clock_ms(), "document": dict(document)}
    statement = insert_of(connection, nodes).values(id=identity, **values)
    connection.execute(statement.on_conflict_do_update(index_elements=["id"], set_=values))


def list_nodes(connection: Connection) -> list[NodeRow]:
    """List the nodes seen within a month, the most recent first."""
    age = clock_ms() - nodes.c.seen_ms
    query = select(nodes.c.id, nodes.c.name, nodes.c.version, age, nodes.c.document)
    rows = connection.execute(query.where(age < _NODE_TTL_MS).order_by(age, nodes.c.id))
    return [NodeRow(node, name, ver, ms / 1000, doc) for node, name, ver, ms, doc in rows]


def delete_node(connection: Connection, identity: str) -> None:
    """Delete a node that ended and release its claims; delete nodes not seen for a month."""
    is_gone = or_(nodes.c.id == identity, nodes.c.seen_ms < clock_ms() - _NODE_TTL_MS)
    connection.execute(delete(nodes).where(is_gone))
    own_claims = update(claims).where(claims.c.node == identity)
    connection.execute(own_claims.values(node=None, expires_ms=0))
