"""What a member may change: whatever they have made themselves, with this key or another of theirs. Admins change
everything of their organisation, and so do keys of the organisation itself. Looking, sampling and copying change
nothing."""

from __future__ import annotations

from sqlalchemy.orm import Session

from api.errors import Forbidden, Invalid
from api.paths import CheckpointPath
from api.who.lookup import checkpoint_at, operation_by_id, run_by_id, session_by_id
from api.who.principal import Principal
from scheduler.order.operations import Operation
from store import tables


def own_session(session: Session, who: Principal, session_id: str) -> tables.Session:
    """A session, to be changed by `who`. Raises Forbidden for a colleague's."""
    row = session_by_id(session, who, session_id)
    check_own(who, row)
    return row


def check_own(who: Principal, row: tables.Session) -> None:
    """Raises Forbidden for a colleague's session."""
    if not is_own(who, row):
        raise Forbidden(
            f"session {row.id} is somebody else's, and a member changes only their own: use a session of your own "
            "(weights of other runs can be loaded, copied and sampled), or ask an admin"
        )


def active_session(session: Session, who: Principal, session_id: str) -> tables.Session:
    """A session that still accepts work. Using an ended one is a permanent mistake of its client."""
    row = own_session(session, who, session_id)
    if row.state != "active":
        raise Invalid(f"session {session_id} has ended ({row.state}): create a new one")
    return row


def own_run(session: Session, who: Principal, run_id: str) -> tables.Run:
    """A run, to be trained or written about by `who`."""
    row = run_by_id(session, who, run_id)
    own_session(session, who, row.session_id)
    return row


def own_checkpoint(session: Session, who: Principal, path: CheckpointPath) -> tables.Checkpoint:
    """The checkpoint of that path, to be changed by `who`."""
    row = checkpoint_at(session, who, path)
    own_run(session, who, row.run_id)
    return row


def own_operation(session: Session, who: Principal, request_id: str) -> tables.Operation:
    """An operation, to be cancelled by `who`: one that they asked for."""
    row = operation_by_id(session, who, request_id)
    if not is_own(who, row):
        raise Forbidden(f"request {row.id} is somebody else's, and a member can cancel only their own requests")
    return row


def is_own(who: Principal, row: tables.Session | tables.Operation | Operation) -> bool:
    """Whether `who`, who sees a session or an operation, may also change what belongs to it."""
    return who.role != "member" or who.owns(row)
