"""A dataset on its way into the catalog, or out of it: the JSON-lines file of normalised rows, and transactions that take it.

Runs in a worker process, in memory bounded by a batch and by the ids of the old dataset. A kill at any moment rolls the
transaction back: the old dataset stays whole. Rows that did not change are not written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from ..model import CommitRole, Direction, MirrorName, parse_commit
from ..protocol import DatasetChange
from .database import Database
from .datasets import iter_instances
from .mirrors import in_batches
from .schema import DatasetHead, InstanceRow, datasets, instances, recorded

_BATCH_BYTES = 4 * 1024**2
_BATCH_ROWS = 500


def spooled(row: InstanceRow) -> bytes:
    """One line of the spool: the same bytes for the same row, so that their hash says whether it changed."""
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
    }
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def unspooled(line: bytes) -> InstanceRow:
    """The row of one line that anybody may have written; raises ValueError, KeyError or TypeError where it is none."""
    value = json.loads(line)
    texts = [
        value["id"],
        *(value[name] for name in ("patch", "test_patch") if value[name] is not None),
    ]
    if (
        not all(isinstance(text, str) for text in (*texts, *value["fail"], *value["pass"]))
        or len(value["id"]) > 500
    ):
        raise ValueError("not the row of an instance")
    return InstanceRow(
        id=value["id"],
        dataset="",
        mirror=MirrorName.parse(value["mirror"]),
        base_commit=parse_commit(value["base"]),
        direction=Direction(value["direction"]),
        commits=tuple(
            dict.fromkeys(
                (parse_commit(commit), CommitRole(role)) for commit, role in value["commits"]
            )
        ),
        patch=value["patch"],
        test_patch=value["test_patch"],
        fail_to_pass=tuple(value["fail"]),
        pass_to_pass=tuple(value["pass"]),
    )


def spool_rows(place: str, dataset: str, key: str, spool: Path) -> int:
    """Write the rows of a dataset that name one mirror; answers how many."""
    database = Database.at(place)
    count = 0
    try:
        with database.read() as connection, spool.open("wb") as lines:
            for row in iter_instances(connection, dataset, key):
                lines.write(spooled(row))
                count += 1
    finally:
        database.close()
    return count


def merge_dataset(place: str, head: DatasetHead, spool: Path) -> int | None:
    """Add what is missing of a dataset; answers how many rows, or None where another dataset has the name.

    Two are the same when they were read from the same bytes. Rows that are there stay as they are.
    """
    database = Database.at(place)
    try:
        with database.write() as connection:
            return _merge(connection, head, spool)
    finally:
        database.shrink()
        database.close()


def _merge(connection: Connection, head: DatasetHead, spool: Path) -> int | None:
    found = connection.execute(
        select(datasets.c.id, datasets.c.sha256).where(datasets.c.name == head.name)
    ).first()
    if found is not None and found.sha256 != head.sha256:
        return None
    dataset_id = int(found.id) if found is not None else _put_head(connection, head)
    known = set(
        connection.execute(
            select(instances.c.id).where(instances.c.dataset_id == dataset_id)
        ).scalars()
    )
    count = 0
    for batch in _batches(spool):
        fresh = {line["id"]: (digest, line) for digest, line in batch if line["id"] not in known}
        _insert_instances(connection, dataset_id, list(fresh.values()))
        known |= fresh.keys()
        count += len(fresh)
    return count


def replace_dataset(place: str, head: DatasetHead, spool: Path) -> DatasetChange:
    """Make the dataset what `head` and the spool say, whatever it was."""
    database = Database.at(place)
    try:
        with database.write() as connection:
            return _replace(connection, head, spool)
    finally:
        database.shrink()
        database.close()


def _replace(connection: Connection, head: DatasetHead, spool: Path) -> DatasetChange:
    dataset_id = _put_head(connection, head)
    old = {identity: bytes(digest) for identity, digest in connection.execute(_digests(dataset_id))}
    change = DatasetChange()
    unchanged = 0
    for batch in _batches(spool):
        fresh = [(digest, line) for digest, line in batch if old.get(line["id"]) != digest]
        unchanged += len(batch) - len(fresh)
        changed = [line["id"] for _, line in fresh if line["id"] in old]
        change.changed.extend(changed)
        change.added.extend(line["id"] for _, line in fresh if line["id"] not in old)
        _delete_instances(connection, dataset_id, changed)
        _insert_instances(connection, dataset_id, fresh)
        for _, line in batch:
            old.pop(line["id"], None)
    _delete_instances(connection, dataset_id, list(old))
    change.removed.extend(sorted(old))
    return replace(change, unchanged_count=unchanged)


def _digests(dataset_id: int) -> Any:
    return select(instances.c.id, instances.c.digest).where(instances.c.dataset_id == dataset_id)


def _put_head(connection: Connection, head: DatasetHead) -> int:
    values = {
        "name": head.name,
        "format": head.format,
        "source": head.source,
        "sha256": head.sha256,
        "imported_at": head.imported_at,
        "fault_count": head.fault_count,
        "faults": [fault.to_json() for fault in head.faults],
        "rules": head.rules,
        "refused": head.refused,
    }
    found = connection.execute(select(datasets.c.id).where(datasets.c.name == head.name)).scalar()
    if found is None:
        return int(
            connection.execute(
                insert(datasets).values(values).returning(datasets.c.id)
            ).scalar_one()
        )
    connection.execute(update(datasets).where(datasets.c.id == found).values(values))
    return int(found)


def _batches(spool: Path) -> Iterator[list[tuple[bytes, dict[str, Any]]]]:
    batch: list[tuple[bytes, dict[str, Any]]] = []
    size = 0
    with spool.open("rb") as lines:
        for line in lines:
            batch.append((hashlib.sha256(line).digest(), json.loads(line)))
            size += len(line)
            if size >= _BATCH_BYTES or len(batch) >= _BATCH_ROWS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _delete_instances(connection: Connection, dataset_id: int, ids: list[str]) -> None:
    for batch in in_batches(ids):
        connection.execute(
            delete(instances).where(instances.c.dataset_id == dataset_id, instances.c.id.in_(batch))
        )


def _insert_instances(
    connection: Connection, dataset_id: int, rows: list[tuple[bytes, dict[str, Any]]]
) -> None:
    if not rows:
        return
    connection.execute(
        insert(instances), [_instance_values(dataset_id, digest, line) for digest, line in rows]
    )
    connection.execute(
        insert(recorded),
        [values for _, line in rows for values in _recorded_values(dataset_id, line)],
    )


def _instance_values(dataset_id: int, digest: bytes, line: dict[str, Any]) -> dict[str, Any]:
    return {
        "dataset_id": dataset_id,
        "id": line["id"],
        "mirror_name": line["mirror"],
        "base_commit": line["base"],
        "direction": line["direction"],
        "patch": _bytes(line["patch"]),
        "test_patch": _bytes(line["test_patch"]),
        "fail_to_pass": line["fail"],
        "pass_to_pass": line["pass"],
        "digest": digest,
    }


def _recorded_values(dataset_id: int, line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for commit, role in line["commits"]:
        yield {
            "dataset_id": dataset_id,
            "instance_id": line["id"],
            "commit_id": commit,
            "role": role,
            "mirror_key": line["mirror"].lower(),
            "mirror_name": line["mirror"],
        }


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()
