"""Alerts that are not over are found among all that were raised by an index."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_UNRESOLVED = sa.text("resolved_at IS NULL")


def upgrade() -> None:
    op.create_index("ix_alerts_open", "alerts", ["kind", "ref"], sqlite_where=_UNRESOLVED, postgresql_where=_UNRESOLVED)


def downgrade() -> None:
    op.drop_index("ix_alerts_open", table_name="alerts")
