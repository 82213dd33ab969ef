"""The official client, set up: short timeouts, and no retries of its own, because ours know about identifiers."""

from __future__ import annotations

import stripe
from stripe import StripeClient

from billing.payments.secrets import stripe_secrets
from store.settings import PaymentsSettings

#: Seconds to connect, and to wait for an answer.
TIMEOUTS_S = (5.0, 20.0)

#: Micro-USD are what meters count; a payment counts cents.
NUSD_PER_UUSD = 1000
NUSD_PER_CENT = 10**7


def stripe_client(settings: PaymentsSettings) -> StripeClient:
    """Raises SettingsError without a usable key."""
    base = {"api": settings.api_base, "meter_events": settings.api_base} if settings.api_base else None
    return StripeClient(
        stripe_secrets(settings).key.get_secret_value(),
        base_addresses=base,  # type: ignore[arg-type]
        http_client=stripe.RequestsClient(timeout=TIMEOUTS_S),
        max_network_retries=0,
    )
