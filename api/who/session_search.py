"""Searching sessions. SQL filters what it can; names and metadata are compared here, by Unicode's rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, and_, false, func, null, or_, select
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

from api.checks.runs import check_text, check_utc
from api.errors import Invalid, quote
from api.who.lookup import live_checkpoints, plain_id, visible
from api.who.principal import Principal
from api.who.tokens import key_of, owner_urn
from store import tables

#: The project of sessions that were put into no other.
DEFAULT_PROJECT = "default"
#: How many sessions' names or metadata are compared for one page, and how many are read at a time: a thousand may take
#: a second, in which the interpreter does little else.
MOST_LOOKED_AT, BATCH = 1000, 100
#: How many characters a searched name may have (names are no longer), and how many statuses one search.
MAX_NAME, MAX_STATUSES = 256, 64

S = tables.Session


def search(session: Session, who: Principal, wanted: SessionSearchRequest) -> SessionSearchResponse:
    """One page, newest first, and where the next one starts. Where names or metadata are compared, a page may have
    fewer sessions than asked for, and none: it ends with the last that was looked at."""
    matches = _comparison(wanted)
    most = wanted.limit if matches is None else MOST_LOOKED_AT
    ids: list[str] = []
    last: Row[Any] | None = None  # the last one looked at: the next page starts after it
    more = False
    for number, row in enumerate(_candidates(session, who, wanted, most + 1)):
        if number == most:
            more = True
            break
        if matches is None or matches(row):
            if len(ids) == wanted.limit:
                more = True
                break
            ids.append(row.id)
        last = row
    rows = {row.id: row for row in session.scalars(select(S).where(S.id.in_(ids)))}
    stored = _stored(session, ids)
    cursor = SessionSearchCursor(last_created_at=last.created_at, last_session_id=last.id) if more and last else None
    return SessionSearchResponse(
        sessions=[_summary(rows[id], stored.get(id, _NOTHING)) for id in ids if id in rows], next_cursor=cursor
    )


def text_values(metadata: dict[str, Any]) -> dict[str, str]:
    """Metadata as text values: clients read it as text, whatever they stored."""
    return {str(key): value if isinstance(value, str) else str(value) for key, value in metadata.items()}


def _candidates(session: Session, who: Principal, wanted: SessionSearchRequest, most: int) -> Iterator[Row[Any]]:
    """The compared fields of each session: metadata are up to 16 KB, and the reader may need nothing of them."""
    compared = S.user_metadata if wanted.user_metadata else null().label("user_metadata")
    query = select(S.id, S.created_at, S.display_name, compared)
    query = query.where(visible(who, S), *_conditions(who, wanted))
    query = query.order_by(S.created_at.desc(), S.id.desc()).limit(most)
    yield from session.execute(_after(query, wanted.cursor).execution_options(yield_per=BATCH))


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
        if len(wanted.statuses) > MAX_STATUSES:
            raise Invalid(f"statuses: {len(wanted.statuses)} statuses, the limit is {MAX_STATUSES}")
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
    """The condition for these statuses. Sessions here are never cancelled or failed as a whole: those statuses match
    nothing."""
    if isinstance(status, ClientFinishedSessionStatusQuery):
        finished = S.state == "finished"
        return finished if status.reasons is None else and_(finished, S.finish_reason.in_(status.reasons))
    return S.state == "active" if status.type == "active" else false()


def _comparison(wanted: SessionSearchRequest) -> Callable[[Row[Any]], bool] | None:
    """The comparison that SQL cannot do on a candidate; None if there is none."""
    if wanted.display_name is None and not wanted.user_metadata:
        return None
    words = dict.fromkeys((check_text(wanted.display_name, "display_name", MAX_NAME) or "").casefold().split())

    def matches(row: Row[Any]) -> bool:
        if words and row.id != wanted.session_id:
            name = (row.display_name or "").casefold()
            if not all(word in name for word in words):
                return False
        metadata = text_values(row.user_metadata) if wanted.user_metadata else {}
        return all(metadata.get(key) == value for key, value in wanted.user_metadata.items())

    return matches


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
    """The status of a session; None if it fell silent: it is neither finished nor known to run."""
    if row.state == "finished":
        reason = ClientSessionFinishReason(type=row.finish_reason or "success")
        return ClientSessionFinished(reason=reason, detail=row.finish_detail)
    return SessionActive() if row.state == "active" else None
