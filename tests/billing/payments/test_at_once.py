"""The jobs of payments in several processes at once, as when a lease has run out: the same in books and at Stripe."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from billing.payments import inbox
from billing.payments.meters import METERS
from scheduler.jobs.payments import close_invoices, process_webhooks, put_meter_events, send_meter_events
from scheduler.jobs.registry import Result, Run
from store.database.db import Database
from store.tables import Alert, Invoice
from tests.billing.payments.kit import START, Payments
from tests.fakestripe import FakeStripe

NOVEMBER, DECEMBER = (int(datetime(2026, month, 1, tzinfo=UTC).timestamp()) for month in (11, 12))
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
