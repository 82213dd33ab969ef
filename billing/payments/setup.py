"""Sets up a Stripe account for Weft: four meters and a metered price for each, made once. Values are micro-USD, so a
unit costs 0.0001 cents, and a change of our prices needs no change at Stripe.
"""

from __future__ import annotations

import stripe
from stripe import StripeClient

from billing.payments.meters import METERS, event_name
from billing.payments.summaries import meter_ids

CENTS_PER_UUSD = "0.0001"


def set_up(client: StripeClient) -> tuple[str, ...]:
    """Make what is missing. Returns the ids of the prices, for `payments.price_ids`."""
    meters = meter_ids(client)
    prices = {price.lookup_key: price.id for price in _prices(client)}
    for meter in METERS:
        name = event_name(meter)
        if name not in meters:
            made = client.v1.billing.meters.create(
                {
                    "event_name": name,
                    "display_name": f"Weft {meter} (micro-USD)",
                    "default_aggregation": {"formula": "sum"},
                    "customer_mapping": {"type": "by_id", "event_payload_key": "stripe_customer_id"},
                    "value_settings": {"event_payload_key": "value"},
                }
            )
            meters[name] = made.id
        if name not in prices:
            product = client.v1.products.create({"name": f"Weft: {meter}"}, {"idempotency_key": f"{name}-product"})
            price = client.v1.prices.create(
                {
                    "product": product.id,
                    "currency": "usd",
                    "unit_amount_decimal": CENTS_PER_UUSD,  # type: ignore[typeddict-item]
                    "lookup_key": name,
                    "recurring": {"interval": "month", "usage_type": "metered", "meter": meters[name]},
                }
            )
            prices[name] = price.id
    return tuple(prices[event_name(meter)] for meter in METERS)


def _prices(client: StripeClient) -> list[stripe.Price]:
    keys = [event_name(meter) for meter in METERS]
    return list(client.v1.prices.list({"lookup_keys": keys, "active": True}).auto_paging_iter())
