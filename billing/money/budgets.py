"""Limits that people set on spending: of an organisation, a project or a key, in a UTC month or in total.

`billing.money.accounts` enforces them while work is accepted and ends. Here they are made, changed and listed. The time
at which work was accepted decides its month, so a budget that is made in the middle of a month starts with what that
month's work has spent and holds.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.orm import Session

from billing.money.accounts import period_start, record_alerts
from billing.money.wallets import wallet_of
from store.tables import ApiKey, Budget, BudgetAlert, BudgetPeriod, Operation, Project, StorageSpan, UsageEvent
from store.tables.base import any_index_but

Scope = Literal["org", "project", "key"]
Period = Literal["month", "total"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
PERIODS: tuple[Period, ...] = get_args(Period)
_ACCEPTED = func.coalesce(UsageEvent.accepted_at, UsageEvent.recorded_at)
#: Default percentages of the limit at which spending is recorded.
ALERT_PCTS = (50, 80, 100)


@dataclass(frozen=True)
class BudgetState:
    """A budget, and what is spent and held of it in its current period."""

    budget: Budget
    start: datetime
    spent_nusd: int
    held_nusd: int
    alerts: tuple[BudgetAlert, ...]

    @property
    def left_nusd(self) -> int:
        return self.budget.limit_nusd - self.spent_nusd - self.held_nusd


@dataclass(frozen=True)
class Counted:
    """The amounts spent in the periods that a budget may need, from its organisation's events up to `last_id`. Later
    events have greater ids, since whoever writes one has the organisation's lock."""

    last_id: int
    spent_nusd: dict[datetime, int]


def count(
    session: Session, org_id: str, scope: Scope, scope_id: str, period: Period, now: datetime | None = None
) -> Counted:
    """Count for `set_budget`. Runs in a read: it takes as long as the organisation's history, and a write would hold up
    everybody."""
    budget = Budget(org_id=org_id, scope=scope, scope_id=scope_id, period=period)
    last_id = session.scalar(select(func.max(UsageEvent.id)).where(UsageEvent.org_id == org_id)) or 0
    upto = (UsageEvent.id <= last_id, UsageEvent.org_id == org_id)
    starts = _starts(session, budget, now or datetime.now(UTC))
    return Counted(last_id, {start: _spent(session, budget, start, *upto) for start in starts})


def set_budget(
    session: Session,
    org_id: str,
    scope: Scope,
    scope_id: str,
    period: Period,
    limit_nusd: int,
    *,
    hard: bool = True,
    alert_pcts: Collection[int] = ALERT_PCTS,
    now: datetime | None = None,
    counted: Counted | None = None,
) -> Budget:
    """Make a budget, or change the existing one. Call it in a write, with the result of `count` from before. The caller
    has checked that `scope_id` belongs to the organisation."""
    now = now or datetime.now(UTC)
    wallet_of(session, org_id)  # takes the organisation's lock: nothing is accepted or settled meanwhile
    counted = counted or count(session, org_id, scope, scope_id, period, now)
    query = select(Budget).filter_by(org_id=org_id, scope=scope, scope_id=scope_id, period=period)
    budget = session.scalars(query).one_or_none()
    if budget is None:
        names = {"org_id": org_id, "scope": scope, "scope_id": scope_id, "period": period}
        budget = Budget(id=uuid.uuid4().hex, **names, created_at=now)
        session.add(budget)
    budget.limit_nusd, budget.hard, budget.alert_pcts = limit_nusd, hard, sorted(set(alert_pcts))
    session.flush()
    # Selected by id: any index on an organisation's events covers all of them.
    since = (UsageEvent.id > counted.last_id, any_index_but(UsageEvent.org_id) == org_id)
    for start in counted.spent_nusd.keys() | _present(session, budget, now, *since):
        found = session.get(BudgetPeriod, (budget.id, start))
        if found is None:
            if start in counted.spent_nusd:
                spent = counted.spent_nusd[start] + _spent(session, budget, start, *since)
            else:  # a month that began after the count
                spent = _spent(session, budget, start)
            held = _held(session, budget, start)
            found = BudgetPeriod(budget_id=budget.id, start=start, spent_nusd=spent, held_nusd=held)
            session.add(found)
        reached = [pct for pct in budget.alert_pcts if found.spent_nusd * 100 >= limit_nusd * pct]
        if reached and start == period_start(period, now):
            record_alerts(session, budget, start, found.spent_nusd, reached, now)
    session.flush()
    return budget


def owns(session: Session, org_id: str, scope: Scope, scope_id: str) -> bool:
    """True if the organisation has the project or key that a budget is to be made for."""
    if scope == "project":
        return scope_id.isprintable() and session.get(Project, (org_id, scope_id)) is not None
    number = int(scope_id) if scope_id.isdecimal() and len(scope_id) < 19 else 0
    key = session.get(ApiKey, number) if scope == "key" else None
    if scope == "org":
        return scope_id == org_id
    # The id exactly as events have it: a budget for "07" would never count anything.
    return key is not None and key.org_id == org_id and str(key.id) == scope_id


def remove_budget(session: Session, org_id: str, budget_id: str) -> bool:
    """Remove a budget with its periods and alerts. Call it in a write."""
    wallet_of(session, org_id)
    budget = session.scalars(select(Budget).filter_by(org_id=org_id, id=budget_id)).one_or_none()
    if budget is None:
        return False
    for table in (BudgetAlert, BudgetPeriod):
        session.execute(delete(table).where(table.budget_id == budget_id))
    session.delete(budget)
    session.flush()
    return True


def states(session: Session, org_id: str, now: datetime | None = None) -> list[BudgetState]:
    """The budgets of an organisation in their current periods; those of the whole organisation come first."""
    now = now or datetime.now(UTC)
    found = []
    for budget in session.scalars(select(Budget).where(Budget.org_id == org_id)):
        start = period_start(budget.period, now)
        period = session.get(BudgetPeriod, (budget.id, start))
        alerts = select(BudgetAlert).filter_by(budget_id=budget.id, start=start).order_by(BudgetAlert.pct)
        counts = (period.spent_nusd, period.held_nusd) if period is not None else (0, 0)
        found.append(BudgetState(budget, start, *counts, tuple(session.scalars(alerts))))

    def place(state: BudgetState) -> tuple[int, str, str]:
        of = state.budget
        return SCOPES.index(of.scope), of.scope_id, of.period

    return sorted(found, key=place)


def derived(session: Session, budget: Budget, start: datetime) -> tuple[int, int]:
    """The amounts spent and held of a budget in the period from `start`, computed from events and operations."""
    return _spent(session, budget, start), _held(session, budget, start)


def _spent(session: Session, budget: Budget, start: datetime, *which: ColumnElement[bool]) -> int:
    """The sum of all events of the budget's organisation, or of those of its project or key."""
    chosen = which or (UsageEvent.org_id == budget.org_id,)
    chosen = (*chosen, *_in_scope(budget, UsageEvent), *_in_period(budget, _ACCEPTED, start))
    return _sum(session, select(UsageEvent.amount_nusd).where(*chosen))


def _held(session: Session, budget: Budget, start: datetime) -> int:
    op = Operation
    held = select(op.hold_nusd).where(op.org_id == budget.org_id, op.state == "queued", op.hold_nusd > 0)
    return _sum(session, held.where(*_in_scope(budget, op), *_in_period(budget, op.accepted_at, start)))


def _present(session: Session, budget: Budget, now: datetime, *which: ColumnElement[bool]) -> set[datetime]:
    """The current period, periods with unfinished work, and later ones that already have work, accepted by a process
    whose clock is ahead."""
    open_ops = select(Operation.accepted_at).where(Operation.org_id == budget.org_id, Operation.state == "queued")
    chosen = which or (UsageEvent.org_id == budget.org_id,)
    later = select(_ACCEPTED).where(*chosen, now < _ACCEPTED).distinct()
    return {period_start(budget.period, at) for at in (now, *session.scalars(open_ops), *session.scalars(later))}


def _starts(session: Session, budget: Budget, now: datetime) -> set[datetime]:
    """The same periods, and all since the first with storage that is not metered yet."""
    starts = _present(session, budget, now)
    at = session.scalar(select(func.min(StorageSpan.metered_until)).where(StorageSpan.org_id == budget.org_id)) or now
    while at < now:
        starts.add(period_start(budget.period, at))
        at = _following(period_start("month", at))
    return starts


def _in_scope(budget: Budget, table: type[UsageEvent] | type[Operation]) -> list[ColumnElement[bool]]:
    if budget.scope == "project":
        return [table.project_id == budget.scope_id]
    return [table.key_id == int(budget.scope_id)] if budget.scope == "key" else []


def _in_period(budget: Budget, at: Any, start: datetime) -> list[ColumnElement[bool]]:
    if budget.period == "total":
        return []
    return [at >= start, at < _following(start)]


def _following(month: datetime) -> datetime:
    return month.replace(year=month.year + month.month // 12, month=month.month % 12 + 1)


def _sum(session: Session, amounts: Any) -> int:
    """Summed in Python: SQLite's SUM fails beyond 64 bits."""
    return sum(session.scalars(amounts.execution_options(yield_per=10_000)))
