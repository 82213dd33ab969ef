"""Polls for ids that do not exist are counted; beyond a limit they are refused before they ask the database."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request

from api.errors import RateLimited
from api.state import failures
from api.who.principal import Principal
from tests.api.conftest import World

ONE, OTHER = Principal("a", 1), Principal("a", 2)


def test_a_key_that_misses_too_often_waits_and_no_other() -> None:
    now = [0.0]
    misses = failures.misses(lambda: now[0])
    for _ in range(failures.MISSES_PER_MINUTE + 1):  # one more, because of rounding
        misses.note(ONE)
    with pytest.raises(RateLimited, match="ids that are not there"):
        misses.check(ONE)
    misses.check(OTHER)
    now[0] += 1
    misses.check(ONE)


def test_who_fails_to_sign_in_from_many_addresses_of_one_network_waits() -> None:
    """With IPv6 such a network is one customer."""
    tries = failures.attempts(lambda: 0.0)

    def of(address: str) -> Request:
        return Request({"type": "http", "client": (address, 1)})

    for number in range(failures.TRIES_PER_MINUTE + 1):
        tries.note(of(f"2001:db8::{number:x}"))
    with pytest.raises(RateLimited):
        tries.check(of("2001:db8::ffff"))
    tries.check(of("2001:db8:0:1::1"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("retrieve_future", {"request_id": "0" * 32}),
        ("cancel_future", {"request_id": "0" * 32}),
        ("session_heartbeat", {"session_id": "0" * 32}),
        ("retrieve_futures", {"target": {"sampling_session_id": "0"}, "timeout": 0}),
    ],
)
def test_every_poll_is_counted_that_finds_nothing(
    world: World, path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.state.failures.MISSES_PER_MINUTE", 3)
    found = [world.call("POST", path, json=body) for _ in range(4)]
    assert [reply.status_code for reply in found] == [404, 404, 404, 429]
    assert int(found[-1].headers["retry-after"]) >= 1
    assert world.call("POST", path, json=body, key=world.other_key).status_code == 404


def test_polls_that_find_something_are_not(world: World) -> None:
    run = world.run()
    request_id = world.post("optim_step", {"model_id": run, "seq_id": 1, "adam_params": {"learning_rate": 1e-3}})
    world.finish(request_id["request_id"])
    world.journal.answers.clear()  # type: ignore[attr-defined]
    statuses = {world.outcome(request_id["request_id"]).status_code for _ in range(20)}
    assert statuses <= {200, 408}


def test_telemetry_is_counted_by_itself(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.state.rates.BACKGROUND_PER_MINUTE", 3)
    body = {"events": []}
    assert [world.call("POST", "telemetry", json=body).status_code for _ in range(4)] == [200, 200, 200, 429]
    assert world.call("POST", "telemetry", json=body, key=world.other_key).status_code == 200
    world.session()
