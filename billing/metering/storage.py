"""Storage: every checkpoint is metered by the hour, from its commit to its deletion or expiry; and so are weights that
have no name, for as long as a session has samplers on them.

A span is the time for which a checkpoint stores its bytes. `begin` and `end` are called in the transactions that make
and delete checkpoints, so that spans are exact; `meter`, run every hour, also begins missing spans and ends those of
checkpoints that are gone. A span gives one usage event for each UTC hour that it touches, of bytes x time in that hour,
written once the hour or the span is over; span and hour name it, so it is written once. Nothing is held for storage,
because it cannot be refused.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from billing.metering.charges import Charge, settle
from billing.money.accounts import Payer
from billing.prices import STORAGE, PriceList
from store import tables
from store.database.bulk import take_locks
from store.database.db import Database
from store.tables import Checkpoint, Sampler, StorageSpan

HOUR = timedelta(hours=1)
_HOUR_US = 3_600_000_000
#: Spans metered in one transaction.
AT_A_TIME = 200


def begin(session: Session, checkpoint: Checkpoint, at: datetime) -> None:
    """Begin the span of a checkpoint, whose row is flushed, at `at`."""
    _begin(session, checkpoint.id, checkpoint.run_id, checkpoint.size_bytes, at)


def begin_sampler(session: Session, adapter_ref: str, run_id: str, size_bytes: int, at: datetime) -> None:
    """Begin the span of weights that only samplers have, unless the run's session is over, and with it the samplers."""
    owner = session.scalar(select(tables.Session.state).join(tables.Run).where(tables.Run.id == run_id))
    if owner == "active":
        _begin(session, _weights_of(adapter_ref), run_id, size_bytes, at)


def end_samplers(session: Session, adapter_refs: Iterable[str], at: datetime) -> None:
    """End the spans of weights that no sampler has any more."""
    ids = [_weights_of(ref) for ref in adapter_refs if ref]
    chosen = StorageSpan.checkpoint_id.in_(ids), StorageSpan.ended_at.is_(None)
    session.execute(update(StorageSpan).where(*chosen).values(ended_at=at))


def end_session(session: Session, session_id: str, at: datetime) -> None:
    """A session is over, and with it the samplers on weights that have no name."""
    unnamed = Sampler.session_id == session_id, Sampler.model_path.is_(None), Sampler.adapter_ref != ""
    end_samplers(session, session.scalars(select(Sampler.adapter_ref).where(*unnamed).distinct()).all(), at)


def _weights_of(adapter_ref: str) -> str:
    """What a folder of weights is named by in its span."""
    return adapter_ref.rpartition("/")[2]


def _begin(session: Session, id: str, run_id: str, size_bytes: int, at: datetime) -> None:
    query = select(tables.Session, tables.Run.base_model).join(tables.Run, tables.Run.session_id == tables.Session.id)
    owner, base_model = session.execute(query.where(tables.Run.id == run_id)).one()
    session.add(
        StorageSpan(
            id=uuid.uuid4().hex,
            org_id=owner.org_id,
            checkpoint_id=id,
            run_id=run_id,
            session_id=owner.id,
            base_model=base_model,
            project_id=owner.project_id,
            key_id=owner.key_id,
            user_id=owner.user_id,
            size_bytes=size_bytes,
            started_at=at,
            ended_at=None,
            metered_until=at,
        )
    )
    session.flush()


def end(session: Session, checkpoint: Checkpoint, at: datetime) -> None:
    """End the span of a checkpoint at `at`, or when it expired if that was earlier."""
    over = min(at, checkpoint.expires_at) if checkpoint.expires_at is not None else at
    chosen = StorageSpan.checkpoint_id == checkpoint.id, StorageSpan.ended_at.is_(None)
    session.execute(update(StorageSpan).where(*chosen).values(ended_at=over))


def byte_hours(size_bytes: int, start: datetime, stop: datetime) -> int:
    """Bytes x hours, rounded half up."""
    microseconds = (stop - start) // timedelta(microseconds=1)
    return (size_bytes * microseconds + _HOUR_US // 2) // _HOUR_US


def meter(database: Database, prices: PriceList, now: datetime) -> dict[str, int]:
    """Meter all spans in hours that are over by `now`. For the jobs; may be called at any time, repeatedly."""
    counts = {
        "begun": database.write_now(lambda s: _adopt(s, now)),
        "ended": database.write_now(lambda s: _abandon(s, now)),
    }
    counts |= {"events": 0, "nusd": 0}
    while True:
        events, amount = database.write_now(lambda session: _meter_some(session, prices, now))
        counts["events"] += events
        counts["nusd"] += amount
        if not events:
            return counts


def _adopt(session: Session, now: datetime) -> int:
    """Begin the spans of checkpoints that have none: they were made before storage was metered."""
    take_locks(session, ["storage spans"])  # two that look at once would begin two spans for one checkpoint
    open_spans = select(StorageSpan.checkpoint_id).where(StorageSpan.ended_at.is_(None))
    alive = or_(Checkpoint.expires_at.is_(None), Checkpoint.expires_at > now)
    found = session.scalars(select(Checkpoint).where(Checkpoint.id.not_in(open_spans), alive)).all()
    for checkpoint in found:
        begin(session, checkpoint, now)
    return len(found)


def _abandon(session: Session, now: datetime) -> int:
    """End the spans of checkpoints and samplers that are gone, or have expired and wait to be deleted."""
    for checkpoint in session.scalars(select(Checkpoint).where(Checkpoint.expires_at <= now)):
        end(session, checkpoint, now)
    sampled = select(Sampler.adapter_ref).join(tables.Session, tables.Session.id == Sampler.session_id)
    refs = sampled.where(Sampler.model_path.is_(None), tables.Session.state == "active").scalar_subquery()
    gone = StorageSpan.checkpoint_id.not_in(select(Checkpoint.id)) & ("weights/" + StorageSpan.checkpoint_id).not_in(
        refs
    )
    chosen = update(StorageSpan).where(StorageSpan.ended_at.is_(None), gone).values(ended_at=now)
    return len(session.scalars(chosen.returning(StorageSpan.id)).all())


def _meter_some(session: Session, prices: PriceList, now: datetime) -> tuple[int, int]:
    """Meter some spans, up to the last full hour or their end. Returns the number of pieces, and what they cost."""
    span = StorageSpan
    over = now.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    # A span that ended after `now` is not over by then: an hour is metered in one piece.
    due = select(span).where(or_(span.metered_until < over, span.ended_at <= now), span.metered_until <= now)
    chosen = session.scalars(due.order_by(span.org_id, span.id).limit(AT_A_TIME)).all()
    take_locks(session, {span.org_id for span in chosen})
    query = select(span).where(span.id.in_([span.id for span in chosen])).execution_options(populate_existing=True)
    charges: list[Charge] = []
    pieces = 0
    for row in session.scalars(query):  # again: another process may have metered them while this one waited
        ended = row.ended_at is not None and row.ended_at <= now
        stop = row.ended_at if row.ended_at is not None and ended else over
        found = _charges(row, list(hours(row.metered_until, stop)))
        pieces += max(1, len(found)) if ended else len(found)
        charges += found
        if ended:
            session.delete(row)
        elif stop > row.metered_until:
            row.metered_until = stop
    return pieces, settle(session, charges, prices, now)


def hours(start: datetime, stop: datetime) -> Iterator[tuple[datetime, datetime]]:
    """The pieces of a stretch of time, cut at full hours of UTC."""
    start = start.astimezone(UTC)
    while start < stop:
        following = start.replace(minute=0, second=0, microsecond=0) + HOUR
        yield start, min(following, stop)
        start = following


def _charges(span: StorageSpan, pieces: Sequence[tuple[datetime, datetime]]) -> list[Charge]:
    return [
        Charge(
            payer=Payer(span.org_id, span.project_id, span.key_id),
            session_id=span.session_id,
            run_id=span.run_id,
            operation_id=f"{STORAGE}:{span.id}:{start:%Y%m%d%H}",
            base_model=span.base_model,
            accepted_at=start,
            quantities={STORAGE: byte_hours(span.size_bytes, start, stop)},
            hold_nusd=None,
            user_id=span.user_id,
        )
        for start, stop in pieces
    ]
