"""What the machines cost beside what was paid for them; for operators."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import HTMLResponse
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.console.render import console_router, page
from api.console.security import ViewerDep
from api.errors import Forbidden, Invalid
from api.http.access import declare
from api.state.service import ServiceDep
from billing.reports.ownership import days_back, ownership
from billing.reports.tco import Server, break_even_tokens_per_s
from store.database.caller import unrestricted
from store.tables import Organisation

router = console_router()


@router.get("/ownership", **declare(scope="public", limit="poll"))
async def cost_of_ownership(
    request: Request, service: ServiceDep, viewer: ViewerDep, days: Annotated[int | None, Query(ge=1, le=366)] = None
) -> HTMLResponse:
    if not viewer.operator:
        raise Forbidden("this page is the operator's: weftd user login-link --org NAME --email WHO --operator")
    known = service.settings.limits.sample_days
    try:
        days = days_back(days, known)
    except ValueError as error:
        raise Invalid(f"days: {error}") from None
    owned = service.settings.ownership
    until = datetime.now(UTC)
    since = (until - timedelta(days=days)).replace(minute=0, second=0, microsecond=0)

    def read(session: Session) -> dict[str, Any]:
        with unrestricted(session):
            server = Server(owned)
            found = ownership(session, since, until, gpu_hour=server.gpu_hour, gpus=owned.gpus, machines=owned.machines)
            names = {row.id: row.name for row in session.scalars(select(Organisation))}
        margins = sorted(found.margins, key=lambda row: row.margin_usd)
        price = found.price_usd_per_mtok
        return {
            "found": found,
            "owned": owned,
            "margins": [(names.get(row.org_id, row.org_id), row) for row in margins],
            "break_even": break_even_tokens_per_s(server.gpu_hour.usd, price) if price else None,
        }

    periods = [period for period in (1, 7, 30, 90) if period <= known]
    return page(request, "ownership.html", viewer, days=days, periods=periods, **await service.read(read))
