"""Queries about what base commits need from elsewhere: submodules and LFS objects.

A commit that was read and needs nothing has a row without facts, so that no import reads it again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, and_, insert, select

from ..model import CommitId, CommitRole
from .mirrors import in_batches
from .schema import Composition, Module, datasets, instances, needs, recorded

# by the key of a mirror, and a base commit
Compositions = Mapping[tuple[str, CommitId], Composition]


def find_composition(connection: Connection, key: str, commit: CommitId) -> Composition | None:
    """Find what a base commit needs; None where nothing is."""
    is_it = and_(needs.c.mirror_key == key, needs.c.commit_id == commit)
    record = connection.execute(select(needs.c.facts).where(is_it)).scalar()
    return _read(record) if record else None


def list_compositions(
    connection: Connection, keys: Iterable[str]
) -> dict[tuple[str, CommitId], Composition]:
    """List what the base commits of mirrors that were read need, by mirror key and commit."""
    query = select(needs.c.mirror_key, needs.c.commit_id, needs.c.facts)
    return {
        (key, CommitId(commit)): _read(facts)
        for batch in in_batches(keys)
        for key, commit, facts in connection.execute(query.where(needs.c.mirror_key.in_(batch)))
    }


def _read(record: dict[str, Any]) -> Composition:
    if not record:
        return Composition()
    modules = tuple(Module(*fact) for fact in record["modules"])
    missing = tuple((path, reason) for path, reason in record["missing"])
    return Composition(**{**record, "modules": modules, "missing": missing})


def _facts(composition: Composition) -> dict[str, Any]:
    """Return what `_read` reads. JSON writes tuples as lists; `asdict` would copy each first."""
    if composition == Composition():
        return {}
    return {field.name: getattr(composition, field.name) for field in fields(composition)}


def forget_unneeded(connection: Connection) -> None:
    """Forget what commits need that are no instance's base any more: their pins are removed."""
    is_base = sa.exists().where(
        instances.c.base_commit == needs.c.commit_id,
        sa.func.lower(instances.c.mirror_name) == needs.c.mirror_key,
    )
    connection.execute(sa.delete(needs).where(~is_base))


def replace_compositions(connection: Connection, dataset: str, compositions: Compositions) -> None:
    """Replace what is known of these commits: all base commits of a dataset, if it exists."""
    dataset_id = connection.execute(
        select(datasets.c.id).where(datasets.c.name == dataset)
    ).scalar()
    if dataset_id is not None:
        put_compositions(connection, dataset_id, compositions)


def put_compositions(connection: Connection, dataset_id: int, compositions: Compositions) -> None:
    """Replace what is known of these commits, and record submodules for a dataset's instances.

    Only what differs is written: an import that changes nothing is one of many.
    """
    is_own = instances.c.dataset_id == dataset_id
    columns = (instances.c.id, instances.c.base_commit, instances.c.mirror_name)
    based: dict[tuple[str, str], list[str]] = {}
    for identity, base, name in connection.execute(select(*columns).where(is_own)):
        based.setdefault((name.lower(), base), []).append(identity)
    known = list_compositions(connection, {key for key, _ in compositions})
    rows = set[tuple[str, str, str, str]]()
    old, new = [], []
    for (key, commit), composition in compositions.items():
        if composition != known.get((key, commit)):
            old.append({"k": key, "c": commit})
            new.append({"mirror_key": key, "commit_id": commit, "facts": _facts(composition)})
        rows |= {
            (identity, module.commit, module.mirror.lower(), module.mirror)
            for identity in based.get((key, commit), ())
            for module in composition.modules
        }
    if old:
        is_it = and_(
            needs.c.mirror_key == sa.bindparam("k"), needs.c.commit_id == sa.bindparam("c")
        )
        connection.execute(sa.delete(needs).where(is_it), old)
    if new:
        connection.execute(insert(needs), new)
    _record_modules(connection, dataset_id, rows)


def _record_modules(
    connection: Connection, dataset_id: int, rows: set[tuple[str, str, str, str]]
) -> None:
    """Record these submodules for a dataset's instances, and no others."""
    is_old = and_(recorded.c.dataset_id == dataset_id, recorded.c.role == CommitRole.SUBMODULE)
    columns = (
        recorded.c.instance_id,
        recorded.c.commit_id,
        recorded.c.mirror_key,
        recorded.c.mirror_name,
    )
    if {tuple(row) for row in connection.execute(select(*columns).where(is_old))} == rows:
        return
    connection.execute(sa.delete(recorded).where(is_old))
    values = [
        {
            "dataset_id": dataset_id,
            "instance_id": identity,
            "commit_id": commit,
            "role": CommitRole.SUBMODULE,
            "mirror_key": key,
            "mirror_name": name,
        }
        for identity, commit, key, name in sorted(rows)
    ]
    # a row's key is without its mirror, and forks of one repository have commits in common
    unique = {(value["instance_id"], value["commit_id"]): value for value in values}
    if unique:
        connection.execute(insert(recorded), [*unique.values()])
