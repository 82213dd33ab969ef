"""On whose behalf the code runs: set by the API when a request is authenticated, and carried into threads and into the
database's writer. The audit log (who, from where) and row-level security (`store.database.db`) read it.

Without a caller the server itself acts, for all organisations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

#: The PostgreSQL role that requests work as, bound by row-level security (`store.database.row_security`).
APP_ROLE = "weft_app"
#: Key of `Session.info` for the organisation that a session is restricted to.
RESTRICTED_TO = "restricted_to"
_RESTRICT = text("SELECT set_config('app.org_id', :org, true), set_config('role', :role, true)")


@dataclass(frozen=True)
class Caller:
    """`org_id` None: not bound to one organisation. `actor` is user:<id>, key:<id>, operator or server; `link_by` is
    who made the link by which a user has signed in."""

    org_id: str | None
    actor: str
    ip: str | None = None
    request_id: str | None = None
    link_by: str | None = None


SERVER = Caller(None, "server")
OPERATOR = Caller(None, "operator")

_caller: ContextVar[Caller] = ContextVar("caller", default=SERVER)


def caller() -> Caller:
    return _caller.get()


def become(who: Caller) -> None:
    """Act as `who` for the rest of this task (a request's) or thread."""
    _caller.set(who)


@contextmanager
def acting_as(who: Caller) -> Iterator[None]:
    token = _caller.set(who)
    try:
        yield
    finally:
        _caller.reset(token)


@contextmanager
def unrestricted(session: Session) -> Iterator[None]:
    """Lift row-level security in the block, for the few reads that concern other organisations, too: published
    checkpoints, folders shared between copies, users by e-mail. The queries must themselves select only the rows that
    may be shown."""
    restricted = session.info.get(RESTRICTED_TO)
    if restricted is None:
        yield
        return
    lift(session)
    try:
        yield
    finally:
        restrict(session, restricted)


def enter(session: Session) -> bool:
    """Restrict a new session to the rows that its caller may see. Returns False if nothing is restricted: for the
    server, and on SQLite."""
    org_id = caller().org_id
    if org_id is None or session.get_bind().dialect.name != "postgresql":
        return False
    restrict(session, org_id)
    return True


def restrict(session: Session, org_id: str) -> None:
    """Have PostgreSQL show and accept only rows of `org_id`, until the transaction (or savepoint) ends."""
    session.info[RESTRICTED_TO] = org_id
    session.execute(_RESTRICT, {"org": org_id, "role": APP_ROLE})


def lift(session: Session | Connection) -> None:
    """Undo `restrict`: rows of all organisations are visible again."""
    session.info.pop(RESTRICTED_TO, None)
    session.execute(_RESTRICT, {"org": "", "role": "none"})
