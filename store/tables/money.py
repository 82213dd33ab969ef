"""What was used, what it cost, and who can pay for it. Money is integer nano-dollars (`*_nusd`).

A hold is not a table: it is `operations.hold_nusd` of an operation that is queued, so it cannot outlive its operation.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, String, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base, BigInt


class UsageEvent(Base):
    """One metered quantity of one operation, written in the commit of its result and never changed.
    `kind` is train | prefill | cached_prefill | sample, counted in tokens, or storage, counted in byte-hours.
    `rate_uusd` is the price in micro-USD of `per_units`, that of `accepted_at`; `settlement` names the ledger entry
    that it is part of. Both are None for events of before there was a ledger."""

    __tablename__ = "usage_events"
    __table_args__ = (
        UniqueConstraint("operation_id", "kind"),
        Index("ix_usage_events_org_at", "org_id", "recorded_at"),
    )
    id: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"))
    session_id: Mapped[str] = mapped_column(String(64), index=True)
    run_id: Mapped[str | None] = mapped_column(String(128), index=True)
    operation_id: Mapped[str] = mapped_column(String(64))
    kind: Mapped[str] = mapped_column(String(16))
    base_model: Mapped[str] = mapped_column(String(256))
    quantity: Mapped[int] = mapped_column(BigInteger)
    price_version: Mapped[str] = mapped_column(String(64))
    rate_uusd: Mapped[int] = mapped_column(BigInteger)
    amount_nusd: Mapped[int] = mapped_column(BigInteger)
    recorded_at: Mapped[datetime]
    per_units: Mapped[int] = mapped_column(BigInteger, server_default="1000000")
    project_id: Mapped[str | None] = mapped_column(String(64))
    key_id: Mapped[int | None] = mapped_column(BigInteger)
    user_id: Mapped[str | None] = mapped_column(String(64))
    accepted_at: Mapped[datetime | None]
    settlement: Mapped[str | None] = mapped_column(String(64))


class UsageHour(Base):
    """Sums of usage events by the hour in which they were recorded, updated in the commit of the events. Fields that
    are None in an event are "" here, or 0 for the key, since primary keys cannot contain NULL."""

    __tablename__ = "usage_hourly"
    __table_args__ = (Index("ix_usage_hourly_run", "org_id", "run_id"),)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"), primary_key=True)
    hour: Mapped[datetime] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    base_model: Mapped[str] = mapped_column(String(256), primary_key=True)
    project_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    key_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    user_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    session_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    run_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    price_version: Mapped[str] = mapped_column(String(64), primary_key=True)
    rate_uusd: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    per_units: Mapped[int] = mapped_column(BigInteger)
    quantity: Mapped[int] = mapped_column(BigInteger)
    amount_nusd: Mapped[int] = mapped_column(BigInteger)
    events: Mapped[int] = mapped_column(BigInteger)


class Wallet(Base):
    """What an organisation can spend: `balance_nusd` is the sum of its ledger, `held_nusd` that of its open holds.
    prepaid and postpaid may spend balance + overdraft - held (postpaid: the overdraft is the credit limit); for
    unlimited the sums are only kept."""

    __tablename__ = "wallets"
    __table_args__ = (
        CheckConstraint("mode IN ('prepaid', 'postpaid', 'unlimited')", name="mode"),
        CheckConstraint("held_nusd >= 0", name="held"),
        CheckConstraint("overdraft_nusd >= 0", name="overdraft"),
    )
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"), primary_key=True)
    mode: Mapped[str] = mapped_column(String(16))
    balance_nusd: Mapped[int] = mapped_column(BigInteger, server_default="0")
    held_nusd: Mapped[int] = mapped_column(BigInteger, server_default="0")
    overdraft_nusd: Mapped[int] = mapped_column(BigInteger, server_default="0")


class WalletDefault(Base):
    """A single row: the wallet of a new organisation, by the settings of the server that started last."""

    __tablename__ = "wallet_defaults"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    mode: Mapped[str] = mapped_column(String(16))
    overdraft_nusd: Mapped[int] = mapped_column(BigInteger)


class LedgerEntry(Base):
    """A movement of a wallet's balance, never changed. `type` is topup | grant | usage | refund | adjustment | expiry |
    invoice | chargeback; (org, type, ref_type, ref_id) is posted once. A usage entry is the sum of the events with its
    `ref_id` as their `settlement`."""

    __tablename__ = "ledger_entries"
    __table_args__ = (
        UniqueConstraint("org_id", "type", "ref_type", "ref_id"),
        CheckConstraint("amount_nusd <> 0", name="amount"),
        CheckConstraint(
            "type IN ('topup', 'grant', 'usage', 'refund', 'adjustment', 'expiry', 'invoice', 'chargeback')",
            name="type",
        ),
        Index("ix_ledger_entries_org_at", "org_id", "at"),
        # For movements other than usage, of which there are far more.
        Index(
            "ix_ledger_entries_not_usage",
            *("org_id", "at", "id"),
            sqlite_where=text("type <> 'usage'"),
            postgresql_where=text("type <> 'usage'"),
        ),
    )
    id: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"))
    type: Mapped[str] = mapped_column(String(16))
    amount_nusd: Mapped[int] = mapped_column(BigInteger)
    ref_type: Mapped[str] = mapped_column(String(32))
    ref_id: Mapped[str] = mapped_column(String(128))
    memo: Mapped[str] = mapped_column(String(256))
    at: Mapped[datetime]


class CreditGrant(Base):
    """Credit that is used up before other money, promotions and what expires soonest first. `kind` is promo | paid."""

    __tablename__ = "credit_grants"
    __table_args__ = (
        CheckConstraint("kind IN ('promo', 'paid')", name="kind"),
        CheckConstraint("remaining_nusd >= 0 AND remaining_nusd <= amount_nusd", name="remaining"),
        Index("ix_credit_grants_org_id", "org_id"),
    )
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"))
    kind: Mapped[str] = mapped_column(String(16))
    amount_nusd: Mapped[int] = mapped_column(BigInteger)
    remaining_nusd: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]


class Budget(Base):
    """A limit on what an organisation, a project or a key spends in a UTC month or in total. `scope_id` is the id of
    the organisation or project, or the number of the key. Over a `hard` one nothing is accepted; any records when
    spending reaches each of `alert_pcts` percent of it."""

    __tablename__ = "budgets"
    __table_args__ = (
        UniqueConstraint("org_id", "scope", "scope_id", "period"),
        CheckConstraint("scope IN ('org', 'project', 'key')", name="scope"),
        CheckConstraint("period IN ('month', 'total')", name="period"),
        CheckConstraint("limit_nusd >= 0", name="limit"),
    )
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"))
    scope: Mapped[str] = mapped_column(String(16))
    scope_id: Mapped[str] = mapped_column(String(64))
    period: Mapped[str] = mapped_column(String(16))
    limit_nusd: Mapped[int] = mapped_column(BigInteger)
    hard: Mapped[bool]
    alert_pcts: Mapped[list[int]]
    created_at: Mapped[datetime]


class BudgetPeriod(Base):
    """How much of a budget was spent, and is held, by work accepted in the month that begins at `start` (always
    1970-01-01 for a total)."""

    __tablename__ = "budget_periods"
    __table_args__ = (CheckConstraint("spent_nusd >= 0 AND held_nusd >= 0", name="counts"),)
    budget_id: Mapped[str] = mapped_column(ForeignKey("budgets.id"), primary_key=True)
    start: Mapped[datetime] = mapped_column(primary_key=True)
    spent_nusd: Mapped[int] = mapped_column(BigInteger)
    held_nusd: Mapped[int] = mapped_column(BigInteger)


class BudgetAlert(Base):
    """Spending reached `pct` percent of a budget in a period; recorded once."""

    __tablename__ = "budget_alerts"
    budget_id: Mapped[str] = mapped_column(ForeignKey("budgets.id"), primary_key=True)
    start: Mapped[datetime] = mapped_column(primary_key=True)
    pct: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"), index=True)
    spent_nusd: Mapped[int] = mapped_column(BigInteger)
    limit_nusd: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[datetime]


class StorageSpan(Base):
    """Bytes that a checkpoint keeps, from its commit to its end, metered up to `metered_until`. It outlives the
    checkpoint's row, so that what was stored is metered to the end, and is deleted after that. Of weights that never
    had a name, `checkpoint_id` is the last part of their `adapter_ref`; of those that have lost it, all of that."""

    __tablename__ = "storage_spans"
    __table_args__ = (Index("ix_storage_spans_org_ended", "org_id", "ended_at"),)
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"))
    checkpoint_id: Mapped[str] = mapped_column(String(64), index=True)
    run_id: Mapped[str] = mapped_column(String(128))
    session_id: Mapped[str] = mapped_column(String(64))
    base_model: Mapped[str] = mapped_column(String(256))
    project_id: Mapped[str | None] = mapped_column(String(64))
    key_id: Mapped[int | None] = mapped_column(BigInteger)
    user_id: Mapped[str | None] = mapped_column(String(64))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    metered_until: Mapped[datetime] = mapped_column(index=True)
