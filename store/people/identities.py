"""Accounts of an OpenID provider: whose they are, and which memberships follow from their groups.

An account is (issuer, subject), which never changes hands; an e-mail address may. So a known account stays its user's,
whatever its address is now. A new account belongs to the user with its address, which the provider must have verified,
unless that user already has another account. Refusals are a `PeopleError`, in one line.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from store.database import audit
from store.people import organisations
from store.people.oidc_settings import GroupRole
from store.people.organisations import IsMember, PeopleError, check_email
from store.people.roles import ROLES
from store.tables import Identity, Membership, Organisation, User


@dataclass(frozen=True)
class Account:
    """An account that a provider has proved. `email` is verified; `proved_at` is None if the provider does not tell the
    time of the proof."""

    issuer: str
    subject: str
    email: str
    groups: frozenset[str] = frozenset()
    proved_at: datetime | None = None


def roles_by_groups(session: Session, groups: frozenset[str], rules: Iterable[GroupRole]) -> dict[str, str]:
    """Roles by organisation id. If several groups give a role, the first in the order of ROLES counts. Unknown
    organisations are left out."""
    wanted: dict[str, set[str]] = {}
    for rule in rules:
        if rule.group in groups:
            wanted.setdefault(rule.organisation, set()).add(rule.role)
    rows = session.execute(select(Organisation.id, Organisation.name).where(Organisation.name.in_(wanted)))
    return {org_id: min(wanted[name], key=ROLES.index) for org_id, name in rows}


def user_of(session: Session, account: Account) -> User | None:
    """The user of an account; None if it is new. Raises PeopleError if its address is another account's."""
    known = session.get(Identity, (account.issuer, account.subject))
    if known is not None:
        return session.get_one(User, known.user_id)
    user = session.scalar(select(User).where(User.email == account.email))
    if user is not None and session.scalar(select(Identity).filter_by(issuer=account.issuer, user_id=user.id)):
        raise PeopleError(
            f"{account.email} belongs to another account of the provider here. If the address was given to you after "
            "somebody else had it, the operator unlinks it: weftd user unlink"
        )
    return user


def link(session: Session, account: Account) -> User:
    """The user of an account, made if there is none; from now on the account is theirs."""
    user, now = user_of(session, account), datetime.now(UTC)
    if user is None:
        user = organisations.user_with(session, check_email(account.email))
    key = (account.issuer, account.subject)
    if session.get(Identity, key) is None:
        session.add(
            Identity(issuer=key[0], subject=key[1], user_id=user.id, email=account.email, created_at=now),
        )
        session.flush()
    return user


def follow_groups(session: Session, user: User, issuer: str, wanted: dict[str, str]) -> dict[str, str]:
    """Make the memberships that follow groups (of `issuer`, or of an earlier provider) equal to `wanted`
    (`roles_by_groups`). Memberships given by people stay as they are. So does the last owner's, but it does not let
    them in. Returns, by organisation id, why an organisation does not let them in."""
    rows = session.scalars(select(Membership).filter_by(user_id=user.id).order_by(Membership.org_id)).all()
    for org_id in sorted(wanted.keys() - {row.org_id for row in rows}):
        with suppress(IsMember):  # somebody made them a member at the same moment
            organisations.add_member(session, org_id, user.email, wanted[org_id], issuer=issuer)
    refused: dict[str, str] = {}
    for row in (row for row in rows if row.issuer is not None):
        row.issuer = issuer
        try:
            if row.org_id in wanted:
                organisations.set_role(session, row, wanted[row.org_id])
            else:
                organisations.remove_member(session, row.org_id, user.id)
        except PeopleError as error:
            refused[row.org_id] = str(error)
    return refused


def unlink(session: Session, email: str) -> int:
    """Unlink all accounts from the user with that address, so that another account may be linked, and end the user's
    sessions of the console. Returns how many accounts there were."""
    user = session.scalar(select(User).where(User.email == email.strip().lower()))
    if user is None:
        raise organisations.NoSuch(f"no user {email[:80]!r}")
    gone = list(session.scalars(select(Identity).filter_by(user_id=user.id)))
    session.execute(delete(Identity).where(Identity.user_id == user.id))
    organisations.end_sessions(session, user.id)
    for org_id in session.scalars(select(Membership.org_id).filter_by(user_id=user.id)).all():
        audit.record(session, org_id=org_id, key_id=None, event="member_unlinked", target=user.id)
    return len(gone)
