"""What was used and what it cost. Money is integer nano-dollars."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, Index, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base, BigInt


class UsageEvent(Base):
    """One metered quantity of one operation, written in the commit of its result and never changed.
    `kind` is train | prefill | cached_prefill | sample."""

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
    tokens: Mapped[int] = mapped_column(BigInteger)
    price_version: Mapped[str] = mapped_column(String(64))
    rate_uusd_per_mtok: Mapped[int] = mapped_column(BigInteger)
    amount_nusd: Mapped[int] = mapped_column(BigInteger)
    recorded_at: Mapped[datetime]
