"""Organisations as Stripe's customers, and the subscriptions of postpaid ones."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from billing.payments.periods import end_of, period_of
from store.database.db import Database
from store.tables import Organisation

if TYPE_CHECKING:
    from stripe import StripeClient

#: Metadata of the subscription to our meters, and of the invoices that it prints.
OF_METERS = {"weft": "meters"}


def customer_of(client: StripeClient, database: Database, org_id: str) -> str:
    """The customer of an organisation, made on first use. Two who ask at once get the same one."""
    with database.read() as session:
        org = session.get_one(Organisation, org_id)
    if org.stripe_customer_id is not None:
        return org.stripe_customer_id
    made = client.v1.customers.create(
        {"name": org.name, "metadata": {"weft_org": org_id}}, {"idempotency_key": f"weft-customer-{org_id}"}
    )
    table = Organisation
    claim = update(table).where(table.id == org_id, table.stripe_customer_id.is_(None))

    def keep(session: Session) -> str:
        session.execute(claim.values(stripe_customer_id=made.id))
        return session.scalars(select(table.stripe_customer_id).where(table.id == org_id)).one() or made.id

    return database.write_now(keep)


def enrol(client: StripeClient, database: Database, org_id: str, price_ids: Sequence[str], now: datetime) -> str:
    """Make a postpaid organisation a customer with a subscription to the meters, unless it is one, so that Stripe can
    invoice its usage from now on. Returns the customer's id."""
    customer_id = customer_of(client, database, org_id)
    if price_ids:
        subscribe(client, customer_id, price_ids, now)
    return customer_id


def subscribe(client: StripeClient, customer_id: str, price_ids: Sequence[str], now: datetime) -> str:
    """Have Stripe invoice a customer for its meters at the start of each month, UTC. Repeated calls make one
    subscription. Returns its id."""
    for subscription in client.v1.subscriptions.list({"customer": customer_id, "limit": 100}).auto_paging_iter():
        if OF_METERS.items() <= subscription.to_dict().get("metadata", {}).items():
            return subscription.id
    params = {
        "customer": customer_id,
        "items": [{"price": price} for price in price_ids],
        "billing_cycle_anchor": int(end_of(period_of(now)).timestamp()),
        "proration_behavior": "none",
        "metadata": OF_METERS,
    }
    made = client.v1.subscriptions.create(params, {"idempotency_key": f"weft-subscription-{customer_id}-{now:%Y-%m}"})  # type: ignore[arg-type]
    return made.id
