"""Browser sessions; the curves that users log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "browser_sessions",
        sa.Column("sid_sha256", sa.String(64), nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("key_id", sa.BigInteger(), nullable=True),
        sa.Column("user_id", sa.String(64), nullable=True),
        sa.Column("operator", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_browser_sessions_org_id")),
        sa.PrimaryKeyConstraint("sid_sha256", name=op.f("pk_browser_sessions")),
    )
    op.create_index(op.f("ix_browser_sessions_org_id"), "browser_sessions", ["org_id"])
    op.create_index(op.f("ix_browser_sessions_expires_at"), "browser_sessions", ["expires_at"])
    op.create_table(
        "login_links",
        sa.Column("token_sha256", sa.String(64), nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("user_id", sa.String(64), nullable=False),
        sa.Column("operator", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_login_links_org_id")),
        sa.PrimaryKeyConstraint("token_sha256", name=op.f("pk_login_links")),
    )
    op.create_index(op.f("ix_login_links_org_id"), "login_links", ["org_id"])
    op.create_table(
        "run_curves",
        sa.Column("run_id", sa.String(128), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("points", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("last_value", sa.Double(), nullable=False),
        sa.Column("last_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_run_curves_org_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_curves_run_id")),
        sa.PrimaryKeyConstraint("run_id", "name", name=op.f("pk_run_curves")),
    )
    op.create_table(
        "run_metrics",
        sa.Column("run_id", sa.String(128), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_run_metrics_org_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_metrics_run_id")),
        sa.PrimaryKeyConstraint("run_id", "name", "step", name=op.f("pk_run_metrics")),
    )

    op.create_index(op.f("ix_operations_finished_at"), "operations", ["finished_at"])


def downgrade() -> None:
    op.drop_index(op.f("ix_operations_finished_at"), "operations")
    for table in ("run_metrics", "run_curves", "login_links", "browser_sessions"):
        op.drop_table(table)
