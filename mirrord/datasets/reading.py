"""From a dataset file to normalised rows in a spool file: what a worker does for an import.

Holds one row, the instance ids seen, and the distinct commits. A row that cannot be used becomes a fault with its line and the
rest goes on. Writes nothing but the spool; a crash leaves that, and whoever made its directory removes it.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

from ..catalog import InstanceRow, spooled
from ..errors import DiskFullError, InvalidDatasetError, ResourceError
from ..model import CommitId, MirrorName, shown
from ..protocol import RowFault
from .fields import Fields, RowError
from .formats import Normaliser, choose_format
from .readers import RawRow, iter_rows

FAULTS_KEPT = 1000
"""Faults that are told one by one; the others are only counted."""

_PROBED_ROWS = 20
_SHOWN_ID = 200


@dataclass(slots=True)
class ReadResult:
    """What a file held. `commits` are the distinct commits by mirror key, each with its roles, as words for a pin's reason."""

    format: str
    sha256: str
    row_count: int = 0
    fault_count: int = 0
    faults: list[RowFault] = field(default_factory=list)
    rules: dict[str, int] = field(default_factory=dict)
    names: dict[str, MirrorName] = field(default_factory=dict)
    commits: dict[str, dict[CommitId, str]] = field(default_factory=dict)


def read_dataset(path: Path, source: str, asked_format: str | None, spool: Path) -> ReadResult:
    """Read `path`, which people call `source`, into `spool`. Raises InvalidDatasetError, DiskFullError, ResourceError."""
    try:
        rows = iter_rows(path, source)
        first = list(islice(rows, _PROBED_ROWS))
        values = [row.value for row in first if row.value is not None]
        if not values:
            raise _unusable(source, _nothing_read(source, first, rows))
        chosen, normalise = choose_format(source, asked_format, values)
        with spool.open("xb") as out:
            reading = _Reading(source, chosen.name, normalise, out)
            for row in chain(first, rows):
                reading.take(row)
        return reading.result(_sha256(path))
    except OSError as error:
        raise _io_error(source, error) from error


class _Reading:
    def __init__(self, source: str, format_name: str, normalise: Normaliser, out: BinaryIO) -> None:
        self._source = source
        self._normalise = normalise
        self._out = out
        self._rules: Counter[str] = Counter()
        self._seen: dict[str, tuple[int, bytes]] = {}
        self._roles: dict[str, dict[CommitId, set[str]]] = {}
        self._result = ReadResult(format_name, "")

    def take(self, raw: RawRow) -> None:
        """Normalise one row into the spool, or make it a fault."""
        if raw.value is None:
            self._fault(raw.line, None, raw.fault or "it is not an object")
            return
        rules: Counter[str] = Counter()
        try:
            row = self._normalise(Fields(raw.value, rules))
            row = self._in_first_spelling(row)
            line = spooled(row)
            if not self._is_new(raw.line, row, line):
                return
        except RowError as error:
            self._fault(raw.line, raw.value.get("instance_id"), str(error))
            return
        self._rules.update(rules)
        self._record(row)
        self._out.write(line)

    def result(self, sha256: str) -> ReadResult:
        result = self._result
        if not result.row_count:
            raise _unusable(self._source, result.faults)
        result.sha256 = sha256
        result.rules = dict(sorted(self._rules.items()))
        result.commits = {
            key: {commit: ", ".join(sorted(roles)) for commit, roles in commits.items()}
            for key, commits in self._roles.items()
        }
        return result

    def _in_first_spelling(self, row: InstanceRow) -> InstanceRow:
        """Two spellings of a repository are one mirror, called as the file first calls it."""
        name = self._result.names.get(row.mirror.key, row.mirror)
        if name == row.mirror:
            return row
        self._rules["repo: another letter case of the same repository"] += 1
        return replace(row, mirror=name)

    def _is_new(self, number: int, row: InstanceRow, line: bytes) -> bool:
        """Whether the id is not taken. The same row again is counted; another row of that id is a fault."""
        digest = hashlib.sha256(line).digest()
        first, known = self._seen.setdefault(row.id, (number, digest))
        if first == number:
            return True
        if known != digest:
            raise RowError(
                f"instance_id is that of line {first}, which has other values and is kept"
            )
        self._rules["the same row again, ignored"] += 1
        return False

    def _record(self, row: InstanceRow) -> None:
        self._result.row_count += 1
        self._result.names.setdefault(row.mirror.key, row.mirror)
        commits = self._roles.setdefault(row.mirror.key, {})
        for commit, role in row.commits:
            commits.setdefault(commit, set()).add(str(role))

    def _fault(self, line: int, identity: object, reason: str) -> None:
        self._result.fault_count += 1
        if self._result.fault_count <= FAULTS_KEPT:
            self._result.faults.append(_row_fault(self._source, line, identity, reason))


def _row_fault(source: str, line: int, identity: object, reason: str) -> RowFault:
    known = (
        identity[:_SHOWN_ID].encode("utf-8", "replace").decode()
        if isinstance(identity, str) and identity
        else None
    )
    return RowFault(file=source, line=line, instance=known, reason=reason)


def _nothing_read(source: str, first: list[RawRow], rows: Iterator[RawRow]) -> list[RowFault]:
    faulty = chain(first, islice(rows, FAULTS_KEPT))
    return [
        _row_fault(source, row.line, None, row.fault or "it is not an object") for row in faulty
    ]


def _unusable(source: str, faults: list[RowFault]) -> InvalidDatasetError:
    if not faults:
        return InvalidDatasetError(
            f"cannot import dataset {shown(source)}: it has no rows", hint="nothing was changed"
        )
    worst = faults[0]
    return InvalidDatasetError(
        f"cannot import dataset {shown(source)}: none of its rows can be used; line {worst.line}: {worst.reason}",
        hint="nothing was changed; `mirrord dataset formats` says what a row needs",
        faults=[fault.to_json() for fault in faults[:20]],
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _io_error(source: str, error: OSError) -> ResourceError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return DiskFullError(
            f"cannot import dataset {shown(source)}: the disk is full",
            hint="make room; nothing was changed",
        )
    fact = error.strerror or os.strerror(error.errno or errno.EIO)
    return ResourceError(
        f"cannot read dataset {shown(source)}: {fact}",
        hint="the file must be readable by the daemon's user",
    )
