"""Two organisations with money, and operations that are accepted and settled as the journal does."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy.orm import Session

from billing.metering.charges import Charge, settle
from billing.metering.quotas import Claim
from billing.money.accounts import OutOfMoney, Payer
from billing.money.wallets import Mode, set_mode
from billing.prices import KINDS, PriceList, load_prices
from billing.reports.reconcile import check
from scheduler.journal.accepting.acceptance import Taking, insert_all
from store import tables
from store.database.db import Database
from tests.rows import in_batch

START = datetime(2026, 1, 1, tzinfo=UTC)
ACME = Payer("a")
#: A token costs a nano-dollar.
NANO = {"version": "nano", "effective_from": START, "models": {"*": dict.fromkeys(KINDS, 1000)}}


@dataclass
class Till:
    """Accepts and settles operations. One token costs one nano-dollar unless other prices are given."""

    database: Database
    prices: PriceList = field(default_factory=lambda: load_prices([NANO | {"storage_uusd_per_gb_month": 100_000}]))
    numbers: Any = field(default_factory=itertools.count)

    def accept(
        self,
        hold_nusd: int,
        payer: Payer = ACME,
        at: datetime | None = None,
        op_id: str | None = None,
        run_id: str = "r",
        stores: Claim | None = None,
    ) -> str:
        """The id of an operation that is queued. Raises OutOfMoney and QuotaReached."""
        op_id = op_id or f"op{next(self.numbers)}"
        row = {
            "id": op_id,
            "org_id": payer.org_id,
            "session_id": "s",
            "key_id": payer.key_id,
            "user_id": None,
            "project_id": payer.project_id,
            "lane": run_id,
            "seq": next(self.numbers),
            "kind": "forward_backward",
            "base_model": "m",
            "state": "queued",
            "tokens": hold_nusd,
            "hold_nusd": hold_nusd,
            "body_ref": "",
            "body_sha256": "",
            "plan": {},
            "accepted_at": at or datetime.now(UTC),
            "stores_bytes": stores.adds if stores else 0,
        }
        taking = Taking(row, claims=(stores,) if stores else ())
        in_batch(self.database, insert_all, taking, lock=payer.org_id)
        return op_id

    def end(self, op_id: str, now: datetime | None = None, **used: int) -> int:
        """Settle a queued operation with what it used; nothing if it failed. Returns what it cost; 0 for a repeat."""
        org_id = self.operation(op_id).org_id
        return int(in_batch(self.database, self._end, (op_id, used, now or datetime.now(UTC)), lock=org_id))

    def _end(self, session: Session, items: list[tuple[str, dict[str, int], datetime]]) -> list[int]:
        costs = []
        for op_id, used, now in items:
            row = session.get_one(tables.Operation, op_id)
            if row.state != "queued":
                costs.append(0)
                continue
            row.state = "done" if used else "failed"
            session.flush()
            payer = Payer(row.org_id, row.project_id, row.key_id)
            charge = Charge(payer, "s", row.lane, op_id, "m", row.accepted_at, used, row.hold_nusd)
            costs.append(settle(session, [charge], self.prices, now))
        return costs

    def operation(self, op_id: str) -> tables.Operation:
        with self.database.read() as session:
            return session.get_one(tables.Operation, op_id)

    def wallet(self, org_id: str = "a") -> tables.Wallet:
        with self.database.read() as session:
            return session.get_one(tables.Wallet, org_id)

    def mode(self, mode: Mode, overdraft_nusd: int = 0, org_id: str = "a") -> None:
        self.database.write_now(lambda session: set_mode(session, org_id, mode, overdraft_nusd))

    def rows(self, table: type[tables.Base]) -> list[Any]:
        with self.database.read() as session:
            return list(session.query(table))

    def refused(self, hold_nusd: int, payer: Payer = ACME, at: datetime | None = None) -> OutOfMoney:
        with pytest.raises(OutOfMoney) as caught:
            self.accept(hold_nusd, payer, at)
        return caught.value

    def agrees(self) -> bool:
        return check(self.database) == []


def add_organisations(session: Session) -> None:
    session.add_all([tables.Organisation(id=name, name=name, created_at=START) for name in ("a", "b")])


@pytest.fixture
def till(any_database: Database) -> Till:
    any_database.write_now(add_organisations)
    return Till(any_database)
