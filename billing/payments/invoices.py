"""Invoices of postpaid organisations. We close a month first, once all its meter events are confirmed and the books
agree; then Stripe's invoice is compared with our total, and its payment credited.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from billing.money import ledger
from billing.money.alerts import raise_alert, resolve_alert
from billing.payments.client import NUSD_PER_CENT
from billing.payments.customers import OF_METERS
from billing.payments.meters import METERS, invoiced_nusd, is_closed, unput_uusd
from billing.payments.periods import end_of, name_of, period_of
from billing.reports.reconcile import check
from store.database import audit
from store.database.bulk import insert_into, take_locks
from store.database.db import Database
from store.tables import Invoice, Organisation, StripeOutbox, Wallet

EVENTS = (
    "invoice.finalized",
    "invoice.paid",
    "invoice.payment_failed",
    "invoice.voided",
    "invoice.marked_uncollectible",
)

#: A month is closed at the earliest this long after its end.
CLOSE_AFTER = timedelta(hours=1)
#: If it is still not closed this long after its end, an alert is raised.
CLOSE_BY = timedelta(hours=48)
#: Stripe takes no smaller charge: it adds the amount to what the customer owes on the next invoice.
SMALLEST_CHARGE_CENTS = 50
#: Each line of an invoice is rounded to a cent.
ROUNDING_NUSD = len(METERS) * NUSD_PER_CENT // 2


class NotClosedHere(RuntimeError):
    """Stripe's invoice came before the month was closed here: try again later."""


def reopen(session: Session, now: datetime) -> int:
    """Reopen months that are not over, closed by a fast clock: they continue, and are closed at their end. Call it in a
    write. Returns how many."""
    early = Invoice.period_start >= period_of(now), Invoice.status == "closed", Invoice.stripe_invoice_id.is_(None)
    return len(session.scalars(delete(Invoice).where(*early).returning(Invoice.id)).all())


def close(database: Database, org_id: str, period_start: datetime, now: datetime) -> bool:
    """Close a month of an organisation. Returns False if it is closed already, or cannot be closed yet."""
    if now < end_of(period_start) + CLOSE_AFTER:
        return False
    with database.read() as session:
        if is_closed(session, org_id, period_start):
            return False
        blocked, total_nusd = _unfinished(session, org_id, period_start), invoiced_nusd(session, org_id, period_start)
        if not (blocked or total_nusd):
            return False
    late = now > end_of(period_start) + CLOSE_BY
    # not in a write, since others must be able to settle meanwhile
    if not blocked and (drifts := check(database, org_id)):
        blocked, late = f"the books do not agree ({drifts[0]})", True
    ref = f"{org_id}:{name_of(period_start)}"
    if blocked:
        if late:
            message = f"{name_of(period_start)} of {org_id} cannot be closed: {blocked}"
            alert = partial(raise_alert, kind="invoice_blocked", ref=ref, message=message, now=now)
            database.write_now(alert)
        return False

    def write(session: Session) -> bool:
        facts = {"org_id": org_id, "period_start": period_start, "total_nusd": total_nusd, "closed_at": now}
        row = insert_into(session, Invoice).values(id=f"inv_{uuid.uuid4().hex}", status="closed", **facts)
        resolve_alert(session, kind="invoice_blocked", ref=ref, now=now)
        return session.scalar(row.on_conflict_do_nothing().returning(Invoice.id)) is not None

    return database.write_now(write)


def _unfinished(session: Session, org_id: str, period_start: datetime) -> str:
    """The part of a month's usage that Stripe does not have yet, in words; "" if nothing is missing."""
    metered = session.scalar(select(Wallet.mode).where(Wallet.org_id == org_id)) == "postpaid"
    if metered and (missing := unput_uusd(session, org_id, period_start)):
        return f"{missing} micro-USD are not in the outbox"  # after the closing no more of it would be put there
    row = StripeOutbox
    waiting = select(func.count()).select_from(row).where(row.org_id == org_id, row.period_start == period_start)
    count = session.scalar(waiting.where(row.state != "sent"))
    return f"{count} meter events are unconfirmed" if count else ""


def follow(session: Session, invoice: Any, now: datetime) -> str:
    """Bring our invoice to the state of Stripe's. Call it in a write; it takes the organisation's lock, since another
    process may be about to mark the invoice as paid. Raises NotClosedHere."""
    org_id = session.scalar(select(Organisation.id).where(Organisation.stripe_customer_id == invoice.customer))
    if org_id is None:
        return "ignored: of no organisation here"
    if not _of_meters(invoice):
        return "ignored: not of a month's usage"
    period = period_of(datetime.fromtimestamp(invoice.period_end - 1, UTC))
    take_locks(session, [org_id])
    row = session.scalar(select(Invoice).where(Invoice.org_id == org_id, Invoice.period_start == period))
    if row is None:
        if invoice.total == 0 and not invoiced_nusd(session, org_id, period):
            return "ignored: nothing was used"
        raise NotClosedHere(f"{name_of(period)} of {org_id} is not closed yet")
    voided = row.stripe_invoice_id == invoice.id and row.status == "void"
    row.stripe_invoice_id = invoice.id
    row.hosted_url, row.pdf_url = invoice.hosted_invoice_url, invoice.invoice_pdf
    difference = invoice.total * NUSD_PER_CENT - row.total_nusd
    if abs(difference) > ROUNDING_NUSD:
        message = f"invoice {invoice.id} is {difference:+d} nano-USD beside what was used in {name_of(period)}"
        raise_alert(session, kind="invoice_differs", ref=invoice.id, message=message, now=now, detail={"org": org_id})
    if invoice.status == "paid":
        return _paid(session, row, invoice, now)
    if row.status == "paid":
        return "paid before"
    if voided and invoice.status == "open":  # it was open when it was fetched
        return "voided before"
    if invoice.status == "void":  # nobody has to pay it
        row.status = "void"
        _no_longer_failed(session, row, invoice, now)
        return "invoice is void"
    if invoice.attempted:
        _set_status(session, org_id, "active", "past_due")
        message = f"the invoice for {name_of(period)} could not be collected"
        raise_alert(session, kind="invoice_failed", ref=invoice.id, message=message, now=now, org_id=org_id)
    if invoice.status == "uncollectible":  # given up, and still owed
        row.status = "void"
        return "invoice is uncollectible"
    row.status = "failed" if invoice.attempted else "open"
    return "payment failed" if invoice.attempted else "open"


def _of_meters(invoice: Any) -> bool:
    """True if the invoice is for a month of the subscription to our meters. A customer may have other invoices, and the
    subscription starts with an empty one."""
    details = (invoice.to_dict().get("parent") or {}).get("subscription_details") or {}
    metadata = details.get("metadata") or {}
    return invoice.billing_reason != "subscription_create" and OF_METERS.items() <= metadata.items()


def _paid(session: Session, row: Invoice, invoice: Any, now: datetime) -> str:
    paid_nusd = invoice.amount_paid * NUSD_PER_CENT
    ref = {"org_id": row.org_id, "ref_type": "stripe_invoice", "ref_id": invoice.id}
    if paid_nusd and not ledger.post(session, type="invoice", amount_nusd=paid_nusd, memo="invoice paid", **ref):
        return "paid before"
    rest = row.total_nusd - paid_nusd - _carried_nusd(invoice)
    if rest and abs(rest) <= ROUNDING_NUSD:
        ledger.post(session, type="adjustment", amount_nusd=rest, memo="rounding of an invoice to cents", **ref)
    elif rest:  # paid from a balance at Stripe or by other means, which is not booked here
        remedy = "book them by hand (weftd credit grant, or take)"
        message = f"invoice {invoice.id} is paid, with {rest:+d} nano-USD left in our books: {remedy}"
        named = {"kind": "invoice_differs", "ref": f"{invoice.id}:paid"}
        raise_alert(session, **named, message=message, now=now, detail={"org": row.org_id})
    resolve_alert(session, kind="invoice_differs", ref=invoice.id, now=now)  # what is left of it has just been told
    row.status, row.paid_at = "paid", now
    _no_longer_failed(session, row, invoice, now)
    return "paid"


def _carried_nusd(invoice: Any) -> int:
    """What an invoice adds to the small debt that its customer has at Stripe and pays with a later invoice; negative if
    it collects that. It stays in our balance until it is paid. Larger debts were made by a person."""
    before, after = (
        cents if cents and 0 < cents < SMALLEST_CHARGE_CENTS else 0
        for cents in (invoice.starting_balance, invoice.ending_balance)
    )
    return (after - before) * NUSD_PER_CENT


def _no_longer_failed(session: Session, row: Invoice, invoice: Any, now: datetime) -> None:
    """An organisation without failed invoices is not past due."""
    resolve_alert(session, kind="invoice_failed", ref=invoice.id, now=now)
    session.flush()
    failed = select(Invoice.id).where(Invoice.org_id == row.org_id, Invoice.status == "failed")
    if session.scalar(failed.limit(1)) is None:
        _set_status(session, row.org_id, "past_due", "active")


def _set_status(session: Session, org_id: str, before: str, after: str) -> None:
    """Set the status, unless the operator has set another one, perhaps at this moment."""
    org, detail = Organisation, {"from": before, "to": after}
    changed = update(org).where(org.id == org_id, org.status == before).values(status=after).returning(org.id)
    if session.scalar(changed) is not None:
        audit.record(session, org_id=org_id, key_id=None, event="organization_status_set", target=org_id, detail=detail)
