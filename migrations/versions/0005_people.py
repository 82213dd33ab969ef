"""Users, memberships, projects; what a key may do; the chain of the audit log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from migrations.append_only import protect, unprotect
from store.audit import chain_hash
from store.tables import Utc

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_in_flight")


def _limits() -> list[sa.Column[int]]:
    return [
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("max_in_flight", sa.Integer(), nullable=True),
    ]


def upgrade() -> None:
    with op.batch_alter_table("organisations", schema=None) as batch_op:
        batch_op.add_column(sa.Column("status", sa.String(length=16), nullable=False, server_default="active"))
        batch_op.add_column(sa.Column("weight", sa.Integer(), nullable=False, server_default="1"))
        batch_op.add_column(sa.Column("stripe_customer_id", sa.String(length=64), nullable=True))
        for column in _limits():
            batch_op.add_column(column)
        batch_op.create_unique_constraint(batch_op.f("uq_organisations_stripe_customer_id"), ["stripe_customer_id"])
        batch_op.create_check_constraint(
            batch_op.f("ck_organisations_status"), "status IN ('active', 'past_due', 'suspended', 'closed')"
        )
        batch_op.create_check_constraint(batch_op.f("ck_organisations_weight"), "weight >= 1")
    op.create_table(
        "users",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("email", sa.String(length=254), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("email", name=op.f("uq_users_email")),
    )
    op.create_table(
        "memberships",
        sa.Column("org_id", sa.String(length=64), nullable=False),
        sa.Column("user_id", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "role IN ('owner', 'admin', 'billing-admin', 'member', 'viewer')", name=op.f("ck_memberships_role")
        ),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_memberships_org_id")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_memberships_user_id")),
        sa.PrimaryKeyConstraint("org_id", "user_id", name=op.f("pk_memberships")),
    )
    op.create_index(op.f("ix_memberships_user_id"), "memberships", ["user_id"], unique=False)
    op.create_table(
        "projects",
        sa.Column("org_id", sa.String(length=64), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("archived_at", sa.DateTime(timezone=True), nullable=True),
        *_limits(),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_projects_org_id")),
        sa.PrimaryKeyConstraint("org_id", "id", name=op.f("pk_projects")),
        sa.UniqueConstraint("org_id", "name", name=op.f("uq_projects_org_id")),
    )
    with op.batch_alter_table("api_keys", schema=None) as batch_op:
        batch_op.add_column(sa.Column("project_id", sa.String(length=64), nullable=True))
        batch_op.add_column(sa.Column("user_id", sa.String(length=64), nullable=True))
        batch_op.add_column(sa.Column("name", sa.String(length=128), nullable=False, server_default=""))
        batch_op.add_column(sa.Column("scopes", sa.JSON(), nullable=False, server_default='["admin"]'))
        batch_op.add_column(sa.Column("last4", sa.String(length=4), nullable=False, server_default=""))
        batch_op.add_column(sa.Column("previous_sha256", sa.String(length=64), nullable=True))
        for name in ("previous_expires_at", "expires_at", "last_used_at"):
            batch_op.add_column(sa.Column(name, sa.DateTime(timezone=True), nullable=True))
        for column in _limits():
            batch_op.add_column(column)
        batch_op.create_unique_constraint(batch_op.f("uq_api_keys_previous_sha256"), ["previous_sha256"])
        batch_op.create_foreign_key("fk_api_keys_project", "projects", ["org_id", "project_id"], ["org_id", "id"])
        batch_op.create_foreign_key(batch_op.f("fk_api_keys_user_id"), "users", ["user_id"], ["id"])
    op.add_column("sessions", sa.Column("user_id", sa.String(length=64), nullable=True))
    op.add_column("operations", sa.Column("key_id", sa.BigInteger(), nullable=True))
    op.add_column("operations", sa.Column("user_id", sa.String(length=64), nullable=True))
    op.add_column("operations", sa.Column("project_id", sa.String(length=64), nullable=True))
    # Column by column: copying the table would lose its triggers.
    op.add_column("audit_log", sa.Column("actor", sa.String(length=128), nullable=False, server_default="server"))
    op.add_column("audit_log", sa.Column("ip", sa.String(length=64), nullable=True))
    op.add_column("audit_log", sa.Column("request_id", sa.String(length=64), nullable=True))
    op.add_column("audit_log", sa.Column("prev_hash", sa.String(length=64), nullable=False, server_default=""))
    op.add_column("audit_log", sa.Column("hash", sa.String(length=64), nullable=False, server_default=""))
    _chain_old_entries()
    op.create_index("ix_audit_log_org_id", "audit_log", ["org_id", "id"], unique=False)
    op.create_index("uq_audit_log_chain", "audit_log", ["org_id", "prev_hash"], unique=True)


def _chain_old_entries() -> None:
    names = ("id", "org_id", "actor", "key_id", "ip", "request_id", "event", "target", "prev_hash", "hash")
    typed = (sa.column("at", Utc()), sa.column("detail", sa.JSON()))
    log = sa.table("audit_log", *(sa.column(name) for name in names), *typed)
    connection = op.get_bind()
    unprotect("audit_log")
    last: dict[str, str] = {}
    for row in connection.execute(sa.select(log).order_by(log.c.id)).mappings().all():
        values = {**row, "prev_hash": last.get(row["org_id"], "")}
        values["actor"] = f"key:{row['key_id']}" if row["key_id"] is not None else "server"
        last[row["org_id"]] = values["hash"] = chain_hash(values)
        changed = {name: values[name] for name in ("actor", "prev_hash", "hash")}
        connection.execute(sa.update(log).where(log.c.id == row["id"]).values(changed))
    protect("audit_log")


def downgrade() -> None:
    op.drop_index("ix_audit_log_org_id", table_name="audit_log")
    op.drop_index("uq_audit_log_chain", table_name="audit_log")
    for name in ("hash", "prev_hash", "request_id", "ip", "actor"):
        op.drop_column("audit_log", name)
    for name in ("project_id", "user_id", "key_id"):
        op.drop_column("operations", name)
    op.drop_column("sessions", "user_id")
    with op.batch_alter_table("api_keys", schema=None) as batch_op:
        batch_op.drop_constraint(batch_op.f("fk_api_keys_user_id"), type_="foreignkey")
        batch_op.drop_constraint("fk_api_keys_project", type_="foreignkey")
        batch_op.drop_constraint(batch_op.f("uq_api_keys_previous_sha256"), type_="unique")
        for name in (*_LIMITS, "last_used_at", "expires_at", "previous_expires_at", "previous_sha256", "last4"):
            batch_op.drop_column(name)
        for name in ("scopes", "name", "user_id", "project_id"):
            batch_op.drop_column(name)
    op.drop_table("projects")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP POLICY IF EXISTS tenant ON users")  # it reads memberships (store.row_security)
    op.drop_index(op.f("ix_memberships_user_id"), table_name="memberships")
    op.drop_table("memberships")
    op.drop_table("users")
    with op.batch_alter_table("organisations", schema=None) as batch_op:
        batch_op.drop_constraint(batch_op.f("ck_organisations_weight"), type_="check")
        batch_op.drop_constraint(batch_op.f("ck_organisations_status"), type_="check")
        batch_op.drop_constraint(batch_op.f("uq_organisations_stripe_customer_id"), type_="unique")
        for name in (*_LIMITS, "stripe_customer_id", "weight", "status"):
            batch_op.drop_column(name)
