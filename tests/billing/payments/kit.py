"""Organisations that pay, and a clock for both sides of a test."""

from __future__ import annotations

import itertools
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from billing.metering.charges import Charge, settle
from billing.money.accounts import Payer
from billing.money.wallets import set_mode, wallet_of
from billing.prices import load_prices
from scheduler.jobs.payments import put_meter_events, send_meter_events
from scheduler.jobs.registry import JobContext
from store.blobs.folder import FolderBlobs
from store.database.db import Database
from store.settings import PaymentsSettings, Settings
from store.tables import LedgerEntry, Organisation, StripeOutbox, Wallet
from tests.fakestripe import FakeStripe

#: In the future: what the API stores by the real clock is due then.
START = datetime(2036, 11, 29, 12, tzinfo=UTC)

#: Prices at which one unit of anything costs one nano-dollar.
_TOKENS = dict.fromkeys(("train", "prefill", "cached_prefill", "sample"), 1000)
PRICES = load_prices(
    [
        {
            "version": "1",
            "effective_from": datetime(2020, 1, 1, tzinfo=UTC),
            "storage_uusd_per_gb_month": 720_000_000,
            "models": {"*": _TOKENS},
        }
    ]
)


@dataclass
class Payments:
    """One database and one fake Stripe account, with the fake's clock."""

    database: Database
    fake: FakeStripe
    folder: Path
    settings: PaymentsSettings | None = None
    _numbers: Any = field(default_factory=itertools.count)

    @property
    def now(self) -> datetime:
        return datetime.fromtimestamp(self.fake.stripe.now, UTC)

    def wait(self, seconds: float) -> None:
        self.fake.stripe.now += seconds

    @property
    def context(self) -> JobContext:
        payments = self.settings or self.fake.settings()
        settings = Settings(data_dir=self.folder, payments=payments)
        return JobContext(self.database, FolderBlobs(self.folder / "blobs"), settings, PRICES, lambda: self.now)

    def organisation(self, mode: str = "postpaid", customer: bool = True) -> str:
        """Make an organisation that is a customer of the fake."""
        org_id = uuid.uuid4().hex[:16]
        made = f"cus_{org_id}"
        if customer:
            self.fake.stripe.objects[made] = {"id": made, "object": "customer", "name": org_id}
        self.database.write_now(
            lambda session: session.add(
                Organisation(id=org_id, name=org_id, created_at=self.now, stripe_customer_id=made if customer else None)
            )
        )
        self.database.write_now(lambda session: set_mode(session, org_id, mode, 0))  # type: ignore[arg-type]
        return org_id

    def customer(self, org_id: str) -> str:
        with self.database.read() as session:
            return session.get_one(Organisation, org_id).stripe_customer_id or ""

    def use(self, org_id: str, kind: str, amount_nusd: int) -> str:
        """Record what a settled operation leaves behind. Returns its id."""
        number = f"{org_id}-{next(self._numbers)}"
        charge = Charge(Payer(org_id), "s", None, number, "m", self.now, {kind: amount_nusd}, hold_nusd=None)
        self.database.write_now(lambda session: settle(session, [charge], PRICES, self.now))
        return number

    def ledger(self, org_id: str) -> list[tuple[str, int]]:
        """The entries as (type, amount), in order; the wallet must agree."""

        def look(session: Session) -> tuple[int, list[tuple[str, int]]]:
            balance = wallet_of(session, org_id).balance_nusd
            query = select(LedgerEntry.type, LedgerEntry.amount_nusd).where(LedgerEntry.org_id == org_id)
            return balance, [(kind, amount) for kind, amount in session.execute(query.order_by(LedgerEntry.id))]

        balance, rows = self.database.write_now(look)
        assert balance == sum(amount for _, amount in rows)
        return rows

    def outbox(self, **columns: Any) -> list[StripeOutbox]:
        with self.database.read() as session:
            return list(session.scalars(select(StripeOutbox).filter_by(**columns).order_by(StripeOutbox.id)))

    def forget_others(self) -> None:
        """Let organisations of earlier examples play no part."""

        def write(session: Any) -> None:
            session.execute(delete(StripeOutbox))
            for wallet in session.scalars(select(Wallet).where(Wallet.mode == "postpaid")):
                wallet.mode = "unlimited"

        self.database.write_now(write)


def drain(payments: Payments) -> None:
    """Stripe works again; let time pass until nothing is open."""
    payments.fake.front.faults.clear()
    put_meter_events(payments.context)
    for _ in range(60):
        send_meter_events(payments.context)
        if not any(row.state != "sent" for row in payments.outbox()):
            return
        payments.wait(3600)
    raise AssertionError(
        [(row.identifier, row.state, row.last_error) for row in payments.outbox() if row.state != "sent"]
    )
