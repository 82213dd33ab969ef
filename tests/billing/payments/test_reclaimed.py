"""Money that goes back: refunds, disputes, and what is reclaimed by hand."""

from __future__ import annotations

import pytest
from sqlalchemy.orm import Session

from billing.money.accounts import Accounts, OutOfMoney, Payer
from billing.money.wallets import set_mode
from billing.payments.client import stripe_client
from billing.payments.events import effect_of
from tests.billing.payments.door import USD, Door
from tests.billing.payments.kit import START
from tests.search import chance


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
