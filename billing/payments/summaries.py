"""Stripe's own sums of meter events: they decide rows that are too old to be resent, and are compared with ours
daily."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.money.alerts import raise_alert
from billing.payments.meters import event_name
from billing.payments.periods import end_of, name_of
from billing.payments.sender import mark_sent
from billing.payments.waits import is_due
from store.tables import StripeMeterCursor, StripeOutbox

if TYPE_CHECKING:
    from stripe import StripeClient

#: Stripe's summaries lag; this long after the last attempt they count as complete.
LAG = timedelta(hours=6)
ASK_AGAIN = timedelta(hours=1)


def meter_ids(client: StripeClient) -> dict[str, str]:
    """Stripe's id of each active meter, by the name of the meter's events."""
    meters = client.v1.billing.meters.list({"status": "active", "limit": 100})
    return {meter.event_name: meter.id for meter in meters.auto_paging_iter()}


def counted_uusd(
    client: StripeClient, ids: Mapping[str, str], meter: str, customer_id: str, period_start: datetime
) -> int:
    """Stripe's count for a customer on a meter in a month, in micro-USD."""
    params = {
        "customer": customer_id,
        "start_time": int(period_start.timestamp()),
        "end_time": int(end_of(period_start).timestamp()),
    }
    summaries = client.v1.billing.meters.event_summaries.list(ids[event_name(meter)], params)  # type: ignore[arg-type]
    return sum(round(summary.aggregated_value) for summary in summaries.auto_paging_iter())


def unclear(session: Session, now: datetime) -> list[StripeOutbox]:
    """Rows that only Stripe's sum can decide, old enough to be contained in it."""
    row = StripeOutbox
    query = select(row).where(row.state != "sent", row.state == "reconcile", is_due(row.next_attempt_at, now))
    found = session.scalars(query.where(row.last_sent_at <= now - LAG))
    # sorted here: with ORDER BY, or without "not sent", SQLite would read all rows
    return sorted(found, key=lambda row: row.id)


def decide(session: Session, row_id: int, counted: int, now: datetime) -> str:
    """Decide a row by Stripe's count. If nothing is counted beyond our rows, it did not arrive (pending again, with a
    new window); if it is counted, it did (sent); if the count fits neither, an alert is raised. Of a row that was never
    sent from here, anything counted beyond ours was sent from elsewhere, in order, and so is its beginning. Call it in
    a write. Returns the row's state."""
    row = session.get_one(StripeOutbox, row_id, with_for_update=True)
    if row.state != "reconcile":
        return row.state
    before = confirmed_uusd(session, row.org_id, row.meter, row.period_start)
    beyond = counted - before - row.value_uusd
    if counted == before:
        row.state, row.first_sent_at, row.next_attempt_at = "pending", None, now
    elif beyond == 0 or (beyond > 0 and not row.attempts):
        mark_sent(session, row, now)
    else:
        row.next_attempt_at = now + ASK_AGAIN
        raise_alert(
            session,
            kind="stripe_unclear",
            ref=row.identifier,
            message=f"Stripe counts {counted} micro-USD, which is neither {before} (without {row.identifier}) nor "
            f"{before + row.value_uusd} (with it): compare the two by hand",
            now=now,
        )
    return row.state


def confirmed_uusd(session: Session, org_id: str, meter: str, period_start: datetime) -> int:
    row = StripeOutbox
    query = select(func.sum(row.value_uusd)).where(row.org_id == org_id, row.meter == meter)
    return int(session.scalar(query.where(row.period_start == period_start, row.state == "sent")) or 0)


@dataclass(frozen=True)
class CursorState:
    org_id: str
    customer_id: str
    meter: str
    period_start: datetime


def cursors(session: Session, since: datetime) -> list[CursorState]:
    """The cursors of the months from `since` on whose rows were all confirmed long enough ago to be compared."""
    cursor, row = StripeMeterCursor, StripeOutbox
    found = []
    for state in session.scalars(select(cursor).where(cursor.period_start >= since)):
        mine = select(row).where(row.org_id == state.org_id, row.meter == state.meter)
        rows = list(session.scalars(mine.where(row.period_start == state.period_start).order_by(row.id)))
        if rows and all(entry.state == "sent" for entry in rows):
            found.append(CursorState(state.org_id, rows[-1].customer_id, state.meter, state.period_start))
    return found


def compare(session: Session, state: CursorState, counted: int, now: datetime) -> int:
    """Stripe's sum minus ours, in micro-USD; raises an alert unless that is zero. Call it in a write. Returns 0 while
    Stripe has not had time to count the last row."""
    row = StripeOutbox
    mine = select(func.max(row.sent_at)).where(row.org_id == state.org_id, row.meter == state.meter)
    last = session.scalar(mine.where(row.period_start == state.period_start))
    difference = counted - confirmed_uusd(session, state.org_id, state.meter, state.period_start)
    if difference == 0 or last is None or last > now - LAG:
        return 0
    raise_alert(
        session,
        kind="stripe_drift",
        ref=f"{state.org_id}:{state.meter}:{name_of(state.period_start)}:{now:%Y-%m-%d}",
        message=f"Stripe counts {difference:+d} micro-USD beside ours on meter {state.meter} of {state.org_id}",
        now=now,
    )
    return difference
