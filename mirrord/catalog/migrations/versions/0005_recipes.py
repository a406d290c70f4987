"""What rows say of how they are installed and tested."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("instances", sa.Column("install_config", sa.JSON(none_as_null=True)))
