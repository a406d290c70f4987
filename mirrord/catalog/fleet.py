"""Queries of a fleet: changes, claims, generations, closures, nodes, on one connection.

Times are by the database's clock, because the clocks of nodes differ by minutes. Each decision
between nodes is one transaction with no state outside it, so it works through a pooler.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy import ColumnElement, Connection, and_, delete, func, or_, select, update
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from .database import insert_of, lock, upsert
from .schema import (
    Claim,
    Generation,
    HeldClaim,
    NodeRow,
    changes,
    claims,
    closures,
    generations,
    mirrors,
    nodes,
)

MIRROR = "mirror/"
"""Prefix of a mirror's key in the key of its claim, and in the topic of its changes."""
REPAIR = "repair/"
"""Prefix of a mirror's key in the claim to repair its newest generation in the store."""
RESTORED = "restored"
"""Topic: the database was restored from a backup."""
_CLOCK = ""
_RESTORED_STEP = 1_000_000  # more versions than the lost state can have had since `seen`
_NODE_TTL_MS = 30 * 24 * 3600 * 1000


class _now(FunctionElement[int]):  # noqa: N801 - a function of SQL
    """Milliseconds since 1970 by the database's clock."""

    type = sa.BigInteger()
    inherit_cache = True


@compiles(_now, "postgresql")
def _now_of_postgresql(_element: Any, _compiler: Any, **_: Any) -> str:
    # now() is when the transaction began: a wait for a lock would count for nothing
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"


@compiles(_now, "sqlite")
def _now_of_sqlite(_element: Any, _compiler: Any, **_: Any) -> str:
    return "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"


def _ms(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1000)


# -- changes ---------------------------------------------------------------------------------------


def note_changes(connection: Connection, *topics: str) -> None:
    """Publish changes to the fleet. Must be the last statements of a transaction.

    They lock the clock's row until it ends, so versions become visible in order: a reader of one
    version has all before it.
    """
    if connection.dialect.name == "sqlite":
        return  # no other daemon uses it
    row = {"topic": _CLOCK, "version": 1}
    statement = insert_of(connection, changes).values(row)
    statement = statement.on_conflict_do_update(
        index_elements=["topic"], set_={"version": changes.c.version + 1}
    )
    version = connection.execute(statement.returning(changes.c.version)).scalar_one()
    upsert(connection, changes, [{"topic": each, "version": version} for each in sorted(topics)])


def list_changes(connection: Connection, since: int) -> tuple[int, list[str]]:
    """Return the current version, and the topics that changed after `since`, in order.

    A version below `since` means that the database was restored from a backup.
    """
    none = since if connection.dialect.name == "sqlite" else min(since, 0)
    is_new = or_(changes.c.version > since, changes.c.topic == _CLOCK)
    query = select(changes.c.topic, changes.c.version).where(is_new).order_by(changes.c.version)
    rows = connection.execute(query).all()
    version = next((row.version for row in rows if row.topic == _CLOCK), none)
    return version, [row.topic for row in rows if row.topic]


def note_restored(connection: Connection, seen: int) -> None:
    """Publish once that the database was restored to a state before version `seen`."""
    row = {"topic": _CLOCK, "version": seen + _RESTORED_STEP}
    statement = insert_of(connection, changes).values(row)
    statement = statement.on_conflict_do_update(
        index_elements=["topic"], set_=row, where=changes.c.version < seen
    )
    if connection.execute(statement.returning(changes.c.version)).first():
        note_changes(connection, RESTORED)


# -- claims ----------------------------------------------------------------------------------------

_is_held = and_(claims.c.node.is_not(None), claims.c.expires_ms > _now())
_is_free = or_(claims.c.node.is_(None), claims.c.expires_ms <= _now())


def enrol(connection: Connection, hosts: Mapping[str, str]) -> None:
    """Schedule new work, due now. `hosts` maps claim keys to the upstream's host, or to ""."""
    query = select(claims.c.key).where(claims.c.due_ms.is_not(None))
    known = set(connection.execute(query).scalars())
    for key in sorted(hosts.keys() - known):
        values = _new_claim(key) | {"host": hosts[key], "due_ms": 0}
        statement = insert_of(connection, claims).values(values)
        renewed = {"host": hosts[key], "due_ms": 0, "failures": 0}
        connection.execute(statement.on_conflict_do_update(index_elements=["key"], set_=renewed))


def claim(
    connection: Connection, node: str, key: str, ttl: timedelta, host_limit: int | None = None
) -> Claim | None:
    """Claim work by request; None while another node has it or its host has too many claims.

    A host has at most `host_limit` claims by request, and one while another node has its batch.
    """
    lock(connection, "claims")
    row = connection.execute(select(claims).where(claims.c.key == key).with_for_update()).first()
    if row is None:
        connection.execute(sa.insert(claims).values(_new_claim(key)))
    elif row.host and host_limit is not None:
        query = select(claims.c.is_batch, claims.c.node, func.count())
        query = query.where(_is_held, claims.c.host == row.host, claims.c.key != key)
        held = connection.execute(query.group_by(claims.c.is_batch, claims.c.node)).all()
        by_request = sum(count for is_batch, _, count in held if not is_batch)
        has_batch = any(is_batch and holder != node for is_batch, holder, _ in held)
        if by_request >= (1 if has_batch else host_limit) or (has_batch and host_limit == 1):
            return None
    return next(iter(_take(connection, node, [key], ttl, is_batch=False)), None)


def claim_due(
    connection: Connection,
    node: str,
    ttl: timedelta,
    *,
    most: int,
    local: Collection[str],
    grace: timedelta,
    with_syncs: bool = True,
) -> list[Claim]:
    """Claim due work as a batch, longest due first; syncs of mirrors only `with_syncs`.

    Work whose key is not in `local` is claimed once it is due for `grace`, repairs never. All due
    work of one host goes to one node, which keeps the host's limit by itself. A host with several
    claims by request is skipped.
    """
    is_due = and_(claims.c.due_ms <= _now(), _is_free)
    if not with_syncs:
        is_due &= ~claims.c.key.startswith(MIRROR)
    if connection.execute(select(claims.c.key).where(is_due).limit(1)).first() is None:
        return []
    lock(connection, "claims")
    other = claims.alias()
    is_held = and_(other.c.node.is_not(None), other.c.expires_ms > _now())
    same_host = and_(other.c.host == claims.c.host, other.c.key != claims.c.key)
    in_batch = sa.exists().where(same_host, is_held, other.c.is_batch, other.c.node != node)
    requested = select(func.count()).where(same_host, is_held, ~other.c.is_batch).scalar_subquery()
    is_local = claims.c.key.in_(list(local))
    is_overdue = and_(claims.c.due_ms <= _now() - _ms(grace), ~claims.c.key.startswith(REPAIR))
    query = select(claims.c.key).where(
        is_due, or_(is_local, is_overdue), or_(claims.c.host == "", and_(~in_batch, requested < 2))
    )
    query = query.order_by(claims.c.due_ms, claims.c.key).limit(most)
    keys = connection.execute(query.with_for_update(skip_locked=True)).scalars().all()
    return _take(connection, node, keys, ttl, is_batch=True) if keys else []


def renew(connection: Connection, node: str, ttl: timedelta, keys: Collection[str]) -> set[Claim]:
    """Renew claims of a node, also expired ones that are still free. Return the renewed claims.

    A node's other claims expire: it may have missed the answer that granted them.
    """
    query = update(claims).where(claims.c.node == node, claims.c.key.in_(list(keys)))
    query = query.values(expires_ms=_now() + _ms(ttl))
    rows = connection.execute(query.returning(claims.c.key, claims.c.epoch))
    return {Claim(*row) for row in rows}


def release(
    connection: Connection,
    node: str,
    held: Collection[Claim],
    after: timedelta | None = None,
    *,
    has_failed: bool = False,
) -> None:
    """Release claims. Their work is due again `after` a time, or as before."""
    values: dict[str, Any] = {"node": None, "expires_ms": 0}
    if after is not None:
        values["due_ms"] = sa.case((claims.c.due_ms.is_(None), None), else_=_now() + _ms(after))
        values["failures"] = claims.c.failures + 1 if has_failed else 0
    is_held = sa.tuple_(claims.c.key, claims.c.epoch).in_(list(held))
    connection.execute(update(claims).where(claims.c.node == node, is_held).values(values))


def finish(connection: Connection, done: Claim) -> None:
    """Delete a claim whose work is not to be repeated."""
    is_done = and_(claims.c.key == done.key, claims.c.epoch == done.epoch)
    connection.execute(delete(claims).where(is_done))


def hasten(connection: Connection, within: timedelta) -> None:
    """Make all work due within a time, after the interval was shortened."""
    latest = _now() + _ms(within)
    is_later = and_(claims.c.due_ms > latest, claims.c.failures == 0)
    connection.execute(update(claims).where(is_later).values(due_ms=latest))


def count_failures(connection: Connection, key: str) -> int:
    """Return how often the work of a claim failed since its last success."""
    query = select(claims.c.failures).where(claims.c.key == key)
    return connection.execute(query).scalar() or 0


def find_holder(connection: Connection, key: str) -> HeldClaim | None:
    return next(iter(_held_claims(connection, claims.c.key == key)), None)


def list_claims(connection: Connection) -> list[HeldClaim]:
    """List the claims that are held now."""
    return list(_held_claims(connection))


def _held_claims(connection: Connection, *conditions: ColumnElement[bool]) -> Iterable[HeldClaim]:
    columns = (claims.c.key, claims.c.node, claims.c.epoch, claims.c.expires_ms - _now())
    query = select(*columns).where(_is_held, *conditions).order_by(claims.c.key)
    for key, node, epoch, left_ms in connection.execute(query):
        yield HeldClaim(key, node, epoch, left_ms / 1000)


def _new_claim(key: str) -> dict[str, Any]:
    return {
        "key": key, "node": None, "epoch": 0, "expires_ms": 0, "due_ms": None, "host": "",
        "is_batch": False, "failures": 0,
    }  # fmt: skip


def _take(
    connection: Connection, node: str, keys: Collection[str], ttl: timedelta, *, is_batch: bool
) -> list[Claim]:
    values = {
        "node": node, "epoch": claims.c.epoch + 1, "expires_ms": _now() + _ms(ttl),
        "is_batch": is_batch,
    }  # fmt: skip
    query = update(claims).where(claims.c.key.in_(keys), _is_free).values(values)
    return [
        Claim(*row) for row in connection.execute(query.returning(claims.c.key, claims.c.epoch))
    ]


# -- generations -----------------------------------------------------------------------------------


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
    values = {**new._asdict(), "node": node, "published_ms": _now()}
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
    connection: Connection, node: str, key: str, found: Generation, epoch: int = 0
) -> None:
    """Record a generation found in the store as a mirror's newest, unless a newer one is known.

    Later claims get an epoch above both its own and `epoch`. A held claim with a lower epoch is
    lost and can publish nothing.
    """
    lock(connection, "claims")
    last = max(found.epoch, epoch)
    new_claim = insert_of(connection, claims).values(_new_claim(f"{MIRROR}{key}") | {"epoch": last})
    raised = {"epoch": last, "node": None, "expires_ms": 0}
    connection.execute(
        new_claim.on_conflict_do_update(
            index_elements=["key"], set_=raised, where=claims.c.epoch < last
        )
    )
    row = {**found._asdict(), "node": node, "published_ms": _now()}
    new_generation = insert_of(connection, generations).values(mirror_key=key, **row)
    known = sa.tuple_(generations.c.epoch, generations.c.number)
    connection.execute(
        new_generation.on_conflict_do_update(
            index_elements=["mirror_key"], set_=row, where=known < (found.epoch, found.number)
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
    return {key: Generation(*facts) for key, *facts in connection.execute(query)}


# -- shared closure packs --------------------------------------------------------------------------


def put_closure(connection: Connection, key: str, commit: str, document: Mapping[str, Any]) -> None:
    """Record a shared closure pack, unless the commit has one or the mirror was removed."""
    mirror = select(mirrors.c.key).where(mirrors.c.key == key)
    if connection.execute(mirror).first():
        row = {"mirror_key": key, "commit_id": commit, "document": dict(document)}
        statement = insert_of(connection, closures).values(**row, used_ms=_now())
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
    query = query.values(used_ms=_now())
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
        gone = or_(gone, closures.c.used_ms < _now() - _ms(unused))
    connection.execute(delete(closures).where(closures.c.mirror_key == key, gone))


# -- nodes -----------------------------------------------------------------------------------------


def put_node(
    connection: Connection, identity: str, name: str, version: str, document: Mapping[str, Any]
) -> None:
    """Record that a node is alive, with its state."""
    values = {"name": name, "version": version, "seen_ms": _now(), "document": dict(document)}
    statement = insert_of(connection, nodes).values(id=identity, **values)
    connection.execute(statement.on_conflict_do_update(index_elements=["id"], set_=values))


def list_nodes(connection: Connection) -> list[NodeRow]:
    """List the nodes seen within a month, the most recent first."""
    age = _now() - nodes.c.seen_ms
    query = select(nodes.c.id, nodes.c.name, nodes.c.version, age, nodes.c.document)
    rows = connection.execute(query.where(age < _NODE_TTL_MS).order_by(age, nodes.c.id))
    return [NodeRow(each, name, ver, ms / 1000, facts) for each, name, ver, ms, facts in rows]


def delete_node(connection: Connection, identity: str) -> None:
    """Delete a node that ended and release its claims; delete nodes not seen for a month."""
    is_gone = or_(nodes.c.id == identity, nodes.c.seen_ms < _now() - _NODE_TTL_MS)
    connection.execute(delete(nodes).where(is_gone))
    own_claims = update(claims).where(claims.c.node == identity)
    connection.execute(own_claims.values(node=None, expires_ms=0))
