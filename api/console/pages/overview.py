"""The first page: what there is to spend, what was spent, and on what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.access import declare
from api.console import series
from api.console.pages.runs import RunLine, run_lines
from api.console.render import ConsoleRoute, page
from api.console.security import Viewer, ViewerDep
from api.state import ServiceDep
from billing import reports
from store.tables import Run, Wallet

router = APIRouter(route_class=ConsoleRoute)

DAYS = 30
#: Days that the rate of spending is measured over.
BURN_DAYS = 7
LATEST_RUNS = 6


@dataclass(frozen=True)
class Money:
    """`balance_nusd` is None for who may not see it, `mode` "" where there is no wallet yet."""

    mode: str
    balance_nusd: int | None
    held_nusd: int | None
    overdraft_nusd: int
    burn_nusd: int  # a day

    @property
    def days_left(self) -> int | None:
        """Days until nothing is left at the present rate; None if that is never."""
        if self.balance_nusd is None or self.mode == "unlimited" or self.burn_nusd <= 0:
            return None
        left = self.balance_nusd + self.overdraft_nusd - (self.held_nusd or 0)
        return max(0, left // self.burn_nusd)


@router.get("/", **declare(scope="public", limit="poll"))
async def overview(request: Request, service: ServiceDep, viewer: ViewerDep) -> HTMLResponse:
    def read(session: Session) -> dict[str, Any]:
        window, month = reports.last_days(DAYS), reports.this_month()
        rows = reports.by_day(session, viewer.org_id, window)
        totals = series.daily_totals(window, rows)
        latest = select(Run).filter_by(org_id=viewer.org_id).order_by(Run.created_at.desc(), Run.id)
        runs: list[RunLine] = run_lines(session, viewer.org_id, session.scalars(latest.limit(LATEST_RUNS)).all())
        return {
            "money": _money(session, viewer, sum(totals[-BURN_DAYS:]) // BURN_DAYS),
            "month_nusd": reports.total(session, viewer.org_id, month),
            "today_nusd": totals[-1],
            "window_nusd": sum(totals),
            "month": f"{month.first:%B}",
            "chart": series.cost_by_day(window, rows),
            "days": [(day, amount) for day, amount in zip(window.days, totals, strict=True) if amount],
            "runs": runs,
            "query": {},
        }

    return page(request, "overview.html", viewer, **await service.read(read))


def _money(session: Session, viewer: Viewer, burn_nusd: int) -> Money:
    wallet = session.get(Wallet, viewer.org_id)
    if not viewer.may("billing:read") or wallet is None:
        return Money("unlimited" if wallet is None else wallet.mode, None, None, 0, burn_nusd)
    return Money(wallet.mode, wallet.balance_nusd, wallet.held_nusd, wallet.overdraft_nusd, burn_nusd)
