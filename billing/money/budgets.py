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

Scope = Literal["org", "project", "key"]
Period = Literal["month", "total"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
PERIODS: tuple[Period, ...] = get_args(Period)
#: Default percentages of the limit at which spending is recorded.
ALERT_PCTS = (50, 80, 100)


@dataclass(frozen=True)
class BudgetState:
    """A budget in its current period."""

    budget: Budget
    start: datetime
    spent_nusd: int
    held_nusd: int
    alerts: tuple[BudgetAlert, ...]

    @property
    def left_nusd(self) -> int:
        return self.budget.limit_nusd - self.spent_nusd - self.held_nusd


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
) -> Budget:
    """Make a budget, or change the existing one. Call it in a write. The caller has checked that `scope_id` belongs to
    the organisation."""
    now = now or datetime.now(UTC)
    wallet_of(session, org_id)  # takes its lock: nothing is accepted or settled meanwhile
    query = select(Budget).filter_by(org_id=org_id, scope=scope, scope_id=scope_id, period=period)
    budget = session.scalars(query).one_or_none()
    if budget is None:
        names = {"org_id": org_id, "scope": scope, "scope_id": scope_id, "period": period}
        budget = Budget(id=uuid.uuid4().hex, **names, created_at=now)
        session.add(budget)
    budget.limit_nusd, budget.hard, budget.alert_pcts = limit_nusd, hard, sorted(set(alert_pcts))
    session.flush()
    for start in _starts(session, budget, now):
        found = session.get(BudgetPeriod, (budget.id, start))
        if found is None:
            spent, held = derived(session, budget, start)
            found = BudgetPeriod(budget_id=budget.id, start=start, spent_nusd=spent, held_nusd=held)
            session.add(found)
        reached = [pct for pct in budget.alert_pcts if found.spent_nusd * 100 >= limit_nusd * pct]
        if reached and start == period_start(period, now):
            record_alerts(session, budget, start, found.spent_nusd, reached, now)
    session.flush()
    return budget


def owns(session: Session, org_id: str, scope: Scope, scope_id: str) -> bool:
    """Whether an organisation has the project or key of a budget to be made."""
    if scope == "project":
        return scope_id.isprintable() and session.get(Project, (org_id, scope_id)) is not None
    number = int(scope_id) if scope_id.isdecimal() and len(scope_id) < 19 else 0
    key = session.get(ApiKey, number) if scope == "key" else None
    if scope == "org":
        return scope_id == org_id
    # As it is counted by: 07 would be a limit that nothing ever reaches.
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
    """The budgets of an organisation in their current periods, those of the whole organisation first."""
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
    """What was spent and is held of a budget in the period from `start`, computed from events and operations."""
    event, op = UsageEvent, Operation
    accepted = func.coalesce(event.accepted_at, event.recorded_at)
    spent = select(event.amount_nusd).where(*_in_scope(budget, event), *_in_period(budget, accepted, start))
    held = select(op.hold_nusd).where(op.state == "queued", op.hold_nusd > 0)
    held = held.where(*_in_scope(budget, op), *_in_period(budget, op.accepted_at, start))
    return _sum(session, spent), _sum(session, held)


def _starts(session: Session, budget: Budget, now: datetime) -> set[datetime]:
    """The current period, periods with work that has not ended, later ones with work that has (whoever accepted it has
    a clock ahead of ours), and all since the first with storage that is not metered."""
    open_ops = select(Operation.accepted_at).where(Operation.org_id == budget.org_id, Operation.state == "queued")
    accepted = func.coalesce(UsageEvent.accepted_at, UsageEvent.recorded_at)
    later = select(accepted).where(UsageEvent.org_id == budget.org_id, accepted > now).distinct()
    times = (now, *session.scalars(open_ops), *session.scalars(later))
    starts = {period_start(budget.period, at) for at in times}
    at = session.scalar(select(func.min(StorageSpan.metered_until)).where(StorageSpan.org_id == budget.org_id)) or now
    while at < now:
        starts.add(period_start(budget.period, at))
        at = _following(period_start("month", at))
    return starts


def _in_scope(budget: Budget, table: type[UsageEvent] | type[Operation]) -> list[ColumnElement[bool]]:
    own: list[ColumnElement[bool]] = [table.org_id == budget.org_id]
    if budget.scope == "project":
        own.append(table.project_id == budget.scope_id)
    elif budget.scope == "key":
        own.append(table.key_id == int(budget.scope_id))
    return own


def _in_period(budget: Budget, at: Any, start: datetime) -> list[ColumnElement[bool]]:
    if budget.period == "total":
        return []
    return [at >= start, at < _following(start)]


def _following(month: datetime) -> datetime:
    return month.replace(year=month.year + month.month // 12, month=month.month % 12 + 1)


def _sum(session: Session, amounts: Any) -> int:
    """In Python: SQLite's SUM fails beyond 64 bits."""
    return sum(session.scalars(amounts.execution_options(yield_per=10_000)))
