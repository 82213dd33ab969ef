"""Which versions of a policy an operation drew tokens from, or made."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("operations", sa.Column("policy", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("operations", "policy")
