from __future__ import annotations

import asyncio
from typing import Any

import pytest

from api.errors import RateLimited
from api.state.rates import POINTS_PER_MINUTE, LocalRates, count_points
from api.who.principal import Principal
from tests.api.conftest import World
from tests.api.data import batch


def points(*triples: tuple[str, int, float]) -> dict[str, Any]:
    return {"points": [{"name": name, "step": step, "value": value} for name, step, value in triples]}


def test_curves_beside_what_they_cost(world: World) -> None:
    run = world.run()
    path = f"weft/runs/{run}/metrics"
    assert world.post(path, points(("reward", 0, 0.1), ("loss", 0, 5.0))) == {"new": 2}
    world.finish(world.train(batch(run, 1))["request_id"], b"x", tokens=1_000)
    assert world.post(path, points(("reward", 1, 0.2))) == {"new": 1}
    assert world.post(path, points(("reward", 1, 0.2))) == {"new": 0}
    loss, reward = world.get(path)["curves"]
    usage = world.get(f"weft/usage?run_id={run}")
    assert reward == {
        "name": "reward",
        "points": 2,
        "steps": [0, 1],
        "values": [0.1, 0.2],
        "tokens": [0, 1_000],
        "cost_nusd": [0, usage["total_nusd"]],
    }
    assert usage["total_nusd"] > 0
    assert loss["cost_nusd"] == [0]
    assert [curve["name"] for curve in world.get(path + "?name=loss")["curves"]] == ["loss"]


def test_thinned_on_the_server(world: World) -> None:
    run = world.run()
    for start in range(0, 3000, 200):
        world.post(
            f"weft/runs/{run}/metrics", points(*(("a", step, float(step)) for step in range(start, start + 200)))
        )
    (curve,) = world.get(f"weft/runs/{run}/metrics")["curves"]
    assert curve["points"] == 3000
    assert len(curve["steps"]) <= 2000
    (curve,) = world.get(f"weft/runs/{run}/metrics?points=10")["curves"]
    assert len(curve["steps"]) <= 10
    assert (curve["steps"][0], curve["steps"][-1]) == (0, 2999)


def test_foreign_runs_are_not_there(world: World) -> None:
    path = f"weft/runs/{world.run()}/metrics"
    world.post(path, points(("a", 0, 1.0)))
    for method, body in (("GET", None), ("POST", points(("a", 1, 1.0)))):
        assert world.call(method, path, key=world.other_key, json=body).status_code == 404
    assert world.get(path)["curves"][0]["points"] == 1


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"points": []},
        points(("", 0, 1.0)),
        points(("x" * 65, 0, 1.0)),
        points(("tab\there", 0, 1.0)),
        points(("a", -1, 1.0)),
        points(("a", 2**53, 1.0)),
        points(*((f"a{number}", 0, 1.0) for number in range(1001))),
        {"points": [{"name": "a", "step": 0, "value": "NaN"}]},
        {"points": [{"name": "a", "step": 0, "value": 1, "more": 1}]},
    ],
)
def test_mistakes_are_permanent(world: World, body: dict[str, Any]) -> None:
    run = world.run()
    assert world.call("POST", f"weft/runs/{run}/metrics", json=body).status_code in (413, 422)
    assert world.get(f"weft/runs/{run}/metrics")["curves"] == []


def test_not_a_number_does_not_pass(world: World) -> None:
    raw = '{"points": [{"name": "a", "step": 0, "value": %s}]}'
    run = world.run()
    for value in ("NaN", "Infinity", "1e999"):
        reply = world.call("POST", f"weft/runs/{run}/metrics", content=raw % value)
        assert reply.status_code == 422, reply.text


def test_too_many_curves_is_told(world: World) -> None:
    run = world.run()
    reply = world.call("POST", f"weft/runs/{run}/metrics", json=points(*((f"a{n}", 0, 1.0) for n in range(65))))
    assert reply.status_code == 400
    assert "64 curves" in reply.json()["detail"]


async def _log(rates: LocalRates, org_id: str, count: int) -> None:
    await count_points(rates, Principal(org_id, 1), count)


def test_the_rate() -> None:
    async def story() -> None:
        now = [0.0]
        rates = LocalRates(lambda: now[0])
        await _log(rates, "a", POINTS_PER_MINUTE)
        with pytest.raises(RateLimited, match=f"points_per_minute of {POINTS_PER_MINUTE}"):
            await _log(rates, "a", 1)
        await _log(rates, "b", POINTS_PER_MINUTE)
        now[0] = 1.0
        await _log(rates, "a", POINTS_PER_MINUTE // 60)
        with pytest.raises(RateLimited):
            await _log(rates, "a", 1)

    asyncio.run(story())
