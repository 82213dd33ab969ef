"""Notes of runs, and an index of what moved a balance beside usage."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_INDEX = "ix_ledger_entries_not_usage"
_NOT_USAGE = sa.text("type <> 'usage'")


def upgrade() -> None:
    op.add_column("runs", sa.Column("notes", sa.String(4096), nullable=True))
    op.create_index(
        _INDEX, "ledger_entries", ["org_id", "at", "id"], sqlite_where=_NOT_USAGE, postgresql_where=_NOT_USAGE
    )


def downgrade() -> None:
    op.drop_index(_INDEX, "ledger_entries")
    with op.batch_alter_table("runs") as runs:
        runs.drop_column("notes")
