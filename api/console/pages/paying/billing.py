"""Money in and out: the wallet, top-ups by card, what moved the balance, invoices, prices."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Annotated, Any

from fastapi import Form, Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from sqlalchemy import select
from sqlalchemy.orm import Session
from weft.money import usd

from api.console.formats import csv_cell, csv_text
from api.console.movements import movements
from api.console.render import console_router, page
from api.console.security import ViewerDep, need_fresh
from api.console.spending import bill, billed
from api.console.titles import run_titles
from api.http.access import declare
from api.routes.paying.payments import begin_topup
from api.state.service import Service, ServiceDep
from billing.money.wallets import available_nusd, shown_wallet
from billing.payments.periods import name_of
from billing.prices import ANY_MODEL, KINDS, STORAGE
from billing.reports.spending import by_day
from store.tables import CreditGrant, Invoice, LedgerEntry

router = console_router()

#: How many entries are read, and written, at a time.
AT_A_TIME = 1000


@router.get("/billing", **declare(scope="public", limit="poll"))
async def billing(
    request: Request,
    service: ServiceDep,
    viewer: ViewerDep,
    before: date | None = None,
) -> HTMLResponse:
    viewer.need("admin", "billing:read")
    now = datetime.now(UTC)

    def read(session: Session) -> dict[str, Any]:
        org_id = viewer.org_id
        wallet = shown_wallet(session, org_id)
        moved, older = movements(session, org_id, before)
        invoices = select(Invoice).filter_by(org_id=org_id).order_by(Invoice.period_start.desc())
        grants = select(CreditGrant).filter_by(org_id=org_id).where(CreditGrant.remaining_nusd > 0)
        return {
            "wallet": wallet,
            "available_nusd": available_nusd(wallet),
            "movements": moved,
            "titles": run_titles(session, org_id, {each.run_id for each in moved if each.run_id}),
            "before": before,
            "older": older,
            "bill": bill(by_day(session, org_id, billed(now)), now),
            "invoices": [(row, name_of(row.period_start)) for row in session.scalars(invoices.limit(36))],
            "grants": list(session.scalars(grants.order_by(CreditGrant.expires_at))),
        }

    payments = service.settings.payments
    return page(
        request,
        "billing.html",
        viewer,
        payments=payments,
        prices=_prices(service),
        **await service.read(read),
    )


@router.post("/billing/topup", **declare(scope="public", limit="poll"))
async def topup(
    request: Request,
    service: ServiceDep,
    viewer: ViewerDep,
    amount_usd: Annotated[Decimal, Form(gt=0, le=10**9, max_digits=12, decimal_places=2)],
) -> Response:
    """Off to Stripe's page; the credit comes when Stripe says that it was paid."""
    viewer.need("billing:write")
    need_fresh(request, viewer)
    checkout = await begin_topup(service, viewer.org_id, amount_usd)
    return Response(status_code=204, headers={"hx-redirect": checkout.url})


@router.get("/billing/ledger.csv", **declare(scope="public", limit="poll"))
async def ledger_csv(service: ServiceDep, viewer: ViewerDep) -> StreamingResponse:
    """Everything that moved the balance, oldest first."""
    viewer.need("admin", "billing:read")
    headers = {"content-disposition": 'attachment; filename="weft-ledger.csv"'}
    return StreamingResponse(_entries(service, viewer.org_id), headers=headers, media_type="text/csv; charset=utf-8")


async def _entries(service: Service, org_id: str) -> AsyncIterator[str]:
    """The entries, some at a time: there may be millions."""
    yield csv_text([["id", "at", "type", "amount_usd", "ref_type", "ref_id", "memo"]])
    last = 0

    def read(session: Session) -> list[LedgerEntry]:
        query = select(LedgerEntry).where(LedgerEntry.org_id == org_id, LedgerEntry.id > last)
        return list(session.scalars(query.order_by(LedgerEntry.id).limit(AT_A_TIME)))

    while rows := await service.read(read):
        last = rows[-1].id
        yield csv_text([_cells(row) for row in rows])


def _cells(row: LedgerEntry) -> list[object]:
    texts = [csv_cell(row.ref_type), csv_cell(row.ref_id), csv_cell(row.memo)]
    return [row.id, row.at.isoformat(), row.type, usd(row.amount_nusd), *texts]


def _prices(service: Service) -> list[tuple[str, str, dict[str, str]]]:
    """Each model's present prices, in dollars per million tokens (per GB-month of storage), and the version of the
    price list that they are from."""
    now = datetime.now(UTC)
    table = []
    for name in sorted(service.cards) or [ANY_MODEL]:
        rates = {kind: service.prices.rate(name, kind, now) for kind in (*KINDS, STORAGE)}
        table.append((name, rates["train"].version, {kind: _price(rate.uusd) for kind, rate in rates.items()}))
    return table


def _price(uusd: int) -> str:
    """Micro-dollars in dollars, exactly, with two decimals at least."""
    whole, rest = divmod(uusd, 10**6)
    return f"{whole:,}.{f'{rest:06d}'.rstrip('0'):0<2}"
