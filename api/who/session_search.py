"""Finding sessions: what SQL can say, SQL filters; names and metadata are compared here, as Unicode has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, false, func, or_, select
from sqlalchemy.orm import Session
from weft.wire.sessions import (
    ClientFinishedSessionStatusQuery,
    ClientSessionFinished,
    ClientSessionFinishReason,
    SessionActive,
    SessionSearchCursor,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionStatus,
    SessionStatusQuery,
    SessionSummary,
    UserSearchOwner,
)

from api.checks.times import check_utc
from api.errors import Invalid, quote
from api.who.lookup import live_checkpoints, plain_id, visible
from api.who.principal import Principal
from api.who.tokens import key_of, owner_urn
from store import tables

#: The project of sessions that were put into no other.
DEFAULT_PROJECT = "default"
#: Sessions read at a time while a page fills.
BATCH = 500

S = tables.Session


def search(session: Session, who: Principal, wanted: SessionSearchRequest) -> SessionSearchResponse:
    """One page, newest first, and where the next one starts."""
    found: list[tables.Session] = []
    more = False
    for row in _candidates(session, who, wanted):
        if not _matches(row, wanted):
            continue
        if len(found) == wanted.limit:
            more = True
            break
        found.append(row)
    stored = _stored(session, [row.id for row in found])
    last = found[-1] if more else None
    return SessionSearchResponse(
        sessions=[_summary(row, stored.get(row.id, _NOTHING)) for row in found],
        next_cursor=SessionSearchCursor(last_created_at=last.created_at, last_session_id=last.id) if last else None,
    )


def text_values(metadata: dict[str, Any]) -> dict[str, str]:
    """Clients read metadata back as text, whatever they stored."""
    return {str(key): value if isinstance(value, str) else str(value) for key, value in metadata.items()}


def _candidates(session: Session, who: Principal, wanted: SessionSearchRequest) -> Iterator[tables.Session]:
    query = select(S).where(visible(who, S), *_conditions(who, wanted))
    query = query.order_by(S.created_at.desc(), S.id.desc()).limit(BATCH)
    after = wanted.cursor
    while True:
        rows = list(session.scalars(_after(query, after)))
        yield from rows
        if len(rows) < BATCH:
            return
        after = SessionSearchCursor(last_created_at=rows[-1].created_at, last_session_id=rows[-1].id)


def _after(query: Select[Any], cursor: SessionSearchCursor | None) -> Select[Any]:
    if cursor is None:
        return query
    if not plain_id(cursor.last_session_id):
        raise Invalid(f"cursor.last_session_id: not a session, got {quote(cursor.last_session_id)}")
    check_utc(cursor.last_created_at, "cursor.last_created_at")
    same_time = and_(S.created_at == cursor.last_created_at, S.id < cursor.last_session_id)
    return query.where(or_(S.created_at < cursor.last_created_at, same_time))


def _conditions(who: Principal, wanted: SessionSearchRequest) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if isinstance(wanted.owner, UserSearchOwner):
        conditions.append(S.key_id.in_([_key(urn) for urn in wanted.owner.owner_urns]))
    elif wanted.owner.type == "own":
        conditions.append(who.made())
    if wanted.project_ids is not None:
        named = [project for project in wanted.project_ids if "\0" not in project]
        in_default = S.project_id.is_(None) if DEFAULT_PROJECT in named else false()
        conditions.append(or_(S.project_id.in_(named), in_default))
    if wanted.statuses is not None:
        conditions.append(or_(*(_has_status(status) for status in wanted.statuses)))
    if wanted.session_id is not None and wanted.display_name is None:
        conditions.append(S.id == wanted.session_id if plain_id(wanted.session_id) else false())
    return conditions


def _key(urn: str) -> int:
    try:
        return key_of(urn)
    except ValueError:
        raise Invalid(f"owner.owner_urns: {quote(urn)} is not an owner; they read like {owner_urn(1)}") from None


def _has_status(status: SessionStatusQuery) -> ColumnElement[bool]:
    """Sessions here are never cancelled or failed as a whole: those match nothing."""
    if isinstance(status, ClientFinishedSessionStatusQuery):
        finished = S.state == "finished"
        return finished if status.reasons is None else and_(finished, S.finish_reason.in_(status.reasons))
    return S.state == "active" if status.type == "active" else false()


def _matches(row: tables.Session, wanted: SessionSearchRequest) -> bool:
    if wanted.display_name is not None and row.id != wanted.session_id:
        name = (row.display_name or "").casefold()
        if not all(word in name for word in wanted.display_name.casefold().split()):
            return False
    metadata = text_values(row.user_metadata)
    return all(metadata.get(key) == value for key, value in wanted.user_metadata.items())


@dataclass(frozen=True)
class _Stored:
    checkpoints: int
    size_bytes: int


_NOTHING = _Stored(0, 0)


def _stored(session: Session, session_ids: list[str]) -> dict[str, _Stored]:
    """Checkpoints of these sessions' runs that have not expired."""
    sums = (tables.Run.session_id, func.count(), func.sum(tables.Checkpoint.size_bytes))
    query = select(*sums).join(tables.Run, tables.Run.id == tables.Checkpoint.run_id).where(live_checkpoints())
    query = query.where(tables.Run.session_id.in_(session_ids)).group_by(tables.Run.session_id)
    return {session_id: _Stored(count, int(size or 0)) for session_id, count, size in session.execute(query)}


def _summary(row: tables.Session, stored: _Stored) -> SessionSummary:
    return SessionSummary(
        session_id=row.id,
        created_at=row.created_at,
        owner=owner_urn(row.key_id) if row.key_id is not None else "",
        project_id=row.project_id or DEFAULT_PROJECT,
        status=_status(row),
        checkpoints_count=stored.checkpoints,
        checkpoint_storage_bytes=stored.size_bytes,
        display_name=row.display_name,
        user_metadata=text_values(row.user_metadata),
    )


def _status(row: tables.Session) -> SessionStatus | None:
    """None for one that fell silent: it neither finished nor is it running."""
    if row.state == "finished":
        reason = ClientSessionFinishReason(type=row.finish_reason or "success")
        return ClientSessionFinished(reason=reason, detail=row.finish_detail)
    return SessionActive() if row.state == "active" else None
