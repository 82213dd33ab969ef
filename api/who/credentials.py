"""Keys and memberships: which ones a principal sees, and which it may make, change and end.

Admins see all keys of their organisation, everybody else their own, and a key that is bound to a project those of it.
What may be done with one follows from `api.who.reach`.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from api.errors import NotFound, quote
from api.who.principal import Principal
from api.who.reach import Reach, permit
from store import tables
from store.people import organisations
from store.people.roles import ADMIN


def managed_key(session: Session, who: Principal, key_id: str) -> tables.ApiKey:
    """A key that `who` sees; any other is NotFound."""
    number = int(key_id) if key_id.isascii() and key_id.isdecimal() and len(key_id) <= 18 else -1
    row = session.get(tables.ApiKey, number)
    own = row is not None and who.user_id is not None and row.user_id == who.user_id
    within = row is not None and who.project_id in (None, row.project_id)
    if row is None or row.org_id != who.org_id or not (within and (own or ADMIN in who.scopes)):
        raise NotFound(f"no key {quote(key_id)}")
    return row


def changed_key(session: Session, who: Principal, key_id: str, what: str) -> tables.ApiKey:
    """As `managed_key`, for a key that is to be changed or ended. Raises Forbidden for a key that goes beyond `who`."""
    row = managed_key(session, who, key_id)
    permit(who.reach, key_reach(session, row), f"{what} key {key_id}")
    return row


def key_reach(session: Session, row: tables.ApiKey) -> Reach:
    """What a key allows today."""
    member = session.get(tables.Membership, (row.org_id, row.user_id)) if row.user_id is not None else None
    role = "owner" if row.user_id is None else member.role if member is not None else "viewer"
    return Reach.of(row.scopes, role, row.project_id, row.expires_at)


def permit_secret(who: Principal, key: Reach, user_id: str | None, what: str) -> None:
    """Check that `who` may be given the secret of a key like `key`, of user `user_id`. Another person's key counts as
    an owner's, because that person may become an owner. Raises Forbidden."""
    role = who.role if user_id is not None and user_id == who.user_id else "owner"
    permit(who.reach, Reach(key.scopes, role, key.project_id, key.until), what)


def changed_member(session: Session, who: Principal, user_id: str, what: str) -> tables.Membership:
    """A membership, to change it, end it or sign in with it. Raises Forbidden if it goes beyond `who`."""
    row = organisations.membership(session, who.org_id, user_id)
    permit(who.reach, Reach.of_member(row.role), what)
    return row
