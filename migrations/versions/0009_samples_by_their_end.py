"""Samples that ended long ago are found among all that ended by an index."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_SAMPLES = sa.text("kind = 'sample' AND finished_at IS NOT NULL")


def upgrade() -> None:
    op.create_index(
        "ix_operations_samples", "operations", ["finished_at"], sqlite_where=_SAMPLES, postgresql_where=_SAMPLES
    )


def downgrade() -> None:
    op.drop_index("ix_operations_samples", table_name="operations")
