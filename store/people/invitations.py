"""Invitations: links by which one person becomes a member of an organisation, with the role that the link was made for.

A link has 256 random bits, of which the database holds a SHA-256. It is used up by the one request that makes the
member, in that request's transaction. Whether its maker may still give that role is asked above (`api.who.inviting`).
"""

from __future__ import annotations

import secrets
import uuid
from datetime import UTC, datetime, timedelta

from sqlalchemy import ColumnElement, delete, func, select, update
from sqlalchemy.orm import Session

from store.database import audit
from store.database.caller import caller
from store.people.organisations import PeopleError, check_email, check_role
from store.people.secret import digest
from store.tables import Invitation, Organisation

#: How many open links one organisation may have.
MAX_OPEN = 50
#: How many links one organisation may make in a day, even if it revokes them.
MAX_PER_DAY = 200
#: The longest time that a link is open, and for which its row is kept.
MAX_DAYS = 30
KEPT = timedelta(days=90)


def make(
    session: Session, org_id: str, role: str, days: int, email: str | None = None, key_id: int | None = None
) -> tuple[Invitation, str]:
    """Make an invitation. Returns it with its secret, which is not stored."""
    check_role(role)
    email = check_email(email) if email is not None else None
    if not 1 <= days <= MAX_DAYS:
        raise PeopleError(f"days: must be 1 to {MAX_DAYS}, got {days}")
    now = datetime.now(UTC)
    session.scalars(select(Organisation.id).where(Organisation.id == org_id).with_for_update()).all()
    session.execute(delete(Invitation).where(Invitation.org_id == org_id, Invitation.created_at < now - KEPT))
    if _count(session, *_open(org_id, now)) >= MAX_OPEN:
        raise PeopleError(f"{MAX_OPEN} invitations are open, which is the limit: revoke some that nobody will use")
    if _count(session, Invitation.org_id == org_id, Invitation.created_at > now - timedelta(days=1)) >= MAX_PER_DAY:
        raise PeopleError(f"{MAX_PER_DAY} invitations were made within a day, which is the limit: go on tomorrow")
    secret = secrets.token_urlsafe(32)
    row = Invitation(
        id=uuid.uuid4().hex,
        org_id=org_id,
        token_sha256=digest(secret),
        role=role,
        email=email,
        made_by=caller().actor,
        made_with=key_id,
        created_at=now,
        expires_at=now + timedelta(days=days),
    )
    session.add(row)
    session.flush()
    _note(session, row, "member_invited", key_id)
    return row, secret


def open_of(session: Session, org_id: str) -> list[Invitation]:
    """The open invitations, newest first."""
    query = select(Invitation).where(*_open(org_id, datetime.now(UTC)))
    return list(session.scalars(query.order_by(Invitation.created_at.desc(), Invitation.id)))


def find(session: Session, secret: str, now: datetime) -> Invitation | None:
    """The invitation of a link, if it is open. This does not use it up."""
    return session.scalar(select(Invitation).where(*_good(secret, now)))


def use(session: Session, secret: str, user_id: str, now: datetime) -> Invitation | None:
    """Use an invitation up for `user_id`; None if it is not open, or another request was first."""
    used = update(Invitation).where(*_good(secret, now)).values(used_at=now, used_by=user_id).returning(Invitation)
    row = session.scalars(used, execution_options={"synchronize_session": False}).one_or_none()
    if row is not None:
        _note(session, row, "member_invitation_used", None, user_id=user_id)
    return row


def revoke(session: Session, row: Invitation, key_id: int | None = None) -> None:
    """Revoke an invitation. Doing it twice is no error; a used one stays as it is."""
    if row.used_at is not None:
        raise PeopleError("this invitation was used: remove the member instead")
    if row.revoked_at is None:
        row.revoked_at = datetime.now(UTC)
        _note(session, row, "member_invitation_revoked", key_id)


def _count(session: Session, *which: ColumnElement[bool]) -> int:
    return session.scalar(select(func.count()).select_from(Invitation).where(*which)) or 0


def _open(org_id: str, now: datetime) -> tuple[ColumnElement[bool], ...]:
    return (Invitation.org_id == org_id, *_usable(now))


def _good(secret: str, now: datetime) -> tuple[ColumnElement[bool], ...]:
    return (Invitation.token_sha256 == digest(secret), *_usable(now))


def _usable(now: datetime) -> tuple[ColumnElement[bool], ...]:
    return (Invitation.used_at.is_(None), Invitation.revoked_at.is_(None), Invitation.expires_at > now)


def _note(session: Session, row: Invitation, event: str, key_id: int | None, **more: str) -> None:
    detail = {"role": row.role, **({"email": row.email} if row.email else {}), **more}
    audit.record(session, org_id=row.org_id, key_id=key_id, event=event, target=row.id, detail=detail)
