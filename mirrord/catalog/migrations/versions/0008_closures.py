"""Closure packs that the daemons of a fleet share."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
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
