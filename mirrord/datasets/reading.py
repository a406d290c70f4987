"""From a dataset file to normalised rows in a spool file: a worker's part of an import.

Holds one row, the instance ids seen, and the distinct commits. An invalid row becomes a fault with
its line, and reading continues. Writes nothing but the spool, which its caller removes.
"""

import errno
import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

from ..catalog import digest_of, spooled
from ..errors import DiskFullError, InvalidDatasetError, ResourceError
from ..model import CommitId, MirrorName, shown
from ..protocol import RowFault
from .fields import Columns, RowError
from .formats import COLUMNS, DatasetFormat, choose_format
from .readers import Origin, RawRow, iter_rows

FAULTS_KEPT = 1000
"""Faults that are listed; all are counted."""

_NO_OBJECT = "it is not an object"


@dataclass(slots=True)
class ReadResult:
    """The content of a file. By mirror key: the distinct `commits`, each with its roles as the
    reason of its pin, and the `revisions` that stand for base commits."""

    format: str
    sha256: str = ""
    row_count: int = 0
    fault_count: int = 0
    faults: list[RowFault] = field(default_factory=list)
    rules: dict[str, int] = field(default_factory=dict)
    names: dict[str, MirrorName] = field(default_factory=dict)
    commits: dict[str, dict[CommitId, str]] = field(default_factory=dict)
    revisions: dict[str, set[str]] = field(default_factory=dict)


def read_dataset(
    path: Path, source: str, asked_format: str | Columns | None, spool: Path
) -> ReadResult:
    """Read `path`, which messages call `source`, into `spool`; the format has a name or a mapping.

    Raises InvalidDatasetError, DiskFullError, ResourceError.
    """
    try:
        columns = asked_format.names() if isinstance(asked_format, Columns) else COLUMNS
        rows = iter_rows(path, source, columns)
        first = list(islice(rows, 20))
        values = [row.value for row in first if row.value is not None]
        if not values:
            faulty = chain(first, islice(rows, FAULTS_KEPT))
            faults = [_row_fault(source, row, row.fault or _NO_OBJECT) for row in faulty]
            raise _unusable(source, faults)
        kind = choose_format(source, asked_format, values)
        with spool.open("xb") as out:
            result = _normalise_rows(chain(first, rows), source, kind, out)
        if not result.row_count:
            raise _unusable(source, result.faults)
        with path.open("rb") as file:
            result.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return result
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise DiskFullError(
                f"cannot import dataset {shown(source)}: the disk is full",
                hint="make room; nothing was changed",
            ) from error
        fact = error.strerror or os.strerror(error.errno or errno.EIO)
        raise ResourceError(
            f"cannot read dataset {shown(source)}: {fact}",
            hint="the file must be readable by the daemon's user",
        ) from error


def _normalise_rows(
    rows: Iterable[RawRow], source: str, kind: DatasetFormat, out: BinaryIO
) -> ReadResult:
    """Write each row in its normalised form, once."""
    result = ReadResult(kind.name)
    rules: Counter[str] = Counter()
    seen: dict[str, tuple[int, bytes, Origin | None]] = {}
    roles: dict[str, dict[CommitId, set[str]]] = {}
    for raw in rows:
        try:
            if raw.value is None:
                raise RowError(raw.fault or _NO_OBJECT)
            row = kind.read(raw.value)
            # two spellings of a repository are one mirror, called as the file first calls it
            name = result.names.get(row.mirror.key, row.mirror)
            if name != row.mirror:
                fired = (*row.rules, "repo: another letter case of the same repository")
                row = replace(row, mirror=name, rules=fired)
            line = spooled(row)
            digest = digest_of(line)
            first, known, origin = seen.setdefault(row.id, (raw.line, digest, raw.origin))
            if first != raw.line and known != digest:
                where = f"{origin.file}:{origin.line}" if origin else f"line {first}"
                kept = f"instance_id is that of {where}, which has other values and is kept"
                raise RowError(kept)
        except RowError as error:
            result.fault_count += 1
            if result.fault_count <= FAULTS_KEPT:
                result.faults.append(_row_fault(source, raw, str(error)))
            continue
        if first != raw.line:
            rules["the same row again, ignored"] += 1
            continue
        rules.update(row.rules)
        result.row_count += 1
        result.names.setdefault(row.mirror.key, row.mirror)
        commits = roles.setdefault(row.mirror.key, {})
        for commit, role in row.commits:
            commits.setdefault(commit, set()).add(str(role))
        if row.revision is not None and row.base_commit is None:
            result.revisions.setdefault(row.mirror.key, set()).add(row.revision)
        out.write(line)
    result.rules = dict(sorted(rules.items()))
    result.commits = {
        key: {commit: ", ".join(sorted(words)) for commit, words in commits.items()}
        for key, commits in roles.items()
    }
    return result


def _row_fault(source: str, raw: RawRow, reason: str) -> RowFault:
    identity = (raw.value or {}).get("instance_id")
    known = None
    if isinstance(identity, str) and identity:
        known = identity[:200].encode("utf-8", "replace").decode()
    file, line = raw.origin or (source, raw.line)
    return RowFault(file=file, line=line, instance=known, reason=reason)


def _unusable(source: str, faults: list[RowFault]) -> InvalidDatasetError:
    if not faults:
        return InvalidDatasetError(
            f"cannot import dataset {shown(source)}: it has no rows", hint="nothing was changed"
        )
    worst = faults[0]
    return InvalidDatasetError(
        f"cannot import dataset {shown(source)}: none of its rows can be used;"
        f" {shown(worst.file)}, line {worst.line}: {worst.reason}",
        hint="nothing was changed; `mirrord dataset formats` lists the fields that a row needs",
        faults=[fault.to_json() for fault in faults[:20]],
    )
