"""Money is credited by webhooks only, and once, even if they are repeated, reordered, late or forged."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import pytest

from billing.payments import inbox
from scheduler.jobs.payments import process_webhooks, put_meter_events, send_meter_events
from store.tables import Alert, StripeWebhookEvent
from tests.billing.payments.door import USD, Door
from tests.fakestripe.server import WEBHOOK_SECRET
from tests.fakestripe.webhooks import signed
from tests.servers import free_port


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
