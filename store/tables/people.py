"""Who uses Weft: organisations, users, projects, keys; and the log of what they did."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base, BigInt


class Organisation(Base):
    __tablename__ = "organisations"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(128), unique=True)
    created_at: Mapped[datetime]


class ApiKey(Base):
    """An API key; only its SHA-256 is kept. `prefix` is what a person may see to tell keys apart."""

    __tablename__ = "api_keys"
    id: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"), index=True)
    prefix: Mapped[str] = mapped_column(String(16))
    secret_sha256: Mapped[str] = mapped_column(String(64), unique=True)
    created_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]


class AuditEntry(Base):
    """Who did what to what; never changed. `event` reads <resource>_<action>, `key_id` is None for the server itself
    and for the operator's command."""

    __tablename__ = "audit_log"
    __table_args__ = (Index("ix_audit_log_org_at", "org_id", "at"),)
    id: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"))
    at: Mapped[datetime]
    key_id: Mapped[int | None] = mapped_column(BigInteger)
    event: Mapped[str] = mapped_column(String(64))
    target: Mapped[str] = mapped_column(String(512))
    detail: Mapped[dict[str, Any]]
