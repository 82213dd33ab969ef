"""What is looked for while others wait to write is found by an index, however many rows there are."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_PLAIN = (
    ("sessions", "state"),
    ("runs", "state"),
    ("samplers", "adapter_ref"),
    ("samplers", "run_id"),
    ("checkpoints", "ref"),
    ("checkpoints", "expires_at"),
)
_LOADS = sa.text("kind IN ('create', 'load_state')")


def upgrade() -> None:
    for table, column in _PLAIN:
        op.create_index(f"ix_{table}_{column}", table, [column])
    op.create_index("ix_operations_loads", "operations", ["lane"], sqlite_where=_LOADS, postgresql_where=_LOADS)


def downgrade() -> None:
    op.drop_index("ix_operations_loads", table_name="operations")
    for table, column in _PLAIN:
        op.drop_index(f"ix_{table}_{column}", table_name=table)
