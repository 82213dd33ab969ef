"""How many clients have joined a sampler."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("samplers", schema=None) as batch_op:
        batch_op.add_column(sa.Column("clients", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    with op.batch_alter_table("samplers", schema=None) as batch_op:
        batch_op.drop_column("clients")
