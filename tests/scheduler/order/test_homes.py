"""Where runs live: even from the start, evened out when it pays, and never to and fro."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.order.homes import HALF_LIFE_S, LOOK_S, MARGIN, MOST_MOVES, STAY_S, Claim, Homes

PASS = 100


class World:
    """Homes on a clock that stands until it is moved."""

    def __init__(self, *trainers: str, memory: int = 0) -> None:
        self.now = 0.0
        self.homes = Homes(PASS, lambda: self.now)
        for name in trainers:
            self.homes.offer(name, ["m"], memory)

    def settle(self, claims: list[Claim], name: str) -> None:
        for claim in claims:
            self.homes.settle(claim, name)

    def loads(self, claims: list[Claim]) -> Counter[str]:
        loads = Counter[str]()
        for claim in claims:
            loads[str(self.homes.home(claim.run_id))] += claim.queued
        return loads


def runs(*queued: int, size: int = 0) -> list[Claim]:
    return [Claim(f"r{i}", "m", tokens, size) for i, tokens in enumerate(queued)]


def test_a_run_goes_where_least_is_to_do_and_with_equals_where_least_is_held() -> None:
    world = World("one", "two")
    assert world.homes.place(runs(50, 10, 10, 10)) == {"r0": "one", "r1": "two", "r2": "two", "r3": "two"}
    world.settle([Claim("idle", "m", 0, size_bytes=7)], "one")
    assert world.homes.place(runs(0, size=1)) == {"r0": "two"}


def test_memory_comes_before_load_and_a_trainer_without_the_model_is_no_trainer() -> None:
    world = World("small", "large")
    world.homes.offer("small", ["m"], 10)
    world.homes.offer("large", ["m"], 100)
    world.homes.offer("other", ["n"], 100)
    assert set(world.homes.place(runs(5, 5, 5, size=20)).values()) == {"large"}
    assert world.homes.place([Claim("x", "none")]) == {}
    world.homes.retire("large")
    assert world.homes.place(runs(5, size=20)) == {"r0": "small"}  # paged, not refused


@given(st.lists(st.integers(0, 300), min_size=1, max_size=30), st.integers(1, 4))
def test_placing_is_a_function_and_as_even_as_one_run(queued: list[int], trainers: int) -> None:
    names = [f"t{i}" for i in range(trainers)]
    claims = runs(*queued)
    found = World(*names).homes.place(claims)
    assert found == World(*names).homes.place(claims)
    loads = Counter(dict.fromkeys(names, 0))
    for claim in claims:
        loads[found[claim.run_id]] += min(PASS, claim.queued)
    assert max(loads.values()) - min(loads.values()) <= PASS


def test_one_that_joins_takes_its_share_at_once_of_what_was_served_lately() -> None:
    world = World("one")
    claims = runs(0, 0, 0, 0)
    world.settle(claims, "one")
    for claim in claims:
        world.homes.served(claim.run_id, 1000)
    world.now = HALF_LIFE_S / 2
    world.homes.offer("two", ["m"])
    moves = world.homes.even_out(claims)
    assert [(move.source, move.target) for move in moves] == [("one", "two")] * 2
    assert len({move.run_id for move in moves}) == 2
    world.now += LOOK_S
    assert world.homes.even_out(claims) == []


@pytest.mark.parametrize("count", [2, 8, 9, 16, 40])
def test_one_that_joins_takes_its_share_of_however_many_small_runs(count: int) -> None:
    world = World("one")
    claims = runs(*[10] * count)
    world.settle(claims, "one")
    world.homes.offer("two", ["m"])
    for _ in range(count):
        world.now += LOOK_S
        world.homes.even_out(claims)
    assert max(world.loads(claims).values()) * (1 - MARGIN) <= 10 * count / 2


@pytest.mark.parametrize(("move_tokens", "moves"), [(20, 1), (26, 0)])
def test_a_move_must_pay(move_tokens: int, moves: int) -> None:
    world = World("one", "two")
    claims = [Claim(f"r{i}", "m", 100, move_tokens=move_tokens) for i in range(2)]
    world.settle(claims, "one")
    assert len(world.homes.even_out(claims)) == moves


def test_what_is_fixed_stays() -> None:
    world = World("one", "two")
    claims = [Claim(f"r{i}", "m", 100, fixed=i < 2) for i in range(3)]
    world.settle(claims, "one")
    assert [move.run_id for move in world.homes.even_out(claims)] == ["r2"]


loads = st.lists(st.tuples(st.integers(0, PASS), st.integers(0, 2)), min_size=1, max_size=24)


@given(loads, st.integers(2, 4))
def test_under_constant_demand_moves_end_and_nothing_that_would_pay_is_left(
    found: list[tuple[int, int]], n: int
) -> None:
    world = World(*(f"t{i}" for i in range(n)))
    claims = runs(*(queued for queued, _ in found))
    for claim, (_, home) in zip(claims, found, strict=True):
        world.settle([claim], f"t{home % n}")
    highest, moved = max(world.loads(claims).values()), 0
    for _ in range(2 * len(claims) + 2):
        world.now += STAY_S
        moves = world.homes.even_out(claims)
        assert len(moves) <= MOST_MOVES
        assert max(world.loads(claims).values()) <= highest
        highest, moved = max(world.loads(claims).values()), moved + len(moves)
    assert world.homes.even_out(claims) == []
    assert moved <= 2 * len(claims)
    full = Counter({f"t{i}": 0 for i in range(n)}) + world.loads(claims)
    top = max(full, key=full.__getitem__, default="t0")
    low = min(full[f"t{i}"] for i in range(n))
    for claim in claims:
        if world.homes.home(claim.run_id) == top and claim.queued:
            gain = min(claim.queued, full[top] - low - claim.queued)
            assert gain <= 0 or gain < MARGIN * full[top]


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 5 * PASS), min_size=6, max_size=6), min_size=5, max_size=60), st.integers(2, 3))
def test_under_any_demand_no_run_moves_twice_within_its_stay(demands: list[list[int]], trainers: int) -> None:
    world = World(*(f"t{i}" for i in range(trainers)))
    world.settle(runs(*demands[0]), "t0")
    when: dict[str, list[float]] = {}
    for queued in demands:
        world.now += 3.0
        for claim in runs(*queued):
            world.homes.served(claim.run_id, claim.queued)
        for move in world.homes.even_out(runs(*queued)):
            assert move.source != move.target == world.homes.home(move.run_id)
            when.setdefault(move.run_id, []).append(world.now)
    assert all(b - a >= STAY_S for times in when.values() for a, b in pairwise(times))


def test_who_is_gone_leaves_its_runs_without_a_home() -> None:
    world = World("one", "two")
    world.settle(runs(1, 1), "one")
    world.homes.leave("one")
    assert [world.homes.home(run) for run in ("r0", "r1")] == [None, None]
    assert set(world.homes.place(runs(1, 1)).values()) == {"two"}
    assert world.homes.forget("r0") is None
