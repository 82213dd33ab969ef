"""In which project a session goes. `default` names the project of everything that was put into no other; it is no row.

A key that may manage its organisation makes a project by naming it, as Tinker's clients expect; others name what is
there. A key that is bound to a project works in that one.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, and_, select
from sqlalchemy.orm import Session

from api.checks.runs import check_text
from api.errors import Forbidden, Invalid, NotFound, quote
from api.who.principal import Principal
from api.who.session_search import DEFAULT_PROJECT
from store import tables
from store.people.organisations import create_project, project_by_id
from store.people.roles import ADMIN


def check_project(project_id: str | None) -> str | None:
    """Check a project's name. Returns None for the default project."""
    check_text(project_id, "project_id", 64)
    if project_id is not None and not (project_id.isprintable() and project_id.strip()):
        raise Invalid(f"project_id: must be 1 to 64 printable characters, got {quote(project_id)}")
    return None if project_id == DEFAULT_PROJECT else project_id


def project_for(session: Session, who: Principal, named: str | None) -> str | None:
    """Within a write: the project, named by id or by name, for a session that `who` makes or moves."""
    wanted = check_project(named)
    if who.project_id is not None and wanted is None and named is None:
        wanted = who.project_id
    row = _named(session, who.org_id, wanted) if wanted is not None else None
    if who.project_id is not None and (row is None or row.id != who.project_id):
        raise Forbidden(f"project_id: this key is bound to the project {who.project_id}, not to {quote(named)}")
    if wanted is None:
        return None
    if row is None:
        if ADMIN not in who.scopes:
            raise NotFound(f"no project {quote(named)}: an admin of your organisation can make it")
        row = create_project(session, who.org_id, wanted, key_id=who.key_id)
    if row.archived_at is not None:
        raise Invalid(f"project_id: {quote(row.name)} is archived and takes no more sessions")
    return row.id


def visible_projects(who: Principal) -> ColumnElement[bool]:
    """The condition for projects that `who` sees, for `where`: only its own, if it is bound to one."""
    own = tables.Project.org_id == who.org_id
    return own if who.project_id is None else and_(own, tables.Project.id == who.project_id)


def visible_project(session: Session, who: Principal, project_id: str) -> tables.Project:
    if who.project_id not in (None, project_id):
        raise NotFound(f"no project {quote(project_id)}")
    return project_by_id(session, who.org_id, project_id)


def _named(session: Session, org_id: str, wanted: str) -> tables.Project | None:
    by_id = session.get(tables.Project, (org_id, wanted))
    return by_id or session.scalars(select(tables.Project).filter_by(org_id=org_id, name=wanted)).one_or_none()
