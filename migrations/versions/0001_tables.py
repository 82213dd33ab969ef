"""Every table. There is one revision, because nothing was deployed before it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from migrations.append_only import protect, unprotect

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

AT = sa.DateTime(timezone=True)
BIG = sa.BigInteger()
#: SQLite only auto-increments an INTEGER primary key.
BIG_ID = BIG.with_variant(sa.Integer(), "sqlite")

APPEND_ONLY = ("usage_events", "audit_log", "ledger_entries")
#: In the order in which they are made: a table comes after those that it refers to.
TABLES = (
    "job_leases",
    "job_runs",
    "organisations",
    "stripe_webhook_events",
    "users",
    "wallet_defaults",
    "alerts",
    "audit_log",
    "browser_sessions",
    "budgets",
    "credit_grants",
    "invoices",
    "ledger_entries",
    "login_links",
    "memberships",
    "operations",
    "projects",
    "sessions",
    "storage_spans",
    "stripe_meter_cursors",
    "stripe_outbox",
    "usage_events",
    "usage_hourly",
    "wallets",
    "api_keys",
    "budget_alerts",
    "budget_periods",
    "runs",
    "samplers",
    "checkpoints",
    "run_curves",
    "run_metrics",
    "session_turns",
)


def upgrade() -> None:
    op.create_table(
        "job_leases",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("holder", sa.String(64), nullable=False),
        sa.Column("until", AT, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_job_leases")),
    )
    op.create_table(
        "job_runs",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("asked_at", AT, nullable=True),
        sa.Column("started_at", AT, nullable=True),
        sa.Column("succeeded_at", AT, nullable=True),
        sa.Column("failed_at", AT, nullable=True),
        sa.Column("duration_ms", BIG, nullable=True),
        sa.Column("result", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("error", sa.String(1024), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_job_runs")),
    )
    op.create_table(
        "organisations",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("status", sa.String(16), server_default="active", nullable=False),
        sa.Column("weight", sa.Integer(), server_default="1", nullable=False),
        sa.Column("stripe_customer_id", sa.String(64), nullable=True),
        sa.Column("quotas", sa.JSON(), server_default="{}", nullable=False),
        sa.Column("created_at", AT, nullable=False),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.Column("tokens_per_minute", BIG, nullable=True),
        sa.Column("max_in_flight", sa.Integer(), nullable=True),
        sa.CheckConstraint(
            "status IN ('active', 'past_due', 'suspended', 'closed')", name=op.f("ck_organisations_status")
        ),
        sa.CheckConstraint("weight >= 1", name=op.f("ck_organisations_weight")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_organisations")),
        sa.UniqueConstraint("name", name=op.f("uq_organisations_name")),
        sa.UniqueConstraint("stripe_customer_id", name=op.f("uq_organisations_stripe_customer_id")),
    )
    op.create_table(
        "stripe_webhook_events",
        sa.Column("event_id", sa.String(255), nullable=False),
        sa.Column("type", sa.String(128), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("received_at", AT, nullable=False),
        sa.Column("processed_at", AT, nullable=True),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("next_attempt_at", AT, nullable=False),
        sa.Column("outcome", sa.String(512), nullable=True),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_stripe_webhook_events")),
    )
    op.create_index(
        "ix_stripe_webhook_events_due",
        "stripe_webhook_events",
        ["next_attempt_at"],
        sqlite_where=sa.text("processed_at IS NULL"),
        postgresql_where=sa.text("processed_at IS NULL"),
    )
    op.create_table(
        "users",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("email", sa.String(254), nullable=False),
        sa.Column("created_at", AT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("email", name=op.f("uq_users_email")),
    )
    op.create_table(
        "wallet_defaults",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("mode", sa.String(16), nullable=False),
        sa.Column("overdraft_nusd", BIG, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_wallet_defaults")),
    )
    op.create_table(
        "alerts",
        sa.Column("id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("org_id", sa.String(64), nullable=True),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("ref", sa.String(255), nullable=False),
        sa.Column("message", sa.String(1024), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.Column("raised_at", AT, nullable=False),
        sa.Column("resolved_at", AT, nullable=True),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_alerts_org_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alerts")),
        sa.UniqueConstraint("kind", "ref", name=op.f("uq_alerts_kind")),
    )
    op.create_index("ix_alerts_org_at", "alerts", ["org_id", "raised_at"])
    op.create_table(
        "audit_log",
        sa.Column("id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("at", AT, nullable=False),
        sa.Column("actor", sa.String(128), server_default="server", nullable=False),
        sa.Column("key_id", BIG, nullable=True),
        sa.Column("ip", sa.String(64), nullable=True),
        sa.Column("request_id", sa.String(64), nullable=True),
        sa.Column("event", sa.String(64), nullable=False),
        sa.Column("target", sa.String(512), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.Column("prev_hash", sa.String(64), server_default="", nullable=False),
        sa.Column("hash", sa.String(64), server_default="", nullable=False),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_audit_log_org_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_log")),
    )
    op.create_index("ix_audit_log_org_at", "audit_log", ["org_id", "at"])
    op.create_index("ix_audit_log_org_id", "audit_log", ["org_id", "id"])
    op.create_index("uq_audit_log_chain", "audit_log", ["org_id", "prev_hash"], unique=True)
    op.create_table(
        "browser_sessions",
        sa.Column("sid_sha256", sa.String(64), nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("key_id", BIG, nullable=True),
        sa.Column("user_id", sa.String(64), nullable=True),
        sa.Column("operator", sa.Boolean(), nullable=False),
        sa.Column("opened_until", AT, nullable=True),
        sa.Column("link_by", sa.String(128), nullable=True),
        sa.Column("created_at", AT, nullable=False),
        sa.Column("last_seen_at", AT, nullable=False),
        sa.Column("expires_at", AT, nullable=False),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_browser_sessions_org_id")),
        sa.PrimaryKeyConstraint("sid_sha256", name=op.f("pk_browser_sessions")),
    )
    op.create_index("ix_browser_sessions_expires_at", "browser_sessions", ["expires_at"])
    op.create_index("ix_browser_sessions_org_id", "browser_sessions", ["org_id"])
    op.create_table(
        "budgets",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("scope", sa.String(16), nullable=False),
        sa.Column("scope_id", sa.String(64), nullable=False),
        sa.Column("period", sa.String(16), nullable=False),
        sa.Column("limit_nusd", BIG, nullable=False),
        sa.Column("hard", sa.Boolean(), nullable=False),
        sa.Column("alert_pcts", sa.JSON(), nullable=False),
        sa.Column("created_at", AT, nullable=False),
        sa.CheckConstraint("period IN ('month', 'total')", name=op.f("ck_budgets_period")),
        sa.CheckConstraint("scope IN ('org', 'project', 'key')", name=op.f("ck_budgets_scope")),
        sa.CheckConstraint("limit_nusd >= 0", name=op.f("ck_budgets_limit")),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_budgets_org_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_budgets")),
        sa.UniqueConstraint("org_id", "scope", "scope_id", "period", name=op.f("uq_budgets_org_id")),
    )
    op.create_table(
        "credit_grants",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("amount_nusd", BIG, nullable=False),
        sa.Column("remaining_nusd", BIG, nullable=False),
        sa.Column("created_at", AT, nullable=False),
        sa.Column("expires_at", AT, nullable=True),
        sa.CheckConstraint("kind IN ('promo', 'paid')", name=op.f("ck_credit_grants_kind")),
        sa.CheckConstraint(
            "remaining_nusd >= 0 AND remaining_nusd <= amount_nusd", name=op.f("ck_credit_grants_remaining")
        ),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_credit_grants_org_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_credit_grants")),
    )
    op.create_index("ix_credit_grants_org_id", "credit_grants", ["org_id"])
    op.create_table(
        "invoices",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("period_start", AT, nullable=False),
        sa.Column("total_nusd", BIG, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("stripe_invoice_id", sa.String(255), nullable=True),
        sa.Column("hosted_url", sa.String(2048), nullable=True),
        sa.Column("pdf_url", sa.String(2048), nullable=True),
        sa.Column("closed_at", AT, nullable=False),
        sa.Column("paid_at", AT, nullable=True),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_invoices_org_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_invoices")),
        sa.UniqueConstraint("org_id", "period_start", name=op.f("uq_invoices_org_id")),
        sa.UniqueConstraint("stripe_invoice_id", name=op.f("uq_invoices_stripe_invoice_id")),
    )
    op.create_table(
        "ledger_entries",
        sa.Column("id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("type", sa.String(16), nullable=False),
        sa.Column("amount_nusd", BIG, nullable=False),
        sa.Column("ref_type", sa.String(32), nullable=False),
        sa.Column("ref_id", sa.String(128), nullable=False),
        sa.Column("memo", sa.String(256), nullable=False),
        sa.Column("at", AT, nullable=False),
        sa.CheckConstraint(
            "type IN ('topup', 'grant', 'usage', 'refund', 'adjustment', 'expiry', 'invoice', 'chargeback')",
            name=op.f("ck_ledger_entries_type"),
        ),
        sa.CheckConstraint("amount_nusd <> 0", name=op.f("ck_ledger_entries_amount")),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_ledger_entries_org_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_entries")),
        sa.UniqueConstraint("org_id", "type", "ref_type", "ref_id", name=op.f("uq_ledger_entries_org_id")),
    )
    op.create_index("ix_ledger_entries_org_at", "ledger_entries", ["org_id", "at"])
    op.create_table(
        "login_links",
        sa.Column("token_sha256", sa.String(64), nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("user_id", sa.String(64), nullable=False),
        sa.Column("operator", sa.Boolean(), nullable=False),
        sa.Column("made_by", sa.String(128), nullable=True),
        sa.Column("created_at", AT, nullable=False),
        sa.Column("expires_at", AT, nullable=False),
        sa.Column("used_at", AT, nullable=True),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_login_links_org_id")),
        sa.PrimaryKeyConstraint("token_sha256", name=op.f("pk_login_links")),
    )
    op.create_index("ix_login_links_org_id", "login_links", ["org_id"])
    op.create_table(
        "memberships",
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("user_id", sa.String(64), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("created_at", AT, nullable=False),
        sa.CheckConstraint(
            "role IN ('owner', 'admin', 'billing-admin', 'member', 'viewer')", name=op.f("ck_memberships_role")
        ),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_memberships_org_id")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_memberships_user_id")),
        sa.PrimaryKeyConstraint("org_id", "user_id", name=op.f("pk_memberships")),
    )
    op.create_index("ix_memberships_user_id", "memberships", ["user_id"])
    op.create_table(
        "operations",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("key_id", BIG, nullable=True),
        sa.Column("user_id", sa.String(64), nullable=True),
        sa.Column("project_id", sa.String(64), nullable=True),
        sa.Column("lane", sa.String(128), nullable=False),
        sa.Column("seq", BIG, nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("base_model", sa.String(256), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("tokens", BIG, nullable=False),
        sa.Column("hold_nusd", BIG, server_default="0", nullable=False),
        sa.Column("stores_bytes", BIG, server_default="0", nullable=False),
        sa.Column("body_ref", sa.String(256), nullable=False),
        sa.Column("body_sha256", sa.String(64), nullable=False),
        sa.Column("body_bytes", BIG, server_default="0", nullable=False),
        sa.Column("sent_sha256", sa.String(64), nullable=True),
        sa.Column("plan", sa.JSON(), nullable=False),
        sa.Column("result_ref", sa.String(256), nullable=True),
        sa.Column("result_type", sa.String(64), nullable=True),
        sa.Column("result_bytes", BIG, nullable=True),
        sa.Column("fetched_at", AT, nullable=True),
        sa.Column("error", sa.String(4096), nullable=True),
        sa.Column("error_category", sa.String(16), nullable=True),
        sa.Column("accepted_at", AT, nullable=False),
        sa.Column("finished_at", AT, nullable=True),
        sa.Column("timings", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("policy", sa.JSON(none_as_null=True), nullable=True),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_operations_org_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_operations")),
        sa.UniqueConstraint("lane", "seq", name=op.f("uq_operations_lane")),
    )
    op.create_index("ix_operations_finished_at", "operations", ["finished_at"])
    op.create_index(
        "ix_operations_kept",
        "operations",
        ["org_id", "fetched_at", "finished_at", "result_bytes"],
        sqlite_where=sa.text("result_bytes IS NOT NULL"),
        postgresql_where=sa.text("result_bytes IS NOT NULL"),
    )
    op.create_index("ix_operations_org_id", "operations", ["org_id"])
    op.create_index("ix_operations_session_id", "operations", ["session_id"])
    op.create_index("ix_operations_state_lane", "operations", ["state", "lane"])
    op.create_table(
        "projects",
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("created_at", AT, nullable=False),
        sa.Column("archived_at", AT, nullable=True),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.Column("tokens_per_minute", BIG, nullable=True),
        sa.Column("max_in_flight", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_projects_org_id")),
        sa.PrimaryKeyConstraint("org_id", "id", name=op.f("pk_projects")),
        sa.UniqueConstraint("org_id", "name", name=op.f("uq_projects_org_id")),
    )
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("sdk_version", sa.String(64), nullable=False),
        sa.Column("display_name", sa.String(256), nullable=True),
        sa.Column("project_id", sa.String(64), nullable=True),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("finish_reason", sa.String(32), nullable=True),
        sa.Column("finish_detail", sa.String(4096), nullable=True),
        sa.Column("key_id", BIG, nullable=True),
        sa.Column("user_id", sa.String(64), nullable=True),
        sa.Column("created_at", AT, nullable=False),
        sa.Column("last_seen_at", AT, nullable=False),
        sa.Column("ended_at", AT, nullable=True),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_sessions_org_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sessions")),
    )
    op.create_index("ix_sessions_org_id", "sessions", ["org_id"])
    op.create_index("ix_sessions_org_state", "sessions", ["org_id", "state"])
    op.create_table(
        "storage_spans",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("checkpoint_id", sa.String(64), nullable=False),
        sa.Column("run_id", sa.String(128), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("base_model", sa.String(256), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=True),
        sa.Column("key_id", BIG, nullable=True),
        sa.Column("user_id", sa.String(64), nullable=True),
        sa.Column("size_bytes", BIG, nullable=False),
        sa.Column("started_at", AT, nullable=False),
        sa.Column("ended_at", AT, nullable=True),
        sa.Column("metered_until", AT, nullable=False),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_storage_spans_org_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_storage_spans")),
    )
    op.create_index("ix_storage_spans_checkpoint_id", "storage_spans", ["checkpoint_id"])
    op.create_index("ix_storage_spans_metered_until", "storage_spans", ["metered_until"])
    op.create_index("ix_storage_spans_org_ended", "storage_spans", ["org_id", "ended_at"])
    op.create_table(
        "stripe_meter_cursors",
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("meter", sa.String(16), nullable=False),
        sa.Column("period_start", AT, nullable=False),
        sa.Column("sent_uusd", BIG, nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_stripe_meter_cursors_org_id")),
        sa.PrimaryKeyConstraint("org_id", "meter", "period_start", name=op.f("pk_stripe_meter_cursors")),
    )
    op.create_table(
        "stripe_outbox",
        sa.Column("id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("meter", sa.String(16), nullable=False),
        sa.Column("period_start", AT, nullable=False),
        sa.Column("identifier", sa.String(100), nullable=False),
        sa.Column("customer_id", sa.String(255), nullable=False),
        sa.Column("value_uusd", BIG, nullable=False),
        sa.Column("occurred_at", AT, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("next_attempt_at", AT, nullable=False),
        sa.Column("first_sent_at", AT, nullable=True),
        sa.Column("last_sent_at", AT, nullable=True),
        sa.Column("sent_at", AT, nullable=True),
        sa.Column("last_error", sa.String(512), nullable=True),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_stripe_outbox_org_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stripe_outbox")),
        sa.UniqueConstraint("identifier", name=op.f("uq_stripe_outbox_identifier")),
    )
    op.create_index(
        "ix_stripe_outbox_open",
        "stripe_outbox",
        ["org_id", "meter", "id"],
        sqlite_where=sa.text("state <> 'sent'"),
        postgresql_where=sa.text("state <> 'sent'"),
    )
    op.create_index("ix_stripe_outbox_period", "stripe_outbox", ["org_id", "meter", "period_start"])
    op.create_table(
        "usage_events",
        sa.Column("id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("run_id", sa.String(128), nullable=True),
        sa.Column("operation_id", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("base_model", sa.String(256), nullable=False),
        sa.Column("quantity", BIG, nullable=False),
        sa.Column("price_version", sa.String(64), nullable=False),
        sa.Column("rate_uusd", BIG, nullable=False),
        sa.Column("amount_nusd", BIG, nullable=False),
        sa.Column("recorded_at", AT, nullable=False),
        sa.Column("per_units", BIG, server_default="1000000", nullable=False),
        sa.Column("project_id", sa.String(64), nullable=True),
        sa.Column("key_id", BIG, nullable=True),
        sa.Column("user_id", sa.String(64), nullable=True),
        sa.Column("accepted_at", AT, nullable=True),
        sa.Column("settlement", sa.String(64), nullable=True),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_usage_events_org_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage_events")),
        sa.UniqueConstraint("operation_id", "kind", name=op.f("uq_usage_events_operation_id")),
    )
    op.create_index("ix_usage_events_org_at", "usage_events", ["org_id", "recorded_at"])
    op.create_index("ix_usage_events_run_id", "usage_events", ["run_id"])
    op.create_index("ix_usage_events_session_id", "usage_events", ["session_id"])
    op.create_table(
        "usage_hourly",
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("hour", AT, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("base_model", sa.String(256), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("key_id", BIG, autoincrement=False, nullable=False),
        sa.Column("user_id", sa.String(64), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("run_id", sa.String(128), nullable=False),
        sa.Column("price_version", sa.String(64), nullable=False),
        sa.Column("rate_uusd", BIG, autoincrement=False, nullable=False),
        sa.Column("per_units", BIG, nullable=False),
        sa.Column("quantity", BIG, nullable=False),
        sa.Column("amount_nusd", BIG, nullable=False),
        sa.Column("events", BIG, nullable=False),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_usage_hourly_org_id")),
        sa.PrimaryKeyConstraint(
            "org_id",
            "hour",
            "kind",
            "base_model",
            "project_id",
            "key_id",
            "user_id",
            "session_id",
            "run_id",
            "price_version",
            "rate_uusd",
            name=op.f("pk_usage_hourly"),
        ),
    )
    op.create_index("ix_usage_hourly_run", "usage_hourly", ["org_id", "run_id"])
    op.create_table(
        "wallets",
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("mode", sa.String(16), nullable=False),
        sa.Column("balance_nusd", BIG, server_default="0", nullable=False),
        sa.Column("held_nusd", BIG, server_default="0", nullable=False),
        sa.Column("overdraft_nusd", BIG, server_default="0", nullable=False),
        sa.CheckConstraint("mode IN ('prepaid', 'postpaid', 'unlimited')", name=op.f("ck_wallets_mode")),
        sa.CheckConstraint("held_nusd >= 0", name=op.f("ck_wallets_held")),
        sa.CheckConstraint("overdraft_nusd >= 0", name=op.f("ck_wallets_overdraft")),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_wallets_org_id")),
        sa.PrimaryKeyConstraint("org_id", name=op.f("pk_wallets")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=True),
        sa.Column("user_id", sa.String(64), nullable=True),
        sa.Column("name", sa.String(128), server_default="", nullable=False),
        sa.Column("scopes", sa.JSON(), server_default='["admin"]', nullable=False),
        sa.Column("prefix", sa.String(16), nullable=False),
        sa.Column("last4", sa.String(4), server_default="", nullable=False),
        sa.Column("secret_sha256", sa.String(64), nullable=False),
        sa.Column("previous_sha256", sa.String(64), nullable=True),
        sa.Column("previous_expires_at", AT, nullable=True),
        sa.Column("given_to", sa.String(128), nullable=True),
        sa.Column("created_at", AT, nullable=False),
        sa.Column("expires_at", AT, nullable=True),
        sa.Column("last_used_at", AT, nullable=True),
        sa.Column("revoked_at", AT, nullable=True),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.Column("tokens_per_minute", BIG, nullable=True),
        sa.Column("max_in_flight", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(
            ["org_id", "project_id"], ["projects.org_id", "projects.id"], name="fk_api_keys_project"
        ),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_api_keys_org_id")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_api_keys_user_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("previous_sha256", name=op.f("uq_api_keys_previous_sha256")),
        sa.UniqueConstraint("secret_sha256", name=op.f("uq_api_keys_secret_sha256")),
    )
    op.create_index("ix_api_keys_org_id", "api_keys", ["org_id"])
    op.create_table(
        "budget_alerts",
        sa.Column("budget_id", sa.String(64), nullable=False),
        sa.Column("start", AT, nullable=False),
        sa.Column("pct", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("spent_nusd", BIG, nullable=False),
        sa.Column("limit_nusd", BIG, nullable=False),
        sa.Column("at", AT, nullable=False),
        sa.ForeignKeyConstraint(["budget_id"], ["budgets.id"], name=op.f("fk_budget_alerts_budget_id")),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_budget_alerts_org_id")),
        sa.PrimaryKeyConstraint("budget_id", "start", "pct", name=op.f("pk_budget_alerts")),
    )
    op.create_index("ix_budget_alerts_org_id", "budget_alerts", ["org_id"])
    op.create_table(
        "budget_periods",
        sa.Column("budget_id", sa.String(64), nullable=False),
        sa.Column("start", AT, nullable=False),
        sa.Column("spent_nusd", BIG, nullable=False),
        sa.Column("held_nusd", BIG, nullable=False),
        sa.CheckConstraint("spent_nusd >= 0 AND held_nusd >= 0", name=op.f("ck_budget_periods_counts")),
        sa.ForeignKeyConstraint(["budget_id"], ["budgets.id"], name=op.f("fk_budget_periods_budget_id")),
        sa.PrimaryKeyConstraint("budget_id", "start", name=op.f("pk_budget_periods")),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("model_seq_id", sa.Integer(), nullable=False),
        sa.Column("base_model", sa.String(256), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("alpha", sa.Double(), nullable=False),
        sa.Column("seed", BIG, nullable=False),
        sa.Column("train_attn", sa.Boolean(), nullable=False),
        sa.Column("train_mlp", sa.Boolean(), nullable=False),
        sa.Column("train_unembed", sa.Boolean(), nullable=False),
        sa.Column("optimizer", sa.String(16), server_default="adamw", nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("snapshot_seq", BIG, nullable=True),
        sa.Column("snapshot_ref", sa.String(256), nullable=True),
        sa.Column("snapshot_part", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("broken", sa.String(4096), nullable=True),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("created_at", AT, nullable=False),
        sa.Column("last_request_at", AT, nullable=False),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_runs_org_id")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_runs_session_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
    )
    op.create_index("ix_runs_org_id", "runs", ["org_id"])
    op.create_index("ix_runs_org_state", "runs", ["org_id", "state"])
    op.create_index("ix_runs_session_id", "runs", ["session_id"])
    op.create_table(
        "samplers",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("sampling_session_seq_id", sa.Integer(), nullable=False),
        sa.Column("base_model", sa.String(256), nullable=False),
        sa.Column("model_path", sa.String(512), nullable=True),
        sa.Column("adapter_ref", sa.String(256), nullable=False),
        sa.Column("run_id", sa.String(128), nullable=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("clients", sa.Integer(), server_default="0", nullable=False),
        sa.Column("created_at", AT, nullable=False),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_samplers_org_id")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_samplers_session_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_samplers")),
    )
    op.create_index("ix_samplers_org_id", "samplers", ["org_id"])
    op.create_index("ix_samplers_session_id", "samplers", ["session_id"])
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("run_id", sa.String(128), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("name", sa.String(256), nullable=False),
        sa.Column("ref", sa.String(256), nullable=False),
        sa.Column("size_bytes", BIG, nullable=False),
        sa.Column("public", sa.Boolean(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("created_at", AT, nullable=False),
        sa.Column("expires_at", AT, nullable=True),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_checkpoints_org_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_checkpoints_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint("run_id", "kind", "name", name=op.f("uq_checkpoints_run_id")),
    )
    op.create_index("ix_checkpoints_org_id", "checkpoints", ["org_id"])
    op.create_index("ix_checkpoints_run_id", "checkpoints", ["run_id"])
    op.create_table(
        "run_curves",
        sa.Column("run_id", sa.String(128), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("points", BIG, nullable=False),
        sa.Column("last_step", BIG, nullable=False),
        sa.Column("last_value", sa.Double(), nullable=False),
        sa.Column("last_at", AT, nullable=False),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_run_curves_org_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_curves_run_id")),
        sa.PrimaryKeyConstraint("run_id", "name", name=op.f("pk_run_curves")),
    )
    op.create_table(
        "run_metrics",
        sa.Column("run_id", sa.String(128), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("step", BIG, autoincrement=False, nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("at", AT, nullable=False),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_run_metrics_org_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_metrics_run_id")),
        sa.PrimaryKeyConstraint("run_id", "name", "step", name=op.f("pk_run_metrics")),
    )
    op.create_table(
        "session_turns",
        sa.Column("id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=True),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("ref", sa.String(256), nullable=False),
        sa.Column("size_bytes", BIG, nullable=False),
        sa.Column("created_at", AT, nullable=False),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_session_turns_org_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_session_turns")),
        sa.UniqueConstraint("request_id", name=op.f("uq_session_turns_request_id")),
    )
    op.create_index("ix_session_turns_created_at", "session_turns", ["created_at"])
    op.create_index("ix_session_turns_name", "session_turns", ["org_id", "name", "id"])
    for table in APPEND_ONLY:
        protect(table)


def downgrade() -> None:
    for table in APPEND_ONLY:
        unprotect(table)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP POLICY IF EXISTS tenant ON users")  # it reads memberships (store.database.row_security)
        op.execute("DROP POLICY IF EXISTS tenant ON budget_periods")  # and this one budgets
    for table in reversed(TABLES):
        op.drop_table(table)
