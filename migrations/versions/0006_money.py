"""Wallets, budgets, holds, the ledger; storage beside tokens in usage events."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from alembic import op

from migrations.append_only import protect, unprotect

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_BIG = sa.BigInteger()
_BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_AT = sa.DateTime(timezone=True)
_TYPES = ("topup", "grant", "usage", "refund", "adjustment", "expiry", "invoice", "chargeback")


def _text(name: str, length: int = 64, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.String(length=length), nullable=nullable)


def _big(name: str, default: str | None = None, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, _BIG, nullable=nullable, server_default=default)


def _at(name: str, *, nullable: bool = False) -> sa.Column[datetime]:
    return sa.Column(name, _AT, nullable=nullable)


def _org(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["org_id"], ["organisations.id"], name=op.f(f"fk_{table}_org_id"))


def _check(table: str, name: str, condition: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(condition, name=op.f(f"ck_{table}_{name}"))


def _primary(table: str, *columns: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint(*columns, name=op.f(f"pk_{table}"))


def upgrade() -> None:
    # In place, column by column: copying the table would lose its triggers.
    op.execute("ALTER TABLE usage_events RENAME COLUMN tokens TO quantity")
    op.execute("ALTER TABLE usage_events RENAME COLUMN rate_uusd_per_mtok TO rate_uusd")
    op.add_column("usage_events", _big("per_units", "1000000"))
    op.add_column("usage_events", _text("project_id", nullable=True))
    op.add_column("usage_events", _big("key_id", nullable=True))
    op.add_column("usage_events", _text("user_id", nullable=True))
    op.add_column("usage_events", _at("accepted_at", nullable=True))
    op.add_column("usage_events", _text("settlement", nullable=True))
    op.add_column("operations", _big("hold_nusd", "0"))
    _make_usage_hourly()
    _make_wallets()
    _make_budgets()
    _make_storage_spans()
    _take_over()
    protect("ledger_entries")


def _make_usage_hourly() -> None:
    key = ("org_id", "hour", "kind", "base_model", "project_id", "key_id", "user_id", "session_id", "run_id")
    op.create_table(
        "usage_hourly",
        _text("org_id"),
        _at("hour"),
        _text("kind", 16),
        _text("base_model", 256),
        _text("project_id"),
        sa.Column("key_id", _BIG, autoincrement=False, nullable=False),
        _text("user_id"),
        _text("session_id"),
        _text("run_id", 128),
        _text("price_version"),
        sa.Column("rate_uusd", _BIG, autoincrement=False, nullable=False),
        _big("per_units"),
        _big("quantity"),
        _big("amount_nusd"),
        _big("events"),
        _org("usage_hourly"),
        _primary("usage_hourly", *key, "price_version", "rate_uusd"),
    )
    op.create_index("ix_usage_hourly_run", "usage_hourly", ["org_id", "run_id"])


def _make_wallets() -> None:
    op.create_table(
        "wallets",
        _text("org_id"),
        _text("mode", 16),
        _big("balance_nusd", "0"),
        _big("held_nusd", "0"),
        _big("overdraft_nusd", "0"),
        _org("wallets"),
        _check("wallets", "mode", "mode IN ('prepaid', 'postpaid', 'unlimited')"),
        _check("wallets", "held", "held_nusd >= 0"),
        _check("wallets", "overdraft", "overdraft_nusd >= 0"),
        _primary("wallets", "org_id"),
    )
    op.create_table(
        "wallet_defaults",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        _text("mode", 16),
        _big("overdraft_nusd"),
        _primary("wallet_defaults", "id"),
    )
    op.create_table(
        "ledger_entries",
        sa.Column("id", _BIG_ID, autoincrement=True, nullable=False),
        _text("org_id"),
        _text("type", 16),
        _big("amount_nusd"),
        _text("ref_type", 32),
        _text("ref_id", 128),
        _text("memo", 256),
        _at("at"),
        _org("ledger_entries"),
        _check("ledger_entries", "amount", "amount_nusd <> 0"),
        _check("ledger_entries", "type", f"type IN {_TYPES}"),
        _primary("ledger_entries", "id"),
        sa.UniqueConstraint("org_id", "type", "ref_type", "ref_id", name=op.f("uq_ledger_entries_org_id")),
    )
    op.create_index("ix_ledger_entries_org_at", "ledger_entries", ["org_id", "at"])
    op.create_table(
        "credit_grants",
        _text("id"),
        _text("org_id"),
        _text("kind", 16),
        _big("amount_nusd"),
        _big("remaining_nusd"),
        _at("created_at"),
        _at("expires_at", nullable=True),
        _org("credit_grants"),
        _check("credit_grants", "kind", "kind IN ('promo', 'paid')"),
        _check("credit_grants", "remaining", "remaining_nusd >= 0 AND remaining_nusd <= amount_nusd"),
        _primary("credit_grants", "id"),
    )
    op.create_index("ix_credit_grants_org_id", "credit_grants", ["org_id"])


def _make_budgets() -> None:
    op.create_table(
        "budgets",
        _text("id"),
        _text("org_id"),
        _text("scope", 16),
        _text("scope_id"),
        _text("period", 16),
        _big("limit_nusd"),
        sa.Column("hard", sa.Boolean(), nullable=False),
        sa.Column("alert_pcts", sa.JSON(), nullable=False),
        _at("created_at"),
        _org("budgets"),
        _check("budgets", "scope", "scope IN ('org', 'project', 'key')"),
        _check("budgets", "period", "period IN ('month', 'total')"),
        _check("budgets", "limit", "limit_nusd >= 0"),
        _primary("budgets", "id"),
        sa.UniqueConstraint("org_id", "scope", "scope_id", "period", name=op.f("uq_budgets_org_id")),
    )
    op.create_table(
        "budget_periods",
        _text("budget_id"),
        _at("start"),
        _big("spent_nusd"),
        _big("held_nusd"),
        _check("budget_periods", "counts", "spent_nusd >= 0 AND held_nusd >= 0"),
        sa.ForeignKeyConstraint(["budget_id"], ["budgets.id"], name=op.f("fk_budget_periods_budget_id")),
        _primary("budget_periods", "budget_id", "start"),
    )
    op.create_table(
        "budget_alerts",
        _text("budget_id"),
        _at("start"),
        sa.Column("pct", sa.Integer(), autoincrement=False, nullable=False),
        _text("org_id"),
        _big("spent_nusd"),
        _big("limit_nusd"),
        _at("at"),
        _org("budget_alerts"),
        sa.ForeignKeyConstraint(["budget_id"], ["budgets.id"], name=op.f("fk_budget_alerts_budget_id")),
        _primary("budget_alerts", "budget_id", "start", "pct"),
    )
    op.create_index(op.f("ix_budget_alerts_org_id"), "budget_alerts", ["org_id"])


def _make_storage_spans() -> None:
    op.create_table(
        "storage_spans",
        _text("id", 32),
        _text("org_id"),
        _text("checkpoint_id"),
        _text("run_id", 128),
        _text("session_id"),
        _text("base_model", 256),
        _text("project_id", nullable=True),
        _big("key_id", nullable=True),
        _text("user_id", nullable=True),
        _big("size_bytes"),
        _at("started_at"),
        _at("ended_at", nullable=True),
        _at("metered_until"),
        _org("storage_spans"),
        _primary("storage_spans", "id"),
    )
    op.create_index(op.f("ix_storage_spans_checkpoint_id"), "storage_spans", ["checkpoint_id"])
    op.create_index(op.f("ix_storage_spans_metered_until"), "storage_spans", ["metered_until"])


def _take_over() -> None:
    """What was metered before there was a ledger: its hours, one entry for each organisation, and unlimited wallets."""
    connection, meta = op.get_bind(), sa.MetaData()
    names = ("usage_events", "usage_hourly", "ledger_entries", "wallets", "organisations")
    events, hourly, ledger, wallets, orgs = (sa.Table(name, meta, autoload_with=connection) for name in names)
    hours: defaultdict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0, 0])
    spent: defaultdict[str, int] = defaultdict(int)
    for row in connection.execute(sa.select(events)):
        hour = _utc(row.recorded_at).replace(minute=0, second=0, microsecond=0)
        key = (row.org_id, hour, row.kind, row.base_model, row.session_id, row.run_id or "")
        total = hours[*key, row.price_version, row.rate_uusd]
        for place, value in enumerate((row.quantity, row.amount_nusd, 1)):
            total[place] += value
        spent[row.org_id] += row.amount_nusd
    columns = ("org_id", "hour", "kind", "base_model", "session_id", "run_id", "price_version", "rate_uusd")
    rest = {"project_id": "", "key_id": 0, "user_id": "", "per_units": 1_000_000}
    for key, (quantity, amount, count) in hours.items():
        values = dict(zip(columns, key, strict=True)) | rest
        values |= {"quantity": quantity, "amount_nusd": amount, "events": count}
        connection.execute(hourly.insert().values(values))
    entry = {"type": "usage", "ref_type": "migration", "ref_id": revision, "memo": "before the ledger"}
    for (org_id,) in connection.execute(sa.select(orgs.c.id)).all():
        connection.execute(wallets.insert().values(org_id=org_id, mode="unlimited", balance_nusd=-spent[org_id]))
        if spent[org_id]:
            values = entry | {"org_id": org_id, "amount_nusd": -spent[org_id], "at": datetime.now(UTC)}
            connection.execute(ledger.insert().values(values))


def _utc(at: datetime) -> datetime:
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)


def downgrade() -> None:
    unprotect("ledger_entries")
    for table in (
        "storage_spans",
        "budget_alerts",
        "budget_periods",
        "budgets",
        "credit_grants",
        "ledger_entries",
        "wallet_defaults",
        "wallets",
        "usage_hourly",
    ):
        op.drop_table(table)
    op.drop_column("operations", "hold_nusd")
    for name in ("settlement", "accepted_at", "user_id", "key_id", "project_id", "per_units"):
        op.drop_column("usage_events", name)
    op.execute("ALTER TABLE usage_events RENAME COLUMN rate_uusd TO rate_uusd_per_mtok")
    op.execute("ALTER TABLE usage_events RENAME COLUMN quantity TO tokens")
