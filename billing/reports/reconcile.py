"""Checks the books: every amount that is kept in two places must be equal in both, to the nano-dollar.

    wallet balance  = sum of ledger entries
    usage entry     = minus the sum of its events, for each settlement
    hours of usage  = sums of their events, in quantity, amount and number, for each model, project, key, user,
                      session, run and price
    wallet held     = sum of holds of queued operations
    budget spent    = sum of events accepted in its period, and held likewise
    grants          remain no more than they were

It only reads: a difference is a fault to be understood, and nothing is corrected automatically.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.money.budgets import derived
from store.database.db import Database
from store.tables import Budget, BudgetPeriod, LedgerEntry, Operation, UsageEvent, UsageHour, Wallet
from store.tables.base import halves, whole


@dataclass(frozen=True)
class Drift:
    """An amount that is kept in two places and differs: as kept, and as derived from other rows."""

    org_id: str
    what: str
    kept: int
    derived: int

    def __str__(self) -> str:
        return f"{self.org_id}: {self.what}: kept {self.kept}, derived {self.derived}, {self.kept - self.derived:+d}"


def check(database: Database, org_id: str | None = None) -> list[Drift]:
    """All differences, of one organisation or of all. Work may go on meanwhile."""
    with database.read() as session:
        if session.get_bind().dialect.name == "postgresql":  # one snapshot; SQLite's reads are always that
            session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        return reconcile(session, org_id)


def reconcile(session: Session, org_id: str | None = None) -> list[Drift]:
    """`check` within the session's snapshot."""
    found = [
        *_wallets(session, org_id),
        *_settlements(session, org_id),
        *_hours(session, org_id),
        *_budgets(session, org_id),
    ]
    return sorted(found, key=lambda drift: (drift.org_id, drift.what))


def drift_nusd(drifts: Iterable[Drift]) -> int:
    """The sum of all differences, for a gauge; 0 is good."""
    return sum(abs(drift.kept - drift.derived) for drift in drifts)


def _wallets(session: Session, org_id: str | None) -> list[Drift]:
    entry, op, wallet = LedgerEntry, Operation, Wallet
    ledger = _sums(session, _of(org_id, entry.org_id, select(entry.org_id, *halves(entry.amount_nusd))), entry.org_id)
    open_ops = select(op.org_id, *halves(op.hold_nusd)).where(op.state == "queued", op.hold_nusd != 0)
    held = _sums(session, _of(org_id, op.org_id, open_ops), op.org_id)
    drifts = []
    rows = session.execute(_of(org_id, wallet.org_id, select(wallet.org_id, wallet.balance_nusd, wallet.held_nusd)))
    wallets = {owner: (balance, on_hold) for owner, balance, on_hold in rows}
    for owner in wallets.keys() | ledger.keys() | held.keys():
        balance, on_hold = wallets.get(owner, (0, 0))
        drifts.append(Drift(owner, "balance against ledger", balance, ledger[owner]))
        drifts.append(Drift(owner, "held against queued operations", on_hold, held[owner]))
    return [drift for drift in drifts if drift.kept != drift.derived]


def _settlements(session: Session, org_id: str | None) -> list[Drift]:
    """Each usage entry against the sum of its events; and events without an entry."""
    event, entry = UsageEvent, LedgerEntry
    query = select(event.org_id, event.settlement, *halves(event.amount_nusd))
    rows = session.execute(_of(org_id, event.org_id, query).group_by(event.org_id, event.settlement))
    spent = {(owner, ref): -whole(*sums) for owner, ref, *sums in rows}
    posted = select(entry.org_id, entry.ref_id, entry.amount_nusd).where(entry.type == "usage")
    entries: Counter[tuple[str, str | None]] = Counter()
    for owner, ref_id, amount in session.execute(_of(org_id, entry.org_id, posted)):
        entries[owner, ref_id] += amount
    return [
        Drift(key[0], f"usage entry {key[1]} against its events", entries[key], spent.get(key, 0))
        for key in spent.keys() | entries.keys()
        if entries[key] != spent.get(key, 0)
    ]


def _hours(session: Session, org_id: str | None) -> list[Drift]:
    """Events are added up by all that an hour's row is for, except the hour: that would need the database's clock."""
    event, hour = UsageEvent, UsageHour
    names = [column.name for column in hour.__table__.primary_key if column.name != "hour"]
    kept = _counts(session, org_id, hour, names, func.sum(hour.events))
    summed = _counts(session, org_id, event, names, func.count())
    return [
        Drift(which[0], f"hours of {' '.join(str(part or '-') for part in which[1:])}", kept[which], summed[which])
        for which in kept.keys() | summed.keys()
        if kept[which] != summed[which]
    ]


def _counts(
    session: Session, org_id: str | None, table: type[UsageEvent | UsageHour], names: list[str], events: Any
) -> Counter[tuple[Any, ...]]:
    """The number of events and their sums by the columns `names`, in which None, "" and 0 are the same."""
    counter = Counter[tuple[Any, ...]]()
    key = [getattr(table, name) for name in names]
    query = select(*key, events, *halves(table.quantity, table.amount_nusd))
    for row in session.execute(_of(org_id, table.org_id, query).group_by(*key)):
        which, (number, *sums) = [part or "" for part in row[: len(key)]], row[len(key) :]
        counter[*which, "events"] += int(number)
        counter[*which, "quantity"] += whole(*sums[:2])
        counter[*which, "nUSD"] += whole(*sums[2:])
    return counter


def _budgets(session: Session, org_id: str | None) -> list[Drift]:
    drifts = []
    query = select(Budget, BudgetPeriod).join(BudgetPeriod, BudgetPeriod.budget_id == Budget.id)
    for budget, period in session.execute(_of(org_id, Budget.org_id, query)):
        spent, held = derived(session, budget, period.start)
        name = f"{budget.scope} {budget.scope_id} in the {budget.period} from {period.start:%Y-%m-%d}"
        drifts.append(Drift(budget.org_id, f"spent of the budget of {name}", period.spent_nusd, spent))
        drifts.append(Drift(budget.org_id, f"held of the budget of {name}", period.held_nusd, held))
    return [drift for drift in drifts if drift.kept != drift.derived]


def _of(org_id: str | None, column: Any, query: Any) -> Any:
    return query if org_id is None else query.where(column == org_id)


def _sums(session: Session, query: Any, column: Any) -> Counter[str]:
    return Counter({owner: whole(*sums) for owner, *sums in session.execute(query.group_by(column))})
