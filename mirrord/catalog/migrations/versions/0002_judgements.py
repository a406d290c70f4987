"""What audits said of each mirror, so that one that was interrupted goes on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "judgements",
        sa.Column("mirror_key", sa.Text, primary_key=True),
        sa.Column("level", sa.String(16), primary_key=True),
        sa.Column("audit_id", sa.Text, nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("judged_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
    )
