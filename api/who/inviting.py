"""Using invitations: whether the maker may still give that role, and who may use the link.

An invitation never goes beyond its maker, when it is made and again when it is used: rights that the maker has lost
meanwhile, the link has lost, too.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Session

from api.errors import Forbidden
from api.who.principal import principal_of
from api.who.reach import Reach, beyond
from store.people import invitations, organisations
from store.people.keys import is_good
from store.tables import ApiKey, Invitation, Membership, User

STALE = "This invitation was used already, taken back, or is too old. Ask who sent it for a new one."
MADE_BY_NOBODY = (
    "Who made this invitation may no longer give this role. Ask an admin of the organisation for a new one."
)


def still_meant(session: Session, row: Invitation) -> bool:
    """Whether the maker of an invitation could still make it today."""
    reach = _maker(session, row)
    return reach is not None and not beyond(reach, Reach.of_member(row.role))


def join(session: Session, secret: str, user: User, now: datetime, address: str | None = None) -> Membership:
    """Make `user` a member by an invitation, which is then used up. `address` is the one just verified by the provider,
    if it has; the user's own is the one of their first sign-in. Raises Forbidden if they cannot use it, and PeopleError
    if they are a member already; then it is not used up."""
    address = address or user.email
    row = invitations.find(session, secret, now)
    if row is None:
        raise Forbidden(STALE)
    if not still_meant(session, row):
        raise Forbidden(MADE_BY_NOBODY)
    if row.email is not None and row.email != address:
        raise Forbidden(f"This invitation is for another address than {address}: sign in as whom it is for.")
    organisations.add_member(session, row.org_id, user.email, row.role)
    if invitations.use(session, secret, user.id, now) is None:
        raise Forbidden(STALE)
    return organisations.membership(session, row.org_id, user.id)


def _maker(session: Session, row: Invitation) -> Reach | None:
    """What the invitation's maker may do today; None if they have left. Operators have no bounds."""
    if row.made_with is not None:
        key = session.get(ApiKey, row.made_with)
        who = principal_of(session, key) if key is not None and key.org_id == row.org_id and is_good(key) else None
        return who.reach if who is not None else None
    kind, _, name = row.made_by.partition(":")
    if kind != "user":
        return Reach.of_member("owner") if kind == "operator" else None
    member = session.get(Membership, (row.org_id, name))
    return Reach.of_member(member.role) if member is not None else None
