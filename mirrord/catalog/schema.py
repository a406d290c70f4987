"""The tables of the catalog at revision HEAD, and classes of their rows.

A test compares the tables with those that the migrations make. Mirrors are keyed by their name in
lower case, so two spellings are one row.
"""

import hashlib
import re
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import lru_cache, partial
from typing import Any, NamedTuple

import sqlalchemy as sa

from ..model import AuditLevel, CommitId, CommitRole, DatasetName, Direction, History, MirrorName
from ..protocol import AuditPart, Receipt, RowFault
from ..quoting import as_utf8, quote_name, unquote_name

HEAD = "0001"  # the newest migration


class UtcTime(sa.TypeDecorator[datetime]):
    """An aware time in UTC; SQLite stores no time zone."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        return value.astimezone(timezone.utc) if value else None

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> datetime | None:
        if value is None:
            return None
        aware = value if value.tzinfo else value.replace(tzinfo=timezone.utc)
        return aware.astimezone(timezone.utc)  # type: ignore[no-any-return]


class Text(sa.TypeDecorator[str]):
    """Text. What no database takes as such, a byte that is not UTF-8 or NUL, is escaped."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        return None if value is None else as_utf8(value).replace("\0", "\\000")


class Name(sa.TypeDecorator[str]):
    """A name of git, in its printable form, to be read back."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        return None if value is None else quote_name(value)

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> str | None:
        return None if value is None else unquote_name(value)


_cascade = partial(sa.ForeignKey, ondelete="CASCADE")
metadata = sa.MetaData()

# Alembic's own table. Not part of `metadata`, because migrations do not make it.
version = sa.Table(
    "alembic_version", sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True)
)

mirrors = sa.Table(
    "mirrors",
    metadata,
    sa.Column("key", Text, primary_key=True),
    sa.Column("name", Text, nullable=False),
    sa.Column("url", Text, nullable=False),
    sa.Column("configured_url", Text),
    sa.Column("added_at", UtcTime, nullable=False),
    sa.Column("default_branch", Name),
    sa.Column("ref_count", sa.Integer),
    sa.Column("kept_count", sa.Integer),
    sa.Column("size_bytes", sa.BigInteger),
    sa.Column("synced_at", UtcTime),
    sa.Column("attempted_at", UtcTime),
    sa.Column("error", sa.JSON),
    sa.Column("ref_faults", sa.JSON, nullable=False),
    sa.Column("history", sa.String(40)),
)

pins = sa.Table(
    "pins",
    metadata,
    sa.Column("mirror_key", Text, _cascade("mirrors.key"), primary_key=True),
    sa.Column("commit_id", sa.String(40), primary_key=True),
    sa.Column("owner", Text, primary_key=True),
    sa.Column("reason", Text, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Index("pins_by_owner", "owner"),
)

datasets = sa.Table(
    "datasets",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", Text, nullable=False, unique=True),
    sa.Column("format", Text, nullable=False),
    sa.Column("source", Text, nullable=False),
    sa.Column("sha256", sa.String(64), nullable=False),
    sa.Column("imported_at", UtcTime, nullable=False),
    sa.Column("fault_count", sa.Integer, nullable=False),
    sa.Column("faults", sa.JSON, nullable=False),
    sa.Column("rules", sa.JSON, nullable=False),
    sa.Column("refused", sa.JSON, nullable=False),
)

instances = sa.Table(
    "instances",
    metadata,
    sa.Column("dataset_id", sa.Integer, _cascade("datasets.id"), primary_key=True),
    sa.Column("id", Text, primary_key=True),
    # no foreign key: a dataset may record what is not mirrored
    sa.Column("mirror_name", Text, nullable=False),
    sa.Column("base_commit", sa.String(40), nullable=False),
    sa.Column("direction", sa.String(16), nullable=False),
    # bytes: PostgreSQL's text refuses NUL, which git's patches may contain
    sa.Column("patch", sa.LargeBinary),
    sa.Column("test_patch", sa.LargeBinary),
    sa.Column("fail_to_pass", sa.JSON, nullable=False),
    sa.Column("pass_to_pass", sa.JSON, nullable=False),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    sa.Column("public_id", Text),  # NULL: the same as id
    sa.Column("revision", Text),
    sa.Column("environment", Text),
    sa.Column("python_version", Text),
    sa.Column("version", Text),
    sa.Column("workdir", Text),
    sa.Column("created_at", UtcTime),
    sa.Column("history", sa.String(16)),
    sa.Column("rules", sa.JSON),
    sa.Column("install_config", sa.JSON(none_as_null=True)),
    sa.Index("instances_by_id", "id", "dataset_id"),
    sa.Index("instances_by_public_id", "public_id"),
    # 20,000 rows of 5 kB: 0.3 ms by it, 6.1 by the primary key
    sa.Index(  # an empty base commit: the mirror does not have the branch yet
        "unresolved_instances",
        "dataset_id",
        "mirror_name",
        sqlite_where=sa.text("base_commit = ''"),  # PostgreSQL's: in postgresql.py
    ),
)

needs = sa.Table(
    "needs",
    metadata,
    sa.Column("mirror_key", Text, primary_key=True),
    sa.Column("commit_id", sa.String(40), primary_key=True),
    sa.Column("facts", sa.JSON, nullable=False),
)

recorded = sa.Table(
    "recorded_commits",
    metadata,
    sa.Column("dataset_id", sa.Integer, primary_key=True),
    sa.Column("instance_id", Text, primary_key=True),
    sa.Column("commit_id", sa.String(40), primary_key=True),
    sa.Column("role", sa.String(32), primary_key=True),
    sa.Column("mirror_key", Text, nullable=False),
    sa.Column("mirror_name", Text, nullable=False),
    sa.ForeignKeyConstraint(
        ["dataset_id", "instance_id"],
        ["instances.dataset_id", "instances.id"],
        ondelete="CASCADE",
        name="recorded_instance",
    ),
    sa.Index("recorded_by_mirror", "mirror_key", "commit_id"),
)

audits = sa.Table(
    "audits",
    metadata,
    sa.Column("id", Text, primary_key=True),
    sa.Column("finished_at", UtcTime, nullable=False),
    sa.Column("document", sa.JSON, nullable=False),
    sa.Column("node", Text),
    sa.Index("audits_by_time", "finished_at"),
)

reports = sa.Table(
    "reports",
    metadata,
    sa.Column("id", Text, primary_key=True),
    sa.Column("received_at", UtcTime, nullable=False),
    sa.Column("document", sa.JSON, nullable=False),
    sa.Index("reports_by_time", "received_at"),
)

receipts = sa.Table(
    "receipts",
    metadata,
    sa.Column("id", Text, primary_key=True),
    sa.Column("issued_at", UtcTime, nullable=False),
    sa.Column("node", Text, nullable=False),
    sa.Column("node_name", Text, nullable=False),
    sa.Column("owner_uid", sa.BigInteger, nullable=False),
    sa.Column("is_grader", sa.Boolean, nullable=False),
    sa.Column("document", sa.JSON, nullable=False),
    sa.Index("receipts_by_time", "issued_at"),
)

judgements = sa.Table(
    "judgements",
    metadata,
    sa.Column("mirror_key", Text, primary_key=True),
    sa.Column("level", sa.String(16), primary_key=True),
    sa.Column("node", Text, primary_key=True),
    sa.Column("audit_id", Text, nullable=False),
    sa.Column("started_at", UtcTime, nullable=False),
    sa.Column("judged_at", UtcTime, nullable=False),
    sa.Column("document", sa.JSON, nullable=False),
)

# -- tables of a fleet; times are milliseconds by the database's clock, since those of nodes differ

claims = sa.Table(
    "claims",
    metadata,
    sa.Column("key", Text, primary_key=True),  # `mirror/<key>`, or other work of one node
    sa.Column("node", Text),
    sa.Column("epoch", sa.BigInteger, nullable=False),  # grows by one with each claim
    sa.Column("expires_ms", sa.BigInteger, nullable=False),
    sa.Column("due_ms", sa.BigInteger),  # NULL: by request only
    sa.Column("host", Text, nullable=False),  # of the upstream; empty: no limit per host
    sa.Column("is_batch", sa.Boolean, nullable=False),
    sa.Column("failures", sa.Integer, nullable=False),  # since the last success
    sa.Index("claims_by_due", "due_ms"),
    sa.Index("claims_by_node", "node"),
)

generations = sa.Table(
    "generations",
    metadata,
    sa.Column("mirror_key", Text, _cascade("mirrors.key"), primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("number", sa.BigInteger, nullable=False),
    sa.Column("manifest", sa.String(64), nullable=False),  # the hash of its bytes
    sa.Column("node", Text, nullable=False),
    sa.Column("published_ms", sa.BigInteger, nullable=False),
)

closures = sa.Table(
    "closures",
    metadata,
    sa.Column("mirror_key", Text, _cascade("mirrors.key"), primary_key=True),
    sa.Column("commit_id", Text, primary_key=True),
    sa.Column("document", sa.JSON, nullable=False),  # its layer of the chain, its pack's digests
    sa.Column("used_ms", sa.BigInteger, nullable=False),
)

nodes = sa.Table(
    "nodes",
    metadata,
    sa.Column("id", Text, primary_key=True),
    sa.Column("name", Text, nullable=False),
    sa.Column("version", Text, nullable=False),
    sa.Column("seen_ms", sa.BigInteger, nullable=False),
    sa.Column("document", sa.JSON, nullable=False),
)

changes = sa.Table(
    "changes",
    metadata,
    sa.Column("topic", Text, primary_key=True),  # empty: the clock that versions come from
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Index("changes_by_version", "version"),
)


@dataclass(frozen=True, slots=True)
class MirrorRow:
    """A mirror. `url` may hold a secret: show it only masked.

    `history` is the id of a record of the mirror's ref history, the newest or an older one.
    `configured_url` is what the configuration said when `url` was set.
    """

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
    configured_url: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class PinRow:
    """A pin. `owner` is `dataset/NAME` or `person/UID`."""

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
    """One mirror's part of the last, possibly unfinished, audit of everything at one level."""

    key: str
    level: AuditLevel
    audit_id: str
    started_at: datetime
    judged_at: datetime
    part: AuditPart
    node: str = ""


class Claim(NamedTuple):
    """The right of one node to some work. `epoch` only grows."""

    key: str
    epoch: int


class Generation(NamedTuple):
    """A published state of a mirror, ordered by epoch and number. `manifest` is a hash."""

    epoch: int
    number: int
    manifest: str


@dataclass(frozen=True, slots=True)
class ReceiptRow:
    """A receipt, with its issuer, its owner and its view. `id` is its canonical form's SHA-256."""

    id: str
    node: str
    node_name: str
    owner_uid: int
    is_grader: bool
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A daemon of a fleet; `age_s` is how long ago it was seen."""

    id: str
    name: str
    version: str
    age_s: float
    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class HeldClaim:
    """A claim that a node holds for another `left_s` seconds."""

    key: str
    node: str
    epoch: int
    left_s: float


class Module(NamedTuple):
    """A submodule that was had: its path and name, also of one within another: `git_dir` is its
    repository in a checkout's `.git`.
    """

    path: str
    name: str
    git_dir: str
    url: str
    mirror: str
    commit: str


@dataclass(frozen=True, slots=True)
class Composition:
    """What a base commit needs from elsewhere, as an import found it.

    `tree` is the composed one, with the files of all `modules` and LFS objects; None without any.
    `missing` has the path of each other submodule, and why. `pointers` counts LFS objects, which
    have `lfs_bytes`; `lfs_missing` of them are not had.
    """

    tree: str | None = None
    modules: tuple[Module, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()
    pointers: int = 0
    lfs_bytes: int = 0
    lfs_missing: int = 0


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """An instance with its answer. `commits` includes the base commit.

    `revision` is the branch of a row that names no base commit; `base_commit` is None until the
    mirror has that branch. `history` limits what agents see: the past of a SWE-smith instance is
    its answer. `environment` and `python_version` say where it runs, `install_config` how that is
    built, `workdir` where the tree is, `rules` how its values were interpreted.
    """

    id: str
    dataset: str
    mirror: MirrorName
    base_commit: CommitId | None
    direction: Direction
    commits: tuple[tuple[CommitId, CommitRole], ...]
    patch: str | None
    test_patch: str | None
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    revision: str | None = None
    environment: str | None = None
    python_version: str | None = None
    version: str | None = None
    created_at: datetime | None = None
    history: History | None = None
    rules: tuple[str, ...] = ()
    install_config: dict[str, Any] | None = None
    workdir: str | None = None
    repo_url: str | None = None  # as the row names it; an import reads it, and it is not stored

    @property
    def repo(self) -> str:
        return self.mirror.repo

    @property
    def public_id(self) -> str:
        """The id that agents may see: the row's, or a hash of it if that reveals a gold commit.

        Any full commit id counts as revealing, because a row may lack the column that records it.
        """
        return _public_id(self.id, self.mirror, self.base_commit, self.commits)


_ABBREVIATED_DIGITS = 7  # git's shortest abbreviation by default


@lru_cache(maxsize=4096)  # it is asked for with each checkout and reset
def _public_id(
    identity: str,
    mirror: MirrorName,
    base: CommitId | None,
    commits: tuple[tuple[CommitId, CommitRole], ...],
) -> str:
    text = identity.lower()
    hidden = {commit[:_ABBREVIATED_DIGITS] for commit, _ in commits if commit != base}
    full_ids = set(re.findall(r"[0-9a-f]{40}", text)) - {base}
    if not full_ids and not any(digits in text for digits in hidden):
        return identity
    return f"{mirror.key}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True)
class DatasetHead:
    """A dataset without its rows.

    `faults` has the first faults, `fault_count` counts all. `refused` has, by mirror key and commit
    (`*`: all of them), the reason why it has no pin.
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
