"""How long the body of an operation is, and what its client sent where that is not the body."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("operations", sa.Column("body_bytes", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("operations", sa.Column("sent_sha256", sa.String(64), nullable=True))


def downgrade() -> None:
    op.drop_column("operations", "sent_sha256")
    op.drop_column("operations", "body_bytes")
