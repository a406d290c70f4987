"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_UNRESOLVED = sa.text("base_commit = ''")


def upgrade() -> None:
    op.create_table(
        "mirrors",
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("configured_url", sa.Text),
        sa.Column("added_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("default_branch", sa.Text),
        sa.Column("ref_count", sa.Integer),
        sa.Column("kept_count", sa.Integer),
        sa.Column("size_bytes", sa.BigInteger),
        sa.Column("synced_at", sa.DateTime(timezone=True)),
        sa.Column("attempted_at", sa.DateTime(timezone=True)),
        sa.Column("error", sa.JSON),
        sa.Column("ref_faults", sa.JSON, nullable=False),
        sa.Column("history", sa.String(40)),
    )
    op.create_table(
        "pins",
        sa.Column(
            "mirror_key",
            sa.Text,
            sa.ForeignKey("mirrors.key", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("commit_id", sa.String(40), primary_key=True),
        sa.Column("owner", sa.Text, primary_key=True),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Index("pins_by_owner", "owner"),
    )
    _create_datasets()
    _create_needs()
    _create_documents()
    _create_fleet()


def _create_datasets() -> None:
    op.create_table(
        "datasets",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        sa.Column("format", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("imported_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("fault_count", sa.Integer, nullable=False),
        sa.Column("faults", sa.JSON, nullable=False),
        sa.Column("rules", sa.JSON, nullable=False),
        sa.Column("refused", sa.JSON, nullable=False),
    )
    op.create_table(
        "instances",
        sa.Column(
            "dataset_id",
            sa.Integer,
            sa.ForeignKey("datasets.id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("mirror_name", sa.Text, nullable=False),
        sa.Column("base_commit", sa.String(40), nullable=False),
        sa.Column("direction", sa.String(16), nullable=False),
        sa.Column("patch", sa.LargeBinary),
        sa.Column("test_patch", sa.LargeBinary),
        sa.Column("fail_to_pass", sa.JSON, nullable=False),
        sa.Column("pass_to_pass", sa.JSON, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("public_id", sa.Text),
        sa.Column("revision", sa.Text),
        sa.Column("environment", sa.Text),
        sa.Column("python_version", sa.Text),
        sa.Column("version", sa.Text),
        sa.Column("workdir", sa.Text),
        sa.Column("created_at", sa.DateTime(timezone=True)),
        sa.Column("history", sa.String(16)),
        sa.Column("rules", sa.JSON),
        sa.Column("install_config", sa.JSON(none_as_null=True)),
        sa.Index("instances_by_id", "id", "dataset_id"),
        sa.Index("instances_by_public_id", "public_id"),
        sa.Index(
            "unresolved_instances",
            "dataset_id",
            "mirror_name",
            sqlite_where=_UNRESOLVED,
            postgresql_where=_UNRESOLVED,
        ),
    )


def _create_needs() -> None:
    op.create_table(
        "needs",
        sa.Column("mirror_key", sa.Text, primary_key=True),
        sa.Column("commit_id", sa.String(40), primary_key=True),
        sa.Column("facts", sa.JSON, nullable=False),
    )
    op.create_table(
        "recorded_commits",
        sa.Column("dataset_id", sa.Integer, primary_key=True),
        sa.Column("instance_id", sa.Text, primary_key=True),
        sa.Column("commit_id", sa.String(40), primary_key=True),
        sa.Column("role", sa.String(32), primary_key=True),
        sa.Column("mirror_key", sa.Text, nullable=False),
        sa.Column("mirror_name", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(
            ["dataset_id", "instance_id"],
            ["instances.dataset_id", "instances.id"],
            ondelete="CASCADE",
            name="recorded_instance",
        ),
        sa.Index("recorded_by_mirror", "mirror_key", "commit_id"),
    )


def _create_documents() -> None:
    op.create_table(
        "audits",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Column("node", sa.Text),
        sa.Index("audits_by_time", "finished_at"),
    )
    op.create_table(
        "judgements",
        sa.Column("mirror_key", sa.Text, primary_key=True),
        sa.Column("level", sa.String(16), primary_key=True),
        sa.Column("node", sa.Text, primary_key=True),
        sa.Column("audit_id", sa.Text, nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("judged_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
    )
    op.create_table(
        "reports",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("received_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Index("reports_by_time", "received_at"),
    )
    op.create_table(
        "receipts",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("issued_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("node_name", sa.Text, nullable=False),
        sa.Column("owner_uid", sa.BigInteger, nullable=False),
        sa.Column("is_grader", sa.Boolean, nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Index("receipts_by_time", "issued_at"),
    )


def _create_fleet() -> None:
    op.create_table(
        "claims",
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("node", sa.Text),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("expires_ms", sa.BigInteger, nullable=False),
        sa.Column("due_ms", sa.BigInteger),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("is_batch", sa.Boolean, nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Index("claims_by_due", "due_ms"),
        sa.Index("claims_by_node", "node"),
    )
    op.create_table(
        "generations",
        sa.Column(
            "mirror_key",
            sa.Text,
            sa.ForeignKey("mirrors.key", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("manifest", sa.String(64), nullable=False),
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("published_ms", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "closures",
        sa.Column(
            "mirror_key",
            sa.Text,
            sa.ForeignKey("mirrors.key", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("commit_id", sa.Text, primary_key=True),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Column("used_ms", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "nodes",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("seen_ms", sa.BigInteger, nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
    )
    op.create_table(
        "changes",
        sa.Column("topic", sa.Text, primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Index("changes_by_version", "version"),
    )
