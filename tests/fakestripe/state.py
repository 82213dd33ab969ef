"""The state of the fake: customers, meters and what they counted, payments; and the events that tell of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tests.fakestripe.contract import BadRequest, Form, check_object

DAY_S = 86_400
#: How long a meter event's identifier is remembered. Stripe promises "at least 24 hours"; this is the least.
IDENTIFIERS_LAST_S = DAY_S
SMALLEST_CHARGE_CENTS = 50


class NotFound(Exception):
    pass


@dataclass
class Counted:
    """A meter event that was accepted."""

    event_name: str
    customer: str
    value: int
    timestamp: int
    received: float


@dataclass
class Stripe:
    """An account. `now` is its clock, in seconds since the epoch; summaries lack events of the last `lag_s` seconds."""

    now: float
    lag_s: float = 60.0
    objects: dict[str, Form] = field(default_factory=dict)
    counted: list[Counted] = field(default_factory=list)
    identifiers: dict[str, float] = field(default_factory=dict)
    #: Events whose webhooks are not delivered yet, oldest first: the test takes them.
    events: list[Form] = field(default_factory=list)
    #: All events ever told, for requests that list them.
    told: list[Form] = field(default_factory=list)
    #: The full contents of thin events, for requests that fetch them.
    thin: dict[str, Form] = field(default_factory=dict)
    #: The metadata that the payment of each checkout session will carry.
    payment_metadata: dict[str, Form] = field(default_factory=dict)
    _numbers: Any = field(default_factory=lambda: itertools.count(1))

    def add(self, prefix: str, kind: str, **fields: Any) -> Form:
        thing = {"id": f"{prefix}_{next(self._numbers)}", "object": kind, **fields}
        self.objects[thing["id"]] = check_object(thing)
        return thing

    def get(self, kind: str, thing_id: str) -> Form:
        thing = self.objects.get(thing_id)
        if thing is None or thing["object"] != kind:
            raise NotFound(thing_id)
        return thing

    def all(self, kind: str) -> list[Form]:
        return [thing for thing in self.objects.values() if thing["object"] == kind]

    def tell(self, kind: str, thing: Form) -> Form:
        event = {
            "id": f"evt_{next(self._numbers)}",
            "object": "event",
            "api_version": "2026-10-28.endive",
            "created": int(self.now),
            "livemode": False,
            "type": kind,
            "data": {"object": dict(thing)},
        }
        self.events.append(event)
        self.told.append(event)
        return event

    # Meters.

    def count(self, params: Form) -> Form:
        """Refuse or count a meter event, by Stripe's documented rules."""
        meter = next((row for row in self.all("billing.meter") if row["event_name"] == params["event_name"]), None)
        if meter is None:
            raise BadRequest(f"No active meter found for event name {params['event_name']}", code="resource_missing")
        identifier = params.get("identifier", f"auto_{next(self._numbers)}")
        if len(identifier) > 100:
            raise BadRequest("Invalid identifier: at most 100 characters", param="identifier")
        timestamp = int(params.get("timestamp", self.now))
        if timestamp < self.now - 35 * DAY_S:
            raise BadRequest("The timestamp is too far in the past", code="timestamp_too_far_in_past")
        if timestamp > self.now + 300:
            raise BadRequest("The timestamp is in the future", code="timestamp_in_future")
        value = params["payload"].get("value", "")
        if not value.removeprefix("-").isdecimal():
            raise BadRequest("The value must be a whole number", code="meter_event_invalid_value", param="payload")
        seen = self.identifiers.get(identifier)
        if seen is not None and self.now - seen < IDENTIFIERS_LAST_S:
            raise BadRequest(f"An event already exists with identifier {identifier}.", param="identifier")
        self.identifiers[identifier] = self.now
        customer = params["payload"].get("stripe_customer_id", "")
        if customer in self.objects:
            self.counted.append(Counted(params["event_name"], customer, int(value), timestamp, self.now))
        else:  # accepted nevertheless: the error comes later, as an event
            self.report_error(meter, "meter_event_customer_not_found", identifier)
        return check_object(
            {
                "object": "billing.meter_event",
                "created": int(self.now),
                "event_name": params["event_name"],
                "identifier": identifier,
                "livemode": False,
                "payload": params["payload"],
                "timestamp": timestamp,
            }
        )

    def report_error(self, meter: Form, code: str, identifier: str) -> None:
        """Tell of an error by a thin event: it only names the meter, and the rest must be fetched."""
        event_id = f"evt_{next(self._numbers)}"
        thin = {
            "id": event_id,
            "object": "v2.core.event",
            "type": "v1.billing.meter.error_report_triggered",
            "created": datetime.fromtimestamp(self.now).isoformat() + "Z",
            "livemode": False,
            "related_object": {"id": meter["id"], "type": "billing.meter", "url": f"/v1/billing/meters/{meter['id']}"},
        }
        sample = {"error_message": code, "request": {"identifier": identifier}}
        kinds = [{"code": code, "error_count": 1, "sample_errors": [sample]}]
        reason = {"error_count": 1, "error_types": kinds}
        data = {"developer_message_summary": code, "reason": reason, "validation_start": thin["created"]}
        self.thin[event_id] = {**thin, "data": {**data, "validation_end": thin["created"]}}
        self.events.append(thin)

    def total(self, event_name: str, customer: str, start: int = 0, end: int = 2**62, *, lag_s: float = 0.0) -> int:
        return sum(
            row.value
            for row in self.counted
            if (row.event_name, row.customer) == (event_name, customer)
            and start <= row.timestamp < end
            and row.received <= self.now - lag_s
        )

    # Payments.

    def finish_checkout(self, session_id: str, *, decline: str | None = None) -> Form:
        """Let the customer pay, or be declined. Returns the payment intent."""
        session = self.get("checkout.session", session_id)
        payment = self.objects.get(session["payment_intent"] or "") or self.add(
            "pi",
            "payment_intent",
            amount=session["amount_total"],
            amount_received=0,
            currency=session["currency"],
            customer=session["customer"],
            metadata=self.payment_metadata[session_id],
            status="requires_payment_method",
            last_payment_error=None,
        )
        session["payment_intent"] = payment["id"]
        if decline is not None:
            payment["last_payment_error"] = {"type": "card_error", "code": "card_declined", "decline_code": decline}
            self.tell("payment_intent.payment_failed", payment)
            return payment
        payment.update(status="succeeded", amount_received=payment["amount"], last_payment_error=None)
        session.update(status="complete", payment_status="paid")
        self.tell("payment_intent.succeeded", payment)
        self.tell("checkout.session.completed", session)
        return payment

    def expire_checkout(self, session_id: str) -> None:
        """A day has passed: the payment of an open session is cancelled with it."""
        session = self.get("checkout.session", session_id)
        session["status"] = "expired"
        if session["payment_intent"]:
            self.change("payment_intent.canceled", self.objects[session["payment_intent"]], status="canceled")
        self.tell("checkout.session.expired", session)

    def refund(self, payment_id: str, cents: int, status: str = "succeeded") -> Form:
        payment = self.get("payment_intent", payment_id)
        refund = self.add("re", "refund", amount=cents, currency="usd", payment_intent=payment["id"], status=status)
        self.tell("refund.created", refund)
        return refund

    def dispute(self, payment_id: str, status: str = "needs_response") -> Form:
        payment = self.get("payment_intent", payment_id)
        dispute = self.add(
            "dp",
            "dispute",
            amount=payment["amount"],
            currency="usd",
            payment_intent=payment["id"],
            reason="fraudulent",
            status=status,
        )
        self.tell("charge.dispute.created", dispute)
        return dispute

    def change(self, kind: str, thing: Form, **fields: Any) -> None:
        thing.update(fields)
        self.tell(kind, thing)

    def invoice(self, customer: str, start: int, end: int) -> Form:
        """Issue the invoice of a month: each meter's sum, in cents, on a line of its own."""
        cents = 0
        for meter in self.all("billing.meter"):
            uusd = self.total(meter["event_name"], customer, start, end)
            cents += max(0, (uusd + 5_000) // 10_000)
        return self.print_invoice(customer, start, end, cents, "subscription_cycle", {"weft": "meters"})

    def print_invoice(
        self, customer: str, start: int, end: int, cents: int, reason: str, subscription: Form | None
    ) -> Form:
        """Issue an invoice for that `reason`: of the `subscription` with this metadata, or of none. Below its smallest
        charge Stripe takes nothing, and adds it to what the customer owes on the next invoice; a negative balance is
        credit that is used up (docs.stripe.com/billing/customer/balance)."""
        details = {"metadata": subscription, "subscription": "sub_1"}
        owner = self.objects.get(customer, {})
        before = owner.get("balance", 0)
        due = before + cents if before + cents >= SMALLEST_CHARGE_CENTS else 0
        owner["balance"] = before + cents - due
        invoice = self.add(
            "in",
            "invoice",
            customer=customer,
            billing_reason=reason,
            parent={"type": "subscription_details", "subscription_details": details} if subscription else None,
            status="open" if due else "paid",
            attempted=not due,
            period_start=start,
            period_end=end,
            starting_balance=before,
            ending_balance=owner["balance"],
            total=cents,
            amount_due=due,
            amount_paid=0,
            hosted_invoice_url="https://invoice.example/1",
            invoice_pdf="https://invoice.example/1.pdf",
        )
        self.tell("invoice.finalized", invoice)
        if not due:
            self.tell("invoice.paid", invoice)
        return invoice

    def pay_invoice(self, invoice: Form) -> None:
        self.change("invoice.paid", invoice, status="paid", attempted=True, amount_paid=invoice["amount_due"])
