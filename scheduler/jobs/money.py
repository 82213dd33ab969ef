"""Jobs about money: meter storage, take back expired credit, check the books, send budget alerts. Holds need no
reaping: one is a column of its queued operation and cannot outlive it."""

from __future__ import annotations

from datetime import datetime
from functools import partial

from sqlalchemy import Select, String, case, cast, exists, not_, select
from weft.money import dollars

from billing.metering import storage
from billing.money import grants
from billing.money.accounts import period_start
from billing.money.alerts import raise_alert, resolve_alert
from billing.money.budgets import PERIODS
from billing.payments.periods import period_before
from billing.reports import reconcile
from scheduler.jobs.registry import JobContext, Result, job
from store.tables import Alert, Budget, BudgetAlert


@job("meter_storage", every_s=3600, final=True)
def meter_storage(context: JobContext) -> Result:
    """Meter what was stored in the hours that have ended."""
    return storage.meter(context.database, context.prices, context.now())


@job("expire_credit", every_s=3600, final=True)
def expire_credit(context: JobContext) -> Result:
    return grants.expire(context.database, context.now())


@job("reconcile", every_s=86_400)
def reconcile_books(context: JobContext) -> Result:
    """Check that all books agree; if they differ, alert once a day and say where. Nothing is corrected automatically,
    and an organisation whose books differ does not get its month closed."""
    drifts, now = reconcile.check(context.database), context.now()
    for drift in drifts:
        alert = partial(
            raise_alert,
            kind="drift",
            ref=f"{drift.org_id}:{drift.what}:{now:%Y-%m-%d}",
            message=str(drift),
            now=now,
            detail={"org_id": drift.org_id},
        )
        context.database.write_now(alert)
    return {"differ": len(drifts), "drift_nusd": reconcile.drift_nusd(drifts)}


@job("budget_alerts", every_s=60)
def budget_alerts(context: JobContext) -> Result:
    """Alert on budgets whose spending has reached a threshold. An alert ends with its budget or the budget's period."""
    with context.database.read() as session:
        reached = session.scalars(_untold(context.now())).all()
        over = session.scalars(_over(context.now())).all()
    for row in reached:
        alert = partial(
            raise_alert,
            kind="budget",
            ref=_ref(row),
            message=f"{row.pct} % of a budget is spent: {dollars(row.spent_nusd)} of {dollars(row.limit_nusd)}",
            now=context.now(),
            org_id=row.org_id,
            detail={"budget_id": row.budget_id, "pct": row.pct},
        )
        context.database.write_now(alert)
    for ref in over:
        context.database.write_now(partial(resolve_alert, kind="budget", ref=ref, now=context.now()))
    return {"raised": len(reached), "over": len(over)}


def _untold(now: datetime) -> Select[BudgetAlert]:
    """Thresholds reached without an alert, in budgets over all time, of this month, or of the last month, whose last
    operations end in this one."""
    this = period_start("month", now)
    starts = (period_start("total", now), this, period_before(this))
    row, month = BudgetAlert, case({start: f"{start:%Y-%m}" for start in starts}, value=BudgetAlert.start)
    ref = row.budget_id + ":" + month + ":" + cast(row.pct, String)
    told = exists().where(Alert.kind == "budget", Alert.ref == ref)
    return select(row).where(row.budget_id.in_(select(Budget.id)), row.start.in_(starts), not_(told))


def _over(now: datetime) -> Select[str]:
    """Alerts that are shown, of no budget that is there, or of another month than this."""
    starts = {period: f"{period_start(period, now):%Y-%m}" for period in PERIODS}
    shown = Budget.id + ":" + case(starts, value=Budget.period) + ":"
    there = exists().where(Budget.id == Alert.detail["budget_id"].as_string(), Alert.ref.startswith(shown))
    return select(Alert.ref).where(Alert.kind == "budget", Alert.resolved_at.is_(None), not_(there))


def _ref(row: BudgetAlert) -> str:
    return f"{row.budget_id}:{row.start:%Y-%m}:{row.pct}"
