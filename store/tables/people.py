"""Who uses Weft: organisations, users, projects, keys; and the log of what they did."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base, BigInt


class RateLimited:
    """The most that a key, a project or an organisation may ask for; None is no limit."""

    requests_per_minute: Mapped[int | None]
    tokens_per_minute: Mapped[int | None] = mapped_column(BigInteger)
    #: Operations that are accepted and not finished.
    max_in_flight: Mapped[int | None]


class Organisation(RateLimited, Base):
    """A tenant. `status` is active | past_due | suspended | closed; the last two are refused everything. `weight` is
    its fair share of the machines, relative to others'; `quotas` are those that the operator has set, by name
    (`billing.metering.quotas`). Since `sso_required_at` members sign in to the console by the OpenID provider alone."""

    __tablename__ = "organisations"
    __table_args__ = (
        CheckConstraint("status IN ('active', 'past_due', 'suspended', 'closed')", name="status"),
        CheckConstraint("weight >= 1", name="weight"),
    )
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(128), unique=True)
    status: Mapped[str] = mapped_column(String(16), default="active", server_default="active")
    weight: Mapped[int] = mapped_column(default=1, server_default="1")
    stripe_customer_id: Mapped[str | None] = mapped_column(String(64), unique=True)
    quotas: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")
    sso_required_at: Mapped[datetime | None]
    created_at: Mapped[datetime]


class User(Base):
    """A person, by a lower-case e-mail address; what they may do is in their memberships."""

    __tablename__ = "users"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    email: Mapped[str] = mapped_column(String(254), unique=True)
    created_at: Mapped[datetime]


class Membership(Base):
    """`role` is owner | admin | billing-admin | member | viewer (`store.people.roles`). It follows the groups that
    `issuer` says its user is in; None: people have given it."""

    __tablename__ = "memberships"
    __table_args__ = (CheckConstraint("role IN ('owner', 'admin', 'billing-admin', 'member', 'viewer')", name="role"),)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"), primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), primary_key=True, index=True)
    role: Mapped[str] = mapped_column(String(16))
    issuer: Mapped[str | None] = mapped_column(String(255))
    created_at: Mapped[datetime]


class Identity(Base):
    """An account of an OpenID provider, and its user. `email` is its address when it was first seen."""

    __tablename__ = "identities"
    __table_args__ = (UniqueConstraint("issuer", "user_id"),)
    issuer: Mapped[str] = mapped_column(String(255), primary_key=True)
    subject: Mapped[str] = mapped_column(String(255), primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), index=True)
    email: Mapped[str] = mapped_column(String(254))
    created_at: Mapped[datetime]


class Invitation(Base):
    """A link by which one person becomes a member with `role`; of its secret only the SHA-256 is kept. `email` is for
    whom it is, None for whoever signs in. `made_by` is the actor who made it, with the key `made_with` if with any;
    `used_by` the user who did."""

    __tablename__ = "invitations"
    __table_args__ = (CheckConstraint("role IN ('owner', 'admin', 'billing-admin', 'member', 'viewer')", name="role"),)
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"), index=True)
    token_sha256: Mapped[str] = mapped_column(String(64), unique=True)
    role: Mapped[str] = mapped_column(String(16))
    email: Mapped[str | None] = mapped_column(String(254))
    made_by: Mapped[str] = mapped_column(String(128))
    made_with: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]
    used_at: Mapped[datetime | None]
    used_by: Mapped[str | None] = mapped_column(String(64))
    revoked_at: Mapped[datetime | None]


class Project(RateLimited, Base):
    """A part of an organisation's work with limits of its own. Clients choose the id, so it is only unique within its
    organisation. An archived project takes no new sessions."""

    __tablename__ = "projects"
    __table_args__ = (UniqueConstraint("org_id", "name"),)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"), primary_key=True)
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(128))
    created_at: Mapped[datetime]
    archived_at: Mapped[datetime | None]


class ApiKey(RateLimited, Base):
    """An API key; only its SHA-256 is kept. `prefix` and `last4` are what a person may see to tell keys apart. A key
    that is rotated stays this key with another secret; `previous_sha256` is good until `previous_expires_at`.
    Without `user_id` it belongs to the organisation itself; with `project_id` it works in that project only.
    `given_to` is the actor who was given its secret, None if it was the operator."""

    __tablename__ = "api_keys"
    __table_args__ = (
        ForeignKeyConstraint(["org_id", "project_id"], ["projects.org_id", "projects.id"], name="fk_api_keys_project"),
    )
    id: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"), index=True)
    project_id: Mapped[str | None] = mapped_column(String(64))
    user_id: Mapped[str | None] = mapped_column(ForeignKey("users.id"))
    name: Mapped[str] = mapped_column(String(128), default="", server_default="")
    scopes: Mapped[list[str]] = mapped_column(default=lambda: ["admin"], server_default='["admin"]')
    prefix: Mapped[str] = mapped_column(String(16))
    last4: Mapped[str] = mapped_column(String(4), default="", server_default="")
    secret_sha256: Mapped[str] = mapped_column(String(64), unique=True)
    previous_sha256: Mapped[str | None] = mapped_column(String(64), unique=True)
    previous_expires_at: Mapped[datetime | None]
    given_to: Mapped[str | None] = mapped_column(String(128))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class AuditEntry(Base):
    """Who did what to what; never changed. `event` reads <resource>_<action>. `actor` is user:<id>, key:<id>, operator
    or server; `key_id` is the key it was done with, if any. The entries of an organisation are a chain: `hash` covers
    the entry and the hash of the one before it (`store.database.audit`)."""

    __tablename__ = "audit_log"
    __table_args__ = (
        Index("ix_audit_log_org_at", "org_id", "at"),
        Index("ix_audit_log_org_id", "org_id", "id"),
        Index("uq_audit_log_chain", "org_id", "prev_hash", unique=True),
    )
    id: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"))
    at: Mapped[datetime]
    actor: Mapped[str] = mapped_column(String(128), server_default="server")
    key_id: Mapped[int | None] = mapped_column(BigInteger)
    ip: Mapped[str | None] = mapped_column(String(64))
    request_id: Mapped[str | None] = mapped_column(String(64))
    event: Mapped[str] = mapped_column(String(64))
    target: Mapped[str] = mapped_column(String(512))
    detail: Mapped[dict[str, Any]]
    prev_hash: Mapped[str] = mapped_column(String(64), server_default="")
    hash: Mapped[str] = mapped_column(String(64), server_default="")
