"""The effects of Stripe's events. Events come late, twice and in any order, so none is believed: each names an object,
the object is fetched in its present state, and the effect is posted under a reference that exists once. The fetch
happens outside of any transaction; the effect, inside the one that marks the event as processed. Between the two
another process may act on a later state: what is final stays so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.money import ledger
from billing.money.alerts import raise_alert
from billing.payments import customers, invoices
from billing.payments.client import NUSD_PER_CENT
from billing.payments.customers import ORG_KEY
from store.tables import LedgerEntry, Organisation

if TYPE_CHECKING:
    from stripe import Customer, StripeClient

log = logging.getLogger(__name__)

#: Writes an event's effect to the database, and returns a line that describes it.
Effect = Callable[[Session, datetime], str]

#: Metadata that Checkout puts on our payments.
KIND_KEY, TOPUP = "weft_kind", "topup"

#: States of a dispute that has not taken money yet.
INQUIRIES = ("warning_needs_response", "warning_under_review", "warning_closed", "prevented")


CHECKOUTS = ("checkout.session.completed", "checkout.session.async_payment_succeeded")
REFUNDS = ("refund.created", "refund.updated", "refund.failed")
DISPUTES = (
    "charge.dispute.created",
    "charge.dispute.updated",
    "charge.dispute.closed",
    "charge.dispute.funds_withdrawn",
    "charge.dispute.funds_reinstated",
)
#: The types of events that are handled; Stripe also lists these (`billing.payments.inbox.missed`).
TYPES = ("payment_intent.succeeded", "payment_intent.payment_failed", *CHECKOUTS, *REFUNDS, *DISPUTES, *invoices.EVENTS)


def effect_of(client: StripeClient, event: dict[str, Any]) -> Effect:
    """Fetch the object that the event is about. Raises stripe.StripeError if Stripe does not answer."""
    kind = event["type"]
    if kind.startswith("v1.billing.meter."):
        return _meter_problem(client, event)
    about = event.get("data", {}).get("object", {})
    match kind:
        case _ if kind in CHECKOUTS:
            payment = about.get("payment_intent")
            return _topup(client, payment) if payment else _nothing("a checkout without a payment")
        case "payment_intent.succeeded":
            return _topup(client, about["id"])
        case "payment_intent.payment_failed":
            return _declined(client, about["id"])
        case _ if kind in REFUNDS:
            return _refund(client, about["id"])
        case _ if kind in DISPUTES:
            return _dispute(client, about["id"])
        case _ if kind in invoices.EVENTS:
            invoice = client.v1.invoices.retrieve(about["id"])
            return lambda session, now: invoices.follow(session, invoice, now)
    return _nothing("nothing to do")


def _nothing(why: str) -> Effect:
    return lambda _session, _now: f"ignored: {why}"


def organisation_of(session: Session, customer_id: str | None) -> Organisation | None:
    if customer_id is None:
        return None
    return session.scalar(select(Organisation).where(Organisation.stripe_customer_id == customer_id))


def _owner(session: Session, payment: Any) -> str | None:
    """The organisation that a payment tops up: a payment of ours, by a customer we know, for that same organisation."""
    found = organisation_of(session, payment.customer)
    metadata = payment.to_dict().get("metadata") or {}
    if found is None or metadata.get(KIND_KEY) != TOPUP or metadata.get(ORG_KEY) != found.id:
        log.info("payment %s is no top-up of an organisation here", payment.id)
        return None
    return found.id


def _credited(session: Session, payment: Any, reversal: Any) -> str | None:
    """The organisation that was credited the payment which is now reversed. Payments in other currencies are never
    credited, and a bank's claim in another currency has no amount here."""
    dollars = payment is not None and payment.currency == reversal.currency == "usd"
    return _owner(session, payment) if dollars else None


def _topup(client: StripeClient, payment_id: str) -> Effect:
    payment = client.v1.payment_intents.retrieve(payment_id)
    customer = _named_customer(client, payment)

    def credit(session: Session, now: datetime) -> str:
        if customer is not None:
            customers.claim(session, customer)
        org_id = _owner(session, payment)
        if org_id is None:
            return "ignored: no top-up of an organisation here"
        if payment.status != "succeeded" or payment.currency != "usd":
            return f"ignored: payment is {payment.status} in {payment.currency}"
        entry = ledger.post(
            session,
            org_id=org_id,
            type="topup",
            amount_nusd=payment.amount_received * NUSD_PER_CENT,
            ref_type="payment_intent",
            ref_id=payment.id,
            memo="card payment",
        )
        return "credited" if entry is not None else "credited before"

    return credit


def _named_customer(client: StripeClient, payment: Any) -> Customer | None:
    """The customer of a payment that says it is a top-up: a restored database may be older than the customer."""
    if payment.customer is None or (payment.to_dict().get("metadata") or {}).get(KIND_KEY) != TOPUP:
        return None
    import stripe

    try:
        return client.v1.customers.retrieve(payment.customer)
    except stripe.InvalidRequestError as error:
        if error.code != "resource_missing":
            raise
        return None


def _declined(client: StripeClient, payment_id: str) -> Effect:
    payment = client.v1.payment_intents.retrieve(payment_id)

    def tell(session: Session, now: datetime) -> str:
        org_id = _owner(session, payment)
        if org_id is None or payment.status == "succeeded":
            return "ignored: no open top-up of an organisation here"
        error = payment.to_dict().get("last_payment_error") or {}
        reason = error.get("decline_code") or error.get("code") or "unknown"
        message = f"a top-up of {payment.amount / 100:.2f} USD was declined ({reason})"
        raise_alert(session, kind="payment_declined", ref=payment.id, message=message, now=now, org_id=org_id)
        return "declined"

    return tell


def _refund(client: StripeClient, refund_id: str) -> Effect:
    refund = client.v1.refunds.retrieve(refund_id)
    payment = client.v1.payment_intents.retrieve(str(refund.payment_intent)) if refund.payment_intent else None

    def follow(session: Session, now: datetime) -> str:
        org_id = _credited(session, payment, refund)
        if org_id is None:
            return _by_hand(session, "refund", refund.id, payment, now)
        nusd = refund.amount * NUSD_PER_CENT
        if refund.status == "succeeded":
            return _take(session, org_id, "refund", refund.id, nusd)
        if refund.status in ("failed", "canceled"):
            return _give_back(session, org_id, "refund", refund.id, nusd)
        return f"waiting: refund is {refund.status}"

    return follow


def _dispute(client: StripeClient, dispute_id: str) -> Effect:
    dispute = client.v1.disputes.retrieve(dispute_id)
    payment = client.v1.payment_intents.retrieve(str(dispute.payment_intent)) if dispute.payment_intent else None

    def follow(session: Session, now: datetime) -> str:
        org_id = _credited(session, payment, dispute)
        if org_id is None:
            return _by_hand(session, "dispute", dispute.id, payment, now)
        message = f"a payment of {dispute.amount / 100:.2f} USD is disputed ({dispute.reason})"
        raise_alert(session, kind="dispute", ref=dispute.id, message=message, now=now, org_id=org_id)
        if dispute.status in INQUIRIES:
            return f"waiting: {dispute.status}"
        nusd = dispute.amount * NUSD_PER_CENT
        if dispute.status == "won":
            return _give_back(session, org_id, "dispute", dispute.id, nusd)
        return _take(session, org_id, "dispute", dispute.id, nusd)

    return follow


#: Ledger types and memos for taking money back and for undoing that.
_ENTRY: dict[str, tuple[ledger.EntryType, str, str]] = {
    "refund": ("refund", "card refund", "card refund came back"),
    "dispute": ("chargeback", "disputed payment", "dispute won"),
}


def _take(session: Session, org_id: str, ref_type: str, ref_id: str, nusd: int) -> str:
    kind, memo, _ = _ENTRY[ref_type]
    row = ledger.post(session, org_id=org_id, type=kind, amount_nusd=-nusd, ref_type=ref_type, ref_id=ref_id, memo=memo)
    return "taken" if row is not None else "taken before"


def _give_back(session: Session, org_id: str, ref_type: str, ref_id: str, nusd: int) -> str:
    """Undo a `_take`. Even if there was none, it is posted: another process that fetched the object earlier may still
    be about to post the `_take`."""
    _take(session, org_id, ref_type, ref_id, nusd)
    kind, _, memo = _ENTRY[ref_type]
    entry = select(LedgerEntry.amount_nusd).filter_by(org_id=org_id, type=kind, ref_type=ref_type, ref_id=ref_id)
    taken, undone = session.scalars(entry).one(), f"{ref_type}_undone"
    row = ledger.post(session, org_id=org_id, type=kind, amount_nusd=-taken, ref_type=undone, ref_id=ref_id, memo=memo)
    return "given back" if row is not None else "given back before"


def _by_hand(session: Session, what: str, ref: str, payment: Any, now: datetime) -> str:
    """A payment of our customer that is no top-up in dollars, an invoice for instance: a person books its reversal."""
    owner = organisation_of(session, payment.customer) if payment is not None else None
    if owner is None:
        log.info("%s %s is of no organisation here", what, ref)
        return "ignored: of no organisation here"
    message = f"{what} {ref} is not of a top-up, or not in US dollars: book it by hand (weftd credit take)"
    raise_alert(session, kind=f"{what}_by_hand", ref=ref, message=message, now=now, detail={"org_id": owner.id})
    return "for a person to book"


def _meter_problem(client: StripeClient, event: dict[str, Any]) -> Effect:
    """Stripe accepted events that it could not count. It names samples, not all of them."""
    full = client.v2.core.events.retrieve(event["id"]).to_dict()
    reason = dict(full.get("data") or {}).get("reason") or {}
    codes = sorted({str(kind.get("code")) for kind in reason.get("error_types", [])})
    samples = [
        str((sample.get("request") or {}).get("identifier"))
        for kind in reason.get("error_types", [])
        for sample in kind.get("sample_errors", [])
    ]

    def tell(session: Session, now: datetime) -> str:
        why = ", ".join(codes) or event["type"]
        message = f"Stripe did not count {reason.get('error_count', 'some')} meter events: {why}"
        detail = {"codes": codes, "identifiers": samples[:100]}
        raise_alert(session, kind="meter_errors", ref=event["id"], message=message, now=now, detail=detail)
        return "alert raised"

    return tell
