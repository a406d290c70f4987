"""Queries about datasets, their instances and the commits those record. Sync, on one connection.

Answers a registered mirror in its own spelling, another one in the row's. Whether a commit is
pinned is never stored with a dataset but read from the pins: no dataset claims a pin it lacks.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection, RowMapping, and_, distinct, exists, func, or_, select

from ..errors import InstanceAmbiguousError
from ..model import CommitId, CommitRole, DatasetName, Direction, History, MirrorName, shown
from ..protocol import AmbiguousInstance, Dataset, DatasetSummary, RowFault, UnpinnedCommit
from .database import lock
from .fleet import touch
from .mirrors import in_batches
from .schema import InstanceRow, RecordedRow, datasets, instances, mirrors, pins, recorded

EVERY = "*"
"""Stands for every commit of a mirror in the reasons why commits have no pin."""

_NO_BRANCH = "the mirror has no such branch; a sync that brings it pins its commit"
_NOT_YET = "it has not been pinned yet; import the dataset again"
_SHOWN = 10_000
_LISTED = 100

_PINNED = exists().where(
    pins.c.mirror_key == recorded.c.mirror_key,
    pins.c.commit_id == recorded.c.commit_id,
    pins.c.owner == "dataset/" + datasets.c.name,
)
_UNPINNED = ~_PINNED.correlate(recorded, datasets)
"""The commit is recorded by a dataset that has no pin of it."""

_UNRESOLVED = instances.c.base_commit == sa.literal_column("''")  # as the partial index has it
"""The mirror does not have the branch that holds the instance's base commit."""


def of_dataset(dataset: str | None, *columns: Any, of: sa.Table = instances) -> sa.Select[Any]:
    """A query of the rows of one dataset, or of all."""
    query = select(*columns).join(datasets, datasets.c.id == of.c.dataset_id)
    return query if dataset is None else query.where(datasets.c.name == dataset)


# -- datasets -------------------------------------------------------------------------------------


def find_dataset(connection: Connection, name: str) -> Dataset | None:
    """One dataset, with what its rows have in sum."""
    found = connection.execute(select(datasets).where(datasets.c.name == name)).mappings().first()
    if found is None:
        return None
    mine, own = instances.c.dataset_id == found["id"], recorded.c.dataset_id == found["id"]
    by_role = select(recorded.c.role, func.count(distinct(recorded.c.commit_id))).where(own)
    roles = connection.execute(by_role.group_by(recorded.c.role).order_by(recorded.c.role))
    born = instances.c.created_at
    sums = select(func.count(distinct(instances.c.environment)), func.min(born), func.max(born))
    environments, first, last = connection.execute(sums.where(mine)).one()
    digests = select(instances.c.id, instances.c.digest).where(mine)
    rows = sorted((i.encode(), bytes(d)) for i, d in connection.execute(digests))
    return replace(
        _dataset(connection, found, _SHOWN),
        digest=hashlib.sha256(b"".join(b"%b\0%b" % row for row in rows)).hexdigest(),
        commits_by_role={CommitRole(role): count for role, count in roles},
        environment_count=environments,
        first_created_at=first,
        last_created_at=last,
    )


def list_datasets(connection: Connection) -> list[Dataset]:
    """All, each with only the first of its unpinned commits and faults."""
    rows = connection.execute(select(datasets).order_by(datasets.c.name)).mappings().all()
    return [_dataset(connection, row, _LISTED) for row in rows]


def summarise_datasets(connection: Connection) -> list[DatasetSummary]:
    """Every dataset by its counts alone, for `status`."""
    rows = connection.execute(select(datasets).order_by(datasets.c.name)).mappings().all()
    same = ("name", "format", "fault_count", "imported_at")
    return [
        DatasetSummary(**{name: row[name] for name in same}, **_counts(connection, row["id"]))
        for row in rows
    ]


def count_rows(connection: Connection) -> tuple[int, int]:
    found = [connection.execute(select(func.count()).select_from(t)) for t in (datasets, instances)]
    return found[0].scalar_one(), found[1].scalar_one()


def weigh_datasets(connection: Connection) -> dict[str, int]:
    """The bytes of patches and test lists by dataset: nearly all that the catalog holds."""
    row = instances.c
    lists = (sa.cast(column, sa.Text) for column in (row.fail_to_pass, row.pass_to_pass))
    parts = (func.length(part) for part in (row.patch, row.test_patch, *lists))
    size = func.sum(sum((func.coalesce(part, 0) for part in parts), sa.literal(0)))
    query = select(datasets.c.name, func.coalesce(size, 0)).outerjoin(
        instances, instances.c.dataset_id == datasets.c.id
    )
    rows = connection.execute(query.group_by(datasets.c.name).order_by(datasets.c.name))
    return {name: int(size) for name, size in rows}


def delete_dataset(connection: Connection, name: str) -> bool:
    """Delete a dataset with its instances; the caller removes its pins."""
    lock(connection, f"dataset/{name}")
    found = connection.execute(sa.delete(datasets).where(datasets.c.name == name)).rowcount > 0
    touch(connection, f"dataset/{name}")
    return found


def put_refused(connection: Connection, name: str, key: str, refused: dict[str, str]) -> None:
    """Replace the reasons why commits of one mirror (`*`: all of them) have no pin."""
    lock(connection, f"dataset/{name}")
    mine = datasets.c.name == name
    old = connection.execute(select(datasets.c.refused).where(mine)).scalar()
    if old is not None:
        values = {**old, key: refused}
        connection.execute(sa.update(datasets).where(mine).values(refused=values))


def _dataset(connection: Connection, row: RowMapping, limit: int) -> Dataset:
    names = sa.union(
        select(recorded.c.mirror_name).where(recorded.c.dataset_id == row["id"]),
        select(instances.c.mirror_name).where(instances.c.dataset_id == row["id"], _UNRESOLVED),
    )
    by_key = {name.lower(): name for name in connection.execute(names).scalars()}
    same = ("name", "format", "source", "sha256", "fault_count", "rules", "imported_at")
    return Dataset(
        **{name: row[name] for name in same},
        mirrors=sorted(by_key.values()),
        unpinned=_list_unpinned(connection, row, limit),
        faults=[RowFault.from_json(fault) for fault in row["faults"][:limit]],
        **_counts(connection, row["id"]),
    )


def _counts(connection: Connection, dataset_id: int) -> dict[str, Any]:
    commits = select(recorded.c.mirror_key, recorded.c.commit_id).distinct()
    mine = commits.where(recorded.c.dataset_id == dataset_id)
    known_by = recorded.c.dataset_id == datasets.c.id
    waiting = select(instances.c.id).where(instances.c.dataset_id == dataset_id, _UNRESOLVED)
    queries = {
        "instance_count": select(instances.c.id).where(instances.c.dataset_id == dataset_id),
        "commit_count": mine,
        "unpinned_count": mine.join(datasets, known_by).where(_UNPINNED),
        "waiting": waiting,
    }
    counts = {
        name: connection.execute(select(func.count()).select_from(query.subquery())).scalar_one()
        for name, query in queries.items()
    }
    counts["unpinned_count"] += counts.pop("waiting")
    return counts


def _list_unpinned(connection: Connection, row: RowMapping, limit: int) -> list[UnpinnedCommit]:
    order = (recorded.c.mirror_key, recorded.c.commit_id)
    query = (
        select(*order, recorded.c.mirror_name, recorded.c.instance_id, recorded.c.role)
        .join(datasets, recorded.c.dataset_id == datasets.c.id)
        .where(recorded.c.dataset_id == row["id"], _UNPINNED)
        .order_by(*order)
    )
    found: dict[tuple[str, str], tuple[str, set[str], set[CommitRole]]] = {}
    for key, commit, name, instance, role in connection.execute(query):
        if len(found) == limit and (key, commit) not in found:
            break
        _, ids, roles = found.setdefault((key, commit), (name, set(), set()))
        ids.add(instance)
        roles.add(CommitRole(role))
    unpinned = []
    for (key, commit), (name, ids, roles) in found.items():
        why = row["refused"].get(key, {})
        unpinned.append(
            UnpinnedCommit(
                mirror=name,
                commit=commit,
                roles=sorted(roles),
                instances=sorted(ids),
                reason=why.get(commit) or why.get(EVERY) or _NOT_YET,
            )
        )
    waiting = select(instances.c.mirror_name, instances.c.revision, instances.c.id)
    mine = waiting.where(instances.c.dataset_id == row["id"], _UNRESOLVED)
    for name, revision, identity in connection.execute(mine.limit(limit - len(unpinned))):
        reason = row["refused"].get(name.lower(), {}).get(EVERY) or _NO_BRANCH
        base = [CommitRole.BASE]
        unpinned.append(
            UnpinnedCommit(
                mirror=name, commit=revision, roles=base, instances=[identity], reason=reason
            )
        )
    return unpinned


# -- instances and the commits they record --------------------------------------------------------


def find_instance(
    connection: Connection, identity: str, dataset: str | None = None
) -> InstanceRow | None:
    """An instance by its exact id, the dataset's or ours; of one dataset or of any.

    Of several datasets that record the same, the first imported one answers. Raises
    InstanceAmbiguousError where two of any record other repositories or base commits.
    """
    is_called_so = or_(instances.c.id == identity, instances.c.public_id == identity)
    query = _select_instances(dataset).where(is_called_so).order_by(instances.c.dataset_id)
    rows = connection.execute(query).mappings().all()
    if len({(row["mirror_name"].lower(), row["base_commit"]) for row in rows}) > 1:
        names = [row["dataset"] for row in rows]
        raise InstanceAmbiguousError(
            f"cannot choose instance {shown(identity)}: {len(names)} datasets record it with"
            " different repositories or base commits",
            hint=f"name the dataset: --dataset {names[0]}",
            instance=identity,
            datasets=names,
        )
    return next(_read_instances(connection, rows[:1]), None)


def list_ambiguous(connection: Connection, dataset: str) -> list[AmbiguousInstance]:
    """Instances of a dataset that another one records with another repository or base commit."""
    mine, other = instances.alias(), instances.alias()
    ours, theirs = datasets.alias(), datasets.alias()
    differs = or_(
        func.lower(mine.c.mirror_name) != func.lower(other.c.mirror_name),
        mine.c.base_commit != other.c.base_commit,
    )
    is_same_id = and_(other.c.id == mine.c.id, other.c.dataset_id != mine.c.dataset_id)
    query = (
        select(mine.c.id, theirs.c.name)
        .join(ours, ours.c.id == mine.c.dataset_id)
        .join(other, and_(is_same_id, differs))
        .join(theirs, theirs.c.id == other.c.dataset_id)
        .where(ours.c.name == dataset)
        .order_by(mine.c.id, theirs.c.name)
    )
    found: dict[str, list[str]] = {}
    for identity, name in connection.execute(query):
        found.setdefault(identity, [dataset]).append(name)
    return [AmbiguousInstance(id=identity, datasets=names) for identity, names in found.items()]


def iter_instances(
    connection: Connection, dataset: str, key: str | None = None, *, unresolved: bool = False
) -> Iterator[InstanceRow]:
    """The instances of a dataset in the order of their ids' bytes, each with its repository as the
    file spells it; those that name one mirror, or have no base commit.
    """
    query = _select_instances(dataset)
    if key is not None:
        query = query.where(func.lower(instances.c.mirror_name) == key.lower())
    if unresolved:
        query = query.where(_UNRESOLVED)
    is_sqlite = connection.dialect.name == "sqlite"  # whose own order that is
    order = instances.c.id if is_sqlite else instances.c.id.collate("C")
    found = connection.execute(query.order_by(order)).mappings()
    for rows in found.yield_per(_LISTED).partitions():
        yield from _read_instances(connection, rows, "mirror_name")


def find_instances(connection: Connection, dataset: str, ids: list[str]) -> Iterator[InstanceRow]:
    for batch in in_batches(ids):
        query = _select_instances(dataset).where(instances.c.id.in_(batch))
        yield from _read_instances(connection, connection.execute(query).mappings().all())


def _select_instances(dataset: str | None) -> sa.Select[Any]:
    known_as = func.coalesce(mirrors.c.name, instances.c.mirror_name).label("known_as")
    query = of_dataset(dataset, instances, datasets.c.name.label("dataset"), known_as)
    return query.outerjoin(mirrors, mirrors.c.key == func.lower(instances.c.mirror_name))


def _read_instances(
    connection: Connection, rows: Sequence[RowMapping], repository: str = "known_as"
) -> Iterator[InstanceRow]:
    """Instances of one dataset; `repository` is the column that spells theirs."""
    ids = [row["id"] for row in rows]
    query = select(recorded.c.instance_id, recorded.c.commit_id, recorded.c.role).where(
        recorded.c.dataset_id == (rows[0]["dataset_id"] if rows else None),
        recorded.c.instance_id.in_(ids),
    )
    commits: dict[str, list[tuple[CommitId, CommitRole]]] = {identity: [] for identity in ids}
    for identity, commit, role in connection.execute(query.order_by(recorded.c.role)):
        commits[identity].append((CommitId(commit), CommitRole(role)))
    for row in rows:
        yield _instance_row(row, row[repository], tuple(commits[row["id"]]))


SAME_COLUMNS = (
    *("id", "revision", "environment", "python_version", "version", "created_at"),
    "install_config",
)
"""What a row of `instances` and an InstanceRow have in the same form."""


def _instance_row(
    row: RowMapping, repository: str, commits: tuple[tuple[CommitId, CommitRole], ...]
) -> InstanceRow:
    patch, test_patch = (
        None if row[name] is None else bytes(row[name]).decode() for name in ("patch", "test_patch")
    )
    return InstanceRow(
        dataset=row["dataset"],
        mirror=MirrorName.parse(repository),
        base_commit=CommitId(row["base_commit"]) if row["base_commit"] else None,
        direction=Direction(row["direction"]),
        commits=commits,
        patch=patch,
        test_patch=test_patch,
        fail_to_pass=tuple(row["fail_to_pass"]),
        pass_to_pass=tuple(row["pass_to_pass"]),
        history=History(row["history"]) if row["history"] else None,
        rules=tuple(row["rules"] or ()),
        **{name: row[name] for name in SAME_COLUMNS},
    )


class Servable(StrEnum):
    """Whether an instance can be checked out, or why not. BUT: another commit of its row cannot be
    served; LOST: an audit could not serve its base commit.
    """

    READY = "ready"
    BUT = "ready, but"
    NO_BRANCH = "no branch"
    UNPINNED = "not pinned"
    LOST = "cannot be served"


class InstanceLine(NamedTuple):
    """What a stranger may know of an instance: no id but the public one."""

    id: str
    mirror: str
    commit: str
    state: Servable


def count_servable(
    connection: Connection, lost: Collection[str] = (), dataset: str | None = None
) -> list[tuple[str, str, Servable, int]]:
    """How many instances are in which state, by dataset and mirror. An audit could not serve the
    commits that are `lost`.
    """
    names, mirror, state = datasets.c.name, instances.c.mirror_name, _servable(lost).label("state")
    query = of_dataset(dataset, names, mirror, state, func.count())
    found = connection.execute(query.group_by(names, mirror, "state").order_by(names, mirror))
    return [(name, mirror, Servable(state), count) for name, mirror, state, count in found]


def list_servable(
    connection: Connection,
    dataset: str,
    lost: Collection[str],
    *,
    state: Servable | None = None,
    mirror: str | None = None,
    containing: str = "",
    limit: int = 100,
    offset: int = 0,
) -> tuple[int, list[InstanceLine]]:
    """Some instances of a dataset in the order of their public ids, and how many there are in all.

    Looks for `containing` in the public id alone: in the other it would find commits.
    """
    public, known = func.coalesce(instances.c.public_id, instances.c.id), _servable(lost)
    columns = (public, instances.c.mirror_name, instances.c.base_commit, known)
    query = of_dataset(dataset, *columns)
    if state is not None:
        query = query.where(known == state)
    if mirror is not None:
        query = query.where(func.lower(instances.c.mirror_name) == mirror.lower())
    if containing:
        query = query.where(public.icontains(containing, autoescape=True))
    count = connection.execute(select(func.count()).select_from(query.subquery())).scalar_one()
    found = connection.execute(query.order_by(public).limit(limit).offset(offset))
    return count, [
        InstanceLine(identity, name, commit, Servable(word))
        for identity, name, commit, word in found
    ]


def _servable(lost: Collection[str]) -> sa.ColumnElement[str]:
    mine = and_(
        recorded.c.dataset_id == instances.c.dataset_id, recorded.c.instance_id == instances.c.id
    )
    unpinned = exists().where(mine, _UNPINNED)
    is_base = recorded.c.role == CommitRole.BASE
    return sa.case(
        (_UNRESOLVED, Servable.NO_BRANCH),
        (unpinned.where(is_base).correlate(instances, datasets), Servable.UNPINNED),
        (instances.c.base_commit.in_(sorted(lost)[:_SHOWN]), Servable.LOST),
        (unpinned.correlate(instances, datasets), Servable.BUT),
        else_=Servable.READY,
    )


def list_public_ids(connection: Connection, ids: Collection[str]) -> dict[str, str]:
    """The public ids of those that any dataset has."""
    public = func.max(instances.c.public_id)
    known: dict[str, str] = {}
    for batch in in_batches(ids):
        query = select(instances.c.id, public).where(instances.c.id.in_(batch))
        rows = connection.execute(query.group_by(instances.c.id))
        known |= {identity: told or identity for identity, told in rows}
    return known


def list_instance_ids(connection: Connection, dataset: str | None = None) -> list[str]:
    """Ids in the order of the datasets' first import, then by id."""
    query = of_dataset(dataset, instances.c.id).order_by(instances.c.dataset_id, instances.c.id)
    ids = connection.execute(query).scalars()
    return list(dict.fromkeys(ids))


def list_recorded(
    connection: Connection,
    key: str | None = None,
    dataset: str | None = None,
    *,
    unpinned: bool = False,
) -> list[RecordedRow]:
    """Recorded commits of all, of one mirror, of one dataset; or only those without a pin."""
    known_as = func.coalesce(mirrors.c.name, recorded.c.mirror_name).label("known_as")
    query = of_dataset(
        dataset, recorded, datasets.c.name.label("dataset"), known_as, of=recorded
    ).outerjoin(mirrors, mirrors.c.key == recorded.c.mirror_key)
    if key is not None:
        query = query.where(recorded.c.mirror_key == key.lower())
    if unpinned:
        query = query.where(_UNPINNED)
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


def list_unresolved(
    connection: Connection, key: str, dataset: str | None = None
) -> list[tuple[DatasetName, str, str]]:
    """Dataset, id and revision of the instances whose branch a mirror did not have yet."""
    query = of_dataset(dataset, datasets.c.name, instances.c.id, instances.c.revision)
    mine = (_UNRESOLVED, func.lower(instances.c.mirror_name) == key.lower())
    rows = connection.execute(query.where(*mine).order_by(instances.c.id))
    return [(DatasetName(name), *rest) for name, *rest in rows]


def list_unresolved_mirrors(connection: Connection) -> set[str]:
    """The keys of mirrors that lack the branch of an instance."""
    query = select(func.lower(instances.c.mirror_name)).where(_UNRESOLVED).distinct()
    return set(connection.execute(query).scalars())


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


def find_history_limit(connection: Connection, key: str, commit: CommitId) -> History | None:
    """The least history that an instance with this base commit allows agents."""
    is_of = and_(
        recorded.c.dataset_id == instances.c.dataset_id, recorded.c.instance_id == instances.c.id
    )
    query = (
        select(instances.c.history)
        .join(recorded, is_of)
        .where(recorded.c.mirror_key == key, recorded.c.commit_id == commit)
        .where(instances.c.base_commit == commit, instances.c.history.is_not(None))
    )
    limits = [History(each) for each in connection.execute(query.distinct()).scalars()]
    return next((each for each in limits if all(map(each.is_within, limits))), None)


def instances_of(connection: Connection, key: str, commit: CommitId) -> list[str]:
    """Ids of all instances that record a commit, in whatever role."""
    mine = (recorded.c.mirror_key == key.lower(), recorded.c.commit_id == commit)
    query = select(recorded.c.instance_id).where(*mine).distinct()
    return sorted(connection.execute(query).scalars())
