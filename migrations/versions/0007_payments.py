"""What goes to Stripe and comes from it; invoices; alerts; jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "job_leases",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("holder", sa.String(length=64), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_job_leases")),
    )
    op.create_table(
        "job_runs",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("asked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("succeeded_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("failed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("duration_ms", sa.BigInteger(), nullable=True),
        sa.Column("result", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("error", sa.String(length=1024), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_job_runs")),
    )
    op.create_table(
        "stripe_webhook_events",
        sa.Column("event_id", sa.String(length=255), nullable=False),
        sa.Column("type", sa.String(length=128), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("received_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("processed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("next_attempt_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("outcome", sa.String(length=512), nullable=True),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_stripe_webhook_events")),
    )
    with op.batch_alter_table("stripe_webhook_events", schema=None) as batch_op:
        batch_op.create_index(
            "ix_stripe_webhook_events_due",
            ["next_attempt_at"],
            unique=False,
            sqlite_where=sa.text("processed_at IS NULL"),
            postgresql_where=sa.text("processed_at IS NULL"),
        )

    op.create_table(
        "alerts",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("org_id", sa.String(length=64), nullable=True),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("ref", sa.String(length=255), nullable=False),
        sa.Column("message", sa.String(length=1024), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.Column("raised_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("resolved_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_alerts_org_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alerts")),
        sa.UniqueConstraint("kind", "ref", name=op.f("uq_alerts_kind")),
    )
    with op.batch_alter_table("alerts", schema=None) as batch_op:
        batch_op.create_index("ix_alerts_org_at", ["org_id", "raised_at"], unique=False)

    op.create_table(
        "invoices",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("org_id", sa.String(length=64), nullable=False),
        sa.Column("period_start", sa.DateTime(timezone=True), nullable=False),
        sa.Column("total_nusd", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("stripe_invoice_id", sa.String(length=255), nullable=True),
        sa.Column("hosted_url", sa.String(length=2048), nullable=True),
        sa.Column("pdf_url", sa.String(length=2048), nullable=True),
        sa.Column("closed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("paid_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_invoices_org_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_invoices")),
        sa.UniqueConstraint("org_id", "period_start", name=op.f("uq_invoices_org_id")),
        sa.UniqueConstraint("stripe_invoice_id", name=op.f("uq_invoices_stripe_invoice_id")),
    )
    op.create_table(
        "stripe_meter_cursors",
        sa.Column("org_id", sa.String(length=64), nullable=False),
        sa.Column("meter", sa.String(length=16), nullable=False),
        sa.Column("period_start", sa.DateTime(timezone=True), nullable=False),
        sa.Column("sent_uusd", sa.BigInteger(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_stripe_meter_cursors_org_id")),
        sa.PrimaryKeyConstraint("org_id", "meter", "period_start", name=op.f("pk_stripe_meter_cursors")),
    )
    op.create_table(
        "stripe_outbox",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("org_id", sa.String(length=64), nullable=False),
        sa.Column("meter", sa.String(length=16), nullable=False),
        sa.Column("period_start", sa.DateTime(timezone=True), nullable=False),
        sa.Column("identifier", sa.String(length=100), nullable=False),
        sa.Column("customer_id", sa.String(length=255), nullable=False),
        sa.Column("value_uusd", sa.BigInteger(), nullable=False),
        sa.Column("occurred_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("next_attempt_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("first_sent_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_sent_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("sent_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_error", sa.String(length=512), nullable=True),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_stripe_outbox_org_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stripe_outbox")),
        sa.UniqueConstraint("identifier", name=op.f("uq_stripe_outbox_identifier")),
    )
    with op.batch_alter_table("stripe_outbox", schema=None) as batch_op:
        batch_op.create_index(
            "ix_stripe_outbox_open",
            ["org_id", "meter", "id"],
            unique=False,
            sqlite_where=sa.text("state <> 'sent'"),
            postgresql_where=sa.text("state <> 'sent'"),
        )
        batch_op.create_index("ix_stripe_outbox_period", ["org_id", "meter", "period_start"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("stripe_outbox", schema=None) as batch_op:
        batch_op.drop_index("ix_stripe_outbox_period")
        batch_op.drop_index(
            "ix_stripe_outbox_open",
            sqlite_where=sa.text("state <> 'sent'"),
            postgresql_where=sa.text("state <> 'sent'"),
        )

    op.drop_table("stripe_outbox")
    op.drop_table("stripe_meter_cursors")
    op.drop_table("invoices")
    with op.batch_alter_table("alerts", schema=None) as batch_op:
        batch_op.drop_index("ix_alerts_org_at")

    op.drop_table("alerts")
    with op.batch_alter_table("stripe_webhook_events", schema=None) as batch_op:
        batch_op.drop_index(
            "ix_stripe_webhook_events_due",
            sqlite_where=sa.text("processed_at IS NULL"),
            postgresql_where=sa.text("processed_at IS NULL"),
        )

    op.drop_table("stripe_webhook_events")
    op.drop_table("job_runs")
    op.drop_table("job_leases")
