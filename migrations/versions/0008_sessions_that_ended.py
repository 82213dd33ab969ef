"""Sessions of an organisation that ended since some time are found by an index, however many it has had."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_sessions_org_ended", "sessions", ["org_id", "ended_at"])
    op.drop_index("ix_sessions_org_id", table_name="sessions")


def downgrade() -> None:
    op.create_index("ix_sessions_org_id", "sessions", ["org_id"])
    op.drop_index("ix_sessions_org_ended", table_name="sessions")
