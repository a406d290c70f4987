"""Claims of a fleet's daemons to work, on one connection.

Each decision between nodes is one transaction with no state outside it, so it works through a
pooler.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy import ColumnElement, Connection, and_, delete, func, or_, select, update

from .changes import MIRROR
from .clock import clock_ms, to_ms
from .database import insert_of, lock
from .schema import Claim, HeldClaim, claims

# prefix of a mirror's key in the claim to repair its newest generation in the store
REPAIR = "repair/"

_is_held = and_(claims.c.node.is_not(None), claims.c.expires_ms > clock_ms())

_is_free = or_(claims.c.node.is_(None), claims.c.expires_ms <= clock_ms())


def enrol(connection: Connection, hosts: Mapping[str, str]) -> None:
    """Schedule new work, due now. `hosts` maps claim keys to the upstream's host, or to ""."""
    query = select(claims.c.key).where(claims.c.due_ms.is_not(None))
    scheduled = set(connection.execute(query).scalars())
    for key in sorted(hosts.keys() - scheduled):
        values = new_claim(key) | {"host": hosts[key], "due_ms": 0}
        statement = insert_of(connection, claims).values(values)
        # a claim by request, or of a mirror that is back after its removal: its epoch goes on
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
        connection.execute(sa.insert(claims).values(new_claim(key)))
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
    is_due = and_(claims.c.due_ms <= clock_ms(), _is_free)
    if not with_syncs:
        is_due &= ~claims.c.key.startswith(MIRROR)
    # nearly every poll ends here, without the lock for which all nodes queue
    if connection.execute(select(claims.c.key).where(is_due).limit(1)).first() is None:
        return []
    lock(connection, "claims")
    other = claims.alias()
    is_held = and_(other.c.node.is_not(None), other.c.expires_ms > clock_ms())
    same_host = and_(other.c.host == claims.c.host, other.c.key != claims.c.key)
    in_batch = sa.exists().where(same_host, is_held, other.c.is_batch, other.c.node != node)
    requested = select(func.count()).where(same_host, is_held, ~other.c.is_batch).scalar_subquery()
    is_local = claims.c.key.in_(list(local))
    is_overdue = and_(
        claims.c.due_ms <= clock_ms() - to_ms(grace), ~claims.c.key.startswith(REPAIR)
    )
    query = select(claims.c.key).where(
        is_due,
        or_(is_local, is_overdue),
        # beside its batch a host has one place for a request, and that may be taken
        or_(claims.c.host == "", and_(~in_batch, requested < 2)),
    )
    query = query.order_by(claims.c.due_ms, claims.c.key).limit(most)
    # a locked row is of a publication or a request just now, and due at the next poll too
    keys = connection.execute(query.with_for_update(skip_locked=True)).scalars().all()
    return _take(connection, node, keys, ttl, is_batch=True) if keys else []


def renew(connection: Connection, node: str, ttl: timedelta, keys: Collection[str]) -> set[Claim]:
    """Renew claims of a node, also expired ones that are still free. Return the renewed claims.

    A node's other claims expire: it may have missed the answer that granted them.
    """
    query = update(claims).where(claims.c.node == node, claims.c.key.in_(list(keys)))
    query = query.values(expires_ms=clock_ms() + to_ms(ttl))
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
        values["due_ms"] = sa.case(
            (claims.c.due_ms.is_(None), None), else_=clock_ms() + to_ms(after)
        )
        values["failures"] = claims.c.failures + 1 if has_failed else 0
    is_held = sa.tuple_(claims.c.key, claims.c.epoch).in_(list(held))
    connection.execute(update(claims).where(claims.c.node == node, is_held).values(values))


def finish(connection: Connection, done: Claim) -> None:
    """Delete a claim whose work is not to be repeated."""
    is_done = and_(claims.c.key == done.key, claims.c.epoch == done.epoch)
    connection.execute(delete(claims).where(is_done))


def hasten(connection: Connection, within: timedelta) -> None:
    """Make all work due within a time, after the interval was shortened."""
    latest = clock_ms() + to_ms(within)
    # what failed keeps its pause, which may be upstream's Retry-After
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
    columns = (claims.c.key, claims.c.node, claims.c.epoch, claims.c.expires_ms - clock_ms())
    query = select(*columns).where(_is_held, *conditions).order_by(claims.c.key)
    for key, node, epoch, left_ms in connection.execute(query):
        yield HeldClaim(key, node, epoch, left_ms / 1000)


def new_claim(key: str) -> dict[str, Any]:
    return {
        "key": key, "node": None, "epoch": 0, "expires_ms": 0, "due_ms": None, "host": "",
        "is_batch": False, "failures": 0,
    }  # fmt: skip


def _take(
    connection: Connection, node: str, keys: Collection[str], ttl: timedelta, *, is_batch: bool
) -> list[Claim]:
    values = {
        "node": node, "epoch": claims.c.epoch + 1, "expires_ms": clock_ms() + to_ms(ttl),
        "is_batch": is_batch,
    }  # fmt: skip
    query = update(claims).where(claims.c.key.in_(keys), _is_free).values(values)
    return [
        Claim(*row) for row in connection.execute(query.returning(claims.c.key, claims.c.epoch))
    ]
