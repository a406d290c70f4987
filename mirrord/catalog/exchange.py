"""Whole datasets: written as canonical lines, and compared row by row. Runs in worker processes.

An export has a JSON object (RFC 8785) for each instance, in the order of ids, with the columns of
SWE-bench's family and all recorded commits: the same bytes for the same rows, whatever file they
were read from. Importing it again gives an equal dataset.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

from sqlalchemy import Connection, select

from ..model import CommitRole
from ..protocol import InstanceChange, RowsChange
from .database import Database
from .datasets import find_instances, iter_instances
from .schema import InstanceRow, datasets, instances
from .spool import iter_batches

_COMPARED = [
    each.name for each in fields(InstanceRow) if each.name not in ("id", "dataset", "rules")
]


def exported(row: InstanceRow) -> bytes:
    """One line of an export."""
    setup = (commit for commit, role in row.commits if role is CommitRole.ENVIRONMENT)
    value = {
        "instance_id": row.id,
        "repo": row.repo,
        "base_commit": row.base_commit,
        "revision": row.revision,
        "environment_setup_commit": next(setup, None),
        "commits": [{"commit": commit, "role": role} for commit, role in sorted(row.commits)],
        "direction": row.direction,
        "patch": row.patch,
        "test_patch": row.test_patch,
        "FAIL_TO_PASS": row.fail_to_pass,
        "PASS_TO_PASS": row.pass_to_pass,
        "image_name": row.environment,
        "python_version": row.python_version,
        "version": row.version,
        "created_at": row.created_at.isoformat() if row.created_at else None,
        "history": row.history,
        "install_config": row.install_config,
    }
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode() + b"\n"


def export_dataset(place: str, name: str, file: Path) -> None:
    """Write the rows of a dataset into a new file."""
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
                    old = known[identity]
                    bases = {"base_before": old.base_commit, "base_after": row.base_commit}
                    is_moved = "base_commit" in differing
                    moved = bases if is_moved else {}
                    change.changed.append(InstanceChange(id=identity, fields=differing, **moved))
                else:
                    unchanged += 1
            for _, row in batch:
                left.pop(row.id, None)
    change.removed.extend(sorted(left))
    return replace(change, unchanged_count=unchanged)


def _digests(connection: Connection, name: str) -> dict[str, bytes]:
    query = select(instances.c.id, instances.c.digest).join(
        datasets, datasets.c.id == instances.c.dataset_id
    )
    rows = connection.execute(query.where(datasets.c.name == name))
    return {identity: bytes(digest) for identity, digest in rows}


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
