"""Queries about datasets, their instances and recorded commits, on one connection.

A registered mirror is spelled as it was added, another one as the row spells it. Whether a commit
is pinned is read from the pins, never stored with a dataset.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import (
    Connection,
    RowMapping,
    Text,
    and_,
    cast,
    distinct,
    exists,
    func,
    literal,
    or_,
    select,
)

from ..errors import InstanceAmbiguousError
from ..jsontext import dumps
from ..model import CommitId, CommitRole, DatasetName, Direction, History, MirrorName, shown
from ..protocol import AmbiguousInstance, Dataset, DatasetSummary, RowFault, UnpinnedCommit
from .changes import note_changes
from .database import lock
from .mirrors import in_batches
from .needs import forget_unneeded
from .schema import InstanceRow, RecordedRow, datasets, instances, mirrors, pins, recorded

# key of a reason why all commits of a mirror have no pin
ALL_COMMITS = "*"

# of commits that are not pinned, in the answer about one dataset
_SHOWN = 10_000
# of the same in a list of all datasets, and rows of a cursor fetched at a time
_LISTED = 100

_PINNED = exists().where(
    pins.c.mirror_key == recorded.c.mirror_key,
    pins.c.commit_id == recorded.c.commit_id,
    pins.c.owner == "dataset/" + datasets.c.name,
)
# the dataset has no pin of the commit that it records
_UNPINNED = ~_PINNED.correlate(recorded, datasets)

_RECORDED_BY_INSTANCE = and_(
    recorded.c.dataset_id == instances.c.dataset_id, recorded.c.instance_id == instances.c.id
)
# the mirror lacks the branch that has the instance's base commit
_UNRESOLVED = instances.c.base_commit == sa.literal_column("''")  # as in the partial index


def of_dataset(dataset: str | None, *columns: Any, of: sa.Table = instances) -> sa.Select[Any]:
    """Build a query of the rows of one dataset, or of all."""
    query = select(*columns).join(datasets, datasets.c.id == of.c.dataset_id)
    return query if dataset is None else query.where(datasets.c.name == dataset)


# -- datasets -------------------------------------------------------------------------------------


def find_dataset(connection: Connection, name: str) -> Dataset | None:
    """Find a dataset, with sums over its rows."""
    row = connection.execute(select(datasets).where(datasets.c.name == name)).mappings().first()
    if row is None:
        return None
    is_own = instances.c.dataset_id == row["id"]
    by_role = select(recorded.c.role, func.count(distinct(recorded.c.commit_id)))
    by_role = by_role.where(recorded.c.dataset_id == row["id"]).group_by(recorded.c.role)
    roles = connection.execute(by_role.order_by(recorded.c.role))
    created = instances.c.created_at
    sums = select(
        func.count(distinct(instances.c.environment)), func.min(created), func.max(created)
    )
    environments, first, last = connection.execute(sums.where(is_own)).one()
    digests = select(instances.c.id, instances.c.digest).where(is_own)
    # sorted here: PostgreSQL's order of texts depends on its locale
    rows = sorted((i.encode(), bytes(d)) for i, d in connection.execute(digests))
    return replace(
        _dataset(connection, row, _SHOWN),
        digest=hashlib.sha256(b"".join(b"%b\0%b" % pair for pair in rows)).hexdigest(),
        commits_by_role={CommitRole(role): count for role, count in roles},
        environment_count=environments,
        first_created_at=first,
        last_created_at=last,
    )


def list_datasets(connection: Connection) -> list[Dataset]:
    """List datasets, each with only the first of its unpinned commits and faults."""
    rows = connection.execute(select(datasets).order_by(datasets.c.name)).mappings().all()
    return [_dataset(connection, row, _LISTED) for row in rows]


def summarise_datasets(connection: Connection) -> list[DatasetSummary]:
    """List the counts of each dataset, for `status`."""
    rows = connection.execute(select(datasets).order_by(datasets.c.name)).mappings().all()
    columns = ("name", "format", "fault_count", "imported_at")
    return [
        DatasetSummary(**{name: row[name] for name in columns}, **_counts(connection, row["id"]))
        for row in rows
    ]


def count_rows(connection: Connection) -> tuple[int, int]:
    """Return the numbers of datasets and of instances."""
    counts = (
        connection.execute(select(func.count()).select_from(table)).scalar_one()
        for table in (datasets, instances)
    )
    return next(counts), next(counts)


def weigh_datasets(connection: Connection) -> dict[str, int]:
    """Return the bytes of patches and test lists by dataset: nearly all that the catalog holds."""
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
    was_there = connection.execute(sa.delete(datasets).where(datasets.c.name == name)).rowcount > 0
    forget_unneeded(connection)
    note_changes(connection, f"dataset/{name}")
    return was_there


def put_refused(connection: Connection, name: str, key: str, refused: dict[str, str]) -> None:
    """Replace the reasons why commits of one mirror (`*`: all of them) have no pin."""
    lock(connection, f"dataset/{name}")
    is_named = datasets.c.name == name
    old = connection.execute(select(datasets.c.refused).where(is_named)).scalar()
    if old is not None:
        values = {**old, key: refused}
        connection.execute(sa.update(datasets).where(is_named).values(refused=values))


def _dataset(connection: Connection, row: RowMapping, limit: int) -> Dataset:
    names = sa.union(
        select(recorded.c.mirror_name).where(recorded.c.dataset_id == row["id"]),
        select(instances.c.mirror_name).where(instances.c.dataset_id == row["id"], _UNRESOLVED),
    )
    by_key = {name.lower(): name for name in connection.execute(names).scalars()}
    columns = ("name", "format", "source", "sha256", "fault_count", "rules", "imported_at")
    return Dataset(
        **{name: row[name] for name in columns},
        mirrors=sorted(by_key.values()),
        unpinned=_list_unpinned(connection, row, limit),
        faults=[RowFault.from_json(fault) for fault in row["faults"][:limit]],
        **_counts(connection, row["id"]),
    )


def _counts(connection: Connection, dataset_id: int) -> dict[str, Any]:
    commits = select(recorded.c.mirror_key, recorded.c.commit_id).distinct()
    commits = commits.where(recorded.c.dataset_id == dataset_id)
    in_dataset = select(instances.c.id).where(instances.c.dataset_id == dataset_id)
    queries = {
        "instance_count": in_dataset,
        "commit_count": commits,
        "unpinned_count": commits.join(datasets, recorded.c.dataset_id == datasets.c.id).where(
            _UNPINNED
        ),
        "unresolved_count": in_dataset.where(_UNRESOLVED),
    }
    counts = {
        name: connection.execute(select(func.count()).select_from(query.subquery())).scalar_one()
        for name, query in queries.items()
    }
    counts["unpinned_count"] += counts.pop("unresolved_count")
    return counts


_NO_BRANCH = "the mirror has no such branch, tag or commit; a sync that brings it pins its commit"
_NOT_YET = "it has not been pinned yet; import the dataset again"


def _list_unpinned(connection: Connection, row: RowMapping, limit: int) -> list[UnpinnedCommit]:
    order = (recorded.c.mirror_key, recorded.c.commit_id)
    query = (
        select(*order, recorded.c.mirror_name, recorded.c.instance_id, recorded.c.role)
        .join(datasets, recorded.c.dataset_id == datasets.c.id)
        .where(recorded.c.dataset_id == row["id"], _UNPINNED)
        .order_by(*order)
    )
    by_commit: dict[tuple[str, str], tuple[str, set[str], set[CommitRole]]] = {}
    for key, commit, name, instance, role in connection.execute(query):
        # in the order of commits: all instances of the last one listed were read
        if len(by_commit) == limit and (key, commit) not in by_commit:
            break
        _, ids, roles = by_commit.setdefault((key, commit), (name, set(), set()))
        ids.add(instance)
        roles.add(CommitRole(role))
    unpinned = []
    for (key, commit), (name, ids, roles) in by_commit.items():
        reasons = row["refused"].get(key, {})
        unpinned.append(
            UnpinnedCommit(
                mirror=name,
                commit=commit,
                roles=sorted(roles),
                instances=sorted(ids),
                reason=reasons.get(commit) or reasons.get(ALL_COMMITS) or _NOT_YET,
            )
        )
    unresolved = select(instances.c.mirror_name, instances.c.revision, instances.c.id)
    unresolved = unresolved.where(instances.c.dataset_id == row["id"], _UNRESOLVED)
    for name, revision, identity in connection.execute(unresolved.limit(limit - len(unpinned))):
        reason = row["refused"].get(name.lower(), {}).get(ALL_COMMITS) or _NO_BRANCH
        base = [CommitRole.BASE]
        unpinned.append(
            UnpinnedCommit(
                mirror=name, commit=revision, roles=base, instances=[identity], reason=reason
            )
        )
    return unpinned


# -- instances and the commits they record --------------------------------------------------------


class Choice(NamedTuple):
    """The row that an instance id stands for.

    `rivals` are the datasets that record other tests for it, the row's included: a checkout needs
    none of them, and whoever needs the tests must name one. `shares_setup`: they are run alike.
    """

    row: InstanceRow
    rivals: tuple[str, ...] = ()
    shares_setup: bool = True

    def must_be_one(self) -> None:
        """Raise InstanceAmbiguousError where it depends on the dataset which tests are meant."""
        if self.rivals:
            raise _ambiguous(self.row.public_id, self.rivals, "tests")


def find_instance(
    connection: Connection, identity: str, dataset: str | None = None
) -> InstanceRow | None:
    """Find an instance of one dataset, or of any, by its id or public id, as `choose_instance`.

    Raises InstanceAmbiguousError also where datasets record other tests.
    """
    choice = choose_instance(connection, identity, dataset)
    if choice is None:
        return None
    choice.must_be_one()
    return choice.row


def choose_instance(
    connection: Connection, identity: str, dataset: str | None = None
) -> Choice | None:
    """Choose the row of an id or public id: the first imported that records tests, or the first.

    Raises InstanceAmbiguousError if datasets differ in repository or base commit: then a checkout
    would be another. What a dataset does not record contradicts no other.
    """
    has_id = or_(instances.c.id == identity, instances.c.public_id == identity)
    # a public id hides the commits that its row records, so another dataset's may be another
    same = instances.c.id.in_(select(instances.c.id).where(has_id))
    query = _select_instances(dataset).where(same).order_by(instances.c.dataset_id)
    rows = connection.execute(query).mappings().all()
    if len({(row["mirror_name"].lower(), row["base_commit"]) for row in rows}) > 1:
        names = [row["dataset"] for row in rows]
        raise _ambiguous(identity, names, "repositories or base commits")
    tested = [row for row in rows if _has_tests(row)]
    row = next(_read_instances(connection, (tested or rows)[:1]), None)
    if row is None:
        return None
    if len({_tests_of(other) for other in tested}) < 2:
        return Choice(row)
    shares_setup = all(
        len({dumps(other[name]) for other in tested if other[name] is not None}) < 2
        for name in _SETUP
    )
    return Choice(row, tuple(other["dataset"] for other in tested), shares_setup)


def _ambiguous(identity: str, names: Sequence[str], fact: str) -> InstanceAmbiguousError:
    return InstanceAmbiguousError(
        f"cannot choose instance {shown(identity)}: {' and '.join(names[:5])} record it with"
        f" different {fact}",
        hint=f"name the dataset: --dataset {names[0]}",
        instance=identity,
        datasets=list(names),
    )


# as JSON, which PostgreSQL compares as text alone
_LISTS = ("fail_to_pass", "pass_to_pass")
_TESTS = (*_LISTS, "install_config")
_SETUP = ("environment", "python_version", "version", "install_config")


def _has_tests(row: RowMapping) -> bool:
    return bool(row["test_patch"] or any(row[name] for name in _LISTS))


def _tests_of(row: RowMapping) -> tuple[object, ...]:
    """Return what two datasets that record tests must record alike to be graded by the id alone."""
    return row["test_patch"] or b"", *(dumps(row[name]) for name in _TESTS)


def list_ambiguous(connection: Connection, dataset: str) -> list[AmbiguousInstance]:
    """List instances of a dataset for which another records another commit, or other tests."""
    own, other, other_dataset = instances, instances.alias(), datasets.alias()
    places = [(func.lower(it.c.mirror_name), it.c.base_commit) for it in (own, other)]
    is_elsewhere = or_(*(one != another for one, another in zip(*places, strict=True)))
    patches = [func.coalesce(it.c.test_patch, literal(b"")) for it in (own, other)]
    tests = [{name: cast(it.c[name], Text) for name in _TESTS} for it in (own, other)]
    have_tests = (
        or_(patch != literal(b""), *(lists[name] != "[]" for name in _LISTS))
        for patch, lists in zip(patches, tests, strict=True)
    )
    are_others = or_(
        patches[0] != patches[1],
        *(tests[0][name].is_distinct_from(tests[1][name]) for name in _TESTS),
    )
    has_same_id = and_(other.c.id == own.c.id, other.c.dataset_id != own.c.dataset_id)
    differs = or_(is_elsewhere, and_(*have_tests, are_others))
    query = (
        of_dataset(dataset, own.c.id, other_dataset.c.name, is_elsewhere)
        .join(other, and_(has_same_id, differs))
        .join(other_dataset, other_dataset.c.id == other.c.dataset_id)
        .order_by(own.c.id, other_dataset.c.name)
    )
    ambiguous: dict[str, list[str]] = {}
    elsewhere: set[str] = set()
    for identity, name, is_other in connection.execute(query):
        ambiguous.setdefault(identity, [dataset]).append(name)
        elsewhere |= {identity} if is_other else set()
    return [
        AmbiguousInstance(
            id=identity,
            datasets=names,
            differs="commit" if identity in elsewhere else "tests",
        )
        for identity, names in ambiguous.items()
    ]


def iter_instances(
    connection: Connection, dataset: str, key: str | None = None, *, unresolved: bool = False
) -> Iterator[InstanceRow]:
    """Iterate over a dataset's instances by id, in byte order; repositories as the file has them.

    Optionally only those of one mirror, or without a base commit.
    """
    query = _select_instances(dataset)
    if key is not None:
        query = query.where(func.lower(instances.c.mirror_name) == key.lower())
    if unresolved:
        query = query.where(_UNRESOLVED)
    is_sqlite = connection.dialect.name == "sqlite"  # compares bytes by default
    order = instances.c.id if is_sqlite else instances.c.id.collate("C")
    result = connection.execute(query.order_by(order)).mappings()
    for rows in result.yield_per(_LISTED).partitions():
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
    """Read instances of one dataset. `repository` is the column to take theirs from."""
    ids = [row["id"] for row in rows]
    query = select(recorded.c.instance_id, recorded.c.commit_id, recorded.c.role).where(
        recorded.c.dataset_id == (rows[0]["dataset_id"] if rows else None),
        recorded.c.instance_id.in_(ids),
        recorded.c.role != CommitRole.SUBMODULE,  # of another mirror
    )
    commits: dict[str, list[tuple[CommitId, CommitRole]]] = {identity: [] for identity in ids}
    for identity, commit, role in connection.execute(query.order_by(recorded.c.role)):
        commits[identity].append((CommitId(commit), CommitRole(role)))
    for row in rows:
        patch, test_patch = (
            None if row[name] is None else bytes(row[name]).decode()
            for name in ("patch", "test_patch")
        )
        yield InstanceRow(
            dataset=row["dataset"],
            mirror=MirrorName.parse(row[repository]),
            base_commit=CommitId(row["base_commit"]) if row["base_commit"] else None,
            direction=Direction(row["direction"]),
            commits=tuple(commits[row["id"]]),
            patch=patch,
            test_patch=test_patch,
            fail_to_pass=tuple(row["fail_to_pass"]),
            pass_to_pass=tuple(row["pass_to_pass"]),
            history=History(row["history"]) if row["history"] else None,
            rules=tuple(row["rules"] or ()),
            **{name: row[name] for name in PLAIN_COLUMNS},
        )


# columns of `instances` that an InstanceRow has unconverted
PLAIN_COLUMNS = (
    *("id", "revision", "environment", "python_version", "version", "created_at"),
    "install_config",
    "workdir",
)


class Servable(StrEnum):
    """Whether an instance can be checked out, and if not, why.

    PARTLY: it can, but another commit of its row cannot be served.
    LOST: an audit found that its base commit cannot be served.
    """

    READY = "ready"
    PARTLY = "ready, but"
    NO_BRANCH = "no branch"
    UNPINNED = "not pinned"
    LOST = "cannot be served"


class InstanceLine(NamedTuple):
    """The public facts of an instance, with its public id."""

    id: str
    mirror: str
    commit: str
    state: Servable


def count_servable(
    connection: Connection,
    lost: Collection[str] = (),
    dataset: str | None = None,
    accepted: Collection[str] = (),
) -> list[tuple[str, str, Servable, int]]:
    """Count instances by dataset, mirror and state, without those of `accepted` commits. `lost`:
    commits that an audit found missing.
    """
    names, mirror, state = datasets.c.name, instances.c.mirror_name, _servable(lost).label("state")
    query = of_dataset(dataset, names, mirror, state, func.count())
    # SQLite takes 32,766 variables a statement
    query = query.where(instances.c.base_commit.not_in(sorted(accepted)[:_SHOWN]))
    rows = connection.execute(query.group_by(names, mirror, "state").order_by(names, mirror))
    return [(name, mirror, Servable(state), count) for name, mirror, state, count in rows]


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
    """Return how many instances match, and some of them, by public id.

    `containing` is searched in public ids only: other ids would reveal commits.
    """
    public, servable = func.coalesce(instances.c.public_id, instances.c.id), _servable(lost)
    columns = (public, instances.c.mirror_name, instances.c.base_commit, servable)
    query = of_dataset(dataset, *columns)
    if state is not None:
        query = query.where(servable == state)
    if mirror is not None:
        query = query.where(func.lower(instances.c.mirror_name) == mirror.lower())
    if containing:
        query = query.where(public.icontains(containing, autoescape=True))
    count = connection.execute(select(func.count()).select_from(query.subquery())).scalar_one()
    rows = connection.execute(query.order_by(public).limit(limit).offset(offset))
    return count, [
        InstanceLine(identity, name, commit, Servable(word))
        for identity, name, commit, word in rows
    ]


def _servable(lost: Collection[str]) -> sa.ColumnElement[str]:
    unpinned = exists().where(_RECORDED_BY_INSTANCE, _UNPINNED)
    is_base = recorded.c.role == CommitRole.BASE
    return sa.case(
        (_UNRESOLVED, Servable.NO_BRANCH),
        (unpinned.where(is_base).correlate(instances, datasets), Servable.UNPINNED),
        (instances.c.base_commit.in_(sorted(lost)[:_SHOWN]), Servable.LOST),
        (unpinned.correlate(instances, datasets), Servable.PARTLY),
        else_=Servable.READY,
    )


def list_public_ids(connection: Connection, ids: Collection[str]) -> dict[str, str]:
    """Return the public ids of those ids that any dataset has."""
    public = func.coalesce(func.max(instances.c.public_id), instances.c.id)
    public_ids: dict[str, str] = {}
    for batch in in_batches(ids):
        query = select(instances.c.id, public).where(instances.c.id.in_(batch))
        public_ids |= dict(connection.execute(query.group_by(instances.c.id)).tuples().all())
    return public_ids


def list_instance_ids(connection: Connection, dataset: str | None = None) -> list[str]:
    """List ids, datasets in the order of their first import."""
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
    """List recorded commits: all, of a mirror, of a dataset, only those without a pin."""
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
    """List dataset, id and revision of instances whose branch the mirror lacks."""
    query = of_dataset(dataset, datasets.c.name, instances.c.id, instances.c.revision)
    query = query.where(_UNRESOLVED, func.lower(instances.c.mirror_name) == key.lower())
    rows = connection.execute(query.order_by(instances.c.id))
    return [(DatasetName(name), identity, revision) for name, identity, revision in rows]


def list_unresolved_mirrors(connection: Connection) -> set[str]:
    """Return the keys of mirrors that lack the branch of an instance."""
    query = select(func.lower(instances.c.mirror_name)).where(_UNRESOLVED).distinct()
    return set(connection.execute(query).scalars())


def find_base_commit(connection: Connection, key: str, digits: str) -> CommitId | None:
    """Find the only base commit of a mirror's instances with this prefix."""
    query = select(recorded.c.commit_id).where(
        recorded.c.mirror_key == key,
        recorded.c.role == CommitRole.BASE,
        # a range, which the index answers; g comes after the last hexadecimal digit
        recorded.c.commit_id >= digits,
        recorded.c.commit_id < f"{digits}g",
    )
    commits = connection.execute(query.distinct().limit(2)).scalars().all()
    return CommitId(commits[0]) if len(commits) == 1 else None


def find_history_limit(connection: Connection, key: str, commit: CommitId) -> History | None:
    """Find the strictest history limit of the instances with this base commit."""
    query = (
        select(instances.c.history)
        .join(recorded, _RECORDED_BY_INSTANCE)
        .where(recorded.c.mirror_key == key, recorded.c.commit_id == commit)
        .where(instances.c.base_commit == commit, instances.c.history.is_not(None))
    )
    limits = [History(limit) for limit in connection.execute(query.distinct()).scalars()]
    return next((limit for limit in limits if all(map(limit.is_within, limits))), None)
