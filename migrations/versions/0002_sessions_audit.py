"""Who made a session and how it ended; timings of operations; the audit log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from migrations.append_only import protect, unprotect

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("sessions", schema=None) as batch_op:
        batch_op.add_column(sa.Column("finish_detail", sa.String(length=4096), nullable=True))
        batch_op.add_column(sa.Column("key_id", sa.BigInteger(), nullable=True))
        batch_op.add_column(sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True))
    with op.batch_alter_table("operations", schema=None) as batch_op:
        batch_op.add_column(sa.Column("timings", sa.JSON(none_as_null=True), nullable=True))

    op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("org_id", sa.String(length=64), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("key_id", sa.BigInteger(), nullable=True),
        sa.Column("event", sa.String(length=64), nullable=False),
        sa.Column("target", sa.String(length=512), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_audit_log_org_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_log")),
    )
    with op.batch_alter_table("audit_log", schema=None) as batch_op:
        batch_op.create_index("ix_audit_log_org_at", ["org_id", "at"], unique=False)

    protect("audit_log")


def downgrade() -> None:
    unprotect("audit_log")
    with op.batch_alter_table("audit_log", schema=None) as batch_op:
        batch_op.drop_index("ix_audit_log_org_at")

    op.drop_table("audit_log")
    with op.batch_alter_table("operations", schema=None) as batch_op:
        batch_op.drop_column("timings")
    with op.batch_alter_table("sessions", schema=None) as batch_op:
        batch_op.drop_column("ended_at")
        batch_op.drop_column("key_id")
        batch_op.drop_column("finish_detail")
