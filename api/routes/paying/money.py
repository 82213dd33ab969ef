"""What an organisation has, has spent and may spend: balance, usage by run, ledger, budgets. Amounts are exact."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from sqlalchemy import select
from sqlalchemy.orm import Session
from weft.money import usd
from weft.wire import BalanceResponse, UsageResponse, UsageRow
from weft.wire.account.money import (
    BudgetAlertRow,
    BudgetRow,
    BudgetsResponse,
    LedgerResponse,
    LedgerRow,
    SetBudgetRequest,
)
from weft.wire.service import StatusResponse

from api.errors import Forbidden, Invalid, NotFound, quote
from api.http.access import declare
from api.http.auth import PrincipalDep
from api.http.bodies import read_json
from api.state.service import Service, ServiceDep
from api.who.lookup import plain_id, run_by_id
from api.who.principal import Principal
from billing.metering import usage
from billing.money.budgets import BudgetState, Counted, count, owns, remove_budget, set_budget, states
from billing.money.wallets import available_nusd, shown_wallet
from billing.prices import ANY_MODEL, STORAGE
from store import tables
from store.database import audit

router = APIRouter(prefix="/api/v1/weft")

#: How many ledger entries one answer may have.
PAGE = 200


@router.get("/balance", **declare(scope="billing:read", limit="call"))
async def balance(service: ServiceDep, who: PrincipalDep) -> BalanceResponse:
    """What the organisation has spent, and what it can spend: nothing limits it while its wallet is unlimited."""
    month = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)

    def read(session: Session) -> BalanceResponse:
        ever, lately = usage.summary(session, who.org_id), usage.summary(session, who.org_id, since=month)
        answer = BalanceResponse(
            spent_nusd=sum(row.amount_nusd for row in ever),
            spent_this_month_nusd=sum(row.amount_nusd for row in lately),
            month=f"{month:%Y-%m}",
        )
        wallet = shown_wallet(session, who.org_id)
        limited = wallet.mode != "unlimited"
        changes = {
            "mode": wallet.mode,
            "balance_nusd": wallet.balance_nusd if limited else None,
            "held_nusd": wallet.held_nusd,
            "overdraft_nusd": wallet.overdraft_nusd,
            "available_nusd": available_nusd(wallet),
        }
        return answer.model_copy(update=changes)

    return await service.read(read)


@router.get("/usage", **declare(scope=("train", "sample", "billing:read"), limit="call"))
async def get_usage(service: ServiceDep, who: PrincipalDep, run_id: str | None = None) -> UsageResponse:
    """What the organisation, or one run of it, has used, and what it costs. Amounts are exact integers of nano-USD."""
    if run_id is None and "billing:read" not in who.scopes:
        raise Forbidden("the usage of the whole organisation is for keys with billing:read: ask for one run (run_id)")

    def read(session: Session) -> tuple[int, list[usage.UsageRow]]:
        if run_id is not None:
            run_by_id(session, who, run_id)
        return usage.held_nusd(session, who.org_id, run_id), usage.summary(session, who.org_id, run_id)

    held, rows = await service.read(read)
    total = sum(row.amount_nusd for row in rows)
    return UsageResponse(
        rows=[_used(row) for row in rows],
        total_nusd=total,
        total_usd=usd(total),
        price_version=service.prices.rate(ANY_MODEL, "train", datetime.now(UTC)).version,
        held_nusd=held,
    )


def _used(row: usage.UsageRow) -> UsageRow:
    kind: Any = row.kind  # UsageRow has the list of kinds
    return UsageRow(
        run_id=row.run_id,
        kind=kind,
        base_model=row.base_model,
        tokens=0 if row.kind == STORAGE else row.quantity,
        byte_hours=row.quantity if row.kind == STORAGE else 0,
        amount_nusd=row.amount_nusd,
        amount_usd=usd(row.amount_nusd),
    )


@router.get("/ledger", **declare(scope="billing:read", limit="call"))
async def ledger(
    service: ServiceDep,
    who: PrincipalDep,
    before: Annotated[int | None, Query(ge=1, lt=2**63)] = None,
    limit: Annotated[int, Query(ge=1, le=PAGE)] = 50,
) -> LedgerResponse:
    """Movements of the balance, the newest first. A usage entry is all that was settled in one commit."""

    def read(session: Session) -> LedgerResponse:
        entry = tables.LedgerEntry
        query = select(entry).where(entry.org_id == who.org_id)
        if before is not None:
            query = query.where(entry.id < before)
        found = list(session.scalars(query.order_by(entry.id.desc()).limit(limit + 1)))
        rows = [LedgerRow.model_validate(row, from_attributes=True) for row in found[:limit]]
        return LedgerResponse(entries=rows, next_before=rows[-1].id if len(found) > limit else None)

    return await service.read(read)


@router.get("/budgets", **declare(scope="billing:read", limit="call"))
async def budgets(service: ServiceDep, who: PrincipalDep) -> BudgetsResponse:
    """The organisation's budgets in their present periods."""
    found = await service.read(lambda session: states(session, who.org_id))
    return BudgetsResponse(budgets=[_row(state) for state in found])


@router.put("/budgets", **declare(scope="admin", limit="call"))
async def put_budget(request: Request, service: ServiceDep, who: PrincipalDep) -> BudgetRow:
    """Make a budget, or change the one of the same scope and period."""
    return await change_budget(service, who, await read_json(request, SetBudgetRequest))


async def change_budget(service: Service, who: Principal, body: SetBudgetRequest) -> BudgetRow:
    """Make or change a budget, for the API and the console."""

    def read(session: Session) -> Counted:
        return count(session, who.org_id, body.scope, _scope_id(session, who.org_id, body), body.period)

    def write(session: Session) -> str:
        scope_id = _scope_id(session, who.org_id, body)
        budget = set_budget(
            session,
            who.org_id,
            body.scope,
            scope_id,
            body.period,
            body.limit_nusd,
            hard=body.hard,
            alert_pcts=body.alert_pcts,
            counted=counted,
        )
        target, detail = f"{body.scope}:{scope_id}", body.model_dump(mode="json")
        audit.record(session, org_id=who.org_id, key_id=who.key_id, event="budget_set", target=target, detail=detail)
        return budget.id

    counted = await service.read(read)
    budget_id = await service.database.write(write, lock=who.org_id)
    found = await service.read(lambda session: states(session, who.org_id))
    return next(_row(state) for state in found if state.budget.id == budget_id)


@router.delete("/budgets/{budget_id}", **declare(scope="admin", limit="call"))
async def delete_budget(budget_id: str, service: ServiceDep, who: PrincipalDep) -> StatusResponse:
    """Remove a budget: what it limited is not limited any more."""

    def write(session: Session) -> bool:
        removed = plain_id(budget_id) and remove_budget(session, who.org_id, budget_id)
        if removed:
            audit.record(session, org_id=who.org_id, key_id=who.key_id, event="budget_removed", target=budget_id)
        return removed

    if not await service.database.write(write, lock=who.org_id):
        raise NotFound(f"no budget {quote(budget_id)}; see GET /api/v1/weft/budgets")
    return StatusResponse(status="deleted")


def _scope_id(session: Session, org_id: str, body: SetBudgetRequest) -> str:
    """The id of the project or key that a budget is for; it must be this organisation's."""
    if body.scope == "org":
        if body.scope_id not in (None, org_id):
            raise Invalid("scope_id: leave it out for the organisation's own budget")
        return org_id
    if body.scope_id is None:
        raise Invalid(f"scope_id: needed for a budget of a {body.scope}")
    if not owns(session, org_id, body.scope, body.scope_id):
        raise NotFound(f"no {body.scope} {quote(body.scope_id)} in this organisation")
    return body.scope_id


def _row(state: BudgetState) -> BudgetRow:
    budget = state.budget
    facts = {name: getattr(budget, name) for name in ("id", "scope", "scope_id", "period", "limit_nusd", "hard")}
    return BudgetRow(
        **facts,
        period_start=state.start,
        spent_nusd=state.spent_nusd,
        held_nusd=state.held_nusd,
        left_nusd=state.left_nusd,
        alert_pcts=budget.alert_pcts,
        alerts=[BudgetAlertRow.model_validate(alert, from_attributes=True) for alert in state.alerts],
    )
