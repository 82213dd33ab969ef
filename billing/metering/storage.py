"""Storage: every checkpoint is metered by the hour, from its commit to its deletion or expiry; and so are unnamed
weights, for as long as a session has samplers on them. Weights whose checkpoint is deleted while samplers or live runs
still use them stay stored, and are metered on.

A span is the time for which a checkpoint stores its bytes. `begin` and `end` are called in the transactions that make
and delete checkpoints, so that spans are exact; `meter`, run every hour, also begins missing spans and ends those of
checkpoints that are gone. A span gives one usage event for each UTC hour that it touches, of bytes x time in that hour,
written once the hour or the span is over; span and hour name it, so it is written once. Nothing is held for storage,
because it cannot be refused.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

from sqlalchemy import ColumnElement, and_, func, not_, or_, select, update
from sqlalchemy.orm import Session

from billing.metering.charges import Charge, settle
from billing.money.accounts import Payer
from billing.prices import STORAGE, PriceList
from store import tables
from store.database.bulk import take_locks
from store.database.caller import unrestricted
from store.database.db import Database
from store.tables import LOADS, Checkpoint, Operation, Run, Sampler, StorageSpan

HOUR = timedelta(hours=1)
_HOUR_US = 3_600_000_000
#: The longest stretch of time that one call meters. If a clock is years ahead for a moment, this is all that is billed
#: too early; the hours that follow are not billed again.
MOST = timedelta(days=7)
#: How many spans one transaction meters.
AT_A_TIME = 200
#: Source weights of operations that begin a run from a checkpoint, or load one.
_SOURCE_REF = Operation.plan["source", "ref"].as_string()
#: A span of weights without a checkpoint has the whole `adapter_ref`: its last part may be the id of a checkpoint.
_NAMELESS = StorageSpan.checkpoint_id.startswith("weights/")


def begin(session: Session, checkpoint: Checkpoint, at: datetime) -> None:
    """Begin the span of a checkpoint at `at`; its row is flushed already."""
    _begin(session, checkpoint.id, checkpoint.run_id, checkpoint.size_bytes, at)


def begin_sampler(session: Session, adapter_ref: str, run_id: str, size_bytes: int, at: datetime) -> None:
    """Begin the span of weights that only samplers use, unless the run's session, and so its samplers, has ended."""
    owner = session.scalar(select(tables.Session.state).join(tables.Run).where(tables.Run.id == run_id))
    if owner == "active":
        _begin(session, _weights_of(adapter_ref), run_id, size_bytes, at)


def end_samplers(session: Session, adapter_refs: Iterable[str], at: datetime) -> None:
    """End the spans of weights that no sampler uses any more."""
    ids = [_weights_of(ref) for ref in adapter_refs if ref]
    chosen = StorageSpan.checkpoint_id.in_(ids), StorageSpan.ended_at.is_(None)
    session.execute(update(StorageSpan).where(*chosen).values(ended_at=at))


def end_session(session: Session, session_id: str, at: datetime) -> None:
    """A session has ended: end the spans of unnamed weights that its samplers used."""
    unnamed = Sampler.session_id == session_id, Sampler.model_path.is_(None), Sampler.adapter_ref != ""
    end_samplers(session, session.scalars(select(Sampler.adapter_ref).where(*unnamed).distinct()).all(), at)
    # so that the index is used
    org = select(tables.Session.org_id).where(tables.Session.id == session_id).scalar_subquery()
    held = select(StorageSpan).where(StorageSpan.org_id == org, StorageSpan.ended_at.is_(None))
    _pass_on(session, session.scalars(held.where(StorageSpan.session_id == session_id, _NAMELESS)).all(), at)


def _weights_of(adapter_ref: str) -> str:
    """The last part of a ref of weights, by which their span names them."""
    return adapter_ref.rpartition("/")[2]


def _begin(session: Session, id: str, run_id: str, size_bytes: int, at: datetime) -> None:
    query = select(tables.Session, Run.base_model).join(Run, Run.session_id == tables.Session.id)
    owner, base_model = session.execute(query.where(Run.id == run_id)).one()
    session.add(_span(owner, id, run_id, base_model, size_bytes, at))
    session.flush()


def _span(owner: tables.Session, id: str, run_id: str, base_model: str, size_bytes: int, at: datetime) -> StorageSpan:
    return StorageSpan(
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


def end(session: Session, checkpoints: Sequence[Checkpoint], at: datetime) -> None:
    """End the spans of checkpoints at `at`, or when they expired if that was earlier. From then on the weights are
    metered for those who still use them."""
    for checkpoint in checkpoints:
        chosen = StorageSpan.checkpoint_id == checkpoint.id, StorageSpan.ended_at.is_(None)
        session.execute(update(StorageSpan).where(*chosen).values(ended_at=_over(checkpoint, at)))
    for start in range(0, len(checkpoints), AT_A_TIME):
        with unrestricted(session):  # published weights may be used by other organisations
            _keep(session, checkpoints[start : start + AT_A_TIME], at)


def expired(session: Session, now: datetime, *which: ColumnElement[bool]) -> Sequence[Checkpoint]:
    """Some expired checkpoints, under the locks of their organisations until the transaction ends: another checkpoint
    may be saved under an expired name at this moment, and must not be mistaken for it."""
    over = select(Checkpoint).where(Checkpoint.expires_at <= now, *which)
    found = session.scalars(over.order_by(Checkpoint.expires_at).limit(AT_A_TIME)).all()
    take_locks(session, {row.org_id for row in found})
    again = over.where(Checkpoint.id.in_([row.id for row in found])).execution_options(populate_existing=True)
    return session.scalars(again).all()


def _over(checkpoint: Checkpoint, at: datetime) -> datetime:
    return min(at, checkpoint.expires_at) if checkpoint.expires_at is not None else at


def _keep(session: Session, gone: Sequence[Checkpoint], at: datetime) -> None:
    """Begin spans of weights that stay although their checkpoints are deleted: one for each organisation that uses them
    and has no other checkpoint of them."""
    refs, ids = {row.ref for row in gone}, [row.id for row in gone]
    keepers = _keepers(session, refs)
    if not keepers:
        return
    alive = or_(Checkpoint.expires_at.is_(None), Checkpoint.expires_at > at)
    named = select(Checkpoint.org_id, Checkpoint.ref).where(Checkpoint.ref.in_(refs), Checkpoint.id.not_in(ids), alive)
    held = select(StorageSpan.org_id, StorageSpan.checkpoint_id)
    held = held.where(StorageSpan.checkpoint_id.in_(refs), StorageSpan.ended_at.is_(None))
    paid = {(org_id, ref) for query in (named, held) for org_id, ref in session.execute(query)}
    for row in gone:
        base_model = session.get_one(Run, row.run_id).base_model
        for ref, owner in keepers:
            if ref == row.ref and (owner.org_id, ref) not in paid:
                paid.add((owner.org_id, ref))
                run_id = row.run_id if owner.org_id == row.org_id else ""
                session.add(_span(owner, ref, run_id, base_model, row.size_bytes, _over(row, at)))
    session.flush()


def _keepers(session: Session, refs: Collection[str]) -> list[tuple[str, tables.Session]]:
    """(weights, a session that has not ended and uses them, by a sampler or a live run loaded from them), the oldest
    first. Their files stay for these (`scheduler.journal.ending.references`)."""
    owner = tables.Session
    sampled = select(Sampler.adapter_ref, owner).join(owner, owner.id == Sampler.session_id)
    loaded = select(_SOURCE_REF, owner).join(Run, Run.id == Operation.lane).join(owner, owner.id == Run.session_id)
    found = {
        (ref, row.id): (ref, row)
        for query in (
            sampled.where(Sampler.adapter_ref.in_(refs), owner.state == "active"),
            loaded.where(LOADS, _SOURCE_REF.in_(refs), Run.state == "live", owner.state == "active"),
        )
        for ref, row in session.execute(query)
    }
    return sorted(found.values(), key=lambda pair: (pair[1].created_at, pair[1].id))


def _pass_on(session: Session, spans: Sequence[StorageSpan], at: datetime) -> None:
    """The sessions of these spans have ended: other sessions of their organisations that use the same weights continue
    them."""
    if not spans:
        return
    keepers = _keepers(session, {span.checkpoint_id for span in spans})
    for span in spans:
        span.ended_at = at
        others = (owner for ref, owner in keepers if ref == span.checkpoint_id and owner.org_id == span.org_id)
        heir = next((owner for owner in others if owner.id != span.session_id), None)
        if heir is not None:
            session.add(_span(heir, span.checkpoint_id, span.run_id, span.base_model, span.size_bytes, at))
    session.flush()


def byte_hours(size_bytes: int, start: datetime, stop: datetime) -> int:
    """Bytes x hours, rounded half up."""
    microseconds = (stop - start) // timedelta(microseconds=1)
    return (size_bytes * microseconds + _HOUR_US // 2) // _HOUR_US


def meter(database: Database, prices: PriceList, now: datetime) -> dict[str, int]:
    """Meter all spans in hours that have ended by `now`, up to a week after the last metered or begun one. For the
    jobs; may be called at any time, repeatedly."""
    counts = {"begun": database.write_now(lambda s: _adopt(s, now))}
    while database.write_now(lambda s: _end_expired(s, now)):
        pass
    counts |= {"ended": database.write_now(lambda s: _abandon(s, now)), "events": 0, "nusd": 0}
    with database.read() as session:
        newest = session.scalar(select(func.max(StorageSpan.metered_until)))
    until = now if newest is None else min(now, newest + MOST)
    while True:
        events, amount = database.write_now(lambda session: _meter_some(session, prices, until, now))
        counts["events"] += events
        counts["nusd"] += amount
        if not events:
            return counts


def _adopt(session: Session, now: datetime) -> int:
    """Begin spans of checkpoints without one: they were made before storage was metered."""
    take_locks(session, ["storage spans"])  # two processes at once would begin two spans for one checkpoint
    open_spans = select(StorageSpan.checkpoint_id).where(StorageSpan.ended_at.is_(None))
    alive = or_(Checkpoint.expires_at.is_(None), Checkpoint.expires_at > now)
    found = session.scalars(select(Checkpoint).where(Checkpoint.id.not_in(open_spans), alive)).all()
    for checkpoint in found:
        begin(session, checkpoint, now)
    return len(found)


def _end_expired(session: Session, now: datetime) -> int:
    """End some spans of checkpoints that have expired but are not deleted yet."""
    metered = Checkpoint.id.in_(select(StorageSpan.checkpoint_id).where(StorageSpan.ended_at.is_(None)))
    over = expired(session, now, metered)
    end(session, over, now)
    return len(over)


def _abandon(session: Session, now: datetime) -> int:
    """End spans of checkpoints and samplers that are gone. An end that is hours from `now` was set by a fast clock."""
    ahead = StorageSpan.ended_at > now + HOUR, StorageSpan.metered_until <= now
    session.execute(update(StorageSpan).where(*ahead).values(ended_at=now))
    active = select(tables.Session.id).where(tables.Session.state == "active")
    held = select(StorageSpan).where(StorageSpan.ended_at.is_(None), _NAMELESS, StorageSpan.session_id.not_in(active))
    _pass_on(session, session.scalars(held).all(), now)
    sampled = select(Sampler.adapter_ref).join(tables.Session, tables.Session.id == Sampler.session_id)
    refs = sampled.where(Sampler.model_path.is_(None), tables.Session.state == "active").scalar_subquery()
    gone = and_(
        StorageSpan.checkpoint_id.not_in(select(Checkpoint.id)),
        ("weights/" + StorageSpan.checkpoint_id).not_in(refs),
        not_(_NAMELESS),
    )
    chosen = update(StorageSpan).where(StorageSpan.ended_at.is_(None), gone).values(ended_at=now)
    return len(session.scalars(chosen.returning(StorageSpan.id)).all())


def _meter_some(session: Session, prices: PriceList, until: datetime, now: datetime) -> tuple[int, int]:
    """Meter some spans, up to the last full hour before `until`, or their end. Returns the number of pieces, and what
    they cost."""
    span = StorageSpan
    over = until.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    # A span that ends after `until` is not over by then: an hour is metered in one piece.
    due = select(span).where(or_(span.metered_until < over, span.ended_at <= until), span.metered_until <= until)
    chosen = session.scalars(due.order_by(span.org_id, span.id).limit(AT_A_TIME)).all()
    take_locks(session, {span.org_id for span in chosen})
    query = select(span).where(span.id.in_([span.id for span in chosen])).execution_options(populate_existing=True)
    charges: list[Charge] = []
    pieces = 0
    for row in session.scalars(query):  # read again: another process may have metered them meanwhile
        ended = row.ended_at is not None and row.ended_at <= until
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
    """The pieces of a time, cut at full hours of UTC."""
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
            run_id=span.run_id or None,
            operation_id=f"{STORAGE}:{span.id}:{start:%Y%m%d%H}",
            base_model=span.base_model,
            accepted_at=start,
            quantities={STORAGE: byte_hours(span.size_bytes, start, stop)},
            hold_nusd=None,
            user_id=span.user_id,
        )
        for start, stop in pieces
    ]
