"""Browsers that are signed in, and the curves that users log.

Of a session and of a login link only the SHA-256 of the secret is kept."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base


class BrowserSession(Base):
    """Somebody who is signed in to the console, by a key (`key_id`), or as `user_id` by a link or by the OpenID
    provider `issuer`; what they may do is looked up at each request. `operator` shows the pages about the whole
    service. `opened_until` is the end of the secret that opened it (None: no end), `link_by` who made the link (None:
    the operator). `proved_at` is when they proved their identity to the provider, if it told."""

    __tablename__ = "browser_sessions"
    sid_sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"), index=True)
    key_id: Mapped[int | None] = mapped_column(BigInteger)
    user_id: Mapped[str | None] = mapped_column(String(64))
    operator: Mapped[bool]
    opened_until: Mapped[datetime | None]
    link_by: Mapped[str | None] = mapped_column(String(128))
    issuer: Mapped[str | None] = mapped_column(String(255))
    proved_at: Mapped[datetime | None]
    created_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]
    expires_at: Mapped[datetime] = mapped_column(index=True)


class LoginLink(Base):
    """A link that signs a user in, once. `used_at` is set by the one request that it let in, `made_by` is the actor
    who made it, None for the operator."""

    __tablename__ = "login_links"
    token_sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"), index=True)
    user_id: Mapped[str] = mapped_column(String(64))
    operator: Mapped[bool]
    made_by: Mapped[str | None] = mapped_column(String(128))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]
    used_at: Mapped[datetime | None]


class RunCurve(Base):
    """One named curve of a run: how many points it has, and the last one logged."""

    __tablename__ = "run_curves"
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"))
    points: Mapped[int] = mapped_column(BigInteger)
    last_step: Mapped[int] = mapped_column(BigInteger)
    last_value: Mapped[float]
    last_at: Mapped[datetime]


class RunMetric(Base):
    """One point of a curve. Logging a step again replaces its value."""

    __tablename__ = "run_metrics"
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"))
    value: Mapped[float]
    at: Mapped[datetime]
