"""The fake refuses what Stripe refuses; otherwise tests against it would prove nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import stripe
from stripe import StripeClient

from billing.payments.client import stripe_client
from tests.fakestripe import FakeStripe, fake_stripe
from tests.fakestripe.app import API
from tests.fakestripe.contract import _fields, check_object, parse_form

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
DAY_S = 86_400


@pytest.fixture(scope="module")
def server() -> Iterator[FakeStripe]:
    with fake_stripe() as server:
        yield server


@pytest.fixture
def fake(server: FakeStripe) -> FakeStripe:
    server.reset(NOW)
    server.stripe.objects["cus_1"] = {"id": "cus_1", "object": "customer"}
    return server


@pytest.fixture
def client(fake: FakeStripe) -> StripeClient:
    return stripe_client(fake.settings())


def _event(**changes: Any) -> Any:
    payload = {"stripe_customer_id": "cus_1", "value": changes.pop("value", "5")}
    return {"event_name": "weft_train", "identifier": "one", "payload": payload, **changes}


def test_the_types_of_every_endpoint_can_be_read() -> None:
    for table in API.values():
        for declared, _ in table.values():
            assert declared is None or _fields(declared)


def test_forms_are_read_as_stripe_reads_them() -> None:
    assert parse_form("a=1&b[c]=2&d[0][e]=3&d[1][e]=4&f[]=") == {
        "a": "1",
        "b": {"c": "2"},
        "d": [{"e": "3"}, {"e": "4"}],
        "f": {"": ""},
    }


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"colour": "red"}, "unknown parameter: colour"),
        ({"event_name": None}, "Missing required param: event_name"),
        ({"event_name": "other"}, "No active meter"),
        ({"value": "1.5"}, "whole number"),
        ({"value": ""}, "whole number"),
        ({"identifier": "x" * 101}, "100 characters"),
        ({"timestamp": int(NOW.timestamp()) - 35 * DAY_S - 1}, "too far in the past"),
        ({"timestamp": int(NOW.timestamp()) + 301}, "in the future"),
    ],
)
def test_meter_events_that_are_refused(client: StripeClient, params: dict[str, Any], message: str) -> None:
    event = {name: value for name, value in _event(**params).items() if value is not None}
    with pytest.raises(stripe.InvalidRequestError, match=message):
        client.v1.billing.meter_events.create(event)


def test_nested_parameters_are_checked_too(client: StripeClient) -> None:
    price: Any = {"currency": "usd", "unit_amount": 1, "product_data": {"name": "x", "colour": "red"}}
    items: Any = [{"quantity": 1, "price_data": price}]
    with pytest.raises(stripe.InvalidRequestError, match=r"line_items\[0\]\[price_data\]\[product_data\]\[colour\]"):
        client.v1.checkout.sessions.create({"mode": "payment", "customer": "cus_1", "line_items": items})


def test_objects_have_no_invented_fields() -> None:
    with pytest.raises(AssertionError, match="refund has no livemode"):
        check_object({"object": "refund", "livemode": False})


def test_an_identifier_is_known_for_a_day_and_no_longer(client: StripeClient, fake: FakeStripe) -> None:
    client.v1.billing.meter_events.create(_event())
    with pytest.raises(stripe.InvalidRequestError, match="already exists with identifier one"):
        client.v1.billing.meter_events.create(_event())
    fake.stripe.now += DAY_S
    client.v1.billing.meter_events.create(_event())
    assert fake.stripe.total("weft_train", "cus_1") == 10


def test_an_idempotency_key_repeats_its_answer_and_takes_no_other_request(client: StripeClient) -> None:
    first = client.v1.customers.create({"name": "a"}, {"idempotency_key": "k"})
    assert client.v1.customers.create({"name": "a"}, {"idempotency_key": "k"}).id == first.id
    with pytest.raises(stripe.IdempotencyError):
        client.v1.customers.create({"name": "b"}, {"idempotency_key": "k"})


def test_summaries_lack_the_newest_events(client: StripeClient, fake: FakeStripe) -> None:
    fake.stripe.lag_s = 60
    client.v1.billing.meter_events.create(_event())
    window: Any = {"customer": "cus_1", "start_time": 0, "end_time": int(NOW.timestamp()) + 60}

    def counted() -> float:
        return client.v1.billing.meters.event_summaries.list("mtr_1", window).data[0].aggregated_value

    assert counted() == 0
    fake.stripe.now += 60
    assert counted() == 5
    with pytest.raises(stripe.InvalidRequestError, match="minute"):
        client.v1.billing.meters.event_summaries.list("mtr_1", {**window, "end_time": 61})  # type: ignore[typeddict-item]


def test_a_second_call_for_a_customers_meter_meets_429(client: StripeClient, fake: FakeStripe) -> None:
    fake.front.latency_s = 0.5
    thread = threading.Thread(target=client.v1.billing.meter_events.create, args=(_event(),))
    thread.start()
    while not fake.front._in_flight:
        pass
    with pytest.raises(stripe.RateLimitError):
        client.v1.billing.meter_events.create(_event(identifier="two"))
    thread.join()
    assert fake.front.collisions == 1


@pytest.mark.parametrize(("fault", "counted"), [("lost", 0), ("unanswered", 5)])
def test_a_broken_connection_does_not_tell_whether_the_event_arrived(
    client: StripeClient, fake: FakeStripe, fault: Any, counted: int
) -> None:
    fake.front.faults.append(fault)
    with pytest.raises(stripe.APIConnectionError):
        client.v1.billing.meter_events.create(_event())
    assert fake.stripe.total("weft_train", "cus_1") == counted


def test_another_key_is_refused(fake: FakeStripe) -> None:
    client = StripeClient("rk_test_other", base_addresses={"api": fake.url})
    with pytest.raises(stripe.AuthenticationError):
        client.v1.billing.meter_events.create(_event())
