"""After a restore, Stripe counts once what it was told since the backup, and its events of that time are booked."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import select

from billing.money.ledger import refund_operation
from billing.payments import sender
from billing.payments.checkout import start_topup
from billing.payments.client import stripe_client
from billing.payments.customers import customer_of
from scheduler.jobs.payments import (
    ask_for_missed_events,
    close_invoices,
    compare_with_stripe,
    process_webhooks,
    put_meter_events,
)
from store.database.db import Database
from store.tables import Alert, Invoice, Organisation
from tests.billing.payments.kit import START, Payments, drain
from tests.fakestripe import FakeStripe

HOUR = 3600.0
NOVEMBER, DECEMBER = datetime(2036, 11, 1, tzinfo=UTC), datetime(2036, 12, 1, tzinfo=UTC)
#: The states of an invoice before its end.
STEPS = ("used", "closed", "open", "failed")


def back_up(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "weft.db")) as there, closing(sqlite3.connect(folder / "old.db")) as old:
        there.backup(old)


def hear(payments: Payments) -> None:
    """Deliver what Stripe has told, as far as it has not been heard."""
    ask_for_missed_events(payments.context)
    process_webhooks(payments.context)


def test_a_restored_database_does_not_take_lost_events_for_its_own(
    database: Database, stripe_server: FakeStripe, tmp_path: Path
) -> None:
    """Usage after the restore is counted in addition to usage that the restored database does not know."""
    lost = Payments(database, stripe_server.reset(START), tmp_path)
    org_id = lost.organisation()
    lost.use(org_id, "train", 5_000)
    drain(lost)
    back_up(tmp_path)
    lost.use(org_id, "train", 70_000)
    drain(lost)
    restored = replace(lost, database=Database(f"sqlite:///{tmp_path}/old.db"))
    with closing(restored.database):
        restored.use(org_id, "train", 300_000)
        drain(restored)
        assert restored.fake.stripe.total("weft_train", restored.customer(org_id)) == 5 + 70 + 300
        restored.wait(7 * HOUR)
        assert compare_with_stripe(restored.context) == {"compared": 1, "differ": 1}
        with restored.database.read() as session:
            (alert,) = session.scalars(select(Alert).where(Alert.kind == "stripe_drift"))
        assert "counts +70 micro-USD beside ours" in alert.message  # exactly what was lost


@pytest.mark.parametrize("sent_nusd", [0, 5_000, 75_000])
@pytest.mark.parametrize("later_h", [1, 30])
@pytest.mark.parametrize("put", [True, False])
def test_usage_that_waited_at_a_backup_is_at_stripe_once_after_the_restore(
    database: Database, stripe_server: FakeStripe, tmp_path: Path, sent_nusd: int, later_h: int, put: bool
) -> None:
    """Also if it was sent after the backup and Stripe has forgotten its identifier, or if it was in no outbox yet, so
    that Stripe was told another identifier."""
    lost = Payments(database, stripe_server.reset(START), tmp_path)
    org_id = lost.organisation()
    lost.use(org_id, "train", 5_000)
    if put:
        put_meter_events(lost.context)
    made_at = lost.now
    back_up(tmp_path)
    if sent_nusd:
        drain(lost)
        lost.use(org_id, "train", sent_nusd - 5_000)
        drain(lost)
    lost.wait(later_h * HOUR)
    restored = replace(lost, database=Database(f"sqlite:///{tmp_path}/old.db"))
    with closing(restored.database):
        restored.database.write_now(lambda session: sender.restored(session, made_at, restored.now))
        restored.use(org_id, "train", 300_000)
        drain(restored)
        counted = restored.fake.stripe.total("weft_train", restored.customer(org_id))
        assert counted == max(5, sent_nusd // 1000) + 300


@pytest.mark.parametrize("sent", [True, False])
def test_a_refund_that_waited_at_a_backup_is_at_stripe_once_after_the_restore(
    database: Database, stripe_server: FakeStripe, tmp_path: Path, sent: bool
) -> None:
    lost = Payments(database, stripe_server.reset(datetime.now(UTC)), tmp_path)  # refunds are booked at the real time
    org_id = lost.organisation()
    operation = lost.use(org_id, "train", 5_000)
    drain(lost)
    lost.database.write_now(lambda session: refund_operation(session, org_id, operation))
    lost.wait(1)
    made_at = lost.now
    back_up(tmp_path)
    if sent:
        drain(lost)
    lost.wait(HOUR)
    restored = replace(lost, database=Database(f"sqlite:///{tmp_path}/old.db"))
    with closing(restored.database):
        restored.database.write_now(lambda session: sender.restored(session, made_at, restored.now))
        drain(restored)
        assert restored.fake.stripe.total("weft_train", restored.customer(org_id)) == 0


@pytest.mark.parametrize("known", STEPS)
@pytest.mark.parametrize("end", ["paid", "void"])
def test_an_invoice_that_ended_after_the_backup_ends_as_it_did(
    database: Database, stripe_server: FakeStripe, tmp_path: Path, known: str, end: str
) -> None:
    """Whatever the backup knew of the invoice: nobody pays it twice, or is past due after paying it."""
    lost = Payments(database, stripe_server.reset(START), tmp_path)
    stripe = lost.fake.stripe
    org_id = lost.organisation()
    lost.use(org_id, "train", 5_000_000_000)
    drain(lost)
    stripe.now = DECEMBER.timestamp() + 2 * HOUR
    invoice = stripe.invoice(lost.customer(org_id), int(NOVEMBER.timestamp()), int(DECEMBER.timestamp()))

    for step in STEPS:
        if step == "closed":
            close_invoices(lost.context)
        elif step == "failed":
            stripe.change("invoice.payment_failed", invoice, attempted=True)
        if step in ("open", "failed"):
            hear(lost)
        if step == known:
            back_up(tmp_path)
    if end == "paid":
        stripe.pay_invoice(invoice)
    else:
        stripe.change("invoice.voided", invoice, status="void")
    hear(lost)
    lost.wait(5 * 24 * HOUR)
    restored = replace(lost, database=Database(f"sqlite:///{tmp_path}/old.db"))
    with closing(restored.database):
        hear(restored)
        close_invoices(restored.context)
        restored.wait(HOUR)
        hear(restored)
        with restored.database.read() as session:
            assert session.query(Invoice).one().status == end
            assert session.get_one(Organisation, org_id).status == "active"
            assert [alert.kind for alert in session.query(Alert) if alert.resolved_at is None] == []
        assert sum(amount for _, amount in restored.ledger(org_id)) == (0 if end == "paid" else -5_000_000_000)


@pytest.mark.parametrize("first", ["paid", "asked"])
def test_a_customer_made_after_the_backup_is_theirs_after_the_restore(
    database: Database, stripe_server: FakeStripe, tmp_path: Path, first: str
) -> None:
    """And their payment is credited, whether Stripe tells of it first or they first ask for a customer."""
    lost = Payments(database, stripe_server.reset(START), tmp_path)
    stripe, client = lost.fake.stripe, stripe_client(lost.context.settings.payments)
    org_id = lost.organisation("prepaid", customer=False)
    back_up(tmp_path)
    made = customer_of(client, lost.database, org_id, lost.now)
    asked = {"org_id": org_id, "customer_id": made, "cents": 2500, "return_url": "http://x", "key": None}
    stripe.finish_checkout(start_topup(client, **asked).id)  # type: ignore[arg-type]
    hear(lost)
    lost.wait(2 * HOUR)
    restored = replace(lost, database=Database(f"sqlite:///{tmp_path}/old.db"))
    with closing(restored.database):
        if first == "paid":
            hear(restored)
        assert customer_of(client, restored.database, org_id, restored.now) == made
        asked_for = len(stripe_server.front.requests)
        assert customer_of(client, restored.database, org_id, restored.now) == made
        assert len(stripe_server.front.requests) == asked_for  # the books know it
        hear(restored)
        assert [kind for kind, _ in restored.ledger(org_id)] == ["topup"]
