"""Events that never arrived are asked for."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from billing.payments import inbox
from scheduler.jobs.payments import ask_for_missed_events, process_webhooks
from scheduler.jobs.registry import JOBS
from scheduler.jobs.running import run_now
from store.tables import Organisation
from tests.billing.payments.door import USD, Door

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
