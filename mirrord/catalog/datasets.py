"""Queries about datasets, their instances and the commits those record. Sync functions on one connection.

A mirror is answered in the spelling it is registered under, and in the row's own where it is not registered.

Whether a commit is pinned is never stored with a dataset: it is what the pins table says, so that no dataset can claim a pin it
has not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    and_,
    delete,
    exists,
    func,
    or_,
    outerjoin,
    select,
    update,
)

from ..errors import InstanceAmbiguousError
from ..model import CommitId, CommitRole, Direction, MirrorName, shown
from ..protocol import AmbiguousInstance, Dataset, DatasetSummary, RowFault, UnpinnedCommit
from .schema import InstanceRow, RecordedRow, datasets, instances, mirrors, pins, recorded

NOT_YET = "it has not been pinned yet; import the dataset again"
EVERY = "*"
"""Stands for every commit of a mirror in the reasons why commits have no pin."""

_SHOWN = 10_000
_LISTED = 100


# -- datasets ---------------------------------------------------------------------------------------------------------


def find_dataset(connection: Connection, name: str) -> Dataset | None:
    found = connection.execute(select(datasets).where(datasets.c.name == name)).mappings().first()
    return _dataset(connection, found, _SHOWN) if found else None


def list_datasets(connection: Connection) -> list[Dataset]:
    """All, each with only the first of its unpinned commits and faults."""
    rows = connection.execute(select(datasets).order_by(datasets.c.name)).mappings().all()
    return [_dataset(connection, row, _LISTED) for row in rows]


def summarise_datasets(connection: Connection) -> list[DatasetSummary]:
    """Every dataset by its counts alone: what a status needs."""
    rows = connection.execute(select(datasets).order_by(datasets.c.name)).mappings().all()
    return [
        DatasetSummary(
            name=row["name"],
            format=row["format"],
            instance_count=_count_instances(connection, row["id"]),
            commit_count=_count_commits(connection, row["id"]),
            fault_count=row["fault_count"],
            unpinned_count=_count_unpinned(connection, row["id"]),
            imported_at=row["imported_at"],
        )
        for row in rows
    ]


def delete_dataset(connection: Connection, name: str) -> bool:
    """Delete a dataset with its instances; its pins are the caller's to remove."""
    return connection.execute(delete(datasets).where(datasets.c.name == name)).rowcount > 0


def put_refused(connection: Connection, name: str, key: str, refused: dict[str, str]) -> None:
    """Say anew why commits of one mirror have no pin of this dataset."""
    old = connection.execute(select(datasets.c.refused).where(datasets.c.name == name)).scalar()
    if old is not None:
        values = {**old, key: refused}
        connection.execute(update(datasets).where(datasets.c.name == name).values(refused=values))


def _dataset(connection: Connection, row: RowMapping, limit: int) -> Dataset:
    names = select(recorded.c.mirror_name).where(recorded.c.dataset_id == row["id"]).distinct()
    return Dataset(
        name=row["name"],
        format=row["format"],
        source=row["source"],
        sha256=row["sha256"],
        instance_count=_count_instances(connection, row["id"]),
        commit_count=_count_commits(connection, row["id"]),
        mirrors=sorted(
            {name.lower(): name for name in connection.execute(names).scalars()}.values()
        ),
        unpinned_count=_count_unpinned(connection, row["id"]),
        unpinned=_list_unpinned(connection, row, limit),
        fault_count=row["fault_count"],
        faults=[RowFault.from_json(fault) for fault in row["faults"][:limit]],
        rules=row["rules"],
        imported_at=row["imported_at"],
    )


def _count_instances(connection: Connection, dataset_id: int) -> int:
    query = select(func.count()).select_from(instances).where(instances.c.dataset_id == dataset_id)
    return int(connection.execute(query).scalar_one())


def _count_commits(connection: Connection, dataset_id: int) -> int:
    distinct = (
        select(recorded.c.mirror_key, recorded.c.commit_id)
        .where(recorded.c.dataset_id == dataset_id)
        .distinct()
    )
    return int(
        connection.execute(select(func.count()).select_from(distinct.subquery())).scalar_one()
    )


def _is_pinned_by_its_dataset() -> ColumnElement[bool]:
    return and_(
        pins.c.mirror_key == recorded.c.mirror_key,
        pins.c.commit_id == recorded.c.commit_id,
        pins.c.owner == "dataset/" + datasets.c.name,
    )


def _unpinned_of(dataset_id: int, *columns: ColumnElement[Any]) -> Any:
    """Recorded commits of a dataset for which that dataset has no pin."""
    joined = outerjoin(
        recorded.join(datasets, datasets.c.id == recorded.c.dataset_id),
        pins,
        _is_pinned_by_its_dataset(),
    )
    return (
        select(*columns)
        .select_from(joined)
        .where(recorded.c.dataset_id == dataset_id, pins.c.owner.is_(None))
    )


def _count_unpinned(connection: Connection, dataset_id: int) -> int:
    distinct = _unpinned_of(dataset_id, recorded.c.mirror_key, recorded.c.commit_id).distinct()
    return int(
        connection.execute(select(func.count()).select_from(distinct.subquery())).scalar_one()
    )


def _list_unpinned(connection: Connection, row: RowMapping, limit: int) -> list[UnpinnedCommit]:
    columns = (
        recorded.c.mirror_key,
        recorded.c.commit_id,
        recorded.c.mirror_name,
        recorded.c.instance_id,
    )
    found: dict[tuple[str, str], tuple[str, set[str]]] = {}
    for key, commit, name, instance in connection.execute(
        _unpinned_of(row["id"], *columns).order_by(*columns[:2])
    ):
        if len(found) == limit and (key, commit) not in found:
            break
        found.setdefault((key, commit), (name, set()))[1].add(instance)
    return [
        UnpinnedCommit(
            mirror=name,
            commit=commit,
            instances=sorted(ids),
            reason=_reason(row["refused"].get(key, {}), commit),
        )
        for (key, commit), (name, ids) in found.items()
    ]


def _reason(reasons: dict[str, str], commit: str) -> str:
    return reasons.get(commit) or reasons.get(EVERY) or NOT_YET


# -- instances and what they record -----------------------------------------------------------------------------------


def find_instance(
    connection: Connection, identity: str, dataset: str | None = None
) -> InstanceRow | None:
    """An instance by its exact id, of one dataset or of any; of several that record the same, the one imported first answers.

    Raises InstanceAmbiguousError where any was asked for and two record another repository or base commit.
    """
    query = _instances().where(instances.c.id == identity).order_by(instances.c.dataset_id)
    if dataset is not None:
        query = query.where(datasets.c.name == dataset)
    rows = connection.execute(query).mappings().all()
    if len({(row["mirror_name"].lower(), row["base_commit"]) for row in rows}) > 1:
        names = [row["dataset"] for row in rows]
        raise InstanceAmbiguousError(
            f"cannot tell which instance {shown(identity)} is meant: {len(names)} datasets record it with"
            " different repositories or base commits",
            hint=f"name the dataset: --dataset {names[0]}",
            instance=identity,
            datasets=names,
        )
    return _instance(connection, rows[0]) if rows else None


def list_ambiguous(connection: Connection, dataset: str) -> list[AmbiguousInstance]:
    """Instances of a dataset of which another one records another repository or base commit."""
    mine, other = instances.alias(), instances.alias()
    differs = or_(
        func.lower(mine.c.mirror_name) != func.lower(other.c.mirror_name),
        mine.c.base_commit != other.c.base_commit,
    )
    ours, theirs = datasets.alias(), datasets.alias()
    query = (
        select(mine.c.id, theirs.c.name)
        .join(ours, ours.c.id == mine.c.dataset_id)
        .join(
            other, and_(other.c.id == mine.c.id, other.c.dataset_id != mine.c.dataset_id, differs)
        )
        .join(theirs, theirs.c.id == other.c.dataset_id)
        .where(ours.c.name == dataset)
        .order_by(mine.c.id, theirs.c.name)
    )
    found: dict[str, list[str]] = {}
    for identity, name in connection.execute(query):
        found.setdefault(identity, [dataset]).append(name)
    return [AmbiguousInstance(id=identity, datasets=names) for identity, names in found.items()]


def iter_instances(connection: Connection, dataset: str, key: str) -> Iterator[InstanceRow]:
    """The instances of a dataset that name one mirror, by id."""
    query = _instances().where(
        datasets.c.name == dataset, func.lower(instances.c.mirror_name) == key.lower()
    )
    for row in connection.execute(query.order_by(instances.c.id)).mappings().yield_per(_LISTED):
        yield _instance(connection, row)


def _instances() -> Any:
    known_as = func.coalesce(mirrors.c.name, instances.c.mirror_name).label("known_as")
    return (
        select(instances, datasets.c.name.label("dataset"), known_as)
        .join(datasets, datasets.c.id == instances.c.dataset_id)
        .outerjoin(mirrors, mirrors.c.key == func.lower(instances.c.mirror_name))
    )


def _instance(connection: Connection, row: RowMapping) -> InstanceRow:
    mine = (recorded.c.dataset_id == row["dataset_id"], recorded.c.instance_id == row["id"])
    commits = connection.execute(
        select(recorded.c.commit_id, recorded.c.role).where(*mine).order_by(recorded.c.role)
    )
    return InstanceRow(
        id=row["id"],
        dataset=row["dataset"],
        mirror=MirrorName.parse(row["known_as"]),
        base_commit=CommitId(row["base_commit"]),
        direction=Direction(row["direction"]),
        commits=tuple((CommitId(commit), CommitRole(role)) for commit, role in commits),
        patch=_text(row["patch"]),
        test_patch=_text(row["test_patch"]),
        fail_to_pass=tuple(row["fail_to_pass"]),
        pass_to_pass=tuple(row["pass_to_pass"]),
    )


def _text(value: bytes | None) -> str | None:
    return None if value is None else bytes(value).decode()


def list_instance_ids(connection: Connection, dataset: str | None) -> list[str]:
    """Ids in the order of the datasets' first import, then by id."""
    query = select(instances.c.id).join(datasets, datasets.c.id == instances.c.dataset_id)
    if dataset is not None:
        query = query.where(datasets.c.name == dataset)
    return list(
        dict.fromkeys(
            connection.execute(query.order_by(instances.c.dataset_id, instances.c.id)).scalars()
        )
    )


def list_recorded(
    connection: Connection, key: str | None, dataset: str | None, unpinned: bool = False
) -> list[RecordedRow]:
    """Recorded commits; with `unpinned`, only those that their own dataset has no pin of."""
    known_as = func.coalesce(mirrors.c.name, recorded.c.mirror_name).label("known_as")
    query = (
        select(recorded, datasets.c.name.label("dataset"), known_as)
        .join(datasets, datasets.c.id == recorded.c.dataset_id)
        .outerjoin(mirrors, mirrors.c.key == recorded.c.mirror_key)
    )
    if key is not None:
        query = query.where(recorded.c.mirror_key == key.lower())
    if dataset is not None:
        query = query.where(datasets.c.name == dataset)
    if unpinned:
        query = query.where(~exists().where(_is_pinned_by_its_dataset()))
    order = (recorded.c.mirror_key, recorded.c.commit_id, recorded.c.instance_id, recorded.c.role)
    return [
        RecordedRow(
            mirror=MirrorName.parse(row["known_as"]),
            commit=CommitId(row["commit_id"]),
            role=CommitRole(row["role"]),
            instance=row["instance_id"],
            dataset=row["dataset"],
        )
        for row in connection.execute(query.order_by(*order)).mappings()
    ]


def find_base_commit(connection: Connection, key: str, digits: str) -> CommitId | None:
    """The one base commit of a mirror's instances that begins with these digits."""
    query = select(recorded.c.commit_id).where(
        recorded.c.mirror_key == key,
        recorded.c.role == CommitRole.BASE,
        recorded.c.commit_id >= digits,
        recorded.c.commit_id < f"{digits}g",
    )
    found = connection.execute(query.distinct().limit(2)).scalars().all()
    return CommitId(found[0]) if len(found) == 1 else None


def instances_of(connection: Connection, key: str, commit: CommitId) -> list[str]:
    """Ids of all instances that record a commit, in whatever role."""
    mine = (recorded.c.mirror_key == key.lower(), recorded.c.commit_id == commit)
    return sorted(
        connection.execute(select(recorded.c.instance_id).where(*mine).distinct()).scalars()
    )
