"""`weftd payments`: the operator's side of Stripe (docs/payments.md)."""

from __future__ import annotations

import json

import click

from api.commands.places import Place, refuse, settings_of, where
from store.settings import SettingsError


@click.group()
def payments() -> None:
    """Prepare the Stripe account for payments."""


@payments.command()
@where
def setup(place: Place) -> None:
    """Make Weft's meters and prices in the Stripe account, unless they are there; print the line for the settings."""
    import stripe

    from billing.payments.client import stripe_client
    from billing.payments.setup import set_up

    settings = settings_of(place)
    try:
        prices = set_up(stripe_client(settings.payments))
    except SettingsError as error:
        refuse(error)
    except stripe.StripeError as error:
        away = isinstance(error, stripe.APIConnectionError)
        refuse(f"Stripe refuses: {type(error).__name__}: {error.user_message or 'no answer'}", 1 if away else 2)
    click.echo(f"price_ids = {json.dumps(list(prices))}")
