"""The tables of the catalog, as migrations leave them at revision HEAD, and their rows as values.

Owns the definitions; a test holds them equal to what the migrations build. Mirrors are keyed by their name in lower case, so that
two spellings are one row. Instances and recorded commits do not refer to the mirrors table: a dataset may record what is not
mirrored. Patches are bytes, because PostgreSQL's text refuses NUL, which git's patches may hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    DateTime,
    Dialect,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
)

from ..model import AuditLevel, CommitId, CommitRole, DatasetName, Direction, MirrorName
from ..protocol import AuditPart, RowFault

HEAD = "0003"
"""The newest migration."""


class UtcTime(TypeDecorator[datetime]):
    """Aware UTC in and out; SQLite keeps no time zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value.astimezone(timezone.utc) if value else None

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        aware = value if value.tzinfo else value.replace(tzinfo=timezone.utc)
        return aware.astimezone(timezone.utc)  # type: ignore[no-any-return]


metadata = MetaData()

version = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))
"""Alembic's own table; not part of `metadata`, because alembic makes it."""

mirrors = Table(
    "mirrors",
    metadata,
    Column("key", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("added_at", UtcTime, nullable=False),
    Column("default_branch", Text),
    Column("ref_count", Integer),
    Column("kept_count", Integer),
    Column("size_bytes", BigInteger),
    Column("synced_at", UtcTime),
    Column("attempted_at", UtcTime),
    Column("error", JSON),
    Column("ref_faults", JSON, nullable=False),
    Column("history", String(40)),
)

pins = Table(
    "pins",
    metadata,
    Column("mirror_key", Text, ForeignKey("mirrors.key", ondelete="CASCADE"), primary_key=True),
    Column("commit_id", String(40), primary_key=True),
    Column("owner", Text, primary_key=True),
    Column("reason", Text, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Index("pins_by_owner", "owner"),
)

datasets = Table(
    "datasets",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("format", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("imported_at", UtcTime, nullable=False),
    Column("fault_count", Integer, nullable=False),
    Column("faults", JSON, nullable=False),
    Column("rules", JSON, nullable=False),
    Column("refused", JSON, nullable=False),
)

instances = Table(
    "instances",
    metadata,
    Column("dataset_id", Integer, ForeignKey("datasets.id", ondelete="CASCADE"), primary_key=True),
    Column("id", Text, primary_key=True),
    Column("mirror_name", Text, nullable=False),
    Column("base_commit", String(40), nullable=False),
    Column("direction", String(16), nullable=False),
    Column("patch", LargeBinary),
    Column("test_patch", LargeBinary),
    Column("fail_to_pass", JSON, nullable=False),
    Column("pass_to_pass", JSON, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Index("instances_by_id", "id", "dataset_id"),
)

recorded = Table(
    "recorded_commits",
    metadata,
    Column("dataset_id", Integer, primary_key=True),
    Column("instance_id", Text, primary_key=True),
    Column("commit_id", String(40), primary_key=True),
    Column("role", String(32), primary_key=True),
    Column("mirror_key", Text, nullable=False),
    Column("mirror_name", Text, nullable=False),
    ForeignKeyConstraint(
        ["dataset_id", "instance_id"],
        ["instances.dataset_id", "instances.id"],
        ondelete="CASCADE",
        name="recorded_instance",
    ),
    Index("recorded_by_mirror", "mirror_key", "commit_id"),
)

audits = Table(
    "audits",
    metadata,
    Column("id", Text, primary_key=True),
    Column("finished_at", UtcTime, nullable=False),
    Column("document", JSON, nullable=False),
    Index("audits_by_time", "finished_at"),
)

judgements = Table(
    "judgements",
    metadata,
    Column("mirror_key", Text, primary_key=True),
    Column("level", String(16), primary_key=True),
    Column("audit_id", Text, nullable=False),
    Column("started_at", UtcTime, nullable=False),
    Column("judged_at", UtcTime, nullable=False),
    Column("document", JSON, nullable=False),
)


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
