"""The effects of Stripe's events. Events come late, twice and in any order, so none is believed: each names an object,
the object is fetched in its present state, and the effect is posted under a reference that exists once. The fetch
happens outside of any transaction; the effect, inside the one that marks the event as processed. Between the two
another process may act on a later state: what is final stays so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.money import ledger
from billing.money.alerts import raise_alert, resolve_alert
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

#: States of a dispute that has not taken money yet; and of one that is over.
INQUIRIES = ("warning_needs_response", "warning_under_review", "warning_closed", "prevented")
ENDS = ("warning_closed", "prevented", "won", "lost")

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
DECLINES = ("payment_intent.payment_failed", "payment_intent.canceled")
TYPES = ("payment_intent.succeeded", *DECLINES, *CHECKOUTS, *REFUNDS, *DISPUTES, *invoices.EVENTS)


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
        case _ if kind in DECLINES:
            return _declined(client, about["id"])
        case _ if kind in REFUNDS:
            return _reversal(client, client.v1.refunds.retrieve(about["id"]))
        case _ if kind in DISPUTES:
            return _reversal(client, client.v1.disputes.retrieve(about["id"]))
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


def _payment(client: StripeClient, payment_id: str) -> tuple[Any, Customer | None]:
    """A payment; and, if it says that it is a top-up, its customer: a restored database may be older than that."""
    import stripe

    payment = client.v1.payment_intents.retrieve(payment_id)
    if payment.customer is None or (payment.to_dict().get("metadata") or {}).get(KIND_KEY) != TOPUP:
        return payment, None
    try:
        return payment, client.v1.customers.retrieve(str(payment.customer))
    except stripe.InvalidRequestError as error:
        if error.code != "resource_missing":
            raise
        return payment, None


def _owner(session: Session, payment: Any, customer: Customer | None) -> str | None:
    """The organisation that a payment tops up: a payment of ours, by a customer we know, for that same organisation."""
    if customer is not None:
        customers.claim(session, customer)
    found = organisation_of(session, payment.customer)
    metadata = payment.to_dict().get("metadata") or {}
    if found is None or metadata.get(KIND_KEY) != TOPUP or metadata.get(ORG_KEY) != found.id:
        log.info("payment %s is no top-up of an organisation here", payment.id)
        return None
    return found.id


def _topup(client: StripeClient, payment_id: str) -> Effect:
    payment, customer = _payment(client, payment_id)

    def credit(session: Session, now: datetime) -> str:
        org_id = _owner(session, payment, customer)
        if org_id is None:
            return "ignored: no top-up of an organisation here"
        if payment.status != "succeeded" or payment.currency != "usd":
            return f"ignored: payment is {payment.status} in {payment.currency}"
        resolve_alert(session, kind="payment_declined", ref=payment.id, now=now)
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


def _declined(client: StripeClient, payment_id: str) -> Effect:
    payment, customer = _payment(client, payment_id)

    def tell(session: Session, now: datetime) -> str:
        org_id = _owner(session, payment, customer)
        if org_id is None or payment.status == "succeeded":
            return "ignored: no open top-up of an organisation here"
        if payment.status == "canceled":  # its checkout has expired: nobody can pay it any more
            resolve_alert(session, kind="payment_declined", ref=payment.id, now=now)
            return "given up"
        error = payment.to_dict().get("last_payment_error") or {}
        reason = error.get("decline_code") or error.get("code") or "unknown"
        message = f"a top-up of {payment.amount / 100:.2f} USD was declined ({reason})"
        raise_alert(session, kind="payment_declined", ref=payment.id, message=message, now=now, org_id=org_id)
        return "declined"

    return tell


def _reversal(client: StripeClient, thing: Any) -> Effect:
    """The effect of a refund or a dispute. Payments in other currencies are never credited, and a bank's claim in
    another currency has no amount here: those are booked by hand."""
    payment, customer = _payment(client, str(thing.payment_intent)) if thing.payment_intent else (None, None)

    def follow(session: Session, now: datetime) -> str:
        dollars = payment is not None and payment.currency == thing.currency == "usd"
        org_id = _owner(session, payment, customer) if dollars else None
        if org_id is None:
            return _by_hand(session, thing, payment, now)
        if thing.object == "dispute":
            message = f"a payment of {thing.amount / 100:.2f} USD is disputed ({thing.reason})"
            raise_alert(session, kind="dispute", ref=thing.id, message=message, now=now, org_id=org_id)
            if thing.status in ENDS:
                resolve_alert(session, kind="dispute", ref=thing.id, now=now)
        match _stage(thing):
            case "waiting":
                return f"waiting: {thing.object} is {thing.status}"
            case "taken":
                return _take(session, org_id, thing.object, thing.id, thing.amount * NUSD_PER_CENT)
            case "undone":
                return _give_back(session, org_id, thing.object, thing.id, thing.amount * NUSD_PER_CENT)

    return follow


def _stage(thing: Any) -> Literal["waiting", "taken", "undone"]:
    """Whether a refund or a dispute has not moved money yet, has taken it, or has given it back."""
    if thing.object == "refund":
        undone = thing.status in ("failed", "canceled")
        return "undone" if undone else "taken" if thing.status == "succeeded" else "waiting"
    if thing.status in INQUIRIES:
        return "waiting"
    return "undone" if thing.status == "won" else "taken"


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


def _by_hand(session: Session, thing: Any, payment: Any, now: datetime) -> str:
    """A payment of our customer that is no top-up in dollars, an invoice for instance: a person books its reversal, and
    once more if that is undone."""
    owner = organisation_of(session, payment.customer) if payment is not None else None
    if owner is None:
        log.info("%s %s is of no organisation here", thing.object, thing.id)
        return "ignored: of no organisation here"
    stage = _stage(thing)
    if stage == "waiting":
        return f"waiting: {thing.object} is {thing.status}"
    kind, detail = f"{thing.object}_by_hand", {"org_id": owner.id}
    about = f"{thing.object} {thing.id} of {owner.name} is not of a top-up, or not in US dollars"
    message = f"{about}: book it by hand (weftd credit take)"
    raise_alert(session, kind=kind, ref=thing.id, message=message, now=now, detail=detail)
    if stage == "undone":
        resolve_alert(session, kind=kind, ref=thing.id, now=now)
        message = f"{about}, and came back: give back what was taken for it (weftd credit grant --kind paid)"
        raise_alert(session, kind=kind, ref=f"{thing.id}:undone", message=message, now=now, detail=detail)
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
