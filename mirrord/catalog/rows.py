"""The rows of the catalog as values: what queries take and answer. No SQL here, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ..model import AuditLevel, CommitId, CommitRole, DatasetName, Direction, MirrorName
from ..protocol import AuditPart, RowFault


@dataclass(frozen=True, slots=True)
class MirrorRow:
    """A mirror as the catalog knows it. `url` may hold a secret: show it only masked. `history` is
    a record of its ref history that was the newest once."""

    name: MirrorName
    url: str = field(repr=False)
    added_at: datetime
    default_branch: str | None = None
    ref_count: int | None = None
    kept_count: int | None = None
    size_bytes: int | None = None
    synced_at: datetime | None = None
    attempted_at: datetime | None = None
    error: dict[str, Any] | None = None
    ref_faults: list[dict[str, Any]] = field(default_factory=list)
    history: str | None = None


@dataclass(frozen=True, slots=True)
class PinRow:
    """`owner` is `dataset/NAME` or `person/UID`."""

    mirror: MirrorName
    commit: CommitId
    owner: str
    reason: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """One commit that one instance of one dataset depends on."""

    mirror: MirrorName
    commit: CommitId
    role: CommitRole
    instance: str
    dataset: str


@dataclass(frozen=True, slots=True)
class JudgementRow:
    """What the last audit of everything at one level said of one mirror; the audit itself may not have ended yet."""

    key: str
    level: AuditLevel
    audit_id: str
    started_at: datetime
    judged_at: datetime
    part: AuditPart


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """One instance, answer included. `commits` has the base commit too."""

    id: str
    dataset: str
    mirror: MirrorName
    base_commit: CommitId
    direction: Direction
    commits: tuple[tuple[CommitId, CommitRole], ...]
    patch: str | None
    test_patch: str | None
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]

    @property
    def repo(self) -> str:
        return self.mirror.repo


@dataclass(frozen=True, slots=True)
class DatasetHead:
    """What is recorded of a dataset beside its rows.

    `fault_count` counts all faults, of which `faults` keeps the first; `refused` says by mirror key and commit (`*`: all of
    them) why it has no pin.
    """

    name: DatasetName
    format: str
    source: str
    sha256: str
    imported_at: datetime
    fault_count: int
    faults: list[RowFault]
    rules: dict[str, int]
    refused: dict[str, dict[str, str]]
