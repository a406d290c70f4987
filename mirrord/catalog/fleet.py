"""Queries of a fleet: claims, generations, nodes, changes. Sync, on one connection.

Leases end and ages are told by the database's clock, since those of nodes differ by minutes. What
two nodes may do at the same time is decided in one transaction each; nothing is held between them,
so a pooler may stand in between.
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
"""Before the key of a mirror in the key of its claim, and in the topic of its changes."""
REPAIR = "repair/"
"""Before the key of a mirror of whose newest generation the store has lost something."""
RESTORED = "restored"
"""The topic of a catalog that went back to an older state."""
_CLOCK = ""
_LEAP = 1_000_000  # versions that no daemon has seen in the state that was lost
_FORGOTTEN_MS = 30 * 24 * 3600 * 1000  # a node that was not seen for so long is gone


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


# -- what changed ----------------------------------------------------------------------------------


def touch(connection: Connection, *topics: str) -> None:
    """Tell the fleet that these changed, as the last statements of a transaction.

    The clock's row stays locked to its end: versions become visible in their order, and a reader
    that has seen one misses none before it.
    """
    if connection.dialect.name == "sqlite":
        return  # one daemon, which made the change
    row = {"topic": _CLOCK, "version": 1}
    statement = insert_of(connection, changes).values(row)
    statement = statement.on_conflict_do_update(
        index_elements=["topic"], set_={"version": changes.c.version + 1}
    )
    version = connection.execute(statement.returning(changes.c.version)).scalar_one()
    upsert(connection, changes, [{"topic": each, "version": version} for each in sorted(topics)])


def list_changes(connection: Connection, since: int) -> tuple[int, list[str]]:
    """The version now, and the topics that changed after `since`, in order.

    A version before `since` is of a database that was restored from a backup.
    """
    none = since if connection.dialect.name == "sqlite" else min(since, 0)
    is_new = or_(changes.c.version > since, changes.c.topic == _CLOCK)
    query = select(changes.c.topic, changes.c.version).where(is_new).order_by(changes.c.version)
    rows = connection.execute(query).all()
    version = next((row.version for row in rows if row.topic == _CLOCK), none)
    return version, [row.topic for row in rows if row.topic]


def note_restored(connection: Connection, seen: int) -> None:
    """Tell the fleet that the database is an older one than that of version `seen`; once."""
    row = {"topic": _CLOCK, "version": seen + _LEAP}
    statement = insert_of(connection, changes).values(row)
    leapt = statement.on_conflict_do_update(
        index_elements=["topic"], set_=row, where=changes.c.version < seen
    )
    if connection.execute(leapt.returning(changes.c.version)).first():
        touch(connection, RESTORED)


# -- claims ----------------------------------------------------------------------------------------

_is_held = and_(claims.c.node.is_not(None), claims.c.expires_ms > _now())
_is_free = or_(claims.c.node.is_(None), claims.c.expires_ms <= _now())


def enrol(connection: Connection, hosts: Mapping[str, str]) -> None:
    """Have work done by the clock, now for the first time: by the claim's key, its upstream's host.

    Work without an upstream has no host.
    """
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
    """Claim one piece of work; None while another node has it, or its host enough connections.

    A host has at most `host_limit` claims by request at a time, and one beside a batch.
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
    taken = _take(connection, node, [key], ttl, is_batch=False)
    return taken[0] if taken else None


def claim_due(
    connection: Connection,
    node: str,
    ttl: timedelta,
    *,
    most: int,
    here: Collection[str],
    patience: timedelta,
    with_syncs: bool = True,
) -> list[Claim]:
    """Claim what is due, the longest due first; `with_syncs` also mirrors that are to be synced.

    What is not `here` (keys of claims) only when nobody took it for `patience`; repairs never. All
    that is due of one host is of one node, which holds the host's limit by itself; a host with
    several claims by request is left alone.
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
    asked = select(func.count()).where(same_host, is_held, ~other.c.is_batch).scalar_subquery()
    is_here = claims.c.key.in_(list(here))
    is_left = and_(claims.c.due_ms <= _now() - _ms(patience), ~claims.c.key.startswith(REPAIR))
    query = select(claims.c.key).where(
        is_due, or_(is_here, is_left), or_(claims.c.host == "", and_(~in_batch, asked < 2))
    )
    query = query.order_by(claims.c.due_ms, claims.c.key).limit(most)
    keys = connection.execute(query.with_for_update(skip_locked=True)).scalars().all()
    return _take(connection, node, keys, ttl, is_batch=True) if keys else []


def renew(connection: Connection, node: str, ttl: timedelta, keys: Collection[str]) -> set[Claim]:
    """Prolong claims of a node; answers them. One that expired and is free is prolonged too.

    Those that it does not name expire: their answer may have been lost on its way to it.
    """
    mine = (claims.c.node == node, claims.c.key.in_(list(keys)))
    query = update(claims).where(*mine).values(expires_ms=_now() + _ms(ttl))
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
    """Give claims back; their work is due `after` a time, or as it was before."""
    values: dict[str, Any] = {"node": None, "expires_ms": 0}
    if after is not None:
        values["due_ms"] = sa.case((claims.c.due_ms.is_(None), None), else_=_now() + _ms(after))
        values["failures"] = claims.c.failures + 1 if has_failed else 0
    theirs = sa.tuple_(claims.c.key, claims.c.epoch).in_(list(held))
    connection.execute(update(claims).where(claims.c.node == node, theirs).values(values))


def finish(connection: Connection, done: Claim) -> None:
    """Forget work that is not to be done again, with its claim."""
    mine = and_(claims.c.key == done.key, claims.c.epoch == done.epoch)
    connection.execute(delete(claims).where(mine))


def hasten(connection: Connection, within: timedelta) -> None:
    """Make everything due within a time, as after the interval was shortened."""
    latest = _now() + _ms(within)
    far = and_(claims.c.due_ms > latest, claims.c.failures == 0)
    connection.execute(update(claims).where(far).values(due_ms=latest))


def count_failures(connection: Connection, key: str) -> int:
    """How often the work of a claim failed since it last succeeded."""
    query = select(claims.c.failures).where(claims.c.key == key)
    return connection.execute(query).scalar() or 0


def find_holder(connection: Connection, key: str) -> HeldClaim | None:
    """Who holds a claim now."""
    return next(iter(_held_claims(connection, claims.c.key == key)), None)


def list_claims(connection: Connection) -> list[HeldClaim]:
    """The claims that are held now."""
    return list(_held_claims(connection))


def _held_claims(connection: Connection, *conditions: ColumnElement[bool]) -> Iterable[HeldClaim]:
    left = claims.c.expires_ms - _now()
    query = select(claims.c.key, claims.c.node, claims.c.epoch, left).where(_is_held, *conditions)
    for key, node, epoch, left_ms in connection.execute(query.order_by(claims.c.key)):
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
    """Make `new` the generation of a mirror, if the claim of its epoch is still the node's.

    False where another node claimed the mirror meanwhile, or published since `previous`.
    """
    mine = select(claims.c.key).where(
        claims.c.key == f"{MIRROR}{key}", claims.c.node == node, claims.c.epoch == new.epoch
    )
    # locked to the end of the transaction: nobody takes the claim between this and the commit
    if connection.execute(mine.with_for_update()).first() is None:
        return False
    values = {**new._asdict(), "node": node, "published_ms": _now()}
    if previous is None:
        statement = insert_of(connection, generations).values(mirror_key=key, **values)
        change = statement.on_conflict_do_nothing()
    else:
        same = (generations.c.epoch == previous.epoch, generations.c.number == previous.number)
        change = update(generations).where(generations.c.mirror_key == key, *same).values(values)
    if connection.execute(change.returning(generations.c.number)).first() is None:
        return False
    touch(connection, f"{MIRROR}{key}")
    return True


def adopt_generation(
    connection: Connection, node: str, key: str, found: Generation, epoch: int = 0
) -> None:
    """Have a generation of the store as a mirror's newest one, unless a newer one is known.

    Later claims have a higher epoch, also than `epoch`, so what they publish is newer; one that is
    held now with a lower one is lost, and publishes nothing.
    """
    lock(connection, "claims")
    last = max(found.epoch, epoch)
    values = _new_claim(f"{MIRROR}{key}") | {"epoch": last}
    claimed = insert_of(connection, claims).values(values)
    raised = {"epoch": last, "node": None, "expires_ms": 0}
    is_lower = claims.c.epoch < last
    connection.execute(
        claimed.on_conflict_do_update(index_elements=["key"], set_=raised, where=is_lower)
    )
    row = {**found._asdict(), "node": node, "published_ms": _now()}
    added = insert_of(connection, generations).values(mirror_key=key, **row)
    known = generations.c
    is_older = or_(
        known.epoch < found.epoch, and_(known.epoch == found.epoch, known.number < found.number)
    )
    connection.execute(
        added.on_conflict_do_update(index_elements=["mirror_key"], set_=row, where=is_older)
    )
    touch(connection, f"{MIRROR}{key}")


def list_generations(
    connection: Connection, keys: Collection[str] | None = None
) -> dict[str, Generation]:
    """The generations of mirrors, by key; of all of them, or of these."""
    columns = (generations.c.mirror_key, generations.c.epoch, generations.c.number)
    query = select(*columns, generations.c.manifest)
    if keys is not None:
        query = query.where(generations.c.mirror_key.in_(list(keys)))
    return {key: Generation(*rest) for key, *rest in connection.execute(query)}


# -- closures that daemons share -------------------------------------------------------------------


def put_closure(connection: Connection, key: str, commit: str, document: Mapping[str, Any]) -> None:
    """Share the closure pack of a commit, unless another node has; not of a removed mirror."""
    there = select(mirrors.c.key).where(mirrors.c.key == key)
    if connection.execute(there).first():
        row = {"mirror_key": key, "commit_id": commit, "document": dict(document)}
        statement = insert_of(connection, closures).values(**row, used_ms=_now())
        connection.execute(statement.on_conflict_do_nothing())


def list_closures(connection: Connection, key: str) -> dict[str, Mapping[str, Any]]:
    """What is said of a mirror's shared closure packs, by commit."""
    query = select(closures.c.commit_id, closures.c.document).where(closures.c.mirror_key == key)
    return {row.commit_id: row.document for row in connection.execute(query)}


def use_closures(
    connection: Connection, key: str, commits: Collection[str]
) -> dict[str, Mapping[str, Any]]:
    """The same of these commits, which are noted as used."""
    these = and_(closures.c.mirror_key == key, closures.c.commit_id.in_(list(commits)))
    query = update(closures).where(these).values(used_ms=_now())
    rows = connection.execute(query.returning(closures.c.commit_id, closures.c.document))
    return {row.commit_id: row.document for row in rows}


def drop_closures(
    connection: Connection,
    key: str,
    *,
    commits: Collection[str] = (),
    unused: timedelta | None = None,
) -> None:
    """Share these no longer, nor those that nobody used for so long."""
    gone: ColumnElement[bool] = closures.c.commit_id.in_(list(commits))
    if unused is not None:
        gone = or_(gone, closures.c.used_ms < _now() - _ms(unused))
    connection.execute(delete(closures).where(closures.c.mirror_key == key, gone))


# -- nodes -----------------------------------------------------------------------------------------


def put_node(
    connection: Connection, identity: str, name: str, version: str, document: Mapping[str, Any]
) -> None:
    """Say that a node is there, and how it is."""
    values = {"name": name, "version": version, "seen_ms": _now(), "document": dict(document)}
    statement = insert_of(connection, nodes).values(id=identity, **values)
    connection.execute(statement.on_conflict_do_update(index_elements=["id"], set_=values))


def list_nodes(connection: Connection) -> list[NodeRow]:
    """All that were seen within a month, the last one first."""
    age = _now() - nodes.c.seen_ms
    query = select(nodes.c.id, nodes.c.name, nodes.c.version, age, nodes.c.document)
    rows = connection.execute(query.where(age < _FORGOTTEN_MS).order_by(age, nodes.c.id))
    return [NodeRow(each, name, ver, ms / 1000, facts) for each, name, ver, ms, facts in rows]


def delete_node(connection: Connection, identity: str) -> None:
    """Forget a node that ended, with its claims; also those that nobody saw for a month."""
    gone = or_(nodes.c.id == identity, nodes.c.seen_ms < _now() - _FORGOTTEN_MS)
    connection.execute(delete(nodes).where(gone))
    free = update(claims).where(claims.c.node == identity)
    connection.execute(free.values(node=None, expires_ms=0))
