"""Rows of all formats: our own ids, environments, versions, dates, bounds, revisions, rules."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    for name in ("public_id", "revision", "environment", "python_version", "version"):
        op.add_column("instances", sa.Column(name, sa.Text))
    op.add_column("instances", sa.Column("created_at", sa.DateTime(timezone=True)))
    op.add_column("instances", sa.Column("history", sa.String(16)))
    op.add_column("instances", sa.Column("rules", sa.JSON))
    op.create_index("instances_by_public_id", "instances", ["public_id"])
    unresolved = sa.text("base_commit = ''")
    op.create_index(
        "unresolved_instances",
        "instances",
        ["dataset_id", "mirror_name"],
        sqlite_where=unresolved,
        postgresql_where=unresolved,
    )
