"""Rate limits: the token buckets of one process and those in Redis give the same answers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator

import pytest

from api.state.rates import Charge, LocalRates, Rates
from api.state.shared_rates import SharedRates
from tests.servers import redis_server

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["local", "redis"])
def make_rates(request: pytest.FixtureRequest) -> Iterator[Callable[[], Rates]]:
    """Makes rate limits as one process has them; all that were made share their buckets if the carrier can."""
    if request.param == "local":
        rates = LocalRates()
        yield lambda: rates
        return
    url, name, made = request.getfixturevalue("redis_url"), uuid.uuid4().hex, []

    def make() -> Rates:
        made.append(SharedRates(url, name))
        return made[-1]

    yield make
    for shared in made:
        shared.close()


def charge(limit: int, cost: int = 1, id: str = "o", what: str = "requests_per_minute") -> Charge:
    return Charge("organisation", id, what, limit, cost)


async def test_a_minutes_worth_at_once_and_then_no_more(make_rates: Callable[[], Rates]) -> None:
    one, two = make_rates(), make_rates()
    told = [await rates.take([charge(6)]) for rates in (one, two) * 4]
    assert [refusal is None for refusal in told] == [True] * 6 + [False] * 2
    assert told[-1] is not None
    assert 5 < told[-1].retry_after_s <= 10
    assert await one.take([charge(6, id="other")]) is None


async def test_all_charges_or_none(make_rates: Callable[[], Rates]) -> None:
    rates = make_rates()
    assert await rates.take([charge(1, id="small")]) is None
    for _ in range(5):
        refusal = await rates.take([charge(2, id="large"), charge(1, id="small")])
        assert refusal is not None
        assert refusal.charge.id == "small"
    assert await rates.take([charge(2, 2, id="large")]) is None


async def test_what_is_larger_than_a_bucket_is_let_through_once_and_paid_back(make_rates: Callable[[], Rates]) -> None:
    rates = make_rates()
    assert await rates.take([charge(1000, 3000)]) is None
    refusal = await rates.take([charge(1000, 1)])
    assert refusal is not None
    assert 115 < refusal.retry_after_s <= 121


async def test_many_at_once_are_never_let_through_beyond_the_limit(make_rates: Callable[[], Rates]) -> None:
    rates = make_rates()
    told = await asyncio.gather(*(rates.take([charge(20)]) for _ in range(100)))
    assert sum(refusal is None for refusal in told) == 20


async def test_without_redis_nobody_is_refused_here() -> None:
    with redis_server() as url:
        rates = SharedRates(url)
        assert await rates.take([charge(1)]) is None
        assert await rates.take([charge(1)]) is not None
    assert await rates.take([charge(1)]) is None
    rates.close()
