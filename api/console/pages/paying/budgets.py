"""Limits on spending and on rates, how far they are used up, and what was said about them."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any

from fastapi import Form, Query, Request, Response
from fastapi.responses import HTMLResponse
from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session
from weft.wire.account.money import SetBudgetRequest

from api.console.alerts import alerts_of
from api.console.lists import names
from api.console.pages.paying.limits import OF, limits_shown
from api.console.render import console_router, long_page, say
from api.console.security import ViewerDep
from api.errors import Invalid, Malformed, explain
from api.http.access import declare
from api.routes.paying.money import change_budget, delete_budget
from api.state.service import ServiceDep
from billing.metering.quotas import standings
from billing.money.budgets import BudgetState, states
from billing.money.wallets import shown_wallet
from store.people.keys import good_at
from store.tables import ApiKey, Project

router = console_router()

#: How many alerts the page shows.
SHOWN_ALERTS = 50
Dollars = Annotated[Decimal, Form(ge=0, le=10**9, max_digits=18, decimal_places=9)]


@router.get("/budgets", **declare(scope="public", limit="poll"))
async def budgets(
    request: Request,
    service: ServiceDep,
    viewer: ViewerDep,
    of: Annotated[str, Query(max_length=80, pattern=OF)] = "",
) -> HTMLResponse:
    """`of`: whose limits the form for rate limits shows first."""
    viewer.need("admin", "billing:read")
    limits = await limits_shown(service, viewer)
    chosen = next((shown.row for shown in limits if shown.of == of), None)

    def read(session: Session) -> dict[str, Any]:
        org_id = viewer.org_id
        found = states(session, org_id)
        projects = session.scalars(select(Project).filter_by(org_id=org_id, archived_at=None).order_by(Project.name))
        good = select(ApiKey).filter_by(org_id=org_id).where(good_at(datetime.now(UTC)))
        return {
            "budgets": [(state, _title(session, state), _percent(state)) for state in found],
            "wallet": shown_wallet(session, org_id),
            "projects": list(projects),
            "keys": list(session.scalars(good.order_by(ApiKey.id))),
            "alerts": alerts_of(session, viewer, SHOWN_ALERTS),
            "quotas": standings(session, org_id, service.settings.limits),
        }

    values = {"limits": limits, "of": of, "chosen": chosen, **await service.read(read)}
    return await long_page(request, "budgets.html", viewer, **values)


@router.post("/budgets", **declare(scope="public", limit="poll"))
async def set_budget(
    service: ServiceDep,
    viewer: ViewerDep,
    of: Annotated[str, Form(max_length=80, pattern=r"^(org|project:.+|key:\d+)$")],
    limit_usd: Dollars,
    period: Annotated[str, Form(max_length=8)] = "month",
    hard: Annotated[bool, Form()] = False,
    alert_pcts: Annotated[str, Form(max_length=64)] = "50, 80, 100",
) -> Response:
    viewer.need("admin")
    scope, _, scope_id = of.partition(":")
    try:
        body = SetBudgetRequest.model_validate(
            {
                "scope": scope,
                "scope_id": scope_id or None,
                "period": period,
                "limit_nusd": int(limit_usd * 10**9),
                "hard": hard,
                "alert_pcts": _percents(alert_pcts),
            }
        )
    except ValidationError as error:
        raise Malformed(explain(error)) from None
    await change_budget(service, viewer.who, body)
    return say("Budget set")


@router.post("/budgets/{budget_id}/remove", **declare(scope="public", limit="poll"))
async def remove_budget(service: ServiceDep, viewer: ViewerDep, budget_id: str) -> Response:
    viewer.need("admin")
    await delete_budget(budget_id, service, viewer.who)
    return say("Budget removed")


def _percents(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace("%", "").split(",") if part.strip()]
    except ValueError:
        raise Invalid("alerts: must be percentages separated by commas, such as 50, 80, 100") from None


def _title(session: Session, state: BudgetState) -> str:
    budget = state.budget
    if budget.scope == "org":
        return "The whole organisation"
    dimension: Any = budget.scope
    called = names(session, budget.org_id, dimension, [budget.scope_id])[budget.scope_id]
    return f"{'Project' if budget.scope == 'project' else 'Key'} {called}"


def _percent(state: BudgetState) -> int:
    """How much of the limit is spent or held, in percent; a limit of 0 is used up."""
    limit = state.budget.limit_nusd
    return (state.spent_nusd + state.held_nusd) * 100 // limit if limit else 100
