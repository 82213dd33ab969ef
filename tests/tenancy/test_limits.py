"""Rate limits: the arithmetic of their token buckets, and what a client is told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from api.errors import RateLimited
from api.state import rates as api_rates
from api.state.rates import Buckets, Charge, LocalRates, check_in_flight, count_background, count_searches
from api.who.principal import Principal, RateLimit
from scheduler.journal.accepting.in_flight import InFlight
from scheduler.order.operations import SAMPLE, NewOperation
from store.people import organisations
from store.tables import Organisation
from tests.api.conftest import MODEL, World
from tests.api.data import batch, datum
from tests.tenancy.conftest import forget_keys, member, org_id_of


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def charge(limit: int, cost: int = 1, id: str = "a") -> Charge:
    return Charge("key", id, "tokens_per_minute", limit, cost)


def taken(rates: LocalRates, *charges: Charge) -> float | None:
    """None if the request is let through; otherwise how long it has to wait."""
    refusal = asyncio.run(rates.take(charges))
    return None if refusal is None else refusal.retry_after_s


def test_a_minutes_worth_at_once_then_steadily() -> None:
    clock = Clock()
    rates = LocalRates(clock)
    assert [taken(rates, charge(60)) for _ in range(60)] == [None] * 60
    assert taken(rates, charge(60)) == pytest.approx(1.0)
    clock.now = 1.0
    assert taken(rates, charge(60)) is None
    assert taken(rates, charge(60)) == pytest.approx(1.0)


def test_what_is_larger_than_a_bucket_waits_for_a_full_one_and_pays_back() -> None:
    clock = Clock()
    rates = LocalRates(clock)
    assert taken(rates, charge(100, 300)) is None
    assert taken(rates, charge(100, 1)) == pytest.approx(120.6)
    clock.now = 120.7
    assert taken(rates, charge(100, 1)) is None


def test_all_buckets_or_none() -> None:
    rates = LocalRates(Clock())
    assert taken(rates, charge(1, 1, "small")) is None
    assert taken(rates, charge(10, 10, "large"), charge(1, 1, "small")) == pytest.approx(60.0)
    assert taken(rates, charge(10, 10, "large")) is None


@given(
    limit=st.integers(1, 1000),
    asked=st.lists(st.tuples(st.integers(1, 100), st.floats(0, 30)), min_size=1, max_size=60),
)
def test_over_any_time_the_rate_holds(limit: int, asked: list[tuple[int, float]]) -> None:
    """Let through by time t are at most a full bucket, the rate times t, and one request that may overdraw it."""
    clock = Clock()
    rates = LocalRates(clock)
    passed = 0
    for cost, pause in asked:
        clock.now += pause
        if taken(rates, charge(limit, cost)) is None:
            passed += cost
            assert passed <= limit + limit * clock.now / 60 + max(cost, limit) + 1e-6


def test_buckets_that_are_full_again_are_forgotten_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_rates, "MAX_BUCKETS", 2)
    clock = Clock()
    buckets = Buckets(clock)
    assert buckets.empty
    for id in ("at once", "used up"):
        buckets.count(charge(60, 1 if id == "at once" else 60, id))
    clock.now = 1.0
    buckets.count(charge(60, 1, "new"))
    assert {name.split(":")[1] for name in buckets._full_at} == {"used up", "new"}
    assert not buckets.empty
    assert buckets.wait_s(charge(60, 2, "used up")) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("count", "a_minute", "what"),
    [(count_background, 600, "background_per_minute"), (count_searches, 240, "searches_per_minute")],
)
def test_what_is_counted_apart(count: Any, a_minute: int, what: str) -> None:
    clock = Clock()
    app = SimpleNamespace(state=SimpleNamespace(service=SimpleNamespace(rates=LocalRates(clock))))
    asked, who = SimpleNamespace(app=app), Principal("acme", 1)

    async def ask() -> None:
        for _ in range(a_minute):
            await count(asked, who)
            clock.now += 1e-6  # the sum over the parts of a minute is slightly more than the minute's limit
        await count(asked, Principal("acme", 2))
        with pytest.raises(RateLimited, match=f"{what} of {a_minute} .this request is 1."):
            await count(asked, who)

    asyncio.run(ask())


def test_each_limit_of_what_is_in_flight_holds_also_when_it_was_lowered() -> None:
    in_flight = InFlight()
    for seq in range(3):
        in_flight.add(NewOperation("acme", "s", "sampler", seq, SAMPLE, MODEL, 0, key_id=1))
    free, held = RateLimit("key", "1", None, None, None), RateLimit("organisation", "acme", None, None, 2)
    new = NewOperation("acme", "s", "sampler", 3, SAMPLE, MODEL, 0, key_id=1)
    with pytest.raises(RateLimited, match="3 samples and runs of this organisation") as refused:
        asyncio.run(check_in_flight([free, held], in_flight, new))
    assert refused.value.headers["retry-after"] == "1"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=40))
def test_in_flight_ends_at_nothing(arrivals: list[tuple[int, int, bool]]) -> None:
    in_flight = InFlight()
    ops = [
        NewOperation("o", "s", f"lane{lane}", seq, SAMPLE if sample else "optim_step", MODEL, 0, key_id=1)
        for lane, seq, sample in arrivals
    ]
    for op in ops:
        in_flight.add(op)
    units = {f"{op.lane} {op.seq}" if op.kind == SAMPLE else op.lane for op in ops}
    assert in_flight.count("key", "1") == in_flight.count("organisation", "o") == len(units)
    for op in ops:
        in_flight.remove(op)
    assert in_flight.count("key", "1") == 0
    assert in_flight._units == {}


def limit_org(world: World, **values: int | None) -> None:
    org_id = org_id_of(world)

    def write(session: Any) -> None:
        organisations.set_limits(session, session.get_one(Organisation, org_id), values)

    world.database.write_now(write)
    forget_keys(world)


def too_many(reply: Any, *said: str) -> None:
    assert (reply.status_code, reply.json()["code"]) == (429, "rate_limited"), reply.text
    assert int(reply.headers["retry-after"]) >= 1
    for text in said:
        assert text in reply.json()["detail"]


def test_requests_per_minute_of_an_organisation(any_world: World) -> None:
    limit_org(any_world, requests_per_minute=3)
    for _ in range(3):
        any_world.get("weft/stats")
    reply = any_world.call("GET", "weft/stats")
    too_many(reply, "this organisation has reached its limit requests_per_minute of 3")
    assert reply.headers["x-weft-limit-scope"] == "organisation"
    any_world.get("weft/stats", key=any_world.other_key)
    assert any_world.call("POST", "retrieve_future", json={"request_id": "x"}).status_code == 404  # polls are free
    assert any_world.service.journal.meters.rate_limited == {"requests_per_minute": 1}


def test_limits_of_a_key_hold_within_seconds(any_world: World) -> None:
    made = any_world.post("weft/keys", {})
    reply = any_world.call("PUT", f"weft/rate_limits/key/{made['id']}", json={"requests_per_minute": 1})
    assert reply.json() == {
        "scope": "key",
        "id": str(made["id"]),
        "requests_per_minute": 1,
        "tokens_per_minute": None,
        "max_in_flight": None,
        "in_flight": 0,
    }
    forget_keys(any_world)
    any_world.get("weft/stats", key=made["key"])
    too_many(any_world.call("GET", "weft/stats", key=made["key"]), "this key has reached")
    any_world.get("weft/stats")
    assert len(any_world.get("weft/rate_limits")["limits"]) == 2


def test_tokens_per_minute_of_a_project(any_world: World) -> None:
    project = any_world.post("weft/projects", {"name": "p"})["id"]
    limit = {"tokens_per_minute": 10}
    assert any_world.call("PUT", f"weft/rate_limits/project/{project}", json=limit).is_success
    body = {"tags": [], "user_metadata": {}, "sdk_version": "1", "project_id": project}
    run = any_world.run(any_world.post("create_session", body)["session_id"])
    eight = [datum([1, 2, 3, 4, 5, 6, 7, 8])]
    first = any_world.train(batch(run, 1, eight))
    refused = any_world.train(batch(run, 2, eight), status=429)
    assert "this project has reached its limit tokens_per_minute of 10 (this request is 8)" in refused["detail"]
    assert any_world.train(batch(run, 1, eight)) == first  # repeats are not counted again
    any_world.train(batch(any_world.run(), 1, eight))  # a session in no project


def sample(world: World, sampler: str, seq: int, key: str | None = None) -> Any:
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "num_samples": 1,
        "sampling_params": {"max_tokens": 1},
    }
    return world.call("POST", "asample", key=key, json=body)


def test_in_flight(any_world: World) -> None:
    world = any_world
    session = world.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = world.post("create_sampling_session", body)["sampling_session_id"]
    limit_org(world, max_in_flight=2)
    first = sample(world, sampler, 1).json()["request_id"]
    sample(world, sampler, 2)
    reply = sample(world, sampler, 3)
    too_many(reply, "2 samples and runs of this organisation are in flight; its limit max_in_flight is 2")
    assert world.get("weft/rate_limits")["limits"][0]["in_flight"] == 2
    world.finish(first, prefill=2, sample=1)
    assert sample(world, sampler, 3).is_success
    assert sample(world, sampler, 1).json()["request_id"] == first  # a repeat adds nothing


def test_a_run_counts_once_however_much_of_it_waits(any_world: World) -> None:
    """Chunks of a batch may arrive before the one that all of them wait for."""
    run = any_world.run()
    limit_org(any_world, max_in_flight=1)
    for seq in (3, 4, 2, 1):
        any_world.train(batch(run, seq))
    assert any_world.get("weft/rate_limits")["limits"][0]["in_flight"] == 1
    body = {"session_id": any_world.session(), "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
    too_many(any_world.call("POST", "create_model", json=body))


def test_runs_of_a_project_that_are_in_flight(world: World) -> None:
    project = world.post("weft/projects", {"name": "p"})["id"]
    assert world.call("PUT", f"weft/rate_limits/project/{project}", json={"max_in_flight": 1}).is_success
    body = {"tags": [], "user_metadata": {}, "sdk_version": "1", "project_id": project}
    session = world.post("create_session", body)["session_id"]
    new = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
    first = world.post("create_model", new)
    too_many(world.call("POST", "create_model", json=new | {"model_seq_id": 1}), "runs of this project are in flight")
    assert world.post("create_model", new) == first
    world.post("create_model", new | {"session_id": world.session()})  # a run in no project


def test_an_admin_cannot_raise_the_limits_of_the_organisation(any_world: World) -> None:
    reply = any_world.call("PUT", f"weft/rate_limits/organisation/{org_id_of(any_world)}", json={})
    assert reply.status_code == 422
    _, key = member(any_world, "member")
    assert any_world.call("PUT", "weft/rate_limits/key/1", key=key, json={}).status_code == 403
