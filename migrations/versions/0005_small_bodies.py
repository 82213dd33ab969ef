"""Small bodies and results lie in the rows of their operations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("operations", sa.Column("body", sa.Text, nullable=True))
    op.add_column("operations", sa.Column("result", sa.Text, nullable=True))


def downgrade() -> None:
    kept = sa.text("SELECT count(*) FROM operations WHERE body IS NOT NULL OR result IS NOT NULL")
    if lost := op.get_bind().scalar(kept):
        raise RuntimeError(f"{lost} operations have in their rows what 0004 keeps in files: go back to a backup")
    with op.batch_alter_table("operations") as batch:
        batch.drop_column("result")
        batch.drop_column("body")
