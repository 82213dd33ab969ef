"""The first page: what needs attention, what there is to spend, and what was spent, on what."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.console import series
from api.console.alerts import alerts_of
from api.console.pages.runs.listing import run_lines
from api.console.render import console_router, page
from api.console.security import ViewerDep
from api.console.spending import bill, billed
from api.http.access import declare
from api.http.client_wheel import WHEEL_PATH
from api.state.service import ServiceDep
from api.who.lookup import visible
from billing.money.wallets import shown_wallet
from billing.reports import spending
from store.tables import Run

router = console_router()

DAYS = 30
#: Over how many days the rate of spending is measured.
BURN_DAYS = 7
LATEST_RUNS = 6
#: How many open alerts are shown, the latest.
SHOWN_ALERTS = 4


@dataclass(frozen=True)
class Money:
    """What there is to spend."""

    mode: str
    balance_nusd: int
    held_nusd: int
    overdraft_nusd: int
    burn_nusd: int  # per day

    @property
    def days_left(self) -> int | None:
        """Days until nothing is left at the present rate; None if that is never."""
        if self.mode == "unlimited" or self.burn_nusd <= 0:
            return None
        left = self.balance_nusd + self.overdraft_nusd - self.held_nusd
        return max(0, left // self.burn_nusd)


@router.get("/", **declare(scope="public", limit="poll"))
async def overview(request: Request, service: ServiceDep, viewer: ViewerDep) -> HTMLResponse:
    def read(session: Session) -> dict[str, Any]:
        latest = select(Run).where(visible(viewer.who, Run)).order_by(Run.created_at.desc(), Run.id)
        runs = run_lines(session, viewer.org_id, session.scalars(latest.limit(LATEST_RUNS)).all())
        spending = _spending(session, viewer.org_id) if viewer.may("billing:read") else None
        alerts = []
        if viewer.may("billing:read"):
            alerts = alerts_of(session, viewer, SHOWN_ALERTS, open_only=True)
        return {"runs": runs, "spending": spending, "alerts": alerts}

    server = str(request.base_url).rstrip("/")
    found = await service.read(read)
    return page(request, "overview.html", viewer, server=server, client=server + WHEEL_PATH, **found)


def _spending(session: Session, org_id: str) -> dict[str, Any]:
    now = datetime.now(UTC)
    window = spending.last_days(DAYS, now)
    lately = spending.by_day(session, org_id, billed(now, DAYS))
    rows = spending.in_window(lately, window)
    totals = series.daily_totals(window, rows)
    return {
        "money": _money(session, org_id, sum(totals[-BURN_DAYS:]) // BURN_DAYS),
        "bill": bill(lately, now),
        "today_nusd": totals[-1],
        "window_nusd": sum(totals),
        "chart": series.cost_by_day(window, rows),
        "days": [(day, amount) for day, amount in zip(window.days, totals, strict=True) if amount],
    }


def _money(session: Session, org_id: str, burn_nusd: int) -> Money:
    wallet = shown_wallet(session, org_id)
    return Money(wallet.mode, wallet.balance_nusd, wallet.held_nusd, wallet.overdraft_nusd, burn_nusd)
