"""What a member may change: what he has made himself. Admins change everything of their organisation."""

from __future__ import annotations

from sqlalchemy.orm import Session

from api.auth import Principal
from api.errors import Forbidden
from api.lookup import checkpoint_at
from api.paths import CheckpointPath
from store import tables


def check_own(who: Principal, owner: tables.Session) -> None:
    """Raises Forbidden."""
    if who.role == "member" and not who.owns(owner):
        raise Forbidden(f"this belongs to the session {owner.id} of somebody else: a member changes only what is his")


def own_checkpoint(session: Session, who: Principal, path: CheckpointPath) -> tables.Checkpoint:
    """The checkpoint of that path, to be changed by `who`."""
    row = checkpoint_at(session, who.org_id, path)
    run = session.get_one(tables.Run, row.run_id)
    check_own(who, session.get_one(tables.Session, run.session_id))
    return row
