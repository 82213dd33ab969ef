"""Against Stripe itself, in test mode: what our fake of it assumes. Runs only with STRIPE_TEST_KEY, never in CI."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
import stripe
from pydantic import SecretStr
from stripe import StripeClient

from billing.payments import checkout, customers, sender, setup, summaries
from billing.payments.client import stripe_client
from billing.payments.periods import period_of
from store.settings import PaymentsSettings
from store.tables import StripeOutbox

KEY = os.environ.get("STRIPE_TEST_KEY", "")
pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not KEY.startswith(("sk_test_", "rk_test_")), reason="STRIPE_TEST_KEY is not set to a test key"),
]
#: Seconds that Stripe may take until its sums include the last events.
SUMMARY_S = 600


@pytest.fixture(scope="module")
def client() -> StripeClient:
    return stripe_client(
        PaymentsSettings(enabled=True, secret_key=SecretStr(KEY), webhook_secrets=[SecretStr("whsec_none")])
    )


@pytest.fixture(scope="module")
def prices(client: StripeClient) -> tuple[str, ...]:
    return setup.set_up(client)


@pytest.fixture
def customer(client: StripeClient) -> Iterator[str]:
    made = client.v1.customers.create({"name": "weft live test"})
    yield made.id
    client.v1.customers.delete(made.id)


def _event(customer: str, value: int) -> StripeOutbox:
    now = datetime.now(UTC)
    facts = {"identifier": f"live:{uuid.uuid4().hex}", "meter": "train", "customer_id": customer, "value_uusd": value}
    return StripeOutbox(**facts, occurred_at=now, attempts=1, first_sent_at=now)


def _clock() -> datetime:
    return datetime.now(UTC)


def test_set_up_finds_what_it_made(client: StripeClient, prices: tuple[str, ...]) -> None:
    assert setup.set_up(client) == prices


def test_a_repeated_event_counts_as_sent_and_negative_ones_are_summed(
    client: StripeClient, prices: tuple[str, ...], customer: str
) -> None:
    first = _event(customer, 70)
    for event in (first, first, _event(customer, -20)):
        assert sender.send(client, event, _clock).state == "sent"
    ids, deadline = summaries.meter_ids(client), time.monotonic() + SUMMARY_S
    while (counted := summaries.counted_uusd(client, ids, "train", customer, period_of(_clock()))) != 50:
        assert time.monotonic() < deadline, counted
        time.sleep(10)


def test_a_subscription_is_anchored_at_the_month(client: StripeClient, prices: tuple[str, ...], customer: str) -> None:
    first = customers.subscribe(client, customer, prices, _clock()).id
    assert customers.subscribe(client, customer, prices, _clock()).id == first
    client.v1.subscriptions.cancel(first)


def test_checkout_opens_and_its_key_repeats_it(client: StripeClient, customer: str) -> None:
    key = uuid.uuid4().hex

    def start(cents: int) -> checkout.Checkout:
        return checkout.start_topup(
            client, org_id="live", customer_id=customer, cents=cents, return_url="https://weft.example/console", key=key
        )

    first = start(500)
    assert first.url.startswith("https://checkout.stripe.com/")
    assert start(500) == first
    with pytest.raises(stripe.IdempotencyError):
        start(600)
