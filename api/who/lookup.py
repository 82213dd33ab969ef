"""Finding what a request names: always within its organisation and, with a key that is bound to a project, within that
project. Everything else is not found, exactly as unknown ids are not. `visible` is the same for lists.

A session is in a project, and with it all that belongs to it. Every function is a short read; rows come back detached
but loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TypeVar

from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.orm import Session

from api.errors import Invalid, NotFound, quote
from api.paths import CheckpointPath
from api.who.principal import ENDED, Principal, principal_of
from store import tables
from store.database.caller import unrestricted
from store.people.keys import find
from workers.model.card import ModelCard

R = TypeVar("R", bound=tables.Base)

#: Scopes that show weights (`api.http.access.LOOKING`): a key with one of them can lend weights.
_LENDING = frozenset({"train", "sample", "checkpoints:read"})


def plain_id(value: str) -> bool:
    """Whether `value` can be an id at all; some databases fail on other strings."""
    return len(value) <= 256 and value.isascii() and value.isprintable()


def row_of_anyone(session: Session, table: type[R], id: str) -> R | None:
    """The row of that id, whosever it is: the caller looks whether it may be seen."""
    return session.get(table, id) if plain_id(id) else None


def visible(
    who: Principal, table: type[tables.Session | tables.Run | tables.Sampler | tables.Checkpoint | tables.Operation]
) -> ColumnElement[bool]:
    """The condition for rows of `table` that `who` sees, for `where`."""
    own = table.org_id == who.org_id
    if who.project_id is None:
        return own
    if issubclass(table, tables.Session):
        return and_(own, table.project_id == who.project_id)
    sessions = select(tables.Session.id).filter_by(org_id=who.org_id, project_id=who.project_id)
    if issubclass(table, tables.Checkpoint):
        return and_(own, table.run_id.in_(select(tables.Run.id).where(tables.Run.session_id.in_(sessions))))
    return and_(own, table.session_id.in_(sessions))


def sees(session: Session, who: Principal, row: tables.Run | tables.Sampler | tables.Operation) -> bool:
    """True if `who` sees the row, which belongs to a session, by the rule of `visible`."""
    if row.org_id != who.org_id or who.project_id is None:
        return row.org_id == who.org_id
    owner = session.get(tables.Session, row.session_id)
    return owner is not None and owner.project_id == who.project_id


def session_by_id(session: Session, who: Principal, session_id: str) -> tables.Session:
    row = row_of_anyone(session, tables.Session, session_id)
    if row is None or row.org_id != who.org_id or who.project_id not in (None, row.project_id):
        raise NotFound(f"no session {quote(session_id)}")
    return row


def run_by_id(session: Session, who: Principal, run_id: str) -> tables.Run:
    row = row_of_anyone(session, tables.Run, run_id)
    if row is None or not sees(session, who, row):
        raise no_run(run_id)
    return row


def no_run(run_id: str) -> NotFound:
    return NotFound(f"no model {quote(run_id)}; `weft runs` lists the ids of those that this key sees")


def sampler_by_id(session: Session, who: Principal, sampler_id: str) -> tables.Sampler:
    row = row_of_anyone(session, tables.Sampler, sampler_id)
    if row is None or not sees(session, who, row):
        raise no_sampler(sampler_id)
    return row


def no_sampler(sampler_id: str) -> NotFound:
    return NotFound(f"no sampling session {quote(sampler_id)}")


def operation_by_id(session: Session, who: Principal, request_id: str) -> tables.Operation:
    row = row_of_anyone(session, tables.Operation, request_id)
    if row is None or not sees(session, who, row):
        raise NotFound(f"no request {quote(request_id)}", request_id=request_id)
    return row


def checkpoint_at(session: Session, who: Principal, path: CheckpointPath) -> tables.Checkpoint:
    """The checkpoint of that path, unless it has expired."""
    query = select(tables.Checkpoint).where(visible(who, tables.Checkpoint))
    row = session.scalars(query.filter_by(run_id=path.run_id, kind=path.kind, name=path.name)).one_or_none()
    if row is None or expired(row):
        readable_checkpoint(session, who, path)
        raise NotFound(f"checkpoint {path} is published, but not yours: copy it (copy_weights), and take the copy")
    return row


def readable_checkpoint(
    session: Session, who: Principal, path: CheckpointPath, access_token: str | None = None, *, keep: bool = False
) -> tables.Checkpoint:
    """A checkpoint to load, copy or sample from: one that `who` sees, or the owner of the API key `access_token`, or
    published by anybody. With `keep` nobody can delete it or its files before this transaction ends."""
    with unrestricted(session):
        lender = _lender(session, access_token) if access_token is not None else who
        readable = (tables.Checkpoint.public, visible(who, tables.Checkpoint), visible(lender, tables.Checkpoint))
        query = select(tables.Checkpoint).filter_by(run_id=path.run_id, kind=path.kind, name=path.name)
        query = query.where(or_(*readable))
        row = session.scalars(query.with_for_update(read=True) if keep else query).one_or_none()
    if row is None or expired(row):
        raise NotFound(f"no checkpoint {path}; `weft checkpoints` lists those that this key sees")
    return row


def _lender(session: Session, access_token: str) -> Principal:
    """The principal of a key that was sent along to lend weights."""
    lender = principal_of(session, find(session, access_token))
    if lender is None or lender.status in ENDED or not lender.scopes & _LENDING:
        raise Invalid(
            "weights_access_token: not an API key of this server that may read weights (the key of whom they belong to)"
        )
    return lender


def run_of(session: Session, checkpoint: tables.Checkpoint) -> tables.Run:
    """The run of a checkpoint that was found readable, in any organisation."""
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
