"""Money is credited by webhooks only, and once, even if they are repeated, reordered, late or forged."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import update
from sqlalchemy.orm import Session
from starlette.testclient import TestClient

from api.server.app import front
from api.state.service import Service
from billing.money.accounts import Accounts, OutOfMoney, Payer
from billing.money.wallets import set_mode
from billing.payments import inbox
from billing.payments.client import stripe_client
from billing.payments.events import effect_of
from billing.prices import load_prices
from scheduler.jobs.payments import ask_for_missed_events, process_webhooks, put_meter_events, send_meter_events
from scheduler.jobs.registry import JOBS
from scheduler.jobs.running import run_now
from scheduler.journal.journal import Journal
from store.settings import Settings
from store.tables import Alert, Organisation, StripeWebhookEvent
from tests.billing.payments.kit import START, Payments
from tests.fakestripe.server import WEBHOOK_SECRET
from tests.fakestripe.webhooks import signed
from tests.keys import create_key
from tests.search import chance
from tests.servers import free_port


class Door:
    """The API in front of the payments' database, asked as an organisation."""

    def __init__(self, payments: Payments, http: TestClient, key: str, org_id: str) -> None:
        self.payments = payments
        self.http = http
        self.org_id = org_id
        self._headers = {"x-api-key": key}

    def topup(self, amount: str, status: int = 200, **headers: str) -> Any:
        reply = self.http.post(
            "/api/v1/weft/billing/topups", json={"amount_usd": amount}, headers={**self._headers, **headers}
        )
        assert reply.status_code == status, reply.text
        return reply.json()

    def webhook(self, event: Any, secret: str = WEBHOOK_SECRET, age_s: float = 0.0) -> Any:
        body, signature = signed(event, secret, age_s=age_s)
        return self.http.post("/api/v1/stripe/webhook", content=body, headers={"stripe-signature": signature})

    def deliver(self, *events: Any) -> None:
        """Deliver webhooks and act on them."""
        for event in events:
            assert self.webhook(event).status_code == 200
        process_webhooks(self.payments.context)

    @property
    def told(self) -> list[Any]:
        """Take the events that Stripe has to tell."""
        events, self.payments.fake.stripe.events = self.payments.fake.stripe.events, []
        return events

    def ledger(self) -> list[tuple[str, int]]:
        return self.payments.ledger(self.org_id)

    def paid(self, amount: str = "25") -> Any:
        """Finish a top-up, of which Stripe has not told us yet."""
        return self.payments.fake.stripe.finish_checkout(self.topup(amount)["id"])

    def alerts(self) -> list[str]:
        with self.payments.database.read() as session:
            return [alert.kind for alert in session.query(Alert).order_by(Alert.id)]

    def open_alerts(self) -> list[tuple[str, str]]:
        """Their kinds and messages."""
        with self.payments.database.read() as session:
            query = session.query(Alert).filter_by(resolved_at=None).order_by(Alert.id)
            return [(alert.kind, alert.message) for alert in query]


@pytest.fixture
def door(payments: Payments) -> Iterator[Door]:
    context = payments.context
    settings = Settings(data_dir=payments.folder, payments=payments.fake.settings())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> Any:
        journal = Journal(context.database, context.blobs, load_prices(), 100)
        app.state.service = Service(settings, {}, context.database, context.blobs, load_prices(), journal, dict)
        yield

    key = payments.database.write_now(lambda session: create_key(session, "acme"))
    with payments.database.read() as session:
        org_id = session.query(Organisation).filter_by(name="acme").one().id
    with TestClient(front(lifespan)) as http:
        yield Door(payments, http, key, org_id)


USD = 10**9


def test_a_topup_is_credited_by_its_webhook_and_not_before(door: Door) -> None:
    checkout = door.topup("25.50")
    assert checkout["amount_nusd"] == 25_500_000_000
    door.payments.fake.stripe.finish_checkout(checkout["id"])
    assert door.ledger() == []
    door.deliver(*door.told)
    assert door.ledger() == [("topup", 25_500_000_000)]


def test_every_order_and_repetition_credits_once(door: Door) -> None:
    door.paid()
    events = door.told
    assert [event["type"] for event in events] == ["payment_intent.succeeded", "checkout.session.completed"]
    for order in itertools.permutations(events * 2):
        door.deliver(*order)
    assert door.ledger() == [("topup", 25 * USD)]


@pytest.mark.parametrize("status", ["processing", "requires_action", "requires_capture", "canceled"])
def test_only_a_payment_that_has_succeeded_is_money(door: Door, status: str) -> None:
    """Whatever the webhook's type says, and whatever amount the payment has: a bank debit may still be returned."""
    payment = door.paid()
    payment["status"] = status
    door.deliver(*door.told)
    assert door.ledger() == []
    payment["status"] = "succeeded"
    door.payments.fake.stripe.tell("payment_intent.succeeded", payment)
    door.deliver(*door.told)
    assert door.ledger() == [("topup", 25 * USD)]


def test_only_dollars_are_money(door: Door) -> None:
    """And a payment that was not credited takes nothing when it is refunded."""
    stripe, payments = door.payments.fake.stripe, [door.paid(), door.paid()]
    for payment in payments:
        payment["currency"] = "jpy"
    stripe.refund(payments[0]["id"], 2500)
    stripe.dispute(payments[1]["id"])
    door.deliver(*door.told)
    assert door.ledger() == []
    assert door.alerts() == ["refund_by_hand", "dispute_by_hand"]


def test_dollars_that_are_reclaimed_in_another_currency_are_booked_by_hand(door: Door) -> None:
    stripe, payments = door.payments.fake.stripe, [door.paid(), door.paid()]
    stripe.refund(payments[0]["id"], 2500)["currency"] = "eur"
    stripe.dispute(payments[1]["id"])["currency"] = "eur"
    door.deliver(*door.told)
    assert {kind for kind, _ in door.ledger()} == {"topup"}
    assert door.alerts() == ["refund_by_hand", "dispute_by_hand"]


@pytest.mark.search
def test_a_topup_a_refund_and_a_dispute_in_any_order(door: Door) -> None:
    stripe = door.payments.fake.stripe
    first, second = door.paid("10"), door.paid("20")
    refund = stripe.refund(first["id"], 400)
    dispute = stripe.dispute(second["id"])
    stripe.change("charge.dispute.funds_withdrawn", dispute)
    stripe.change("charge.dispute.closed", dispute, status="lost")
    stripe.change("refund.updated", refund)
    events = door.told * 2
    chance(7).shuffle(events)
    door.deliver(*events)
    assert sorted(door.ledger()) == [
        ("chargeback", -20 * USD),
        ("refund", -4 * USD),
        ("topup", 10 * USD),
        ("topup", 20 * USD),
    ]


def test_a_dispute_that_is_won_gives_back_what_it_took(door: Door) -> None:
    stripe = door.payments.fake.stripe
    dispute = stripe.dispute(door.paid()["id"])
    door.deliver(*door.told)
    assert door.ledger() == [("topup", 25 * USD), ("chargeback", -25 * USD)]
    stripe.change("charge.dispute.closed", dispute, status="won")
    door.deliver(*door.told)
    assert door.ledger()[2:] == [("chargeback", 25 * USD)]
    assert "dispute" in door.alerts()


@pytest.mark.parametrize(
    ("first", "last"),
    [("needs_response", "won"), ("needs_response", "lost"), ("warning_needs_response", "warning_closed")],
)
def test_the_alert_of_a_dispute_ends_with_it(door: Door, first: str, last: str) -> None:
    stripe = door.payments.fake.stripe
    dispute = stripe.dispute(door.paid()["id"], status=first)
    door.deliver(*door.told)
    assert door.open_alerts() == [("dispute", "a payment of 25.00 USD is disputed (fraudulent)")]
    stripe.change("charge.dispute.closed", dispute, status=last)
    door.deliver(*door.told)
    assert door.open_alerts() == []


@pytest.mark.parametrize("what", ["refund", "dispute"])
def test_money_of_an_invoice_that_came_back_is_told_of_as_well(door: Door, what: str) -> None:
    """Nothing is to be booked before it moves; and who booked what went is told when it came back."""
    stripe, payment = door.payments.fake.stripe, door.paid()
    payment["metadata"] = {}  # as Stripe makes payments of invoices
    waits = {"refund": "pending", "dispute": "warning_needs_response"}[what]
    thing = getattr(stripe, what)(payment["id"], **({"cents": 2500} if what == "refund" else {}), status=waits)
    door.deliver(*door.told)
    assert door.alerts() == []
    stripe.change(
        f"{'refund' if what == 'refund' else 'charge.dispute'}.updated",
        thing,
        status={"refund": "succeeded", "dispute": "needs_response"}[what],
    )
    door.deliver(*door.told)
    ((kind, message),) = door.open_alerts()
    assert (kind, "weftd credit take" in message) == (f"{what}_by_hand", True)
    stripe.change(
        "refund.failed" if what == "refund" else "charge.dispute.closed",
        thing,
        status={"refund": "failed", "dispute": "won"}[what],
    )
    door.deliver(*door.told)
    ((kind, message),) = door.open_alerts()
    assert (kind, "weftd credit grant --kind paid" in message) == (f"{what}_by_hand", True)
    assert door.ledger() == []


def test_who_is_refused_while_a_payment_is_disputed_is_told_so(door: Door) -> None:
    database, org_id, stripe = door.payments.database, door.org_id, door.payments.fake.stripe
    database.write_now(lambda session: set_mode(session, org_id, "prepaid", 0))

    def hold(session: Session) -> None:
        Accounts(session, {Payer(org_id)}, {door.payments.now}, door.payments.now).hold(Payer(org_id), 1, START)

    dispute = stripe.dispute(door.paid("5")["id"])
    door.deliver(*door.told)
    with pytest.raises(OutOfMoney) as refused:
        database.write_now(hold)
    assert refused.value.figures.endswith("may be owed; a payment of 5.00 USD is disputed (fraudulent)")
    assert refused.value.remedy == "top up"
    stripe.change("charge.dispute.closed", dispute, status="won")
    door.deliver(*door.told)
    database.write_now(hold)


def test_an_inquiry_takes_nothing(door: Door) -> None:
    door.payments.fake.stripe.dispute(door.paid()["id"], status="warning_needs_response")
    door.deliver(*door.told)
    assert door.ledger() == [("topup", 25 * USD)]


def test_a_refund_counts_when_it_has_succeeded_and_no_longer_when_it_failed(door: Door) -> None:
    stripe = door.payments.fake.stripe
    refund = stripe.refund(door.paid()["id"], 2500, status="pending")
    door.deliver(*door.told)
    assert door.ledger() == [("topup", 25 * USD)]
    stripe.change("refund.updated", refund, status="succeeded")
    door.deliver(*door.told)
    stripe.change("refund.failed", refund, status="failed")
    door.deliver(*door.told)
    assert door.ledger() == [("topup", 25 * USD), ("refund", -25 * USD), ("refund", 25 * USD)]


@pytest.mark.parametrize("what", ["refund", "dispute"])
def test_who_has_fetched_before_the_end_and_writes_after_it_takes_nothing(door: Door, what: str) -> None:
    """A process is held up between fetching and writing, while another one acts on the last event."""
    stripe = door.payments.fake.stripe
    payment = door.paid()["id"]
    thing = stripe.refund(payment, 2500) if what == "refund" else stripe.dispute(payment)
    *paid, event = door.told
    door.deliver(*paid)
    late = effect_of(stripe_client(door.payments.fake.settings()), event)
    if what == "refund":
        stripe.change("refund.failed", thing, status="failed")
    else:
        stripe.change("charge.dispute.closed", thing, status="won")
    door.deliver(*door.told)
    door.payments.database.write_now(lambda session: late(session, door.payments.now))
    assert sum(amount for _, amount in door.ledger()) == 25 * USD


def test_a_declined_card_credits_nothing_and_the_next_try_does(door: Door) -> None:
    checkout = door.topup("25")
    door.payments.fake.stripe.finish_checkout(checkout["id"], decline="insufficient_funds")
    door.deliver(*door.told)
    assert door.ledger() == []
    assert door.alerts() == ["payment_declined"]
    door.payments.fake.stripe.finish_checkout(checkout["id"])
    door.deliver(*door.told)
    assert door.ledger() == [("topup", 25 * USD)]
    assert door.open_alerts() == []


@pytest.mark.parametrize("told", ["at once", "together"])
def test_a_declined_topup_that_is_given_up_is_no_alert_any_more(door: Door, told: str) -> None:
    stripe = door.payments.fake.stripe
    checkout = door.topup("25")
    stripe.finish_checkout(checkout["id"], decline="insufficient_funds")
    if told == "at once":
        door.deliver(*door.told)
        assert door.alerts() == ["payment_declined"]
    stripe.expire_checkout(checkout["id"])
    door.deliver(*door.told)
    assert door.open_alerts() == []


@pytest.mark.parametrize("forgery", ["another secret", "changed", "old", "unsigned", "v0 only", "not json"])
def test_forged_webhooks_are_refused_and_leave_nothing(door: Door, forgery: str) -> None:
    door.paid()
    event = door.told[0]
    body, signature = signed(event, WEBHOOK_SECRET)
    if forgery == "another secret":
        body, signature = signed(event, "whsec_other")
    elif forgery == "changed":
        body = body.replace(b"2500", b"9900")
    elif forgery == "old":
        body, signature = signed(event, WEBHOOK_SECRET, age_s=301)
    elif forgery == "unsigned":
        signature = ""
    elif forgery == "v0 only":
        signature = signature.replace("v1=", "v0=")
    else:
        body, signature = signed(event, WEBHOOK_SECRET)
        body, signature = body[:-1], signature
    reply = door.http.post("/api/v1/stripe/webhook", content=body, headers={"stripe-signature": signature})
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid_request")
    with door.payments.database.read() as session:
        assert session.query(StripeWebhookEvent).count() == 0


def test_what_an_event_claims_is_not_believed(door: Door) -> None:
    """Even if it is signed: the payment itself is fetched."""
    payment = door.paid()
    event = door.told[0]
    event["data"]["object"] = {**payment, "amount_received": 9_900_000}
    door.deliver(event)
    assert door.ledger() == [("topup", 25 * USD)]


def test_two_secrets_while_one_is_rotated(door: Door, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "secrets").write_text("whsec_new\nwhsec_old\n")
    monkeypatch.setenv("WEFT_STRIPE_WEBHOOK_SECRETS_FILE", str(tmp_path / "secrets"))
    door.paid()
    first, second = door.told
    assert door.webhook(first, "whsec_new").status_code == 200
    assert door.webhook(second, "whsec_old").status_code == 200
    assert door.webhook(second, "whsec_older").status_code == 400


def test_payments_of_strangers_are_ignored(door: Door) -> None:
    stripe = door.payments.fake.stripe
    other = door.payments.organisation("prepaid")
    second = stripe.add("cus", "customer", metadata={"weft_org": other})["id"]
    for customer, metadata in [
        ("cus_unknown", {"weft_kind": "topup", "weft_org": door.org_id}),
        (second, {"weft_kind": "topup", "weft_org": other}),
        (door.payments.customer(other), {"weft_kind": "topup", "weft_org": door.org_id}),
        (door.payments.customer(other), {}),
    ]:
        payment = stripe.add(
            "pi",
            "payment_intent",
            amount=100,
            amount_received=100,
            currency="usd",
            customer=customer,
            metadata=metadata,
            status="succeeded",
            last_payment_error=None,
        )
        stripe.tell("payment_intent.succeeded", payment)
    door.deliver(*door.told)
    assert door.ledger() == door.payments.ledger(other) == []


def test_an_event_that_cannot_be_acted_on_is_tried_again_and_holds_up_no_other(door: Door) -> None:
    door.paid()
    good = door.told[0]
    broken = {"id": "evt_broken", "type": "payment_intent.succeeded", "data": {"object": {"id": "pi_gone"}}}
    door.deliver(broken, good)
    assert door.ledger() == [("topup", 25 * USD)]
    for _ in range(8):
        door.payments.wait(3600)
        process_webhooks(door.payments.context)
    assert door.alerts() == ["webhook_stuck"]
    with door.payments.database.read() as session:
        row = session.get_one(StripeWebhookEvent, "evt_broken")
        assert row.processed_at is None
        assert row.attempts == 9


def test_while_stripe_does_not_answer_one_event_is_tried_in_a_run(door: Door) -> None:
    """Each try lasts as long as a timeout, and other jobs wait for the one that is running."""
    for _ in range(2):
        door.paid()
    for event in door.told:
        door.webhook(event)
    there = door.payments.fake.settings()
    door.payments.settings = there.model_copy(update={"api_base": f"http://127.0.0.1:{free_port()}"})
    assert process_webhooks(door.payments.context) == {"away": 1}
    door.payments.settings = there
    door.payments.wait(3600)
    assert process_webhooks(door.payments.context) == {"processed": 4}
    assert door.ledger() == [("topup", 25 * USD)] * 2


def test_meter_errors_raise_an_alert(door: Door) -> None:
    """Stripe accepts an event of an unknown customer, and says later that it counted nothing."""
    org_id = door.payments.organisation(customer=True)
    del door.payments.fake.stripe.objects[door.payments.customer(org_id)]
    door.payments.use(org_id, "train", 5_000)
    put_meter_events(door.payments.context)
    send_meter_events(door.payments.context)
    door.deliver(*door.told)
    with door.payments.database.read() as session:
        (alert,) = session.query(Alert)
        assert alert.kind == "meter_errors"
        assert alert.detail["codes"] == ["meter_event_customer_not_found"]
        (row,) = door.payments.outbox()
        assert alert.detail["identifiers"] == [row.identifier]


def test_the_same_topup_asked_for_twice_is_one_checkout(door: Door) -> None:
    first = door.topup("25", **{"idempotency-key": "k1"})
    assert door.topup("25", **{"idempotency-key": "k1"})["id"] == first["id"]
    assert door.topup("25", **{"idempotency-key": "k2"})["id"] != first["id"]
    assert "idempotent" in door.topup("26", status=400, **{"idempotency-key": "k1"})["detail"]
    assert len(door.payments.fake.stripe.all("customer")) == 1


@pytest.mark.parametrize("amount", ["4.99", "10000.01", "-5", "7.001", "nan"])
def test_amounts_that_are_refused(door: Door, amount: str) -> None:
    status = 400 if amount in ("4.99", "10000.01") else 422
    assert "amount_usd" in door.topup(amount, status=status)["detail"]


def test_a_clock_that_was_ahead_puts_off_no_event_for_years(door: Door) -> None:
    door.paid("25")
    (event, *_) = door.told
    door.webhook(event)
    ahead = door.payments.now + timedelta(days=3650)
    door.payments.database.write_now(lambda session: inbox.failed(session, event["id"], OSError("away"), ahead))
    process_webhooks(door.payments.context)
    assert door.ledger() == [("topup", 25 * USD)]


# ---- what never arrived


def test_payments_whose_events_never_arrived_are_asked_for(door: Door) -> None:
    """Weft was down for longer than Stripe tries, or its database is a backup of an earlier time."""
    payment = door.paid("25")
    door.payments.fake.stripe.refund(payment["id"], 500)
    door.told.clear()
    door.payments.wait(20 * 86_400)
    process_webhooks(door.payments.context)
    assert door.ledger() == []
    assert ask_for_missed_events(door.payments.context)["kept"] >= 2
    process_webhooks(door.payments.context)
    assert sorted(door.ledger()) == [("refund", -5 * USD), ("topup", 25 * USD)]
    assert ask_for_missed_events(door.payments.context) == {"kept": 0}


@pytest.mark.parametrize("what", ["refund", "dispute"])
def test_what_went_back_is_taken_if_its_event_is_the_first_that_names_the_customer(door: Door, what: str) -> None:
    """A restored database is older than the customer, and Stripe lists the newest events first."""
    stripe, payment = door.payments.fake.stripe, door.paid("25")
    stripe.refund(payment["id"], 2500) if what == "refund" else stripe.dispute(payment["id"])
    forget = update(Organisation).values(stripe_customer_id=None)
    door.payments.database.write_now(lambda session: session.execute(forget))
    for event in reversed(door.told):
        door.deliver(event)
    assert sorted(door.ledger()) == [("chargeback" if what == "dispute" else what, -25 * USD), ("topup", 25 * USD)]


def test_events_that_a_clock_ahead_passed_over_are_asked_for_again(door: Door) -> None:
    """A machine was down for days and started with a wrong clock: else payments of those days would not be credited."""
    door.paid("25")
    door.told.clear()
    door.payments.wait(10 * 86_400)
    here = door.payments.fake.stripe.now
    door.payments.wait(3650 * 86_400)
    assert run_now(door.payments.context, JOBS["ask_for_missed_events"]) == {"kept": 0}
    door.payments.fake.stripe.now = here
    assert run_now(door.payments.context, JOBS["ask_for_missed_events"]) is not None
    process_webhooks(door.payments.context)
    assert door.ledger() == [("topup", 25 * USD)]


def test_an_event_that_arrives_after_it_was_asked_for_changes_nothing(door: Door) -> None:
    door.paid("25")
    late = door.told
    ask_for_missed_events(door.payments.context)
    process_webhooks(door.payments.context)
    door.deliver(*late)
    assert door.ledger() == [("topup", 25 * USD)]


def test_all_pages_of_missed_events_are_asked_for(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "PAGE", 2)
    for _ in range(3):
        door.paid("25")
        door.payments.wait(60)
    door.told.clear()
    ask_for_missed_events(door.payments.context)
    process_webhooks(door.payments.context)
    assert door.ledger() == [("topup", 25 * USD)] * 3
