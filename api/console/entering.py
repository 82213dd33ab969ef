"""Who has signed in by the OpenID provider, and to which organisation: the one write that makes their user, follows
their groups, uses their invitation and begins their session."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from api.console import sessions
from api.who.inviting import join
from store.people import identities
from store.people.identities import Account
from store.people.oidc_settings import OidcSettings
from store.tables import Membership, Organisation, User


@dataclass(frozen=True)
class Entered:
    """`sid` is the new session; None with `choices`, (id, name) of each organisation, where there are several, or with
    none where there is nothing for them here. `says` is why organisations that they are members of do not let them
    in."""

    sid: str | None = None
    choices: tuple[tuple[str, str], ...] = ()
    says: str = ""


def enter(
    session: Session,
    account: Account,
    before: str,
    settings: OidcSettings,
    now: datetime,
    *,
    org_id: str,
    invitation: str,
) -> Entered:
    """Raises PeopleError or Forbidden when the account, or the invitation, cannot be used; then nothing is changed."""
    wanted = identities.roles_by_groups(session, account.groups, settings.groups)
    user = identities.user_of(session, account)
    if user is None and not (wanted or invitation):
        return Entered()
    user = identities.link(session, account)
    refused = identities.follow_groups(session, user, account.issuer, wanted)
    if invitation:
        org_id = join(session, invitation, user, now, account.email).org_id
    asked = [choice for choice in _organisations(session, user) if not org_id or choice[0] == org_id]
    chosen = [choice for choice in asked if choice[0] not in refused]
    if len(chosen) != 1:
        says = " ".join(f"{name} does not let you in: {refused[id]}." for id, name in asked if id in refused)
        return Entered(choices=tuple(chosen), says=says)
    life_s = settings.session_life_s
    return Entered(sessions.sign_in_with_account(session, chosen[0][0], user.id, before, account, now, life_s))


def _organisations(session: Session, user: User) -> list[tuple[str, str]]:
    query = select(Organisation.id, Organisation.name).join(Membership, Membership.org_id == Organisation.id)
    mine = query.where(Membership.user_id == user.id, Organisation.status != "closed")
    return [(org_id, name) for org_id, name in session.execute(mine.order_by(Organisation.name))]
