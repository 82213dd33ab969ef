"""What was used and what it cost, by day and by whatever one asks for. The filters are the address, so that a view can
be passed on; the same view comes as CSV."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any

from fastapi import Depends, Query, Request
from fastapi.responses import HTMLResponse, Response
from sqlalchemy.orm import Session
from weft.money import usd

from api.console import series
from api.console.formats import csv_cell, csv_text
from api.console.lists import Pages, Text, names
from api.console.render import console_router, page
from api.console.security import Viewer, ViewerDep
from api.errors import Invalid
from api.http.access import declare
from api.state.service import ServiceDep
from api.who.lookup import run_by_id
from billing.reports import spending
from billing.reports.spending import DIMENSIONS, Dimension, ShareRow, Window

router = console_router()

LONGEST = 366
#: Dimensions that a view can be narrowed by and split by.
SPLITS: dict[Dimension, str] = {
    "model": "Model",
    "project": "Project",
    "key": "API key",
    "user": "User",
    "run": "Run",
    "kind": "Kind",
}
_NONE = "-"
#: The first and last days of the calendar are excluded: there is none before or after them.
Day = Annotated[date | None, Query(ge=date(1970, 1, 1), le=date(2999, 12, 31))]


@dataclass(frozen=True)
class Filters:
    """The filters in the page's address. The value `-` selects usage without a project (key, user, run)."""

    window: Window
    split: Dimension
    query: dict[str, str]


def filters(
    first: Day = None,
    last: Day = None,
    days: Annotated[int, Query(ge=1, le=LONGEST)] = 30,
    by: Dimension = "model",
    model: Text = "",
    project: Text = "",
    key: Text = "",
    user: Text = "",
    run: Text = "",
    kind: Text = "",
) -> Filters:
    given = {"model": model, "project": project, "key": key, "user": user, "run": run, "kind": kind}
    window = spending.last_days(days)
    if first is not None or last is not None:
        end = last or window.last
        window = Window(first or end - timedelta(days=days - 1), end)
    length = (window.last - window.first).days + 1
    if not 1 <= length <= LONGEST:
        raise Invalid(f"first, last: a view has 1 to {LONGEST} days, and this would be {length}: change the dates")
    for dimension in DIMENSIONS:
        if given[dimension]:
            window = spending.narrowed(window, dimension, None if given[dimension] == _NONE else given[dimension])
    dated = {"first": first.isoformat() if first else "", "last": last.isoformat() if last else ""}
    query = {**dated, "days": "" if first or last or days == 30 else str(days), "by": by, **given}
    return Filters(window, by, query)


def _check(session: Session, viewer: Viewer, chosen: Filters) -> None:
    """A run's usage is for those who may see the run; the whole organisation's spending is not (as in the API)."""
    if viewer.may("billing:read"):
        return
    run_id = dict(chosen.window.match).get("run")
    if run_id is None:
        viewer.need("billing:read")
    else:
        run_by_id(session, viewer.who, run_id)


FiltersDep = Annotated[Filters, Depends(filters)]


@dataclass
class Share:
    """One line of the table: what one model (project, ...) used."""

    value: str | None
    title: str
    tokens: int = 0
    byte_hours: int = 0
    amounts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    per_mtok_nusd: int | None = None

    @property
    def amount_nusd(self) -> int:
        return sum(self.amounts.values())


@router.get("/usage", **declare(scope="public", limit="poll"))
async def usage_page(
    request: Request,
    service: ServiceDep,
    viewer: ViewerDep,
    chosen: FiltersDep,
    page_number: Annotated[int, Query(alias="page", ge=1, le=10_000)] = 1,
) -> HTMLResponse:
    def read(session: Session) -> dict[str, Any]:
        _check(session, viewer, chosen)
        window = chosen.window
        days = spending.by_day(session, viewer.org_id, window)
        rows = spending.by_dimension(session, viewer.org_id, window, chosen.split)
        shares = _shares(session, viewer, chosen.split, rows)
        pages = Pages(page_number, len(shares))
        narrowed = {dimension: _called(session, viewer, dimension, [value])[value] for dimension, value in window.match}
        return {
            "chosen": chosen,
            "query": chosen.query,
            "splits": SPLITS,
            "narrowed": narrowed,
            "chart": series.cost_by_day(window, days),
            "days": days,
            "kinds": [kind for kind in series.KINDS if any(row.kind == kind for row in days)],
            "shares": shares[pages.offset : pages.last],
            "pages": pages,
            "total_nusd": sum(row.amount_nusd for row in days),
            "per_mtok_nusd": spending.per_mtok_got(days),
            "total_tokens": sum(row.quantity for row in days if row.kind in spending.TOKEN_KINDS),
            "today": datetime.now(UTC).date(),
        }

    return page(request, "usage.html", viewer, **await service.read(read))


@router.get("/usage.csv", **declare(scope="public", limit="poll"))
async def usage_csv(service: ServiceDep, viewer: ViewerDep, chosen: FiltersDep) -> Response:
    """The view by day, kind and the chosen dimension, with exact amounts."""

    def read(session: Session) -> str:
        _check(session, viewer, chosen)
        table: list[list[object]] = [["day", chosen.split, "name", "kind", "quantity", "amount_usd"]]
        rows = spending.by_day_and(session, viewer.org_id, chosen.window, chosen.split)
        called = _called(session, viewer, chosen.split, {row.name for row in rows})
        for row in rows:
            cells = [csv_cell(row.name or ""), csv_cell(called[row.name]), csv_cell(row.kind)]
            table.append([row.day.isoformat(), *cells, row.quantity, usd(row.amount_nusd)])
        return csv_text(table)

    text = await service.read(read)
    name = f"weft-usage-{chosen.window.first}-{chosen.window.last}-by-{chosen.split}.csv"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(text, media_type="text/csv; charset=utf-8", headers=headers)


def _called(
    session: Session, viewer: Viewer, dimension: Dimension, values: Iterable[str | None]
) -> dict[str | None, str]:
    """As `names`; but viewers of a single run see keys and users by their ids only, because they may not know who is
    behind them."""
    if dimension in ("key", "user") and not viewer.may("billing:read"):
        return {value: value or "none" for value in values}
    return names(session, viewer.org_id, dimension, values)


def _shares(session: Session, viewer: Viewer, split: Dimension, rows: list[ShareRow]) -> list[Share]:
    called = _called(session, viewer, split, {row.name for row in rows})
    shares: dict[str | None, Share] = {}
    by_name: defaultdict[str | None, list[ShareRow]] = defaultdict(list)
    for row in rows:
        by_name[row.name].append(row)
        share = shares.setdefault(row.name, Share(row.name, called[row.name]))
        share.amounts[row.kind] += row.amount_nusd
        if row.kind in spending.TOKEN_KINDS:
            share.tokens += row.quantity
        else:
            share.byte_hours += row.quantity
    for name, share in shares.items():
        share.per_mtok_nusd = spending.per_mtok_got(by_name[name])
    return sorted(shares.values(), key=lambda share: (-share.amount_nusd, share.title))
