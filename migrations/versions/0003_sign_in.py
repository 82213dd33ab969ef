"""Sign-in by an OpenID provider, and invitations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

AT = sa.DateTime(timezone=True)
ADDED = (
    ("organisations", sa.Column("sso_required_at", AT, nullable=True)),
    ("memberships", sa.Column("issuer", sa.String(255), nullable=True)),
    ("browser_sessions", sa.Column("issuer", sa.String(255), nullable=True)),
    ("browser_sessions", sa.Column("proved_at", AT, nullable=True)),
)


def upgrade() -> None:
    for table, column in ADDED:
        op.add_column(table, column)
    op.create_table(
        "identities",
        sa.Column("issuer", sa.String(255), nullable=False),
        sa.Column("subject", sa.String(255), nullable=False),
        sa.Column("user_id", sa.String(64), nullable=False),
        sa.Column("email", sa.String(254), nullable=False),
        sa.Column("created_at", AT, nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_identities_user_id")),
        sa.PrimaryKeyConstraint("issuer", "subject", name=op.f("pk_identities")),
        sa.UniqueConstraint("issuer", "user_id", name=op.f("uq_identities_issuer")),
    )
    op.create_index("ix_identities_user_id", "identities", ["user_id"])
    op.create_table(
        "invitations",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("org_id", sa.String(64), nullable=False),
        sa.Column("token_sha256", sa.String(64), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("email", sa.String(254), nullable=True),
        sa.Column("made_by", sa.String(128), nullable=False),
        sa.Column("made_with", sa.BigInteger(), nullable=True),
        sa.Column("created_at", AT, nullable=False),
        sa.Column("expires_at", AT, nullable=False),
        sa.Column("used_at", AT, nullable=True),
        sa.Column("used_by", sa.String(64), nullable=True),
        sa.Column("revoked_at", AT, nullable=True),
        sa.CheckConstraint(
            "role IN ('owner', 'admin', 'billing-admin', 'member', 'viewer')", name=op.f("ck_invitations_role")
        ),
        sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f("fk_invitations_org_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_invitations")),
        sa.UniqueConstraint("token_sha256", name=op.f("uq_invitations_token_sha256")),
    )
    op.create_index("ix_invitations_org_id", "invitations", ["org_id"])


def downgrade() -> None:
    op.drop_table("invitations")
    op.drop_table("identities")
    for table, column in reversed(ADDED):
        op.drop_column(table, column.name)
