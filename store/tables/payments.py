"""What is sent to Stripe and what comes from it, invoices, alerts; and when each job last ran."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import JSON, BigInteger, ColumnElement, ForeignKey, Index, String, UniqueConstraint, or_, text
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base, BigInt

_OPEN = text("state <> 'sent'")


class StripeOutbox(Base):
    """One meter event for Stripe, written in the transaction that moves its cursor. `identifier` is what Stripe knows
    it by; `value_uusd` never changes. `state` is pending | reconcile (may not be resent before Stripe's own sum says
    whether it arrived) | blocked (a person must look) | sent."""

    __tablename__ = "stripe_outbox"
    __table_args__ = (
        Index("ix_stripe_outbox_open", "org_id", "meter", "id", sqlite_where=_OPEN, postgresql_where=_OPEN),
        Index("ix_stripe_outbox_period", "org_id", "meter", "period_start"),
    )
    id: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"))
    meter: Mapped[str] = mapped_column(String(16))
    period_start: Mapped[datetime]
    identifier: Mapped[str] = mapped_column(String(100), unique=True)
    customer_id: Mapped[str] = mapped_column(String(255))
    value_uusd: Mapped[int] = mapped_column(BigInteger)
    occurred_at: Mapped[datetime]
    state: Mapped[str] = mapped_column(String(16))
    attempts: Mapped[int] = mapped_column(server_default="0")
    next_attempt_at: Mapped[datetime]
    first_sent_at: Mapped[datetime | None]
    last_sent_at: Mapped[datetime | None]
    sent_at: Mapped[datetime | None]
    last_error: Mapped[str | None] = mapped_column(String(512))


class StripeMeterCursor(Base):
    """How much of an organisation's usage in a period has been put into the outbox, and the number of the last row."""

    __tablename__ = "stripe_meter_cursors"
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"), primary_key=True)
    meter: Mapped[str] = mapped_column(String(16), primary_key=True)
    period_start: Mapped[datetime] = mapped_column(primary_key=True)
    sent_uusd: Mapped[int] = mapped_column(BigInteger)
    seq: Mapped[int]


_UNRESOLVED = text("resolved_at IS NULL")
_UNPROCESSED = text("processed_at IS NULL")


class StripeWebhookEvent(Base):
    """The inbox: a verified event, written before Stripe is told that it arrived, and processed later. A repeated
    delivery meets the primary key."""

    __tablename__ = "stripe_webhook_events"
    __table_args__ = (
        Index(
            "ix_stripe_webhook_events_due", "next_attempt_at", sqlite_where=_UNPROCESSED, postgresql_where=_UNPROCESSED
        ),
    )
    event_id: Mapped[str] = mapped_column(String(255), primary_key=True)
    type: Mapped[str] = mapped_column(String(128))
    payload: Mapped[dict[str, Any]]
    received_at: Mapped[datetime]
    processed_at: Mapped[datetime | None]
    attempts: Mapped[int] = mapped_column(server_default="0")
    next_attempt_at: Mapped[datetime]
    outcome: Mapped[str | None] = mapped_column(String(512))  # its effect, or the last error


class Invoice(Base):
    """What a postpaid organisation owes for one month. `status` is closed (ours, not yet Stripe's) | open | paid |
    failed | void."""

    __tablename__ = "invoices"
    __table_args__ = (UniqueConstraint("org_id", "period_start"),)
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"))
    period_start: Mapped[datetime]
    total_nusd: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[str] = mapped_column(String(16))
    stripe_invoice_id: Mapped[str | None] = mapped_column(String(255), unique=True)
    hosted_url: Mapped[str | None] = mapped_column(String(2048))
    pdf_url: Mapped[str | None] = mapped_column(String(2048))
    closed_at: Mapped[datetime]
    paid_at: Mapped[datetime | None]


class Alert(Base):
    """Something that a person should know. (kind, ref) names it, so that it is raised once; `org_id` is None for the
    operator alone."""

    __tablename__ = "alerts"
    __table_args__ = (
        UniqueConstraint("kind", "ref"),
        Index("ix_alerts_org_at", "org_id", "raised_at"),
        # Of all that were ever raised, few are not over.
        Index("ix_alerts_open", "kind", "ref", sqlite_where=_UNRESOLVED, postgresql_where=_UNRESOLVED),
    )
    id: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=True)
    org_id: Mapped[str | None] = mapped_column(ForeignKey("organisations.id"))
    kind: Mapped[str] = mapped_column(String(64))
    ref: Mapped[str] = mapped_column(String(255))
    message: Mapped[str] = mapped_column(String(1024))
    detail: Mapped[dict[str, Any]]
    raised_at: Mapped[datetime]
    resolved_at: Mapped[datetime | None]


class JobRun(Base):
    """A job's history: when it last started and succeeded. `asked_at` makes it due before its time."""

    __tablename__ = "job_runs"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    asked_at: Mapped[datetime | None]
    started_at: Mapped[datetime | None]
    succeeded_at: Mapped[datetime | None]
    failed_at: Mapped[datetime | None]
    duration_ms: Mapped[int | None] = mapped_column(BigInteger)
    result: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    error: Mapped[str | None] = mapped_column(String(1024))


#: The name of the lease of the leader, among the servers that share a database (`scheduler.cluster.fence`).
LEADS = "journal"
#: How long a leader may fail to renew its lease before another may follow.
LEADS_S = 5.0


class JobLease(Base):
    """Which process may run a job, and until when: nobody else starts it before. Also which server leads."""

    __tablename__ = "job_leases"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    holder: Mapped[str] = mapped_column(String(64))
    until: Mapped[datetime]

    @classmethod
    def over(cls, now: datetime, lasts_s: float) -> ColumnElement[bool]:
        """The condition that a lease of `lasts_s` is over. One that still lasts for more than twice as long was set by
        a fast clock, and counts as over."""
        return or_(cls.until <= now, cls.until > now + timedelta(seconds=2 * lasts_s))
