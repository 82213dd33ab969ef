"""Finding what a request names, always within its organisation. Somebody else's is not found, exactly as unknown ones.

Every function is a short read; rows come back detached but loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.orm import Session

from api.errors import Invalid, NotFound, quote
from api.paths import CheckpointPath
from store import tables
from store.caller import unrestricted
from store.keys import find
from workers.model.card import ModelCard


def plain_id(value: str) -> bool:
    """Whether `value` can be an id at all; anything else some database might choke on."""
    return len(value) <= 256 and value.isascii() and value.isprintable()


def session_by_id(session: Session, org_id: str, session_id: str) -> tables.Session:
    row = session.get(tables.Session, session_id) if plain_id(session_id) else None
    if row is None or row.org_id != org_id:
        raise NotFound(f"no session {quote(session_id)}")
    return row


def active_session(session: Session, org_id: str, session_id: str) -> tables.Session:
    """A session that still takes work. An ended one is a permanent mistake of its client."""
    row = session_by_id(session, org_id, session_id)
    if row.state != "active":
        raise Invalid(f"session {session_id} has ended ({row.state}): create a new one")
    return row


def run_by_id(session: Session, org_id: str, run_id: str) -> tables.Run:
    row = session.get(tables.Run, run_id) if plain_id(run_id) else None
    if row is None or row.org_id != org_id:
        raise NotFound(f"no model {quote(run_id)}")
    return row


def sampler_by_id(session: Session, org_id: str, sampler_id: str) -> tables.Sampler:
    row = session.get(tables.Sampler, sampler_id) if plain_id(sampler_id) else None
    if row is None or row.org_id != org_id:
        raise NotFound(f"no sampling session {quote(sampler_id)}")
    return row


def checkpoint_at(session: Session, org_id: str, path: CheckpointPath) -> tables.Checkpoint:
    """The checkpoint of that path, unless it has expired."""
    query = select(tables.Checkpoint).filter_by(org_id=org_id, run_id=path.run_id, kind=path.kind, name=path.name)
    row = session.scalars(query).one_or_none()
    if row is None or expired(row):
        raise NotFound(f"no checkpoint {path}")
    return row


def readable_checkpoint(
    session: Session, org_id: str, path: CheckpointPath, access_token: str | None = None
) -> tables.Checkpoint:
    """A checkpoint to load, copy or sample from: of the organisation, of the one whose API key `access_token` is, or
    published by anybody."""
    owners = {org_id}
    with unrestricted(session):
        if access_token is not None:
            owners.add(_lender(session, access_token))
        query = select(tables.Checkpoint).filter_by(run_id=path.run_id, kind=path.kind, name=path.name)
        row = session.scalars(query).one_or_none()
    if row is None or expired(row) or not (row.public or row.org_id in owners):
        raise NotFound(f"no checkpoint {path}")
    return row


def _lender(session: Session, access_token: str) -> str:
    """The organisation that lends its weights to whoever shows a key of it, one that may read them."""
    key = find(session, access_token)
    if key is None:
        raise Invalid("weights_access_token: not an API key of this server (the key of whom the weights belong to)")
    return key.org_id


def run_of(session: Session, checkpoint: tables.Checkpoint) -> tables.Run:
    """The run of a checkpoint that was found readable, whoever it belongs to."""
    with unrestricted(session):
        return session.get_one(tables.Run, checkpoint.run_id)


def expired(row: tables.Checkpoint) -> bool:
    return row.expires_at is not None and row.expires_at <= datetime.now(UTC)


def live_checkpoints() -> ColumnElement[bool]:
    """Checkpoints that have not expired, for `where`."""
    expires = tables.Checkpoint.expires_at
    return or_(expires.is_(None), expires > datetime.now(UTC))


def served_model(cards: Mapping[str, ModelCard], name: str, field: str = "base_model") -> ModelCard:
    """The card of a base model that this server has."""
    card = cards.get(name)
    if card is None:
        raise Invalid(f"{field}: {quote(name)} is not served here; this server has {', '.join(sorted(cards))}")
    return card
