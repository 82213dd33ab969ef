"""Top-ups by card: a Checkout session whose payment says which organisation it is for. Nothing is credited here, and
nothing when the browser comes back: only the webhook of the payment credits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from billing.payments.customers import ORG_KEY
from billing.payments.events import KIND_KEY, TOPUP

if TYPE_CHECKING:
    from stripe import StripeClient


@dataclass(frozen=True)
class Checkout:
    id: str
    url: str


def start_topup(
    client: StripeClient, *, org_id: str, customer_id: str, cents: int, return_url: str, key: str | None
) -> Checkout:
    """`key` makes a repeat of the same request the same session."""
    metadata = {KIND_KEY: TOPUP, ORG_KEY: org_id}
    session = client.v1.checkout.sessions.create(
        {
            "mode": "payment",
            "customer": customer_id,
            "client_reference_id": org_id,
            "line_items": [
                {
                    "quantity": 1,
                    "price_data": {"currency": "usd", "unit_amount": cents, "product_data": {"name": "Weft credit"}},
                }
            ],
            "metadata": metadata,
            "payment_intent_data": {"metadata": metadata},
            "success_url": f"{return_url}?topup=done",
            "cancel_url": f"{return_url}?topup=cancelled",
        },
        {"idempotency_key": f"weft-topup-{org_id}-{key}"} if key is not None else {},
    )
    return Checkout(session.id, session.url or "")
