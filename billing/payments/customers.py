"""Organisations as Stripe's customers, and the subscriptions of postpaid ones."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from billing.money.alerts import raise_alert, resolve_alert
from billing.payments.periods import end_of, period_of
from store.database.db import Database
from store.tables import Organisation

if TYPE_CHECKING:
    from stripe import Customer, RequestOptions, StripeClient, Subscription

log = logging.getLogger(__name__)

#: The key in the metadata of customers and payments for their organisation.
ORG_KEY = "weft_org"
#: The key in the metadata of the subscription to our meters, and of its invoices.
OF_METERS = {"weft": "meters"}


def _once(what: str, now: datetime) -> RequestOptions:
    """An idempotency key, so that two processes at once make one object. It changes every hour, since Stripe would
    repeat an error of its own for a day."""
    return {"idempotency_key": f"weft-{what}-{now:%Y-%m-%dT%H}"}


def customer_of(client: StripeClient, database: Database, org_id: str, now: datetime) -> str:
    """The customer of an organisation, made on first use unless Stripe has one: a restored database may be older than
    its customer. Two calls at once get the same one."""
    with database.read() as session:
        org = session.get_one(Organisation, org_id)
    if org.stripe_customer_id is not None:
        return org.stripe_customer_id
    named = {"name": org.name, "metadata": {ORG_KEY: org_id}}
    customer = _customer_there(client, org_id) or client.v1.customers.create(
        named,  # type: ignore[arg-type]
        _once(f"customer-{org_id}", now),
    )

    def keep(session: Session) -> str:
        return claim(session, customer) or customer.id

    return database.write_now(keep)


def _customer_there(client: StripeClient, org_id: str) -> Customer | None:
    """The oldest customer whose metadata name this organisation. Stripe's search misses those of the last minute, which
    `_once` covers."""
    import stripe

    try:
        found = list(client.v1.customers.search({"query": f"metadata['{ORG_KEY}']:'{org_id}'"}).auto_paging_iter())
    except stripe.InvalidRequestError as error:  # some accounts have no search
        log.warning("customers cannot be searched, so one made after a backup may be made again: %s", error)
        return None
    return min(found, key=lambda one: (one.created, one.id), default=None)


def claim(session: Session, customer: Customer) -> str | None:
    """Make the customer named in a payment's metadata, which only holders of our account's key can write, the
    organisation's customer, unless it has one. Returns the customer that it has then."""
    table, org_id = Organisation, (customer.to_dict().get("metadata") or {}).get(ORG_KEY)
    claimed = update(table).where(table.id == org_id, table.stripe_customer_id.is_(None))
    session.execute(claimed.values(stripe_customer_id=customer.id))
    return session.scalars(select(table.stripe_customer_id).where(table.id == org_id)).one_or_none()


def enrol(client: StripeClient, database: Database, org_id: str, price_ids: Sequence[str], now: datetime) -> str:
    """Make a postpaid organisation a customer with a subscription to the meters, if it is not one yet, so that Stripe
    invoices its usage from now on. Returns the customer's id."""
    customer_id = customer_of(client, database, org_id, now)
    if price_ids:
        subscription = subscribe(client, customer_id, price_ids, now)
        database.write_now(lambda session: _compare(session, subscription, org_id, price_ids, now))
    return customer_id


def _compare(
    session: Session, subscription: Subscription, org_id: str, price_ids: Sequence[str], now: datetime
) -> None:
    """Alert if the settings have other prices than the subscription: a person must change that at Stripe, knowing what
    is invoiced already."""
    there = sorted(item["price"]["id"] for item in subscription.to_dict()["items"]["data"])
    name = {"kind": "subscription_differs", "ref": f"{subscription.id}:{_digest(price_ids)}"}
    if there == sorted(price_ids):
        resolve_alert(session, **name, now=now)
        return
    message = (
        f"subscription {subscription.id} of {org_id} has the prices {', '.join(there)}, and payments.price_ids are "
        f"{', '.join(price_ids)}: what is metered for a price that it lacks is not invoiced; change it at Stripe"
    )
    raise_alert(session, **name, message=message, now=now, detail={"org": org_id})


def subscribe(client: StripeClient, customer_id: str, price_ids: Sequence[str], now: datetime) -> Subscription:
    """Have Stripe invoice a customer for its meters at the start of each month, UTC. Repeated calls make one
    subscription; if two processes have made two, across a full hour, both keep the older one."""
    if not (found := _of_meters(client, customer_id)):
        made = _make(client, customer_id, price_ids, now)
        found = _of_meters(client, customer_id) or [made]
    for younger in found[1:]:
        cancel(client, younger.id)
    return found[0]


def cancel(client: StripeClient, subscription_id: str) -> None:
    """End a subscription without an invoice; an ended one stays as it is."""
    from stripe import InvalidRequestError

    try:
        client.v1.subscriptions.cancel(subscription_id)
    except InvalidRequestError as error:
        if error.code != "resource_missing":
            raise


def _of_meters(client: StripeClient, customer_id: str) -> list[Subscription]:
    """A customer's subscriptions to our meters, the oldest first."""
    listed = client.v1.subscriptions.list({"customer": customer_id, "limit": 100}).auto_paging_iter()
    found = [one for one in listed if OF_METERS.items() <= one.to_dict().get("metadata", {}).items()]
    return sorted(found, key=lambda one: (one.created, one.id))


def _make(client: StripeClient, customer_id: str, price_ids: Sequence[str], now: datetime) -> Subscription:
    params = {
        "customer": customer_id,
        "items": [{"price": price} for price in price_ids],
        "billing_cycle_anchor": int(end_of(period_of(now)).timestamp()),
        "proration_behavior": "none",
        "metadata": OF_METERS,
    }
    # A corrected request needs another key, so that wrong prices can be fixed at once.
    once = _once(f"subscription-{customer_id}-{_digest(price_ids)}", now)
    return client.v1.subscriptions.create(params, once)  # type: ignore[arg-type]


def _digest(price_ids: Sequence[str]) -> str:
    return hashlib.sha256(" ".join(price_ids).encode()).hexdigest()[:16]
