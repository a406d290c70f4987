"""Claims, generations, nodes and changes of a fleet; which node judged.

Audits that were interrupted begin again: a judgement belongs to a node from here on.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("audits", sa.Column("node", sa.Text))
    op.execute("UPDATE audits SET node = ''")
    op.drop_table("judgements")
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
    _create_claims()
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


def _create_claims() -> None:
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
