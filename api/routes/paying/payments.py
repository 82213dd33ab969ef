"""Money in and out by card: top-ups through Checkout, invoices, and what Stripe has to say."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated

from fastapi import APIRouter, Header, Request
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select
from sqlalchemy.orm import Session
from weft.money import usd
from weft.wire.account.money import InvoiceRow, InvoicesResponse, TopUpResponse, WebhookResponse

from api.errors import Invalid, NotHere, Unavailable
from api.http.access import declare
from api.http.auth import PrincipalDep
from api.http.bodies import read_body, read_json
from api.state.service import Service, ServiceDep
from billing.payments import inbox
from billing.payments.checkout import Checkout, start_topup
from billing.payments.client import NUSD_PER_CENT, stripe_client, stripe_secrets
from billing.payments.customers import customer_of
from billing.payments.periods import name_of
from scheduler.jobs.running import ask
from store.settings import PaymentsSettings
from store.tables import Invoice

router = APIRouter(prefix="/api/v1")


class TopUp(BaseModel):
    model_config = ConfigDict(extra="forbid")
    #: Dollars, with at most two decimals: "25" or "25.50".
    amount_usd: Annotated[Decimal, Field(gt=0, le=10**9, decimal_places=2)]


@router.post("/weft/billing/topups", **declare(scope="billing:write", limit="call"))
async def topup(
    request: Request,
    service: ServiceDep,
    who: PrincipalDep,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=100)] = None,
) -> TopUpResponse:
    """A page of Stripe's where the amount is paid by card. It is credited when Stripe says that it was paid."""
    body = await read_json(request, TopUp)
    checkout = await begin_topup(service, who.org_id, body.amount_usd, idempotency_key)
    amount_nusd = int(body.amount_usd * 100) * NUSD_PER_CENT
    return TopUpResponse(id=checkout.id, url=checkout.url, amount_nusd=amount_nusd, amount_usd=usd(amount_nusd))


async def begin_topup(service: Service, org_id: str, amount_usd: Decimal, key: str | None = None) -> Checkout:
    """Start a top-up of an organisation; `key` makes a repeat the same one."""
    settings = _enabled(service)
    if not settings.min_topup_usd <= amount_usd <= settings.max_topup_usd:
        raise Invalid(
            f"amount_usd: must be from {settings.min_topup_usd} to {settings.max_topup_usd} dollars, got {amount_usd}"
        )

    import stripe

    def start() -> Checkout:
        client = stripe_client(settings)
        return start_topup(
            client,
            org_id=org_id,
            customer_id=customer_of(client, service.database, org_id, datetime.now(UTC)),
            cents=int(amount_usd * 100),
            return_url=f"{settings.public_url.rstrip('/')}/console/billing",
            key=key,
        )

    try:
        return await service.threads.run(org_id, start)
    except (stripe.IdempotencyError, stripe.InvalidRequestError) as error:
        raise Invalid(f"Stripe refuses this top-up: {error.user_message or type(error).__name__}") from None
    except stripe.StripeError as error:
        raise Unavailable(f"Stripe does not answer ({type(error).__name__}): nothing was charged, try again") from None


@router.get("/weft/billing/invoices", **declare(scope="billing:read", limit="call"))
async def list_invoices(service: ServiceDep, who: PrincipalDep) -> InvoicesResponse:
    """The months that were closed, the latest first."""

    def read(session: Session) -> list[Invoice]:
        query = select(Invoice).where(Invoice.org_id == who.org_id)
        return list(session.scalars(query.order_by(Invoice.period_start.desc())))

    return InvoicesResponse(invoices=[_invoice(row) for row in await service.read(read)])


def _invoice(row: Invoice) -> InvoiceRow:
    return InvoiceRow(
        id=row.id,
        month=name_of(row.period_start),
        total_nusd=row.total_nusd,
        total_usd=usd(row.total_nusd),
        status=row.status,
        hosted_url=row.hosted_url,
        pdf_url=row.pdf_url,
        closed_at=row.closed_at,
        paid_at=row.paid_at,
    )


@router.post("/stripe/webhook", **declare(scope="public", limit="poll", body="event"))
async def webhook(
    request: Request, service: ServiceDep, stripe_signature: Annotated[str, Header()] = ""
) -> WebhookResponse:
    """An event of Stripe's: verified, written down, answered. What follows from it is a job's."""
    secrets = stripe_secrets(_enabled(service)).webhook_secrets
    try:
        event = inbox.verify(await read_body(request), stripe_signature, secrets)
    except inbox.BadWebhook as error:
        raise Invalid(str(error)) from None
    now = datetime.now(UTC)

    def keep(session: Session) -> bool:
        new = inbox.keep(session, event, now)
        if new:
            ask(session, "process_webhooks", now)
        return new

    new = await service.database.write(keep)
    service.journal.meters.webhook_duplicates += not new
    return WebhookResponse(received=True, new=new)


def _enabled(service: Service) -> PaymentsSettings:
    settings = service.settings.payments
    if not settings.enabled:
        raise NotHere("this server takes no payments ([payments] enabled = false)")
    return settings
