"""Bodies of Weft's answers about money: the ledger and budgets. Amounts are nano-USD (`*_nusd`)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from weft.wire.base import Request, Response

BudgetScope = Literal["org", "project", "key"]
BudgetPeriod = Literal["month", "total"]
Percent = Annotated[int, Field(ge=1, le=1000)]


class LedgerRow(Response):
    """A movement of the balance. `type` is topup, grant, usage, refund, adjustment, expiry, invoice or chargeback."""

    id: int
    at: datetime
    type: str
    amount_nusd: int
    ref_type: str
    ref_id: str
    memo: str


class LedgerResponse(Response):
    """The newest first; `before` for the next page is the last id, while there is more."""

    entries: list[LedgerRow]
    next_before: int | None = None


class BudgetAlertRow(Response):
    """Spending reached `pct` percent of the limit that was set at the time."""

    pct: int
    at: datetime
    spent_nusd: int
    limit_nusd: int


class BudgetRow(Response):
    """A budget in its present period: a UTC month, or all time. Over a hard one, nothing is accepted."""

    id: str
    scope: BudgetScope
    scope_id: str
    period: BudgetPeriod
    period_start: datetime
    limit_nusd: int
    spent_nusd: int
    held_nusd: int
    left_nusd: int
    hard: bool
    alert_pcts: list[int]
    alerts: list[BudgetAlertRow]


class BudgetsResponse(Response):
    budgets: list[BudgetRow]


class SetBudgetRequest(Request):
    """Make the budget of that scope and period, or change it. `scope_id`: the project's id or the key's number."""

    scope: BudgetScope
    scope_id: str | None = None
    period: BudgetPeriod = "month"
    limit_nusd: int = Field(ge=0, lt=2**62)
    hard: bool = True
    alert_pcts: list[Percent] = Field(default=[50, 80, 100], max_length=16)


class TopUpResponse(Response):
    """A top-up that was begun; it is paid on the page at `url`."""

    id: str
    url: str
    amount_nusd: int
    amount_usd: str


class InvoiceRow(Response):
    """A closed month, as 2026-11. `status` is closed, open, paid, failed or void."""

    id: str
    month: str
    total_nusd: int
    total_usd: str
    status: str
    hosted_url: str | None
    pdf_url: str | None
    closed_at: datetime
    paid_at: datetime | None


class InvoicesResponse(Response):
    invoices: list[InvoiceRow]


class WebhookResponse(Response):
    """The answer to Stripe's webhook; `new`: this event had not come before."""

    received: bool
    new: bool
