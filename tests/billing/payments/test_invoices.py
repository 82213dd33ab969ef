"""Months of postpaid organisations: closed when all usage is confirmed, compared with Stripe's invoice, and paid into
the ledger."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.event import listen, remove

from billing.money.ledger import refund_operation
from billing.money.wallets import Mode
from billing.payments import inbox, meters, setup
from billing.payments.client import stripe_client
from billing.payments.events import effect_of
from scheduler.jobs.money import reconcile_books
from scheduler.jobs.payments import close_invoices, process_webhooks, put_meter_events, send_meter_events
from scheduler.jobs.registry import JOBS
from scheduler.jobs.running import LEASE_S
from store.database.db import Database
from store.tables import Alert, AuditEntry, Invoice, Organisation
from tests.billing.payments.kit import START, Payments
from tests.fakestripe import FakeStripe

DECEMBER = datetime(2036, 12, 1, tzinfo=UTC)
NOVEMBER = (int(datetime(2036, 11, 1, tzinfo=UTC).timestamp()), int(DECEMBER.timestamp()))


@pytest.fixture
def org_id(payments: Payments) -> str:
    """An organisation that used 3.210123456 and 0.7 USD in November; nothing of it is sent yet."""
    org_id = payments.organisation()
    payments.use(org_id, "train", 3_210_123_456)
    payments.use(org_id, "sample", 700_000_000)
    return org_id


def _end_november(payments: Payments) -> dict[str, int]:
    payments.fake.stripe.now = DECEMBER.timestamp() + 2 * 3600
    put_meter_events(payments.context)
    send_meter_events(payments.context)
    return close_invoices(payments.context)


def _tell(payments: Payments) -> None:
    for event in payments.fake.stripe.events:
        payments.database.write_now(lambda session, event=event: inbox.keep(session, event, payments.now))  # type: ignore[misc]
    payments.fake.stripe.events.clear()
    process_webhooks(payments.context)


def _invoice(payments: Payments) -> Invoice:
    with payments.database.read() as session:
        return session.query(Invoice).one()


def _alerts(payments: Payments) -> list[str]:
    with payments.database.read() as session:
        return [alert.kind for alert in session.query(Alert).order_by(Alert.id)]


def _open_alerts(payments: Payments) -> list[str]:
    with payments.database.read() as session:
        return [alert.message for alert in session.query(Alert).filter_by(resolved_at=None)]


def test_a_month_from_use_to_payment(payments: Payments, org_id: str) -> None:
    payments.use(org_id, "prefill", 999)  # below what Stripe counts in
    assert _end_november(payments) == {"closed": 1}
    assert _invoice(payments).total_nusd == 3_910_124_455
    invoice = payments.fake.stripe.invoice(payments.customer(org_id), *NOVEMBER)
    assert invoice["total"] == 321 + 70
    _tell(payments)
    assert (_invoice(payments).status, _invoice(payments).pdf_url) == ("open", "https://invoice.example/1.pdf")
    payments.fake.stripe.pay_invoice(invoice)
    _tell(payments)
    assert _invoice(payments).status == "paid"
    assert payments.ledger(org_id)[3:] == [("invoice", 3_910_000_000), ("adjustment", 124_455)]
    assert sum(amount for _, amount in payments.ledger(org_id)) == 0
    assert reconcile_books(payments.context) == {"differ": 0, "drift_nusd": 0}
    assert _alerts(payments) == []


def test_what_is_used_last_in_a_month_is_at_stripe_before_its_invoice_is_final(payments: Payments) -> None:
    """Stripe takes usage of a month for an hour after its end. The job ran just before that end, and died the next
    time: its lease has to run out."""
    org_id = payments.organisation()
    payments.fake.stripe.now = DECEMBER.timestamp() - 1
    put_meter_events(payments.context)
    payments.use(org_id, "train", 5_000_000)
    payments.wait(JOBS["put_meter_events"].every_s + LEASE_S)
    put_meter_events(payments.context)
    send_meter_events(payments.context)
    assert payments.fake.stripe.total("weft_train", payments.customer(org_id)) == 5_000
    assert payments.now < DECEMBER + timedelta(hours=1)


def test_a_month_is_not_closed_before_every_event_is_confirmed(payments: Payments, org_id: str) -> None:
    payments.fake.stripe.now = DECEMBER.timestamp() + 2 * 3600
    put_meter_events(payments.context)
    payments.fake.front.faults.extend(["500"] * 2)
    send_meter_events(payments.context)
    assert close_invoices(payments.context) == {"closed": 0}
    payments.wait(48 * 3600)
    assert close_invoices(payments.context) == {"closed": 0}
    assert _alerts(payments) == ["invoice_blocked"]
    while any(row.state != "sent" for row in payments.outbox()):
        payments.wait(3600)
        send_meter_events(payments.context)
    assert close_invoices(payments.context) == {"closed": 1}


def test_a_month_that_nobody_closed_in_the_next_one_is_closed_later(payments: Payments, org_id: str) -> None:
    """The server was down, or the books did not agree: else its payment would be in nobody's balance."""
    payments.fake.stripe.now = DECEMBER.timestamp() + 2 * 3600
    put_meter_events(payments.context)
    send_meter_events(payments.context)
    invoice = payments.fake.stripe.invoice(payments.customer(org_id), *NOVEMBER)
    payments.fake.stripe.pay_invoice(invoice)
    payments.wait(45 * 24 * 3600)
    payments.use(org_id, "train", 5_000_000)
    put_meter_events(payments.context)
    send_meter_events(payments.context)
    assert close_invoices(payments.context) == {"closed": 1}
    assert close_invoices(payments.context) == {"closed": 0}
    _tell(payments)
    assert _invoice(payments).status == "paid"
    assert ("invoice", 3_910_000_000) in payments.ledger(org_id)


def test_a_clock_that_is_years_ahead_closes_no_month_that_goes_on(payments: Payments, org_id: str) -> None:
    put_meter_events(payments.context)
    send_meter_events(payments.context)
    here = payments.fake.stripe.now
    payments.wait(10 * 365 * 24 * 3600)
    assert close_invoices(payments.context) == {"closed": 0}
    payments.fake.stripe.now = here
    assert close_invoices(payments.context) == {"closed": 0}
    assert _end_november(payments) == {"closed": 1}


def test_a_month_that_a_clock_a_month_ahead_has_closed_goes_on(payments: Payments, org_id: str) -> None:
    put_meter_events(payments.context)
    send_meter_events(payments.context)
    here = payments.fake.stripe.now
    payments.fake.stripe.now = DECEMBER.timestamp() + 2 * 3600
    assert close_invoices(payments.context) == {"closed": 1}
    payments.fake.stripe.now = here
    assert close_invoices(payments.context) == {"closed": 0}
    payments.use(org_id, "train", 5_000_000)
    assert _end_november(payments) == {"closed": 1}
    assert _invoice(payments).total_nusd == 3_915_123_456


def test_a_month_is_not_closed_before_all_of_it_is_in_the_outbox(payments: Payments, org_id: str) -> None:
    put_meter_events(payments.context)
    send_meter_events(payments.context)
    payments.use(org_id, "train", 2_000_000_000)
    payments.fake.stripe.now = DECEMBER.timestamp() + 2 * 3600
    assert close_invoices(payments.context) == {"closed": 0}  # Stripe was away when usage was to be put there
    payments.wait(48 * 3600)
    assert close_invoices(payments.context) == {"closed": 0}
    assert _alerts(payments) == ["invoice_blocked"]
    put_meter_events(payments.context)
    send_meter_events(payments.context)
    assert close_invoices(payments.context) == {"closed": 1}
    assert payments.fake.stripe.total("weft_train", payments.customer(org_id)) == 5_210_123


def test_work_that_ends_while_the_books_are_held_together_stops_no_month(
    postgres_database: Database, stripe_server: FakeStripe, tmp_path: Path
) -> None:
    """In production another process settles meanwhile, many times a second."""
    payments = Payments(postgres_database, stripe_server.reset(START), tmp_path)
    org_id = payments.organisation()
    payments.use(org_id, "train", 3_210_123_456)
    elsewhere = replace(payments, database=Database(postgres_database.url))
    ended: list[str] = []

    def end_more(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "FROM ledger_entries" in statement and not ended:
            ended.append("begun")
            ended.append(elsewhere.use(org_id, "train", 5_000))

    listen(Engine, "after_cursor_execute", end_more)
    try:
        assert _end_november(payments) == {"closed": 1}
    finally:
        remove(Engine, "after_cursor_execute", end_more)
        elsewhere.database.close()
    assert len(ended) == 2
    assert _alerts(payments) == []


def _change_mode(payments: Payments, org_id: str, mode: Mode) -> None:
    payments.database.write_now(lambda session: meters.change_mode(session, org_id, mode, 0, payments.now))


@pytest.mark.parametrize("before", ["prepaid", "unlimited"])
def test_usage_before_an_organisation_paid_by_the_month_is_not_invoiced(payments: Payments, before: str) -> None:
    """An organisation becomes postpaid in the middle of a month, changes back for a while, and is postpaid again."""
    payments.fake.stripe.now = datetime(2036, 10, 30, tzinfo=UTC).timestamp()
    org_id = payments.organisation(before)
    payments.use(org_id, "train", 8_000_000_777)
    payments.fake.stripe.now = START.timestamp()
    for mode, amount_nusd in (("postpaid", 3_000_123_456), (before, 2_000_000_000), ("postpaid", 210_000_000)):
        payments.use(org_id, "train", 5_000_000_000)
        _change_mode(payments, org_id, mode)  # type: ignore[arg-type]
        payments.use(org_id, "train", amount_nusd)
        _change_mode(payments, org_id, mode)  # type: ignore[arg-type]  # its credit limit is another now
        put_meter_events(payments.context)
        send_meter_events(payments.context)
    assert _end_november(payments) == {"closed": 1}
    metered_uusd = 3_000_123 + 210_000
    assert payments.fake.stripe.total("weft_train", payments.customer(org_id)) == metered_uusd
    assert _invoice(payments).total_nusd == 1000 * metered_uusd + 456


def test_who_prepays_from_now_on_pays_the_invoice_of_before(payments: Payments, org_id: str) -> None:
    put_meter_events(payments.context)
    payments.use(org_id, "train", 4_000_000_000)  # not in the outbox: it is taken from the balance
    _change_mode(payments, org_id, "prepaid")
    assert _end_november(payments) == {"closed": 1}
    assert _invoice(payments).total_nusd == 3_910_123_456
    payments.fake.stripe.pay_invoice(payments.fake.stripe.invoice(payments.customer(org_id), *NOVEMBER))
    _tell(payments)
    assert payments.ledger(org_id)[3:] == [("invoice", 3_910_000_000), ("adjustment", 123_456)]
    assert _alerts(payments) == []


def test_books_that_do_not_agree_stop_the_month(payments: Payments, org_id: str) -> None:
    payments.database.write_now(lambda session: session.execute(text("UPDATE wallets SET balance_nusd = 1")))
    assert _end_november(payments) == {"closed": 0}
    assert _alerts(payments) == ["invoice_blocked"]
    assert reconcile_books(payments.context)["differ"] == 1


def test_what_was_refunded_is_not_invoiced(payments: Payments, org_id: str) -> None:
    payments.fake.stripe.now = time.time()  # refunds are booked at the real time
    operation = payments.use(org_id, "prefill", 5_000_000_000)
    for expected in (5_000_000, 0):
        put_meter_events(payments.context)
        send_meter_events(payments.context)
        assert payments.fake.stripe.total("weft_prefill", payments.customer(org_id)) == expected
        payments.database.write_now(lambda session: refund_operation(session, org_id, operation))
        payments.wait(1)


def test_an_invoice_that_comes_before_the_close_waits_for_it(payments: Payments, org_id: str) -> None:
    payments.fake.stripe.now = DECEMBER.timestamp() + 600
    put_meter_events(payments.context)
    send_meter_events(payments.context)
    payments.fake.stripe.invoice(payments.customer(org_id), *NOVEMBER)
    _tell(payments)
    payments.wait(2 * 3600)
    close_invoices(payments.context)
    process_webhooks(payments.context)
    assert _invoice(payments).status == "open"


def test_a_failed_payment_and_the_one_that_follows(payments: Payments, org_id: str) -> None:
    _end_november(payments)
    invoice = payments.fake.stripe.invoice(payments.customer(org_id), *NOVEMBER)
    payments.fake.stripe.change("invoice.payment_failed", invoice, attempted=True)
    _tell(payments)

    def status() -> str:
        with payments.database.read() as session:
            return session.get_one(Organisation, org_id).status

    assert (_invoice(payments).status, status(), _alerts(payments)) == ("failed", "past_due", ["invoice_failed"])
    payments.fake.stripe.pay_invoice(invoice)
    _tell(payments)
    assert (_invoice(payments).status, status()) == ("paid", "active")
    with payments.database.read() as session:
        noted = session.query(AuditEntry).filter_by(org_id=org_id, event="organization_status_set")
        assert [entry.detail["to"] for entry in noted.order_by(AuditEntry.id)] == ["past_due", "active"]


@pytest.mark.parametrize("told_of_failure", [True, False])
@pytest.mark.parametrize(("how", "status"), [("void", "active"), ("uncollectible", "past_due")])
def test_a_failed_invoice_that_nobody_is_to_pay(
    payments: Payments, org_id: str, how: str, status: str, told_of_failure: bool
) -> None:
    """A voided invoice was a mistake and is owed by nobody; one given up as uncollectible is still owed."""
    _end_november(payments)
    invoice = payments.fake.stripe.invoice(payments.customer(org_id), *NOVEMBER)
    payments.fake.stripe.change("invoice.payment_failed", invoice, attempted=True)
    if told_of_failure:
        _tell(payments)
    payments.fake.stripe.change("invoice.voided", invoice, status=how)
    _tell(payments)
    with payments.database.read() as session:
        assert session.get_one(Organisation, org_id).status == status
        still = session.query(Alert).filter_by(kind="invoice_failed", resolved_at=None)
        assert still.count() == (status == "past_due")


@pytest.mark.parametrize("end", ["paid", "void"])
def test_who_has_fetched_an_open_invoice_and_writes_after_its_end_changes_nothing(
    payments: Payments, org_id: str, end: str
) -> None:
    _end_november(payments)
    stripe = payments.fake.stripe
    invoice = stripe.invoice(payments.customer(org_id), *NOVEMBER)
    stripe.change("invoice.payment_failed", invoice, attempted=True)
    late = effect_of(stripe_client(payments.fake.settings()), stripe.events[-1])
    if end == "paid":
        stripe.pay_invoice(invoice)
    else:
        stripe.change("invoice.voided", invoice, status="void")
    _tell(payments)
    payments.database.write_now(lambda session: late(session, payments.now))
    with payments.database.read() as session:
        assert (session.query(Invoice).one().status, session.get_one(Organisation, org_id).status) == (end, "active")


def test_an_invoice_paid_from_elsewhere_is_for_a_person_to_book(payments: Payments, org_id: str) -> None:
    """For example from a balance that the customer has at Stripe, or by a bank transfer."""
    _end_november(payments)
    invoice = payments.fake.stripe.invoice(payments.customer(org_id), *NOVEMBER)
    payments.fake.stripe.change("invoice.paid", invoice, status="paid", amount_paid=100)
    _tell(payments)
    assert payments.ledger(org_id)[2:] == [("invoice", 1_000_000_000)]
    assert _alerts(payments) == ["invoice_differs"]


@pytest.mark.parametrize("closed", [True, False])
def test_an_invoice_that_a_balance_at_stripe_covers_is_for_a_person_to_book(
    payments: Payments, org_id: str, closed: bool
) -> None:
    """Also if Stripe tells of it, with nothing due, before the month is closed here."""
    stripe, customer = payments.fake.stripe, payments.customer(org_id)
    stripe.objects[customer]["balance"] = -10_000
    payments.fake.stripe.now = DECEMBER.timestamp() + 600
    put_meter_events(payments.context)
    send_meter_events(payments.context)
    if closed:
        _end_november(payments)
    assert stripe.invoice(customer, *NOVEMBER)["amount_due"] == 0
    _tell(payments)
    _end_november(payments)
    process_webhooks(payments.context)
    assert _invoice(payments).status == "paid"
    assert _alerts(payments) == ["invoice_differs"]


def test_an_amount_below_stripes_smallest_charge_is_paid_with_the_next_invoice(payments: Payments) -> None:
    org_id = payments.organisation()
    payments.use(org_id, "train", 300_000_000)
    _end_november(payments)
    stripe, customer = payments.fake.stripe, payments.customer(org_id)
    stripe.invoice(customer, *NOVEMBER)
    _tell(payments)
    assert _invoice(payments).status == "paid"
    payments.use(org_id, "train", 1_000_003_456)
    stripe.now = datetime(2037, 1, 1, 2, tzinfo=UTC).timestamp()
    put_meter_events(payments.context)
    send_meter_events(payments.context)
    close_invoices(payments.context)
    invoice = stripe.invoice(customer, NOVEMBER[1], int(stripe.now) - 7200)
    stripe.pay_invoice(invoice)
    _tell(payments)
    assert [amount for kind, amount in payments.ledger(org_id) if kind == "invoice"] == [1_300_000_000]
    assert sum(amount for _, amount in payments.ledger(org_id)) == 0
    assert _alerts(payments) == []


@pytest.mark.parametrize(
    ("reason", "subscription", "cents"),
    [
        ("manual", None, 50_000),
        ("subscription_cycle", {"plan": "support"}, 2_000),
        ("subscription_create", {"weft": "meters"}, 0),  # Stripe prints it at once, for the time before any usage
    ],
)
def test_other_invoices_of_a_customer_are_not_the_months(
    payments: Payments, org_id: str, reason: str, subscription: dict[str, str] | None, cents: int
) -> None:
    """However late Stripe tells of them."""
    at = int(datetime(2036, 11, 29, tzinfo=UTC).timestamp())
    other = payments.fake.stripe.print_invoice(payments.customer(org_id), at, at, cents, reason, subscription)
    _tell(payments)
    _end_november(payments)
    payments.fake.stripe.pay_invoice(other)
    _tell(payments)
    assert (_invoice(payments).status, _invoice(payments).stripe_invoice_id) == ("closed", None)
    assert [kind for kind, _ in payments.ledger(org_id)] == ["usage", "usage"]
    assert _alerts(payments) == []


def test_an_invoice_that_differs_raises_an_alert(payments: Payments, org_id: str) -> None:
    _end_november(payments)
    stripe: Any = payments.fake.stripe
    stripe.count(
        {
            "event_name": "weft_train",
            "timestamp": str(NOVEMBER[1] - 60),
            "payload": {"stripe_customer_id": payments.customer(org_id), "value": "1000000"},
        }
    )
    stripe.invoice(payments.customer(org_id), *NOVEMBER)
    _tell(payments)
    assert _alerts(payments) == ["invoice_differs"]


def test_an_invoice_that_comes_before_its_month_is_closed_is_an_alert_only_if_the_month_stays_open(
    payments: Payments, org_id: str
) -> None:
    """Stripe's is final an hour after the month; ours is closed by a job that runs every hour."""

    def wait(times: int, seconds: int) -> None:
        for _ in range(times):
            payments.wait(seconds)
            process_webhooks(payments.context)

    stripe = payments.fake.stripe
    stripe.now = DECEMBER.timestamp() + 3600
    put_meter_events(payments.context)
    send_meter_events(payments.context)
    stripe.invoice(payments.customer(org_id), *NOVEMBER)
    _tell(payments)
    wait(10, 300)
    assert _alerts(payments) == []
    wait(50, 3600)
    assert _alerts(payments) == ["webhook_stuck"]
    assert close_invoices(payments.context) == {"closed": 1}
    wait(1, 3600)
    assert _invoice(payments).status == "open"
    assert _open_alerts(payments) == []


def test_what_a_paid_invoice_leaves_to_book_is_told_instead_of_that_it_differs(payments: Payments, org_id: str) -> None:
    _end_november(payments)
    stripe, customer = payments.fake.stripe, payments.customer(org_id)
    invoice = stripe.print_invoice(customer, *NOVEMBER, 100, "subscription_cycle", {"weft": "meters"})
    _tell(payments)
    (told,) = _open_alerts(payments)
    assert "beside what was used in 2036-11" in told
    stripe.pay_invoice(invoice)
    _tell(payments)
    (told,) = _open_alerts(payments)
    assert "book them by hand" in told


def test_a_second_close_changes_nothing(payments: Payments, org_id: str) -> None:
    assert _end_november(payments) == {"closed": 1}
    assert close_invoices(payments.context) == {"closed": 0}
    assert put_meter_events(payments.context) == {"put": 0}


def test_setting_up_an_account_twice_makes_one_of_each(payments: Payments) -> None:
    payments.fake.stripe.objects.clear()
    client = stripe_client(payments.fake.settings())
    prices = setup.set_up(client)
    assert len(prices) == 4
    assert setup.set_up(client) == prices
    assert len(payments.fake.stripe.all("billing.meter")) == len(payments.fake.stripe.all("price")) == 4
    payments.settings = payments.fake.settings().model_copy(update={"price_ids": list(prices)})
    for _ in range(2):
        payments.use(payments.organisation(), "train", 5_000)
        put_meter_events(payments.context)
    assert len(payments.fake.stripe.all("subscription")) == 2
