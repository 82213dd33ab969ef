"""Operations know the HTTP request that brought them: for the log, and for traces."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("operations", sa.Column("origin", sa.String(128), server_default="", nullable=False))


def downgrade() -> None:
    with op.batch_alter_table("operations") as batch:
        batch.drop_column("origin")
