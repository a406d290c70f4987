"""A dataset on its way into the catalog, or out of it: a JSON-lines file of normalised rows.

Runs in a worker process, in memory bounded by a batch and by the ids of the old dataset. A kill at
any moment rolls the transaction back: the old dataset stays whole. Unchanged rows are not written.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from ..model import CommitId, CommitRole, Direction, History, MirrorName, parse_commit
from ..protocol import DatasetChange, InstanceChange, RowsChange
from .database import Database, lock
from .datasets import SAME_COLUMNS, find_instances, iter_instances, of_dataset
from .fleet import touch
from .mirrors import in_batches
from .schema import DatasetHead, InstanceRow, datasets, instances, recorded

Found = Mapping[str, Mapping[str, CommitId]]  # by mirror key: what revisions are at
Spooled = tuple[bytes, InstanceRow]  # the hash of a line, and its row


# Digests are of lines: neither the names nor their order may change.
_MEMBERS = {
    "id": "id", "mirror": "mirror", "base_commit": "base", "direction": "direction",
    "commits": "commits", "patch": "patch", "test_patch": "test_patch", "fail_to_pass": "fail",
    "pass_to_pass": "pass", "revision": "revision", "environment": "environment",
    "python_version": "python", "version": "version", "created_at": "created",
    "history": "history", "install_config": "install", "rules": "rules",
}  # fmt: skip
"""What a line calls the fields of a row."""


def spooled(row: InstanceRow) -> bytes:
    """One line: the same bytes for the same row."""
    value = {member: getattr(row, name) for name, member in _MEMBERS.items()}
    value |= {"mirror": str(row.mirror), "commits": sorted(row.commits)}
    if not row.install_config:
        del value["install"]
    return _line(value)


def _line(value: Mapping[str, Any], *, sort_keys: bool = False) -> bytes:
    text = json.dumps(
        value, ensure_ascii=False, sort_keys=sort_keys, separators=(",", ":"),
        default=datetime.isoformat,
    )  # fmt: skip
    return text.encode() + b"\n"


def digest_of(line: bytes) -> bytes:
    """What tells a changed row: a spooled line's hash without its rules, which stand last.

    The same values can be spelled in other ways. A quote inside a value has a backslash.
    """
    end = line.rfind(b',"rules":')
    return hashlib.sha256(memoryview(line)[:end]).digest()  # no copy: a row may have 150 MB


def unspooled(line: bytes) -> InstanceRow:
    """The row of a line from anywhere; raises ValueError, KeyError or TypeError for any other."""
    value = json.loads(line)
    optional = ("revision", "environment", "python", "version", "created", "history")
    value = dict.fromkeys((*optional, "install")) | {"rules": []} | value
    known = (value[name] for name in ("patch", "test_patch", *optional))
    texts = [value["id"], *value["fail"], *value["pass"], *value["rules"]]
    texts += [text for text in known if text is not None]
    is_known = value["install"] is None or isinstance(value["install"], dict)
    is_text = all(isinstance(text, str) for text in texts)
    if not is_text or not is_known or len(value["id"]) > 500:
        raise ValueError("not the row of an instance")
    commits = [(parse_commit(commit), CommitRole(role)) for commit, role in value["commits"]]
    same = {name: value[member] for name, member in _MEMBERS.items()}
    read = {
        "mirror": MirrorName.parse(value["mirror"]),
        "base_commit": parse_commit(value["base"]) if value["base"] else None,
        "direction": Direction(value["direction"]),
        "commits": tuple(dict.fromkeys(commits)),
        "created_at": datetime.fromisoformat(value["created"]) if value["created"] else None,
        "history": History(value["history"]) if value["history"] else None,
    }
    lists = {name: tuple(same[name]) for name in ("fail_to_pass", "pass_to_pass", "rules")}
    return InstanceRow(dataset="", **(same | read | lists))


def spool_rows(place: str, dataset: str, key: str | None, spool: Path) -> int:
    """Write the rows of a dataset, or those that name one mirror; answers how many."""
    count = 0
    with (
        closing(Database(place)) as database,
        database.read() as connection,
        spool.open("wb") as lines,
    ):
        for row in iter_instances(connection, dataset, key):
            lines.write(spooled(row))
            count += 1
    return count


def merge_dataset(place: str, head: DatasetHead, spool: Path) -> int | None:
    """Add the missing rows of a dataset; answers how many, or None where another has the name.

    Two are the same when they were read from the same bytes. Existing rows stay as they are.
    """
    with _writing(place) as connection:
        lock(connection, f"dataset/{head.name}")
        named = select(datasets.c.id, datasets.c.sha256).where(datasets.c.name == head.name)
        found = connection.execute(named).first()
        if found is not None and found.sha256 != head.sha256:
            return None
        dataset_id = _put_head(connection, head) if found is None else int(found.id)
        ids = select(instances.c.id).where(instances.c.dataset_id == dataset_id)
        known = set(connection.execute(ids).scalars())
        count = 0
        for batch in iter_batches(spool):
            fresh = {row.id: (digest, row) for digest, row in batch if row.id not in known}
            _insert_instances(connection, dataset_id, list(fresh.values()))
            known |= fresh.keys()
            count += len(fresh)
        touch(connection, f"dataset/{head.name}")
        return count


def roles_of(revision: str) -> tuple[CommitRole, ...]:
    """The roles of a commit that a row names by a revision."""
    is_parent = revision.endswith("^")
    return (CommitRole.BASE,) if is_parent else (CommitRole.BASE, CommitRole.BUG)


def _resolved(row: InstanceRow, found: Found) -> InstanceRow:
    """The row with the base commit that its revision is at, where that was found."""
    base = found.get(row.mirror.key, {}).get(row.revision or "")
    if base is None or row.base_commit is not None:
        return row
    commits = (*((base, role) for role in roles_of(row.revision or "")), *row.commits)
    return replace(row, base_commit=base, commits=tuple(dict.fromkeys(commits)))


def resolve_instances(
    connection: Connection, dataset: str, key: str, found: Mapping[str, CommitId]
) -> int:
    """Give instances of one mirror the base commits of their revisions; answers how many."""
    lock(connection, f"dataset/{dataset}")
    waiting = iter_instances(connection, dataset, key, unresolved=True)
    rows = [_resolved(row, {key: found}) for row in waiting if row.revision in found]
    dataset_id = connection.execute(
        select(datasets.c.id).where(datasets.c.name == dataset)
    ).scalar_one_or_none()
    if dataset_id is None:
        return 0
    _delete_instances(connection, dataset_id, [row.id for row in rows])
    _insert_instances(connection, dataset_id, [(digest_of(spooled(row)), row) for row in rows])
    touch(connection, f"dataset/{dataset}")
    return len(rows)


def replace_dataset(
    place: str, head: DatasetHead, spool: Path, found: Found | None = None
) -> DatasetChange:
    """Replace the dataset, if any, by `head` and the spooled rows.

    `found` are the commits that the rows' revisions are at.
    """
    change, unchanged = DatasetChange(), 0
    with _writing(place) as connection:
        lock(connection, f"dataset/{head.name}")
        dataset_id = _put_head(connection, head)
        old = _digests(connection, head.name)
        for batch in iter_batches(spool, found):
            fresh = [(digest, row) for digest, row in batch if old.get(row.id) != digest]
            unchanged += len(batch) - len(fresh)
            changed = [row.id for _, row in fresh if row.id in old]
            change.changed.extend(changed)
            change.added.extend(row.id for _, row in fresh if row.id not in old)
            _delete_instances(connection, dataset_id, changed)
            _insert_instances(connection, dataset_id, fresh)
            for _, row in batch:
                old.pop(row.id, None)
        _delete_instances(connection, dataset_id, list(old))
        change.removed.extend(sorted(old))
        touch(connection, f"dataset/{head.name}")
    return replace(change, unchanged_count=unchanged)


@contextmanager
def _writing(place: str) -> Iterator[Connection]:
    """One transaction of a worker; gives back the disk that a large one took."""
    with closing(Database(place)) as database:
        try:
            with database.write() as connection:
                yield connection
        finally:
            database.shrink()


def _put_head(connection: Connection, head: DatasetHead) -> int:
    values = asdict(head)
    found = connection.execute(select(datasets.c.id).where(datasets.c.name == head.name)).scalar()
    if found is None:
        query = insert(datasets).values(values).returning(datasets.c.id)
        return int(connection.execute(query).scalar_one())
    connection.execute(update(datasets).where(datasets.c.id == found).values(values))
    return int(found)


def iter_batches(spool: Path, found: Found | None = None) -> Iterator[list[Spooled]]:
    """The rows of a spool, as many at a time as fit into a few megabytes."""
    batch: list[Spooled] = []
    size = 0
    with spool.open("rb") as lines:
        for line in lines:
            row = unspooled(line)
            if (full := _resolved(row, found or {})) is not row:
                row, line = full, spooled(full)
            batch.append((digest_of(line), row))
            size += len(line)
            if size >= 4 * 1024**2 or len(batch) >= 500:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _digests(connection: Connection, name: str) -> dict[str, bytes]:
    rows = connection.execute(of_dataset(name, instances.c.id, instances.c.digest))
    return {identity: bytes(digest) for identity, digest in rows}


def _delete_instances(connection: Connection, dataset_id: int, ids: list[str]) -> None:
    for batch in in_batches(ids):
        mine = (instances.c.dataset_id == dataset_id, instances.c.id.in_(batch))
        connection.execute(delete(instances).where(*mine))


def _insert_instances(connection: Connection, dataset_id: int, rows: list[Spooled]) -> None:
    if not rows:
        return
    same = [*SAME_COLUMNS, "direction", "fail_to_pass", "pass_to_pass", "history", "rules"]
    values = [
        {
            "dataset_id": dataset_id,
            "mirror_name": str(row.mirror),
            "base_commit": row.base_commit or "",
            "patch": None if row.patch is None else row.patch.encode(),
            "test_patch": None if row.test_patch is None else row.test_patch.encode(),
            "digest": digest,
            "public_id": None if row.public_id == row.id else row.public_id,
            **{name: getattr(row, name) for name in same},
        }
        for digest, row in rows
    ]
    connection.execute(insert(instances), values)
    commits = [
        {
            "dataset_id": dataset_id,
            "instance_id": row.id,
            "commit_id": commit,
            "role": role,
            "mirror_key": row.mirror.key,
            "mirror_name": str(row.mirror),
        }
        for _, row in rows
        for commit, role in row.commits
    ]
    if commits:
        connection.execute(insert(recorded), commits)


# -- whole datasets: written as canonical lines, compared row by row -------------------------------
#
# An export has a JSON object (RFC 8785) for each instance, in the order of ids, with the columns of
# SWE-bench's family and all recorded commits: the same bytes for the same rows, whatever file they
# were read from. Importing it again gives an equal dataset.

_COMPARED = [
    each.name for each in fields(InstanceRow) if each.name not in ("id", "dataset", "rules")
]


_COLUMNS = {
    "id": "instance_id", "repo": "repo", "fail_to_pass": "FAIL_TO_PASS",
    "pass_to_pass": "PASS_TO_PASS", "environment": "image_name",
    **{name: name for name in ("base_commit", "revision", "direction", "patch", "test_patch")},
    **{name: name for name in ("python_version", "version", "created_at", "history")},
    "install_config": "install_config",
}  # fmt: skip


def exported(row: InstanceRow) -> bytes:
    value = {column: getattr(row, name) for name, column in _COLUMNS.items()}
    value["commits"] = [{"commit": commit, "role": role} for commit, role in sorted(row.commits)]
    setup = (commit for commit, role in row.commits if role is CommitRole.ENVIRONMENT)
    return _line(value | {"environment_setup_commit": next(setup, None)}, sort_keys=True)


def export_dataset(place: str, name: str, file: Path) -> None:
    with (
        closing(Database(place)) as database,
        database.read() as connection,
        file.open("xb") as lines,
    ):
        lines.writelines(map(exported, iter_instances(connection, name)))


def compare_dataset(place: str, name: str, spool: Path) -> RowsChange:
    """What becomes of a dataset's rows if these spooled ones take their place."""
    change, unchanged = RowsChange(), 0
    with closing(Database(place)) as database, database.read() as connection:
        left = _digests(connection, name)
        for batch in iter_batches(spool):
            fresh = {row.id: row for digest, row in batch if left.get(row.id) != digest}
            unchanged += len(batch) - len(fresh)
            known = {row.id: row for row in find_instances(connection, name, list(fresh))}
            for identity, row in fresh.items():
                if identity not in known:
                    change.added.append(identity)
                elif differing := list(_differing(known[identity], row)):
                    found = InstanceChange(id=identity, fields=differing)
                    if "base_commit" in differing:
                        old = known[identity].base_commit
                        found = replace(found, base_before=old, base_after=row.base_commit)
                    change.changed.append(found)
                else:
                    unchanged += 1
            for _, row in batch:
                left.pop(row.id, None)
    change.removed.extend(sorted(left))
    return replace(change, unchanged_count=unchanged)


def _differing(old: InstanceRow, new: InstanceRow) -> Iterator[str]:
    """The fields of a row that differ. A branch that was found is the branch that will be."""
    is_found_later = old.revision == new.revision and None in (old.base_commit, new.base_commit)
    for name in _COMPARED:
        before, after = getattr(old, name), getattr(new, name)
        if name == "mirror":
            before, after = before.key, after.key
        elif name in ("base_commit", "commits") and is_found_later:
            continue
        elif name == "commits":
            before, after = set(before), set(after)
        if before != after:
            yield name
