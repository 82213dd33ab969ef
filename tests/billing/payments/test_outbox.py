"""Meter events arrive once each, whatever happens on the way: the fake's sum is the ledger's, to the micro-USD."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import stripe
from hypothesis import HealthCheck, given, settings, strategies as st
from sqlalchemy import select

from billing.money.alerts import read_gauges
from billing.payments import customers, sender, setup
from billing.payments.client import stripe_client
from billing.payments.meters import METERS
from billing.payments.periods import period_of
from billing.payments.sender import RESEND_WINDOW
from scheduler.jobs.payments import compare_with_stripe, put_meter_events, send_meter_events
from store.database.db import Database
from store.tables import Alert, UsageEvent
from tests.billing.payments.kit import START, Payments, drain
from tests.fakestripe import FakeStripe
from tests.search import examples

HOUR = 3600.0


def _agree(payments: Payments, orgs: list[str]) -> None:
    for org_id in orgs:
        total = 0
        for meter, kinds in METERS.items():
            counted = payments.fake.stripe.total(f"weft_{meter}", payments.customer(org_id))
            total += counted
            assert counted == _floors(payments, org_id, kinds), (org_id, meter)
        billed_nusd = -sum(amount for kind, amount in payments.ledger(org_id) if kind == "usage")
        # Below a micro-USD for each meter and month stays in our books.
        assert 0 <= billed_nusd - total * 1000 < 1000 * len(METERS) * 3


def _floors(payments: Payments, org_id: str, kinds: tuple[str, ...]) -> int:
    """The sum over months of each month's amount, rounded down to micro-USD."""
    months: dict[Any, int] = {}
    with payments.database.read() as session:
        query = select(UsageEvent.recorded_at, UsageEvent.amount_nusd).where(UsageEvent.org_id == org_id)
        for at, amount in session.execute(query.where(UsageEvent.kind.in_(kinds))):
            months[period_of(at)] = months.get(period_of(at), 0) + amount
    return sum(amount // 1000 for amount in months.values())


ORGS = st.integers(0, 1)
KINDS = st.sampled_from([kind for kinds in METERS.values() for kind in kinds])
FAULTS = st.sampled_from(["ok", "lost", "unanswered", "429", "500", "403"])
STEPS = st.one_of(
    st.tuples(st.just("use"), ORGS, KINDS, st.integers(1, 10**7)),
    st.tuples(st.just("put")),
    st.tuples(st.just("send"), st.lists(FAULTS, max_size=4)),
    st.tuples(st.just("crash before sending")),
    st.tuples(st.just("crash after sending"), st.sampled_from(["ok", "unanswered"])),
    st.tuples(st.just("lapse"), ORGS, KINDS, st.sampled_from(["lost", "unanswered"])),
    st.tuples(st.just("wait"), st.sampled_from([5.0, 130.0, HOUR, 22.9 * HOUR, 25 * HOUR])),
)


@settings(max_examples=examples(4), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=3, max_size=15), lag_s=st.sampled_from([0.0, 60.0, 5 * HOUR]))
def test_every_micro_dollar_is_counted_once(payments: Payments, steps: list[tuple[Any, ...]], lag_s: float) -> None:
    payments.forget_others()
    payments.fake.reset(START).stripe.lag_s = lag_s
    orgs = [payments.organisation() for _ in range(2)]
    client = stripe_client(payments.fake.settings())
    for step, *rest in steps:
        match step:
            case "use":
                payments.use(orgs[rest[0]], rest[1], rest[2])
            case "put":
                put_meter_events(payments.context)
            case "send":
                payments.fake.front.faults.extend(rest[0])
                send_meter_events(payments.context)
                payments.fake.front.faults.clear()
            case "lapse":  # nothing reaches Stripe until it has forgotten the identifier
                payments.use(orgs[rest[0]], rest[1], 1_234_567)
                put_meter_events(payments.context)
                payments.fake.front.faults.extend([rest[2]] * 8)
                send_meter_events(payments.context)
                payments.fake.front.faults.clear()
                payments.wait(25 * HOUR)
            case "crash before sending":
                payments.database.write_now(lambda session: sender.claim(session, payments.now, 8))
            case "crash after sending":
                for event in payments.database.write_now(lambda session: sender.claim(session, payments.now, 8)):
                    payments.fake.front.faults.append(rest[0])
                    sender.send(client, event, lambda: payments.now)
            case "wait":
                payments.wait(rest[0])
    drain(payments)
    _agree(payments, orgs)
    payments.wait(7 * HOUR)
    assert compare_with_stripe(payments.context)["differ"] == 0


def test_no_more_is_read_of_a_month_than_its_hours(
    database: Database, stripe_server: FakeStripe, tmp_path: Path
) -> None:
    """All writes wait while the writer reads: of usage events, of which a month has millions, it reads only those of
    refunds."""
    payments = Payments(database, stripe_server.reset(START), tmp_path)
    org_id = payments.organisation()
    payments.use(org_id, "train", 5_000)
    driver = database.write_now(lambda session: session.connection().connection.driver_connection)
    assert isinstance(driver, sqlite3.Connection)
    asked: list[str] = []
    driver.set_trace_callback(asked.append)
    put_meter_events(payments.context)
    driver.set_trace_callback(None)
    of_events = [statement for statement in asked if "usage_events" in statement]
    with closing(sqlite3.connect(tmp_path / "weft.db")) as there:
        plans = [step[3] for one in of_events for step in there.execute(f"EXPLAIN QUERY PLAN {one}")]
    assert {step for step in plans if "usage_events" in step and "(operation_id=" not in step} == set()
    assert len(of_events) == 2 * len(METERS)


def test_rounding_never_drifts(payments: Payments) -> None:
    org_id = payments.organisation()
    for _ in range(7):
        payments.use(org_id, "train", 1_300)  # 1.3 micro-USD
        put_meter_events(payments.context)
    send_meter_events(payments.context)
    assert [row.value_uusd for row in payments.outbox()] == [1, 1, 1, 2, 1, 1, 2]  # floor(1.3 n)
    assert payments.fake.stripe.total("weft_train", payments.customer(org_id)) == 9


def test_identifiers_name_organisation_meter_month_and_number(payments: Payments) -> None:
    org_id = payments.organisation()
    payments.use(org_id, "cached_prefill", 5_000)
    put_meter_events(payments.context)
    (row,) = payments.outbox()
    assert row.identifier.startswith(f"{org_id}:prefill:2036-11:1:")


def test_a_lost_answer_is_asked_for_again_under_the_same_identifier(payments: Payments) -> None:
    org_id = payments.organisation()
    payments.use(org_id, "train", 5_000)
    put_meter_events(payments.context)
    payments.fake.front.faults.append("unanswered")
    assert send_meter_events(payments.context) == {"again": 1}
    payments.wait(130)
    assert send_meter_events(payments.context) == {"sent": 1}  # "already exists with identifier"
    assert payments.fake.stripe.total("weft_train", payments.customer(org_id)) == 5


def test_a_clock_that_was_ahead_puts_off_nothing_for_years(payments: Payments) -> None:
    """A machine that starts with a wrong clock may not reach Stripe; that clock then sets the time of the next try."""
    org_id = payments.organisation()
    payments.use(org_id, "train", 5_000)
    put_meter_events(payments.context)
    payments.wait(3650 * 24 * HOUR)
    payments.fake.front.faults.append("lost")
    assert send_meter_events(payments.context) == {"again": 1}
    payments.wait(-3650 * 24 * HOUR)
    assert send_meter_events(payments.context) == {"sent": 1}
    assert payments.fake.stripe.total("weft_train", payments.customer(org_id)) == 5


def test_the_window_of_a_row_that_a_clock_ahead_sent_first_is_no_longer(payments: Payments) -> None:
    org_id = payments.organisation()
    payments.use(org_id, "train", 5_000)
    put_meter_events(payments.context)
    payments.fake.front.faults += ["unanswered", "lost"]
    ahead = payments.now + timedelta(days=10)
    assert send_meter_events(replace(payments.context, clock=lambda: ahead)) == {"again": 1}
    assert send_meter_events(payments.context) == {"again": 1}
    payments.wait(RESEND_WINDOW.total_seconds() + 7 * HOUR)  # its identifier is forgotten by now
    drain(payments)
    assert payments.fake.stripe.total("weft_train", payments.customer(org_id)) == 5


@pytest.mark.parametrize("fault", ["lost", "unanswered"])
def test_past_its_window_a_row_is_not_resent_but_looked_up(payments: Payments, fault: Any) -> None:
    org_id = payments.organisation()
    payments.use(org_id, "train", 5_000)
    put_meter_events(payments.context)
    payments.fake.front.faults.append(fault)
    send_meter_events(payments.context)
    payments.wait(RESEND_WINDOW.total_seconds() + 7 * HOUR)  # its identifier is forgotten by now
    before = len(payments.fake.front.requests)
    send_meter_events(payments.context)
    asked = [path for method, path, _ in payments.fake.front.requests[before:] if method == "POST"]
    assert asked == []
    (row,) = payments.outbox()
    assert row.state == ("sent" if fault == "unanswered" else "pending")
    drain(payments)
    assert payments.fake.stripe.total("weft_train", payments.customer(org_id)) == 5


def test_a_sum_that_fits_neither_is_for_a_person(payments: Payments) -> None:
    org_id = payments.organisation()
    payments.use(org_id, "train", 5_000)
    put_meter_events(payments.context)
    payments.fake.front.faults.append("lost")
    send_meter_events(payments.context)
    payments.fake.stripe.count(  # somebody else uses our meter
        {"event_name": "weft_train", "payload": {"stripe_customer_id": payments.customer(org_id), "value": "3"}}
    )
    payments.wait(RESEND_WINDOW.total_seconds() + 7 * HOUR)
    send_meter_events(payments.context)
    assert [row.state for row in payments.outbox()] == ["reconcile"]
    with payments.database.read() as session:
        assert [alert.kind for alert in session.query(Alert)] == ["stripe_unclear"]


def test_one_call_at_a_time_for_a_customers_meter(payments: Payments) -> None:
    """Two processes send at once; Stripe would answer 429 to the second call."""
    orgs = [payments.organisation() for _ in range(3)]
    for _ in range(3):
        for org_id in orgs:
            payments.use(org_id, "train", 5_000)
            payments.use(org_id, "sample", 7_000)
        put_meter_events(payments.context)
        payments.wait(1)
    payments.fake.front.latency_s = 0.02
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(send_meter_events, [payments.context] * 2))
    drain(payments)
    assert payments.fake.front.collisions == 0
    _agree(payments, orgs)


def test_a_refused_row_holds_up_its_own_meter_only(payments: Payments) -> None:
    org_id = payments.organisation()
    payments.use(org_id, "train", 5_000)
    payments.use(org_id, "sample", 5_000)
    put_meter_events(payments.context)
    payments.wait(36 * 24 * HOUR)  # both are too old for Stripe now
    assert send_meter_events(payments.context) == {"refused": 2}
    other = payments.organisation()
    payments.use(other, "train", 9_000)
    put_meter_events(payments.context)
    assert send_meter_events(payments.context)["sent"] == 1
    with payments.database.read() as session:
        assert {alert.kind for alert in session.query(Alert)} == {"stripe_refused"}


def test_429_waits_as_long_as_it_doubles(payments: Payments) -> None:
    payments.use(payments.organisation(), "train", 5_000)
    put_meter_events(payments.context)
    for attempt, least in enumerate([1, 2, 4, 8], start=1):
        payments.fake.front.faults.append("429")
        assert send_meter_events(payments.context) == {"again": 1}
        (row,) = payments.outbox()
        assert row.attempts == attempt
        assert timedelta(seconds=least) <= row.next_attempt_at - payments.now <= timedelta(seconds=2 * least)
        payments.wait(2 * least)


def test_a_prepaid_organisation_is_not_metered(payments: Payments) -> None:
    for mode in ("prepaid", "unlimited"):
        payments.use(payments.organisation(mode), "train", 5_000)
    assert put_meter_events(payments.context) == {"put": 0}


def test_usage_of_the_last_moment_belongs_to_its_month(payments: Payments) -> None:
    org_id = payments.organisation()
    payments.fake.stripe.now = START.replace(day=30, hour=23, minute=59, second=59).timestamp()
    payments.use(org_id, "train", 5_000)
    payments.wait(600)
    payments.use(org_id, "train", 2_000)
    put_meter_events(payments.context)
    assert [(f"{row.occurred_at:%m-%dT%H:%M:%S}", row.value_uusd) for row in payments.outbox()] == [
        ("11-30T23:59:59", 5),
        ("12-01T00:09:59", 2),
    ]


def test_a_postpaid_organisation_becomes_a_customer_before_it_is_metered(payments: Payments) -> None:
    org_id = payments.organisation(customer=False)
    payments.use(org_id, "train", 5_000)
    for _ in range(2):
        put_meter_events(payments.context)
    customer = payments.customer(org_id)
    assert payments.fake.stripe.objects[customer]["metadata"] == {"weft_org": org_id}
    assert [row.customer_id for row in payments.outbox()] == [customer]
    drain(payments)
    _agree(payments, [org_id])


def _deleted_at_stripe(payments: Payments, org_id: str) -> None:
    del payments.fake.stripe.objects[payments.customer(org_id)]


def _subscribing(payments: Payments) -> None:
    prices = list(setup.set_up(stripe_client(payments.fake.settings())))
    payments.settings = payments.fake.settings().model_copy(update={"price_ids": prices})


@pytest.fixture
def three(payments: Payments) -> list[str]:
    """Organisations that used something, in the order in which jobs come to them."""
    found = sorted(payments.organisation() for _ in range(3))
    for org_id in found:
        payments.use(org_id, "train", 5_000)
    return found


def test_a_customer_whom_stripe_refuses_holds_up_no_other(payments: Payments, three: list[str]) -> None:
    """One customer was deleted at Stripe: the others are still metered, and the job is reported as failed."""
    _subscribing(payments)
    _deleted_at_stripe(payments, three[1])
    with pytest.raises(stripe.InvalidRequestError, match="No such customer"):
        put_meter_events(payments.context)
    assert {row.org_id for row in payments.outbox()} == {three[0], three[2]}


def test_a_customer_whom_stripe_cannot_count_holds_up_no_other(payments: Payments, three: list[str]) -> None:
    """Neither if Stripe's sum decides what arrived, nor if it is compared with ours."""
    put_meter_events(payments.context)
    payments.fake.front.faults.extend(["unanswered"] * 3)
    send_meter_events(payments.context)
    payments.wait(RESEND_WINDOW.total_seconds() + 7 * HOUR)
    _deleted_at_stripe(payments, three[0])
    with pytest.raises(stripe.InvalidRequestError, match="No such customer"):
        send_meter_events(payments.context)
    assert [row.state for row in payments.outbox()] == ["reconcile", "sent", "sent"]
    payments.wait(7 * HOUR)
    _deleted_at_stripe(payments, three[1])
    elsewhere = {"stripe_customer_id": payments.customer(three[2]), "value": "3"}
    payments.fake.stripe.count({"event_name": "weft_train", "timestamp": START.timestamp(), "payload": elsewhere})
    payments.wait(7 * HOUR)
    with pytest.raises(stripe.InvalidRequestError, match="No such customer"):
        compare_with_stripe(payments.context)
    with payments.database.read() as session:
        assert [alert.kind for alert in session.query(Alert)] == ["stripe_drift"]


def test_a_wrong_price_is_put_right_at_once(payments: Payments, three: list[str]) -> None:
    """Stripe keeps its answer to an idempotency key for a day, and refuses any other request with that key."""
    _subscribing(payments)
    assert payments.settings is not None
    right, wrong = payments.settings, payments.settings.model_copy(update={"price_ids": ["price_of_another_account"]})
    payments.settings = wrong
    with pytest.raises(stripe.InvalidRequestError):
        put_meter_events(payments.context)
    payments.settings = right
    assert put_meter_events(payments.context) == {"put": 3}
    assert len(payments.fake.stripe.all("subscription")) == 3


def test_a_subscription_to_other_prices_than_the_settings_say_is_for_a_person(
    payments: Payments, three: list[str]
) -> None:
    """Usage of a meter whose price it lacks is on no invoice, and is noticed a month later at best."""
    _subscribing(payments)
    assert payments.settings is not None
    prices = payments.settings.price_ids
    payments.settings = payments.settings.model_copy(update={"price_ids": prices[:2]})
    put_meter_events(payments.context)
    payments.settings = payments.settings.model_copy(update={"price_ids": prices})
    for _ in range(2):
        put_meter_events(payments.context)

    def told() -> list[tuple[str, bool]]:
        with payments.database.read() as session:
            return [(alert.kind, alert.resolved_at is None) for alert in session.query(Alert)]

    assert told() == [("subscription_differs", True)] * 3
    for subscription in payments.fake.stripe.all("subscription"):
        item = subscription["items"]["data"][0]
        subscription["items"]["data"] = [item | {"price": {"id": price}} for price in reversed(prices)]
    put_meter_events(payments.context)
    assert told() == [("subscription_differs", False)] * 3


def test_an_error_of_stripes_is_not_kept_for_a_day(payments: Payments) -> None:
    """And the next try makes nothing twice."""
    _subscribing(payments)
    org_id, other = payments.organisation(customer=False), payments.organisation()
    for org in (org_id, other):
        payments.use(org, "train", 5_000)
    payments.fake.front.broken = True
    with pytest.raises(stripe.APIError):
        put_meter_events(payments.context)
    payments.fake.front.broken = False
    payments.wait(HOUR)
    for _ in range(2):
        put_meter_events(payments.context)
    assert {row.org_id for row in payments.outbox()} == {org_id, other}
    assert len(payments.fake.stripe.all("subscription")) == 2


def test_two_who_subscribe_at_once_at_a_full_hour_make_one_subscription(
    payments: Payments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else usage would be invoiced twice. Their idempotency keys differ, since they contain the hour."""
    _subscribing(payments)
    assert payments.settings is not None
    org_id, prices, client = payments.organisation(), payments.settings.price_ids, stripe_client(payments.settings)
    customer, at, once = payments.customer(org_id), payments.now, customers._once
    others = list[str]()

    def after_the_other(what: str, now: datetime) -> Any:
        monkeypatch.undo()
        others.append(customers.subscribe(client, customer, prices, at - timedelta(seconds=1)).id)
        return once(what, now)

    monkeypatch.setattr(customers, "_once", after_the_other)
    mine = customers.subscribe(client, customer, prices, at).id
    assert others == [mine]
    assert [row["id"] for row in payments.fake.stripe.all("subscription") if row["status"] == "active"] == [mine]


def test_a_subscription_that_another_cancels_first_is_cancelled(payments: Payments) -> None:
    _subscribing(payments)
    assert payments.settings is not None
    client = stripe_client(payments.settings)
    subscription = customers.subscribe(
        client, payments.customer(payments.organisation()), payments.settings.price_ids, payments.now
    ).id
    for _ in range(2):
        customers.cancel(client, subscription)
    assert payments.fake.stripe.get("subscription", subscription)["status"] == "canceled"


def test_the_outbox_is_watched(payments: Payments) -> None:
    org_id = payments.organisation()
    payments.use(org_id, "train", 5_000)
    put_meter_events(payments.context)
    payments.wait(HOUR)
    with payments.database.read() as session:
        found = read_gauges(session, payments.now)
    assert (found.outbox_pending, found.outbox_oldest_age_s) == (1, HOUR)
    drain(payments)
    with payments.database.read() as session:
        found = read_gauges(session, payments.now)
    assert (found.outbox_pending, found.outbox_oldest_age_s) == (0, 0.0)
