"""Read a dataset file into a spool of normalised rows: the part of an import that a worker does.

Holds one row, the instance ids seen, and the distinct commits. An invalid row becomes a fault with
its line and is skipped. Writes only the spool, which the caller removes.
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

from ..catalog import encode_row, row_digest
from ..errors import DiskFullError, InvalidDatasetError, ResourceError
from ..model import CommitId, MirrorName, shown
from ..protocol import RowFault
from .fields import Columns, RowError
from .formats import COLUMNS, DatasetFormat, find_format, unknown_format
from .hosts import Hosts
from .readers import iter_rows
from .rows import Origin, RawRow

# faults that are listed; all are counted
FAULTS_KEPT = 1000
# the format is chosen by the first rows
_SAMPLE_ROWS = 20
_NO_OBJECT = "it is not an object"


@dataclass(slots=True)
class ReadResult:
    """The content of a file.

    By mirror key: the distinct `commits`, with their roles as the reason of their pin, and the
    `revisions` of rows that have no base commit; `urls` of new mirrors that rows name.
    """

    format: str
    sha256: str = ""
    row_count: int = 0
    fault_count: int = 0
    faults: list[RowFault] = field(default_factory=list)
    rules: dict[str, int] = field(default_factory=dict)
    names: dict[str, MirrorName] = field(default_factory=dict)
    commits: dict[str, dict[CommitId, str]] = field(default_factory=dict)
    revisions: dict[str, set[str]] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)


def read_dataset(
    path: Path,
    source: str,
    asked_format: str | Columns | None,
    spool: Path,
    hosts: Hosts | None = None,
) -> ReadResult:
    """Read `path`, named `source` in messages, into `spool`.

    Raises InvalidDatasetError, DiskFullError, ResourceError.
    """
    try:
        columns = asked_format.names() if isinstance(asked_format, Columns) else COLUMNS
        rows = iter_rows(path, source, columns)
        sample = list(islice(rows, _SAMPLE_ROWS))
        values = [row.value for row in sample if row.value is not None]
        if not values:
            faulty = chain(sample, islice(rows, FAULTS_KEPT))
            faults = [_row_fault(source, row, row.fault or _NO_OBJECT) for row in faulty]
            raise _unusable(source, faults)
        row_format = find_format(asked_format, values)
        if row_format is None:
            whole = (row.value for row in islice(iter_rows(path, source), _SAMPLE_ROWS))
            raise unknown_format(source, [value for value in whole if value is not None])
        with spool.open("xb") as out:
            result = _normalise_rows(chain(sample, rows), source, row_format, out, hosts or Hosts())
        if not result.row_count:
            raise _unusable(source, result.faults)
        with path.open("rb") as file:
            result.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return result
    except OSError as error:
        # EFBIG: RLIMIT_FSIZE, or more than the file system lets a file have
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise DiskFullError(
                f"cannot import dataset {shown(source)}: the disk is full",
                hint="free some space; nothing was changed",
            ) from error
        fact = error.strerror or os.strerror(error.errno or errno.EIO)
        raise ResourceError(
            f"cannot read dataset {shown(source)}: {fact}",
            hint="the file must be readable by the daemon's user",
        ) from error


def _normalise_rows(
    rows: Iterable[RawRow],
    source: str,
    row_format: DatasetFormat,
    out: BinaryIO,
    hosts: Hosts,
) -> ReadResult:
    """Write each row once, in its normalised form."""
    result = ReadResult(row_format.name)
    rules: Counter[str] = Counter()
    seen: dict[str, tuple[int, bytes, Origin | None]] = {}
    roles: dict[str, dict[CommitId, set[str]]] = {}
    for raw in rows:
        try:
            if raw.value is None:
                raise RowError(raw.fault or _NO_OBJECT)
            row = hosts.place(row_format.read(raw.value))
            # spellings in another letter case are one mirror; the first one in the file is taken
            name = result.names.get(row.mirror.key, row.mirror)
            if name != row.mirror:
                applied = (*row.rules, "repo: another letter case of the same repository")
                row = replace(row, mirror=name, rules=applied)
            line = encode_row(row)
            digest = row_digest(line)
            first, kept_digest, origin = seen.setdefault(row.id, (raw.line, digest, raw.origin))
            if first != raw.line and kept_digest != digest:
                where = f"{origin.file}:{origin.line}" if origin else f"line {first}"
                fact = f"instance_id is that of {where}, which has other values and is kept"
                raise RowError(fact)
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
    result.urls = {key: url for key, url in hosts.urls.items() if key in result.names}
    result.commits = {
        key: {commit: ", ".join(sorted(words)) for commit, words in commits.items()}
        for key, commits in roles.items()
    }
    return result


def _row_fault(source: str, raw: RawRow, reason: str) -> RowFault:
    value = (raw.value or {}).get("instance_id")
    identity = None
    if isinstance(value, str) and value:
        # JSON may have half of a surrogate pair, which UTF-8 has not
        identity = value[:200].encode("utf-8", "replace").decode()
    file, line = raw.origin or (source, raw.line)
    return RowFault(file=file, line=line, instance=identity, reason=reason)


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
