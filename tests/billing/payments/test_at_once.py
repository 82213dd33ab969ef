"""The jobs of payments run in several processes at once, as after a lease has run out: books and Stripe agree."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from billing.money.alerts import raise_alert
from billing.payments import inbox, invoices
from billing.payments.client import stripe_client
from billing.payments.events import effect_of
from billing.payments.meters import METERS
from scheduler.jobs.payments import close_invoices, process_webhooks, put_meter_events, send_meter_events
from scheduler.jobs.registry import Result, Run
from store.database.db import Database
from store.people.organisations import set_status
from store.tables import Alert, Invoice, Organisation
from tests.billing.payments.kit import START, Payments
from tests.fakestripe import FakeStripe

NOVEMBER, DECEMBER = (int(datetime(2036, month, 1, tzinfo=UTC).timestamp()) for month in (11, 12))
USED_NUSD = 3_000_000_123


@pytest.fixture
def processes(postgres_database: Database, stripe_server: FakeStripe, tmp_path: Path) -> Iterator[list[Payments]]:
    first = Payments(postgres_database, stripe_server.reset(START), tmp_path)
    with ExitStack() as stack:
        others = [stack.enter_context(closing(Database(postgres_database.url))) for _ in range(2)]
        yield [first, *(replace(first, database=database) for database in others)]


def _at_once(processes: list[Payments], job: Run) -> list[Result]:
    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(job, [process.context for process in processes]))


def test_a_month_from_use_to_payment(processes: list[Payments]) -> None:
    payments = processes[0]
    stripe = payments.fake.stripe
    organisations = [payments.organisation(customer=made) for made in (True, False, True)]
    for org_id in organisations:
        for kinds in METERS.values():
            payments.use(org_id, kinds[0], USED_NUSD)
    stripe.now = DECEMBER + 2 * 3600
    _at_once(processes, put_meter_events)
    for _ in range(3):
        _at_once(processes, send_meter_events)
        payments.wait(130)
    assert sum(result["closed"] for result in _at_once(processes, close_invoices)) == len(organisations)
    for org_id in organisations:
        customer = payments.customer(org_id)
        assert [stripe.total(f"weft_{meter}", customer) for meter in METERS] == [USED_NUSD // 1000] * len(METERS)
        stripe.pay_invoice(stripe.invoice(customer, NOVEMBER, DECEMBER))
    for event in stripe.events:
        payments.database.write_now(lambda session, event=event: inbox.keep(session, event, payments.now))  # type: ignore[misc]
    _at_once(processes, process_webhooks)
    for org_id in organisations:
        assert sum(amount for _, amount in payments.ledger(org_id)) == 0
    with payments.database.read() as session:
        assert [row.status for row in session.query(Invoice)] == ["paid"] * len(organisations)
        assert session.query(Alert).all() == []


def test_a_payment_that_is_told_while_its_failure_is_written_counts(
    processes: list[Payments], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does what an operator does with the organisation at that moment."""
    one, two, three = processes
    stripe, org_id = one.fake.stripe, one.organisation()
    one.use(org_id, "train", USED_NUSD)
    stripe.now = DECEMBER + 2 * 3600
    for job in (put_meter_events, send_meter_events, close_invoices):
        job(one.context)
    invoice = stripe.invoice(one.customer(org_id), NOVEMBER, DECEMBER)
    stripe.change("invoice.payment_failed", invoice, attempted=True)
    client = stripe_client(one.fake.settings())
    failed = effect_of(client, stripe.events[-1])
    stripe.pay_invoice(invoice)
    paid = effect_of(client, stripe.events[-1])
    works = [
        lambda: two.database.write_now(lambda session: paid(session, two.now)),
        lambda: three.database.write_now(lambda session: set_status(session, org_of(session), "suspended")),
    ]
    begun: list[Future[Any]] = []

    def org_of(session: Session) -> Organisation:
        return session.get_one(Organisation, org_id)

    def late(*arguments: Any, **facts: Any) -> bool:
        if not begun:
            begun.extend(map(pool.submit, works))
            wait(begun, 0.5)  # or until the time is over, if they have to wait for this process
        return raise_alert(*arguments, **facts)

    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(invoices, "raise_alert", late)
        assert one.database.write_now(lambda session: failed(session, one.now)) == "payment failed"
    assert begun[0].result() == "paid"
    begun[1].result()
    with one.database.read() as session:
        assert (session.query(Invoice).one().status, org_of(session).status) == ("paid", "suspended")
        assert [alert.resolved_at is None for alert in session.query(Alert)] == [False]
