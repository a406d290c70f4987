"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "mirrors",
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("added_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("default_branch", sa.Text),
        sa.Column("ref_count", sa.Integer),
        sa.Column("kept_count", sa.Integer),
        sa.Column("size_bytes", sa.BigInteger),
        sa.Column("synced_at", sa.DateTime(timezone=True)),
        sa.Column("attempted_at", sa.DateTime(timezone=True)),
        sa.Column("error", sa.JSON),
        sa.Column("ref_faults", sa.JSON, nullable=False),
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
    )
    op.create_index("pins_by_owner", "pins", ["owner"])
    _create_datasets()
    op.create_table(
        "audits",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
    )
    op.create_index("audits_by_time", "audits", ["finished_at"])


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
    )
    op.create_index("instances_by_id", "instances", ["id", "dataset_id"])
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
    )
    op.create_index("recorded_by_mirror", "recorded_commits", ["mirror_key", "commit_id"])
