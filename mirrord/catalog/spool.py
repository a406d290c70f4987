"""Move datasets into and out of the catalog through spools: JSON-lines files of normalised rows.

Runs in a worker. Memory holds a batch of rows and the ids of the old dataset. A kill rolls the
transaction back, so the old dataset stays whole. Unchanged rows are not written.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, fields, replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from ..jsontext import loads
from ..model import CommitId, CommitRole, Direction, History, MirrorName, parse_commit
from ..places import read_workdir
from ..protocol import DatasetChange, InstanceChange, RowsChange
from .changes import note_changes
from .database import Database, lock
from .datasets import PLAIN_COLUMNS, find_instances, iter_instances, of_dataset
from .mirrors import in_batches
from .needs import Compositions, put_compositions
from .schema import DatasetHead, InstanceRow, datasets, instances, recorded

# by mirror key, the commits of revisions
Found = Mapping[str, Mapping[str, CommitId]]
DigestedRow = tuple[bytes, InstanceRow]


# Digests are computed from lines: neither names nor order may change.
# the member of a line for each field of a row
_MEMBERS = {
    "id": "id", "mirror": "mirror", "base_commit": "base", "direction": "direction",
    "commits": "commits", "patch": "patch", "test_patch": "test_patch", "fail_to_pass": "fail",
    "pass_to_pass": "pass", "revision": "revision", "environment": "environment",
    "python_version": "python", "version": "version", "created_at": "created",
    "history": "history", "install_config": "install", "workdir": "workdir",
    "rules": "rules",
}  # fmt: skip


def encode_row(row: InstanceRow) -> bytes:
    """Encode a row as one line. Equal rows give equal bytes."""
    value = {member: getattr(row, name) for name, member in _MEMBERS.items()}
    value |= {"mirror": str(row.mirror), "commits": sorted(row.commits)}
    if not row.install_config:
        del value["install"]
    if not row.workdir:
        del value["workdir"]
    return _line(value)


def _line(value: Mapping[str, Any], *, sort_keys: bool = False) -> bytes:
    text = json.dumps(
        value, ensure_ascii=False, sort_keys=sort_keys, separators=(",", ":"),
        default=datetime.isoformat,
    )  # fmt: skip
    return text.encode() + b"\n"


def row_digest(line: bytes) -> bytes:
    """Return the hash of a line without its rules, by which changed rows are found.

    Equal values can be read by different rules. `rules` is the last member, and a quote inside a
    value is escaped.
    """
    end = line.rfind(b',"rules":')
    return hashlib.sha256(memoryview(line)[:end]).digest()  # no copy: a row may have 150 MB


def decode_row(line: bytes) -> InstanceRow:
    """Decode an untrusted line; raises ValueError, KeyError or TypeError."""
    value = loads(line)
    optional = ("revision", "environment", "python", "version", "workdir", "created", "history")
    value = dict.fromkeys((*optional, "install")) | {"rules": []} | value
    texts = [value["id"], *value["fail"], *value["pass"], *value["rules"]]
    texts += [value[n] for n in ("patch", "test_patch", *optional) if value[n] is not None]
    has_texts = all(isinstance(text, str) for text in texts)
    if not has_texts or len(value["id"]) > 500 or not isinstance(value["install"], dict | None):
        raise ValueError("not the row of an instance")
    commits = [(parse_commit(commit), CommitRole(role)) for commit, role in value["commits"]]
    members = {name: value[member] for name, member in _MEMBERS.items()}
    converted = {
        "mirror": MirrorName.parse(value["mirror"]),
        "base_commit": parse_commit(value["base"]) if value["base"] else None,
        "direction": Direction(value["direction"]),
        "commits": tuple(dict.fromkeys(commits)),
        "created_at": datetime.fromisoformat(value["created"]) if value["created"] else None,
        "history": History(value["history"]) if value["history"] else None,
        "workdir": read_workdir(value["workdir"]) if value["workdir"] else None,
    }
    lists = {name: tuple(members[name]) for name in ("fail_to_pass", "pass_to_pass", "rules")}
    return InstanceRow(dataset="", **(members | converted | lists))


def spool_rows(place: str, dataset: str, key: str | None, spool: Path) -> int:
    """Write the rows of a dataset, or only those of one mirror, to a spool. Return how many."""
    count = 0
    with _reading(place) as connection, spool.open("wb") as lines:
        for row in iter_instances(connection, dataset, key):
            lines.write(encode_row(row))
            count += 1
    return count


def merge_dataset(place: str, head: DatasetHead, spool: Path) -> int | None:
    """Add missing rows to a dataset. Return how many, or None if another dataset has the name.

    Datasets are the same if they were read from the same bytes. Existing rows are not changed.
    """
    with _writing(place) as connection:
        lock(connection, f"dataset/{head.name}")
        named = select(datasets.c.id, datasets.c.sha256).where(datasets.c.name == head.name)
        old = connection.execute(named).first()
        if old is not None and old.sha256 != head.sha256:
            return None
        dataset_id = _put_head(connection, head) if old is None else int(old.id)
        ids = select(instances.c.id).where(instances.c.dataset_id == dataset_id)
        existing = set(connection.execute(ids).scalars())
        count = 0
        for batch in _iter_batches(_lines_of(spool)):
            new = {row.id: (digest, row) for digest, row in batch if row.id not in existing}
            _insert_instances(connection, dataset_id, list(new.values()))
            existing |= new.keys()
            count += len(new)
        note_changes(connection, f"dataset/{head.name}")
        return count


def _resolved(row: InstanceRow, by_mirror: Found) -> InstanceRow:
    """Add the base commit of the row's revision, if it was found; take commits for their tags."""
    by_name = by_mirror.get(row.mirror.key, {})
    row = _without_tags(row, by_name)
    base = by_name.get(row.revision or "")
    if base is None or row.base_commit is not None:
        return row
    # a branch of SWE-smith ends at the bug; with ~ or ^ a row means a commit before that
    is_bug = row.direction is Direction.REVERSE and not re.search(r"[~^]", row.revision or "")
    roles = (CommitRole.BASE, CommitRole.BUG) if is_bug else (CommitRole.BASE,)
    commits = (*((base, role) for role in roles), *row.commits)
    return replace(row, base_commit=base, commits=tuple(dict.fromkeys(commits)))


def _without_tags(row: InstanceRow, by_name: Mapping[str, CommitId]) -> InstanceRow:
    """Replace ids of annotated tags by their commits; that of the base commit is its revision."""
    tags = [commit for commit, _ in row.commits if commit in by_name]
    if not tags:
        return row
    base = row.base_commit or ""
    commits = dict.fromkeys((by_name.get(commit, commit), role) for commit, role in row.commits)
    return replace(
        row,
        base_commit=by_name.get(base, row.base_commit),
        revision=base if base in by_name else row.revision,
        commits=tuple(commits),
        rules=(*row.rules, "the commit of an annotated tag"),
    )


def resolve_instances(
    connection: Connection, dataset: str, key: str, commits: Mapping[str, CommitId]
) -> int:
    """Set the base commits of one mirror's instances by their revisions. Return how many."""
    lock(connection, f"dataset/{dataset}")
    unresolved = iter_instances(connection, dataset, key, unresolved=True)
    rows = [_resolved(row, {key: commits}) for row in unresolved if row.revision in commits]
    dataset_id = connection.execute(
        select(datasets.c.id).where(datasets.c.name == dataset)
    ).scalar_one_or_none()
    if dataset_id is None:
        return 0
    _delete_instances(connection, dataset_id, [row.id for row in rows])
    _insert_instances(connection, dataset_id, [(row_digest(encode_row(row)), row) for row in rows])
    note_changes(connection, f"dataset/{dataset}")
    return len(rows)


def replace_dataset(
    place: str,
    head: DatasetHead,
    spool: Path,
    by_mirror: Found | None = None,
    compositions: Compositions = MappingProxyType({}),
) -> DatasetChange:
    """Replace the dataset, if any, by `head` and the spooled rows, in one transaction."""
    change, unchanged = DatasetChange(), 0
    with _writing(place) as connection:
        lock(connection, f"dataset/{head.name}")
        dataset_id = _put_head(connection, head)
        old = _digests(connection, head.name)
        # what a revision stands for now is not in its line
        is_resolving = any((by_mirror or {}).values())
        same = {} if is_resolving else {digest: identity for identity, digest in old.items()}
        rest = dict(same)
        for batch in _iter_batches(_take_out(rest, _lines_of(spool)), by_mirror):
            new = [(digest, row) for digest, row in batch if old.get(row.id) != digest]
            unchanged += len(batch) - len(new)
            changed = [row.id for _, row in new if row.id in old]
            change.changed.extend(changed)
            change.added.extend(row.id for _, row in new if row.id not in old)
            _delete_instances(connection, dataset_id, changed)
            _insert_instances(connection, dataset_id, new)
            for _, row in batch:
                old.pop(row.id, None)
        for digest in same.keys() - rest.keys():
            del old[same[digest]]
            unchanged += 1
        _delete_instances(connection, dataset_id, list(old))
        change.removed.extend(sorted(old))
        put_compositions(connection, dataset_id, compositions)
        note_changes(connection, f"dataset/{head.name}")
    return replace(change, unchanged_count=unchanged)


@contextmanager
def _reading(place: str) -> Iterator[Connection]:
    with closing(Database(place, is_second=True)) as database, database.read() as connection:
        yield connection


@contextmanager
def _writing(place: str) -> Iterator[Connection]:
    """A write transaction; frees the disk space of its WAL at the end."""
    with closing(Database(place, is_second=True)) as database:
        try:
            with database.write() as connection:
                yield connection
        finally:
            database.shrink()


def _put_head(connection: Connection, head: DatasetHead) -> int:
    values = asdict(head)
    row = connection.execute(select(datasets.c.id).where(datasets.c.name == head.name)).scalar()
    if row is None:
        query = insert(datasets).values(values).returning(datasets.c.id)
        return int(connection.execute(query).scalar_one())
    connection.execute(update(datasets).where(datasets.c.id == row).values(values))
    return int(row)


def _lines_of(spool: Path) -> Iterator[bytes]:
    with spool.open("rb") as lines:
        yield from lines


def _take_out(digests: dict[bytes, str], lines: Iterable[bytes]) -> Iterator[bytes]:
    """Iterate over the lines that have none of these digests; drop the digests of the others.

    To decode a row takes ten times as long.
    """
    for line in lines:
        if digests.pop(row_digest(line), None) is None:
            yield line


def _iter_batches(
    lines: Iterable[bytes], by_mirror: Found | None = None
) -> Iterator[list[DigestedRow]]:
    """Iterate over the rows of lines in batches of a few megabytes, revisions resolved."""
    batch: list[DigestedRow] = []
    size = 0
    for line in lines:
        row = decode_row(line)
        if (resolved := _resolved(row, by_mirror or {})) is not row:
            row, line = resolved, encode_row(resolved)
        batch.append((row_digest(line), row))
        size += len(line)
        # by bytes too: rows of Multi-SWE-bench have up to 168 MB
        if size >= 4 * 1024**2 or len(batch) >= 500:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _digests(connection: Connection, name: str) -> dict[str, bytes]:
    rows = connection.execute(of_dataset(name, instances.c.id, instances.c.digest))
    return {identity: bytes(digest) for identity, digest in rows}


def _delete_instances(connection: Connection, dataset_id: int, ids: list[str]) -> None:
    in_dataset = instances.c.dataset_id == dataset_id
    for batch in in_batches(ids):
        connection.execute(delete(instances).where(in_dataset, instances.c.id.in_(batch)))


def _insert_instances(connection: Connection, dataset_id: int, rows: list[DigestedRow]) -> None:
    if not rows:
        return
    plain = [*PLAIN_COLUMNS, "direction", "fail_to_pass", "pass_to_pass", "history", "rules"]
    values = [
        {
            "dataset_id": dataset_id,
            "mirror_name": str(row.mirror),
            "base_commit": row.base_commit or "",
            "patch": None if row.patch is None else row.patch.encode(),
            "test_patch": None if row.test_patch is None else row.test_patch.encode(),
            "digest": digest,
            "public_id": None if row.public_id == row.id else row.public_id,
            **{name: getattr(row, name) for name in plain},
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


# -- exports and comparisons -----------------------------------------------------------------------
#
# An export has a JSON object (RFC 8785) for each instance, in the order of ids, with the columns of
# SWE-bench's family and all recorded commits. Equal rows give equal bytes, whatever file they were
# read from. Its import gives an equal dataset.

_COMPARED = [
    each.name for each in fields(InstanceRow) if each.name not in ("id", "dataset", "rules")
]


_COLUMNS = {
    "id": "instance_id", "repo": "repo", "fail_to_pass": "FAIL_TO_PASS",
    "pass_to_pass": "PASS_TO_PASS", "environment": "image_name",
    **{name: name for name in ("base_commit", "revision", "direction", "patch", "test_patch")},
    **{name: name for name in ("python_version", "version", "created_at", "history")},
    "install_config": "install_config", "workdir": "workdir",
}  # fmt: skip


def encode_exported_row(row: InstanceRow) -> bytes:
    value = {column: getattr(row, name) for name, column in _COLUMNS.items()}
    value["commits"] = [{"commit": commit, "role": role} for commit, role in sorted(row.commits)]
    setup = (commit for commit, role in row.commits if role is CommitRole.ENVIRONMENT)
    return _line(value | {"environment_setup_commit": next(setup, None)}, sort_keys=True)


def export_dataset(place: str, name: str, file: Path) -> None:
    """Write the rows of a dataset as canonical lines into a new file."""
    with _reading(place) as connection, file.open("xb") as lines:
        lines.writelines(map(encode_exported_row, iter_instances(connection, name)))


def compare_dataset(place: str, name: str, spool: Path) -> RowsChange:
    """Return what would change if spooled rows replaced the dataset's."""
    change, unchanged = RowsChange(), 0
    with _reading(place) as connection:
        old = _digests(connection, name)
        for batch in _iter_batches(_lines_of(spool)):
            new = {row.id: row for digest, row in batch if old.get(row.id) != digest}
            unchanged += len(batch) - len(new)
            stored = {row.id: row for row in find_instances(connection, name, list(new))}
            for identity, row in new.items():
                if identity not in stored:
                    change.added.append(identity)
                elif differing := list(_iter_differing(stored[identity], row)):
                    differs = InstanceChange(id=identity, fields=differing)
                    if "base_commit" in differing:
                        before = stored[identity].base_commit
                        differs = replace(differs, base_before=before, base_after=row.base_commit)
                    change.changed.append(differs)
                else:
                    unchanged += 1
            for _, row in batch:
                old.pop(row.id, None)
    change.removed.extend(sorted(old))
    return replace(change, unchanged_count=unchanged)


def _iter_differing(old: InstanceRow, new: InstanceRow) -> Iterator[str]:
    """Iterate over fields that differ, ignoring base commits that a revision resolves to."""
    is_unresolved = old.revision == new.revision and None in (old.base_commit, new.base_commit)
    for name in _COMPARED:
        before, after = getattr(old, name), getattr(new, name)
        if name == "mirror":
            before, after = before.key, after.key
        elif name in ("base_commit", "commits") and is_unresolved:
            continue
        elif name == "commits":
            before, after = set(before), set(after)
        if before != after:
            yield name
