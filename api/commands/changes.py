"""A change that the operator makes with `weftd`: it is in the audit log as the operator's, and a refusal is one
line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.commands.places import Place, database_of, refuse
from store.database.caller import OPERATOR, acting_as
from store.database.sure import write_surely
from store.people.organisations import NoSuch
from store.tables import Membership, Organisation, User

T = TypeVar("T")


def change(place: Place, work: Callable[[Session], T], may_be_new: bool = False) -> T:
    with database_of(place, may_be_new) as database, acting_as(OPERATOR):
        return write_surely(database, work)


def change_and_tell(place: Place, work: Callable[[Session], object], may_be_new: bool = False) -> None:
    """A change whose result is printed before it is committed. If nothing can be printed, nothing is changed: no key is
    good that nobody has seen, and no credit is given twice because the first time seemed to fail."""

    def write(session: Session) -> None:
        result = work(session)
        session.flush()
        click.echo(result)

    change(place, write, may_be_new)


def organisation(session: Session, name: str) -> Organisation:
    row = session.scalar(select(Organisation).where(Organisation.name == name))
    if row is None:
        raise NoSuch(f"no organisation named {name[:80]!r}: see weftd org list")
    return row


def member_id(session: Session, org_id: str, email: str, remedy: str = "see weftd user list") -> str:
    """The id of the user who is a member with this address."""
    query = select(User.id).join(Membership, Membership.user_id == User.id)
    user_id = session.scalar(query.where(Membership.org_id == org_id, User.email == email.strip().lower()))
    if user_id is None:
        raise NoSuch(f"no member {email[:80]!r}: {remedy}")
    return user_id


def check_org_name(name: str) -> None:
    if not 1 <= len(name) <= 128 or not name.isprintable() or name != name.strip():
        refuse("--org must be 1 to 128 printable characters without spaces around them")
