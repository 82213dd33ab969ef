"""Stripe's official client with our settings: short timeouts, and no retries of its own, because ours reuse
identifiers. Keys come from the environment, from a file that it names, or from the settings, in this order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr

from store.settings import PaymentsSettings, SettingsError

if TYPE_CHECKING:
    from stripe import StripeClient

KEY = "WEFT_STRIPE_SECRET_KEY"
WEBHOOK_SECRETS = "WEFT_STRIPE_WEBHOOK_SECRETS"
#: How many secrets are accepted: two while an endpoint's secret is rotated.
MAX_WEBHOOK_SECRETS = 2


@dataclass(frozen=True)
class StripeSecrets:
    key: SecretStr
    webhook_secrets: tuple[SecretStr, ...]


def stripe_secrets(settings: PaymentsSettings, environment: Mapping[str, str] = os.environ) -> StripeSecrets:
    """The secrets from environment, files and settings. Raises SettingsError, containing no secret, if payments cannot
    work with them."""
    key = _from_environment(KEY, environment) or (settings.secret_key.get_secret_value() if settings.secret_key else "")
    if not key:
        raise SettingsError(f"payments.enabled needs a Stripe key: set {KEY}, {KEY}_FILE or payments.secret_key")
    if key.startswith("sk_live_"):
        raise SettingsError(
            "payments: this is an unrestricted live key (sk_live_...), which could do anything to the account: "
            "make a restricted one (rk_live_...) with the permissions of docs/payments.md"
        )
    if not key.startswith(("rk_", "sk_test_")):
        raise SettingsError("payments: the Stripe key must begin with rk_ (restricted) or sk_test_")
    listed = _from_environment(WEBHOOK_SECRETS, environment).replace(",", " ").split()
    found = listed or [text for secret in settings.webhook_secrets if (text := secret.get_secret_value().strip())]
    if not 1 <= len(found) <= MAX_WEBHOOK_SECRETS:
        raise SettingsError(
            f"payments: {len(found)} webhook secrets; set one, or two while rotating ({WEBHOOK_SECRETS})"
        )
    return StripeSecrets(SecretStr(key), tuple(SecretStr(secret) for secret in found))


def _from_environment(name: str, environment: Mapping[str, str]) -> str:
    if value := environment.get(name, "").strip():
        return value
    path = environment.get(f"{name}_FILE", "")
    if not path:
        return ""
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the file that {name}_FILE names: {type(error).__name__}") from None


#: Seconds to connect, and to wait for an answer.
TIMEOUTS_S = (5.0, 20.0)

#: Meters count micro-USD; payments count cents.
NUSD_PER_UUSD = 1000
NUSD_PER_CENT = 10**7


def stripe_client(settings: PaymentsSettings) -> StripeClient:
    """A client with our settings. Raises SettingsError without a usable key."""
    import stripe

    base = {"api": settings.api_base, "meter_events": settings.api_base} if settings.api_base else None
    return stripe.StripeClient(
        stripe_secrets(settings).key.get_secret_value(),
        base_addresses=base,  # type: ignore[arg-type]
        http_client=stripe.RequestsClient(timeout=TIMEOUTS_S),
        max_network_retries=0,
    )
