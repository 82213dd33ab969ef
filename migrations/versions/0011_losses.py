"""Runs that cannot be rebuilt, operations half done in a snapshot; how large a result is, and since when its client has
it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("broken", sa.String(4096), nullable=True))
    op.add_column("runs", sa.Column("snapshot_part", sa.JSON(), nullable=True))
    op.add_column("operations", sa.Column("result_bytes", sa.BigInteger(), nullable=True))
    op.add_column("operations", sa.Column("fetched_at", sa.DateTime(timezone=True), nullable=True))
    op.create_index(
        "ix_operations_kept",
        "operations",
        ["org_id", "fetched_at", "finished_at", "result_bytes"],
        sqlite_where=sa.text("result_bytes IS NOT NULL"),
        postgresql_where=sa.text("result_bytes IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_index("ix_operations_kept", table_name="operations")
    op.drop_column("operations", "fetched_at")
    op.drop_column("operations", "result_bytes")
    op.drop_column("runs", "snapshot_part")
    op.drop_column("runs", "broken")
