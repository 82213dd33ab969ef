"""What operations cost, at the moment they end: usage, ledger, wallets and budgets move in one transaction.

`settle` is called inside the transaction that commits results, and nowhere else, so there is no result without its
metering and no metering without a result. The caller makes sure that an operation ends once; the database also refuses
a second row for one (operation, kind).
"""

from __future__ import annotations

import logging
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.money.accounts import Accounts, Found, Payer
from billing.prices import PriceError, PriceList
from store.database.bulk import insert_rows
from store.tables import LedgerEntry, Operation, StorageSpan, UsageEvent, UsageHour

log = logging.getLogger(__name__)

_HOUR = tuple(column.name for column in UsageHour.__table__.columns)
_SUMS = ("quantity", "amount_nusd", "events")


@dataclass(frozen=True)
class Charge:
    """An operation that has ended: the `quantities` used, by kind (empty if it failed), and its hold; None for storage,
    which has no hold. `accepted_at` decides prices and the budgets' period."""

    payer: Payer
    session_id: str
    run_id: str | None
    operation_id: str
    base_model: str
    accepted_at: datetime
    quantities: dict[str, int] = field(default_factory=dict)
    hold_nusd: int | None = 0
    user_id: str | None = None


def settle(session: Session, charges: Sequence[Charge], prices: PriceList, now: datetime) -> int:
    """Charge operations and release their holds; the caller has the locks of their organisations. Returns the total
    cost in nano-USD."""
    posting = Posting(session, charges, prices, now)
    posting.store()
    return posting.total_nusd


class Posting:
    """The charges of operations and what they move. Accounts are read (unless given as `found`) and everything is
    computed at once; `store` writes it."""

    def __init__(
        self,
        session: Session,
        charges: Sequence[Charge],
        prices: PriceList,
        now: datetime,
        found: Found | None = None,
    ) -> None:
        charges = [charge for charge in charges if charge.quantities or charge.hold_nusd]
        self._session, self._now = session, now
        self._events: list[dict[str, Any]] = []
        self._entries: list[dict[str, Any]] = []
        self._accounts: Accounts | None = None
        self.total_nusd = 0
        if charges:
            accounts = Accounts(session, {c.payer for c in charges}, {c.accepted_at for c in charges}, now, found)
            self._accounts = accounts
            self._charge(accounts, charges, prices)

    def _charge(self, accounts: Accounts, charges: Sequence[Charge], prices: PriceList) -> None:
        settlements: defaultdict[str, str] = defaultdict(lambda: uuid.uuid4().hex)
        spent: defaultdict[str, int] = defaultdict(int)
        for charge in charges:
            rows = _events(charge, prices, settlements[charge.payer.org_id], self._now)
            amount = sum(row["amount_nusd"] for row in rows)
            if charge.hold_nusd is not None and amount > charge.hold_nusd:
                log.error("operation %s: held %d nUSD, costs %d", charge.operation_id, charge.hold_nusd, amount)
            accounts.settle(charge.payer, charge.hold_nusd or 0, amount, charge.accepted_at)
            self._events += rows
            spent[charge.payer.org_id] += amount
        self._entries = [_entry(org, -amount, settlements[org], self._now) for org, amount in spent.items() if amount]
        self.total_nusd = sum(spent.values())

    def store(self) -> None:
        connection = self._session.connection()
        if self._events:
            insert_rows(connection, UsageEvent, self._events)
            insert_rows(connection, UsageHour, _hours(self._events, self._now), add=_SUMS)
        if self._entries:
            insert_rows(connection, LedgerEntry, self._entries)
        if self._accounts is not None:
            self._accounts.store()


def check_prices(session: Session, prices: PriceList) -> None:
    """Raise PriceError if an operation or storage that is still to be charged is older than all prices."""
    accepted = session.scalar(select(func.min(Operation.accepted_at)).where(Operation.state == "queued"))
    stored = session.scalar(select(func.min(StorageSpan.metered_until)))
    oldest = min(filter(None, (accepted, stored)), default=prices.begins)
    if oldest < prices.begins:
        raise PriceError(
            f"prices: what is not billed yet goes back to {oldest.isoformat()}, and the first version begins at "
            f"{prices.begins.isoformat()}: keep the version that held then, or let the first begin by then"
        )


def _events(charge: Charge, prices: PriceList, settlement: str, now: datetime) -> list[dict[str, Any]]:
    """The usage events of a charge; kinds with quantity 0 have none."""
    rows = []
    for kind, quantity in charge.quantities.items():
        if quantity < 0:
            raise ValueError(f"operation {charge.operation_id} reports {quantity} of {kind}: usage cannot be negative")
        if quantity == 0:
            continue
        rate = prices.rate(charge.base_model, kind, charge.accepted_at)
        rows.append(
            {
                "org_id": charge.payer.org_id,
                "project_id": charge.payer.project_id,
                "key_id": charge.payer.key_id,
                "user_id": charge.user_id,
                "session_id": charge.session_id,
                "run_id": charge.run_id,
                "operation_id": charge.operation_id,
                "kind": kind,
                "base_model": charge.base_model,
                "quantity": quantity,
                "price_version": rate.version,
                "rate_uusd": rate.uusd,
                "per_units": rate.per_units,
                "amount_nusd": rate.amount_nusd(quantity),
                "accepted_at": charge.accepted_at,
                "recorded_at": now,
                "settlement": settlement,
            }
        )
    return rows


def _hours(events: list[dict[str, Any]], now: datetime) -> list[dict[str, Any]]:
    """The rows of `usage_hourly` to which events recorded now are added. Sorted, so that two writers with common rows
    do not deadlock."""
    hour = now.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    sums: defaultdict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0, 0])
    for event in events:
        total = sums[_hour_key(event, hour)]
        total[0] += event["quantity"]
        total[1] += event["amount_nusd"]
        total[2] += 1
    return [dict(zip(_HOUR, (*key, *sums[key]), strict=True)) for key in sorted(sums)]


def _hour_key(event: dict[str, Any], hour: datetime) -> tuple[Any, ...]:
    """The primary key of an event's row in `usage_hourly`, in the order of `_HOUR`."""
    return (
        event["org_id"],
        hour,
        event["kind"],
        event["base_model"],
        event["project_id"] or "",
        event["key_id"] or 0,
        event["user_id"] or "",
        event["session_id"],
        event["run_id"] or "",
        event["price_version"],
        event["rate_uusd"],
        event["per_units"],
    )


def _entry(org_id: str, amount_nusd: int, settlement: str, now: datetime) -> dict[str, Any]:
    values = {"org_id": org_id, "type": "usage", "amount_nusd": amount_nusd, "ref_type": "settlement"}
    return values | {"ref_id": settlement, "memo": "", "at": now}
