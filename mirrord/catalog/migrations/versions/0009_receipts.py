"""The newest receipts, for the pages of all nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
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
