"""A dataset on its way into the catalog, or out of it: a JSON-lines file of normalised rows.

Runs in a worker process, in memory bounded by a batch and by the ids of the old dataset. A kill at
any moment rolls the transaction back: the old dataset stays whole. Unchanged rows are not written.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

from sqlalchemy import Connection, delete, insert, select, update

from ..model import CommitId, CommitRole, Direction, History, MirrorName, parse_commit
from ..protocol import DatasetChange
from .database import Database
from .datasets import iter_instances
from .mirrors import in_batches
from .schema import DatasetHead, InstanceRow, datasets, instances, recorded

Found = Mapping[str, Mapping[str, CommitId]]  # by mirror key: what revisions are at
Spooled = tuple[bytes, InstanceRow]  # the hash of a line, and its row


def spooled(row: InstanceRow) -> bytes:
    """One line: the same bytes for the same row."""
    value = {
        "id": row.id,
        "mirror": str(row.mirror),
        "base": row.base_commit,
        "direction": row.direction,
        "commits": sorted((commit, role) for commit, role in row.commits),
        "patch": row.patch,
        "test_patch": row.test_patch,
        "fail": row.fail_to_pass,
        "pass": row.pass_to_pass,
        "revision": row.revision,
        "environment": row.environment,
        "python": row.python_version,
        "version": row.version,
        "created": row.created_at.isoformat() if row.created_at else None,
        "history": row.history,
        **({"install": row.install_config} if row.install_config else {}),  # digests stay
        "rules": row.rules,
    }
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


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
    return InstanceRow(
        id=value["id"],
        dataset="",
        mirror=MirrorName.parse(value["mirror"]),
        base_commit=parse_commit(value["base"]) if value["base"] else None,
        direction=Direction(value["direction"]),
        commits=tuple(dict.fromkeys(commits)),
        patch=value["patch"],
        test_patch=value["test_patch"],
        fail_to_pass=tuple(value["fail"]),
        pass_to_pass=tuple(value["pass"]),
        revision=value["revision"],
        environment=value["environment"],
        python_version=value["python"],
        version=value["version"],
        created_at=datetime.fromisoformat(value["created"]) if value["created"] else None,
        history=History(value["history"]) if value["history"] else None,
        rules=tuple(value["rules"]),
        install_config=value["install"],
    )


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
    waiting = iter_instances(connection, dataset, key, unresolved=True)
    rows = [_resolved(row, {key: found}) for row in waiting if row.revision in found]
    dataset_id = connection.execute(
        select(datasets.c.id).where(datasets.c.name == dataset)
    ).scalar_one_or_none()
    if dataset_id is None:
        return 0
    _delete_instances(connection, dataset_id, [row.id for row in rows])
    _insert_instances(connection, dataset_id, [(digest_of(spooled(row)), row) for row in rows])
    return len(rows)


def replace_dataset(
    place: str, head: DatasetHead, spool: Path, found: Found | None = None
) -> DatasetChange:
    """Replace the dataset, if any, by `head` and the spooled rows.

    `found` are the commits that the rows' revisions are at.
    """
    change, unchanged = DatasetChange(), 0
    with _writing(place) as connection:
        dataset_id = _put_head(connection, head)
        digests = select(instances.c.id, instances.c.digest)
        mine = digests.where(instances.c.dataset_id == dataset_id)
        old = {identity: bytes(digest) for identity, digest in connection.execute(mine)}
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


def _delete_instances(connection: Connection, dataset_id: int, ids: list[str]) -> None:
    for batch in in_batches(ids):
        mine = (instances.c.dataset_id == dataset_id, instances.c.id.in_(batch))
        connection.execute(delete(instances).where(*mine))


def _insert_instances(connection: Connection, dataset_id: int, rows: list[Spooled]) -> None:
    if not rows:
        return
    values = [
        {
            "dataset_id": dataset_id,
            "id": row.id,
            "mirror_name": str(row.mirror),
            "base_commit": row.base_commit or "",
            "direction": row.direction,
            "patch": None if row.patch is None else row.patch.encode(),
            "test_patch": None if row.test_patch is None else row.test_patch.encode(),
            "fail_to_pass": row.fail_to_pass,
            "pass_to_pass": row.pass_to_pass,
            "digest": digest,
            "public_id": None if row.public_id == row.id else row.public_id,
            "revision": row.revision,
            "environment": row.environment,
            "python_version": row.python_version,
            "version": row.version,
            "created_at": row.created_at,
            "history": row.history,
            "rules": row.rules,
            "install_config": row.install_config,
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
