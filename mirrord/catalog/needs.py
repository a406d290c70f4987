"""Queries about what base commits need from elsewhere: submodules and LFS objects."""

from collections.abc import Mapping
from dataclasses import asdict

import sqlalchemy as sa
from sqlalchemy import Connection, and_, insert, select

from ..model import CommitId, CommitRole
from .schema import Composition, Module, instances, needs, recorded

Compositions = Mapping[tuple[str, CommitId], Composition]
"""By the key of a mirror, and a base commit."""


def find_composition(connection: Connection, key: str, commit: CommitId) -> Composition | None:
    """Find what a base commit needs; None where nothing is."""
    is_it = and_(needs.c.mirror_key == key, needs.c.commit_id == commit)
    facts = connection.execute(select(needs.c.facts).where(is_it)).scalar()
    if facts is None:
        return None
    modules = tuple(Module(*each) for each in facts["modules"])
    missing = tuple((path, reason) for path, reason in facts["missing"])
    return Composition(**{**facts, "modules": modules, "missing": missing})


def forget_unneeded(connection: Connection) -> None:
    """Forget what commits need that are no instance's base any more: their pins are removed."""
    is_base = sa.exists().where(
        instances.c.base_commit == needs.c.commit_id,
        sa.func.lower(instances.c.mirror_name) == needs.c.mirror_key,
    )
    connection.execute(sa.delete(needs).where(~is_base))


def put_compositions(connection: Connection, dataset_id: int, found: Compositions) -> None:
    """Replace what is known of these commits, and record submodules for a dataset's instances."""
    is_old = and_(recorded.c.dataset_id == dataset_id, recorded.c.role == CommitRole.SUBMODULE)
    connection.execute(sa.delete(recorded).where(is_old))
    rows = set[tuple[str, str, str, str]]()
    for (key, commit), composition in found.items():
        is_it = and_(needs.c.mirror_key == key, needs.c.commit_id == commit)
        connection.execute(sa.delete(needs).where(is_it))
        if composition == Composition():
            continue
        facts = asdict(composition)
        row = {"mirror_key": key, "commit_id": commit, "facts": facts}
        connection.execute(insert(needs).values(row))
        if composition.modules:
            is_based = and_(
                instances.c.dataset_id == dataset_id,
                instances.c.base_commit == commit,
                sa.func.lower(instances.c.mirror_name) == key,
            )
            ids = connection.execute(select(instances.c.id).where(is_based)).scalars().all()
            rows |= {
                (identity, module.commit, module.mirror.lower(), module.mirror)
                for identity in ids
                for module in composition.modules
            }
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
    unique = {(each["instance_id"], each["commit_id"]): each for each in values}
    if unique:
        connection.execute(insert(recorded), [*unique.values()])
