"""Usage becomes meter events. For each organisation, meter and month a cursor counts the micro-USD that are in the
outbox; usage beyond it becomes one new row, in the transaction that moves the cursor. The remainder below a micro-USD
waits for the next time, so rounding errors do not add up.
"""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta

from sqlalchemy import and_, exists, func, not_, or_, select, text
from sqlalchemy.orm import Session

from billing.money.wallets import Mode, set_mode, wallet_of
from billing.payments.client import NUSD_PER_UUSD
from billing.payments.periods import end_of, name_of, period_before, period_of
from store.database.bulk import insert_into
from store.tables import Invoice, LedgerEntry, StripeMeterCursor, StripeOutbox, UsageEvent, UsageHour, Wallet
from store.tables.base import any_index_but

#: Which kinds of usage each meter counts. A meter is one line of an invoice.
METERS: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "prefill": ("prefill", "cached_prefill"),
    "sample": ("sample",),
    "storage": ("storage",),
}

#: Written as in its index; otherwise SQLite does not see that the index has all columns.
_NOT_USAGE = text("ledger_entries.type <> 'usage'")


def event_name(meter: str) -> str:
    """The meter's name at Stripe."""
    return f"weft_{meter}"


def postpaid_organisations(session: Session) -> list[str]:
    """Organisations that are metered. Prepaid ones have paid already: metering would charge them twice."""
    query = select(Wallet.org_id).where(Wallet.mode == "postpaid").order_by(Wallet.org_id)
    return list(session.scalars(query))


def unclosed(session: Session, last: datetime) -> list[tuple[str, datetime]]:
    """Organisations and months to be closed: for the `last` month those that are metered, or were during it; and open
    earlier months. A month counts as over only once Stripe, which accepts no usage of the future, has accepted later
    usage: otherwise a clock that is years ahead would close the current month."""
    row, invoice = StripeOutbox, Invoice
    taken = select(func.max(row.period_start)).where(row.state == "sent").scalar_subquery()
    over = and_(row.period_start <= last, or_(row.period_start == last, row.period_start < taken))
    closed = exists().where(invoice.org_id == row.org_id, invoice.period_start == row.period_start)
    metered = session.execute(select(row.org_id, row.period_start).where(over, not_(closed)).distinct())
    months = {(org_id, start) for org_id, start in metered} | {(org, last) for org in postpaid_organisations(session)}
    return sorted(months, key=lambda month: (month[1], month[0]))


def change_mode(session: Session, org_id: str, mode: Mode, overdraft_nusd: int, now: datetime) -> Wallet:
    """Change how an organisation pays; call it in a write. What it uses while it is not postpaid is taken from its
    balance, so its cursors skip that usage. The same happens to postpaid usage that is not in the outbox yet."""
    if wallet_of(session, org_id).mode != "postpaid" and mode == "postpaid":
        this = period_of(now)
        for period in (period_before(this), this):
            for meter in METERS:
                cursor = _cursor(session, org_id, meter, period)
                cursor.sent_uusd += _beyond_uusd(session, org_id, meter, period, cursor)
    return set_mode(session, org_id, mode, overdraft_nusd)


def put_into_outbox(session: Session, org_id: str, customer_id: str, now: datetime) -> int:
    """Put new usage of an organisation into the outbox: of this month, and of the last one until it is invoiced. Call
    it in a write. Returns the number of rows."""
    this = period_of(now)
    periods = [this] if is_closed(session, org_id, period_before(this)) else [period_before(this), this]
    return sum(_put(session, org_id, customer_id, meter, period, now) for period in periods for meter in METERS)


def used_nusd(session: Session, org_id: str, period_start: datetime, kinds: tuple[str, ...]) -> int:
    """How much an organisation used of some kinds in a month, less the operations refunded in it. Read from the hourly
    sums, because settling waits meanwhile. Beyond 64 bits of nano-dollars SQLite raises an error instead of returning a
    wrong sum."""
    hour, event, entry, end = UsageHour, UsageEvent, LedgerEntry, end_of(period_start)
    used = select(func.sum(hour.amount_nusd)).where(hour.org_id == org_id, hour.kind.in_(kinds))
    used = used.where(hour.hour >= period_start, hour.hour < end)
    of_operation = and_(any_index_but(event.org_id) == entry.org_id, event.operation_id == entry.ref_id)
    refunded = select(func.sum(event.amount_nusd)).select_from(entry).join(event, of_operation)
    refunded = refunded.where(entry.org_id == org_id, _NOT_USAGE, entry.type == "refund")
    refunded = refunded.where(entry.ref_type == "operation", event.kind.in_(kinds))
    refunded = refunded.where(entry.at >= period_start, entry.at < end)
    return int(session.scalar(used) or 0) - int(session.scalar(refunded) or 0)


def invoiced_nusd(session: Session, org_id: str, period_start: datetime) -> int:
    """How much of a month's usage is invoiced: what is in the outbox, and the remainder below a micro-USD of each
    meter; 0 if no meter has reached one."""
    row = StripeOutbox
    query = select(row.meter, func.sum(row.value_uusd)).where(row.org_id == org_id, row.period_start == period_start)
    put_uusd = {meter: int(value) for meter, value in session.execute(query.group_by(row.meter))}
    rests = (used_nusd(session, org_id, period_start, kinds) % NUSD_PER_UUSD for kinds in METERS.values())
    return sum(put_uusd.values()) * NUSD_PER_UUSD + sum(rests) if put_uusd else 0


def unput_uusd(session: Session, org_id: str, period_start: datetime) -> int:
    """How much of a month's usage is not in the outbox yet, or is there and was refunded since."""
    missing = 0
    for meter in METERS:
        cursor = session.get(StripeMeterCursor, (org_id, meter, period_start), populate_existing=True)
        missing += abs(_beyond_uusd(session, org_id, meter, period_start, cursor))
    return missing


def _beyond_uusd(session: Session, org_id: str, meter: str, period: datetime, cursor: StripeMeterCursor | None) -> int:
    """How much was used of a meter beyond the cursor; negative if more was refunded."""
    return used_nusd(session, org_id, period, METERS[meter]) // NUSD_PER_UUSD - (cursor.sent_uusd if cursor else 0)


def is_closed(session: Session, org_id: str, period_start: datetime) -> bool:
    """True if the month that begins at `period_start` has its invoice."""
    return session.scalar(select(Invoice.id).filter_by(org_id=org_id, period_start=period_start)) is not None


def _put(session: Session, org_id: str, customer_id: str, meter: str, period: datetime, now: datetime) -> int:
    cursor = _cursor(session, org_id, meter, period)
    delta_uusd = _beyond_uusd(session, org_id, meter, period, cursor)
    if delta_uusd == 0:
        return 0
    cursor.seq += 1
    cursor.sent_uusd += delta_uusd
    session.add(
        StripeOutbox(
            org_id=org_id,
            meter=meter,
            period_start=period,
            # The last part makes it unique: a restored database would give its row numbers once more.
            identifier=f"{org_id}:{meter}:{name_of(period)}:{cursor.seq}:{uuid.uuid4().hex[:8]}",
            customer_id=customer_id,
            value_uusd=delta_uusd,
            occurred_at=min(now, end_of(period) - timedelta(seconds=1)).replace(microsecond=0),
            state="pending",
            next_attempt_at=now,
        )
    )
    return 1


def _cursor(session: Session, org_id: str, meter: str, period: datetime) -> StripeMeterCursor:
    """The cursor, locked before the sum is taken, so that two processes never put the same usage in."""
    key = {"org_id": org_id, "meter": meter, "period_start": period}
    first = insert_into(session, StripeMeterCursor).values(**key, sent_uusd=0, seq=0)
    session.execute(first.on_conflict_do_nothing())
    return session.get_one(StripeMeterCursor, tuple(key.values()), with_for_update=True, populate_existing=True)
