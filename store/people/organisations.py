"""Changes of organisations, their members and their projects, each with its entry in the audit log.

Called inside writes, by the API and by `weftd`. What is wrong with a change is a `PeopleError`, in one line.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime

from sqlalchemy import delete, func, or_, select
from sqlalchemy.orm import Session

from store.database import audit
from store.database.bulk import insert_into
from store.database.caller import unrestricted
from store.people.keys import revoke_row
from store.people.roles import ROLES
from store.tables import ApiKey, BrowserSession, LoginLink, Membership, Organisation, Project, User

_EMAIL = re.compile(r"[^@\s\x00-\x1f]{1,64}@[^@\s\x00-\x1f]{1,189}")
#: How many members or projects one organisation may have: lists and pages show all of them.
MAX_MEMBERS = 10_000
MAX_PROJECTS = 10_000
STATUSES = ("active", "past_due", "suspended", "closed")


class PeopleError(ValueError):
    """A change that cannot be made."""


class IsMember(PeopleError):
    def __init__(self, email: str) -> None:
        super().__init__(f"email: {email} is a member already; change the role instead")


class NoSuch(PeopleError):
    """A change names something that does not exist in this organisation."""


def organisation_named(session: Session, name: str) -> Organisation:
    """The organisation of that name, made if it does not exist. Two calls at the same moment get the same one."""
    query = select(Organisation).where(Organisation.name == name)
    org = session.scalar(query)
    if org is None:
        new = {"id": uuid.uuid4().hex, "name": name, "created_at": datetime.now(UTC)}
        made = insert_into(session, Organisation).values(**new)
        session.execute(made.on_conflict_do_nothing(index_elements=["name"]))
        org = session.scalars(query).one()
    return org


def set_status(session: Session, org: Organisation, status: str) -> None:
    if status not in STATUSES:
        raise PeopleError(f"status: must be one of {', '.join(STATUSES)}, got {status!r}")
    if org.status != status:
        detail = {"from": org.status, "to": status}
        org.status = status
        audit.record(session, org_id=org.id, key_id=None, event="organization_status_set", target=org.id, detail=detail)


def set_weight(session: Session, org: Organisation, weight: int) -> None:
    """Set an organisation's fair share of the machines, relative to others'."""
    if org.weight != weight:
        detail = {"from": org.weight, "to": weight}
        org.weight = weight
        audit.record(session, org_id=org.id, key_id=None, event="organization_weight_set", target=org.id, detail=detail)


def require_sso(session: Session, org: Organisation, required: bool, key_id: int | None = None) -> None:
    """Set whether members sign in to the console by the OpenID provider alone. Then sessions begun by keys and by
    members' links end for good. The operator's links still work, for times when the provider is away."""
    if (org.sso_required_at is not None) != required:
        org.sso_required_at = datetime.now(UTC) if required else None
        if required:
            others = or_(BrowserSession.key_id.is_not(None), BrowserSession.link_by.is_not(None))
            session.execute(delete(BrowserSession).filter_by(org_id=org.id, issuer=None).where(others))
        audit.record(
            session,
            org_id=org.id,
            key_id=key_id,
            event="organization_sso_required" if required else "organization_sso_not_required",
            target=org.id,
        )


# ---- members


def add_member(
    session: Session, org_id: str, email: str, role: str, key_id: int | None = None, issuer: str | None = None
) -> User:
    """Make that person a member; an unknown person becomes a user. With `issuer` the membership follows the groups of
    that provider."""
    check_role(role)
    user = user_with(session, check_email(email))
    if session.get(Membership, (org_id, user.id)) is not None:
        raise IsMember(user.email)
    if _count(session, Membership, org_id) >= MAX_MEMBERS:
        raise PeopleError(f"the organisation has {MAX_MEMBERS} members, which is the limit: remove some first")
    new = {"org_id": org_id, "user_id": user.id, "role": role, "issuer": issuer, "created_at": datetime.now(UTC)}
    made = insert_into(session, Membership).values(**new).on_conflict_do_nothing().returning(Membership.user_id)
    if session.scalar(made) is None:  # an admin, or a first sign-in, did so at the same moment
        raise IsMember(user.email)
    how = {"by_groups_of": issuer} if issuer is not None else {}
    _note(session, org_id, key_id, "member_added", user.id, role=role, email=user.email, **how)
    return user


def user_with(session: Session, email: str) -> User:
    """The user with that address, made if there is none. Organisations, and replicas, that do so at the same moment get
    the same user."""
    query = select(User).where(User.email == email)
    with unrestricted(session):
        user = session.scalar(query)
        if user is None:
            new = {"id": uuid.uuid4().hex, "email": email, "created_at": datetime.now(UTC)}
            session.execute(insert_into(session, User).values(**new).on_conflict_do_nothing(index_elements=["email"]))
            user = session.scalars(query).one()
    return user


def change_role(session: Session, org_id: str, user_id: str, role: str, key_id: int | None = None) -> Membership:
    row = membership(session, org_id, user_id)
    check_role(role)
    if row.issuer is not None and row.role != role:
        raise PeopleError(
            "the role of this member follows their groups at the OpenID provider: change those; or remove the member "
            "and add them again, and the role is yours to give"
        )
    return set_role(session, row, role, key_id)


def set_role(session: Session, row: Membership, role: str, key_id: int | None = None) -> Membership:
    """Set a member's role, also if the provider's groups gave the present one."""
    if row.role == "owner" and role != "owner":
        _keep_an_owner(session, row.org_id)
    if row.role != role:
        how = {"by_groups_of": row.issuer} if row.issuer is not None else {}
        _note(session, row.org_id, key_id, "member_role_set", row.user_id, was=row.role, role=role, **how)
        row.role = role
    return row


def remove_member(session: Session, org_id: str, user_id: str, key_id: int | None = None) -> None:
    """End a membership, and with it the member's keys and sessions in this organisation."""
    row = membership(session, org_id, user_id)
    if row.role == "owner":
        _keep_an_owner(session, org_id)
    for key in session.scalars(select(ApiKey).filter_by(org_id=org_id, user_id=user_id, revoked_at=None)):
        revoke_row(session, key, key_id)
    end_sessions(session, user_id, org_id)
    session.delete(row)
    _note(session, org_id, key_id, "member_removed", user_id, role=row.role)


def end_sessions(session: Session, user_id: str, org_id: str | None = None) -> None:
    """End a user's sessions of the console and open sign-in links, of one organisation or of all: they would be good
    again if a membership were restored."""
    of = {"user_id": user_id} if org_id is None else {"user_id": user_id, "org_id": org_id}
    session.execute(delete(BrowserSession).filter_by(**of))
    session.execute(delete(LoginLink).filter_by(**of))


def members(session: Session, org_id: str) -> list[tuple[Membership, User]]:
    query = select(Membership, User).join(User, User.id == Membership.user_id)
    rows = session.execute(query.where(Membership.org_id == org_id).order_by(Membership.created_at, User.id))
    return [(member, user) for member, user in rows]


def membership(session: Session, org_id: str, user_id: str) -> Membership:
    row = session.get(Membership, (org_id, user_id)) if user_id.isprintable() else None
    if row is None:
        raise NoSuch(f"no member {user_id[:80]!r}")
    return row


def _keep_an_owner(session: Session, org_id: str) -> None:
    """Raise if no owner would be left. Owners are read under a lock, so that the last two cannot leave at the same
    moment."""
    session.scalars(select(Organisation.id).where(Organisation.id == org_id).with_for_update()).all()
    if _count(session, Membership, org_id, role="owner") <= 1:
        raise PeopleError("the last owner of an organisation stays: make somebody else an owner first")


def _count(session: Session, table: type[Membership | Project], org_id: str, **which: str) -> int:
    return session.scalar(select(func.count()).select_from(table).filter_by(org_id=org_id, **which)) or 0


def check_email(email: str) -> str:
    email = email.strip().lower()
    if not _EMAIL.fullmatch(email) or not email.isprintable():
        raise PeopleError(f"email: must be an e-mail address of at most 254 characters, got {email[:80]!r}")
    return email


def check_role(role: str) -> None:
    if role not in ROLES:
        raise PeopleError(f"role: must be one of {', '.join(ROLES)}, got {role[:80]!r}")


# ---- projects


def create_project(session: Session, org_id: str, name: str, *, key_id: int | None = None) -> Project:
    """Make a project; its id is the name, if that is a valid id and not taken."""
    _check_name(session, org_id, name)
    if _count(session, Project, org_id) >= MAX_PROJECTS:
        limit = f"the organisation has {MAX_PROJECTS} projects, which is the limit"
        raise PeopleError(f"{limit}, archived ones too: use one that is there")
    taken = session.get(Project, (org_id, name)) is not None
    project_id = name if _is_id(name) and not taken else uuid.uuid4().hex
    row = Project(id=project_id, org_id=org_id, name=name, created_at=datetime.now(UTC))
    session.add(row)
    session.flush()
    _note(session, org_id, key_id, "project_created", row.id, name=name)
    return row


def rename_project(session: Session, row: Project, name: str, key_id: int | None = None) -> None:
    if row.name != name:
        _check_name(session, row.org_id, name)
        _note(session, row.org_id, key_id, "project_renamed", row.id, was=row.name, name=name)
        row.name = name


def archive_project(session: Session, row: Project, archived: bool = True, key_id: int | None = None) -> None:
    """Archive a project: it takes no new sessions; what is in it stays, and goes on."""
    if (row.archived_at is not None) != archived:
        row.archived_at = datetime.now(UTC) if archived else None
        _note(session, row.org_id, key_id, "project_archived" if archived else "project_restored", row.id)


def project_by_id(session: Session, org_id: str, project_id: str) -> Project:
    row = session.get(Project, (org_id, project_id)) if _is_id(project_id) else None
    if row is None:
        raise NoSuch(f"no project {project_id[:80]!r}: `weftd project list` and the console have the ids")
    return row


def _is_id(text: str) -> bool:
    """True if the text can be a project's id: it fits the column, consists of words, and is unchanged in the path of a
    URL."""
    fits = 1 <= len(text) <= 64 and text.isprintable() and text == text.strip() and text != "default"
    return fits and not {".", ".."} & set(text.split("/"))


def _check_name(session: Session, org_id: str, name: str) -> None:
    if not 1 <= len(name) <= 128 or not name.isprintable() or name != name.strip():
        raise PeopleError("name: must be 1 to 128 printable characters without spaces around them")
    if session.scalar(select(Project.id).filter_by(org_id=org_id, name=name)) is not None:
        raise PeopleError(f"name: a project named {name!r} exists already")


def _note(session: Session, org_id: str, key_id: int | None, event: str, target: str, **detail: str) -> None:
    audit.record(session, org_id=org_id, key_id=key_id, event=event, target=target, detail=dict(detail))


def set_quotas(session: Session, org: Organisation, values: Mapping[str, int | None]) -> None:
    """Set quotas (None: the server's default); quotas not in `values` stay."""
    kept = {**org.quotas, **values}
    org.quotas = {name: value for name, value in kept.items() if value is not None}
    target = f"organisation {org.id}"
    audit.record(session, org_id=org.id, key_id=None, event="quotas_set", target=target, detail=dict(values))


# ---- limits

#: The rate limits, with the highest value of each.
LIMITS = {"requests_per_minute": 2**31 - 1, "tokens_per_minute": 2**53, "max_in_flight": 2**31 - 1}


def set_limits(
    session: Session, row: Organisation | Project | ApiKey, values: Mapping[str, int | None], key_id: int | None = None
) -> None:
    """Set the rate limits in `values` (None: no limit); others stay."""
    org_id = row.id if isinstance(row, Organisation) else row.org_id
    for name, value in values.items():
        setattr(row, name, value)
    target = f"{row.__tablename__.rstrip('s')} {row.id}"
    audit.record(session, org_id=org_id, key_id=key_id, event="limits_set", target=target, detail=dict(values))
