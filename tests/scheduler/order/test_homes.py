"""Where runs live: evenly from the start, evened out when it pays, and never moved to and fro."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from scheduler.order.homes import GUESS, HALF_LIFE_S, LOOK_S, MARGIN, MOST_MOVES, PAID_PASSES, STAY_S, Claim, Homes
from tests.scheduler.order.closed_loops import Client, Loops
from tests.search import examples

PASS = 100


class World:
    """Homes with a clock that stands until the test moves it."""

    def __init__(self, *trainers: str, memory: int = 0) -> None:
        self.now = 0.0
        self.homes = Homes(PASS, lambda: self.now)
        for name in trainers:
            self.homes.offer(name, ["m"], memory)

    def runs(self, *outstanding: int, size: int = 0) -> list[Claim]:
        """Runs that have had so much work outstanding for a very long time."""
        for i, tokens in enumerate(outstanding):
            self.homes.outstanding(f"r{i}", tokens)
        self.now += 100 * HALF_LIFE_S
        return [Claim(f"r{i}", "m", size) for i in range(len(outstanding))]

    def settle(self, claims: list[Claim], name: str) -> None:
        for claim in claims:
            self.homes.settle(claim, name)

    def loads(self, claims: list[Claim]) -> Counter[str]:
        loads = Counter[str]()
        for claim in claims:
            loads[str(self.homes.home(claim.run_id))] += round(self.homes.demand(claim.run_id))
        return loads


def test_a_run_goes_where_least_is_to_do_and_with_equals_where_least_is_held() -> None:
    world = World("one", "two")
    assert world.homes.place(world.runs(50, 10, 10, 10)) == {"r0": "one", "r1": "two", "r2": "two", "r3": "two"}
    world.settle(world.runs(0, size=7), "one")
    assert world.homes.place([Claim("new", "m", size_bytes=1)]) == {"new": "two"}


def test_new_runs_part_whatever_they_will_ask_for() -> None:
    world = World("one", "two")
    world.settle(world.runs(10), "one")
    for i in range(8):
        world.now += 0.1
        (place,) = world.homes.place([Claim(f"new{i}", "m")]).values()
        world.homes.outstanding(f"new{i}", 1)
        world.settle([Claim(f"new{i}", "m")], place)
    assert max(Counter(world.homes.home(f"new{i}") for i in range(8)).values()) <= 5


def test_memory_comes_before_load_and_a_trainer_without_the_model_is_no_trainer() -> None:
    world = World("small", "large")
    world.homes.offer("small", ["m"], 10)
    world.homes.offer("large", ["m"], 100)
    world.homes.offer("other", ["n"], 100)
    assert set(world.homes.place(world.runs(5, 5, 5, size=20)).values()) == {"large"}
    assert world.homes.place([Claim("x", "none")]) == {}
    world.homes.retire("large")
    assert world.homes.place(world.runs(5, size=20)) == {"r0": "small"}  # paged, not refused


@given(st.lists(st.integers(0, 300), min_size=1, max_size=30), st.integers(1, 4))
def test_placing_is_a_function_and_as_even_as_one_run(tokens: list[int], trainers: int) -> None:
    names = [f"t{i}" for i in range(trainers)]
    world, again = World(*names), World(*names)
    claims = world.runs(*tokens)
    found = world.homes.place(claims)
    assert found == again.homes.place(again.runs(*tokens))
    loads = Counter(dict.fromkeys(names, 0))
    for claim, of in zip(claims, tokens, strict=True):
        loads[found[claim.run_id]] += min(PASS, of)
    assert max(loads.values()) - min(loads.values()) <= PASS


def test_demand_is_what_was_outstanding_on_average_and_of_late_most() -> None:
    world = World("one")
    assert world.homes.demand("r0") == GUESS * PASS
    world.homes.outstanding("r0", 60)
    assert world.homes.demand("r0") == GUESS * PASS
    world.now = 1e6
    assert world.homes.demand("r0") == pytest.approx(60)
    world.homes.outstanding("r0", 20)
    world.now += HALF_LIFE_S
    assert world.homes.demand("r0") == pytest.approx(60 / 2 + 20 / 2)
    world.homes.outstanding("r0", 0)
    world.now += 2 * HALF_LIFE_S
    assert world.homes.demand("r0") == pytest.approx(40 / 4)
    world.homes.forget("r0")
    assert world.homes.demand("r0") == GUESS * PASS


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 10**9)), max_size=30))
def test_a_flood_counts_a_pass_at_most(asked: list[tuple[float, int]]) -> None:
    world = World("one")
    for later, tokens in asked:
        world.now += later
        world.homes.outstanding("r0", tokens)
        assert 0 <= world.homes.demand("r0") <= PASS * (1 + 1e-9)


def test_one_that_joins_takes_its_share_at_once() -> None:
    world = World("one")
    claims = world.runs(50, 50, 50, 50)
    world.settle(claims, "one")
    world.homes.offer("two", ["m"])
    moves = world.homes.even_out(claims)
    assert [(move.source, move.target) for move in moves] == [("one", "two")] * 2
    assert len({move.run_id for move in moves}) == 2
    world.now += LOOK_S
    assert world.homes.even_out(claims) == []


@pytest.mark.parametrize("count", [2, 8, 9, 16, 40])
def test_one_that_joins_takes_its_share_of_however_many_small_runs(count: int) -> None:
    world = World("one")
    claims = world.runs(*[10] * count)
    world.settle(claims, "one")
    world.homes.offer("two", ["m"])
    for _ in range(count):
        world.now += LOOK_S
        world.homes.even_out(claims)
    assert max(world.loads(claims).values()) * (1 - MARGIN) <= 10 * -(-count // 2)


@pytest.mark.parametrize(("passes", "moves"), [(PAID_PASSES, 1), (PAID_PASSES + 1, 0)])
def test_a_move_must_pay(passes: int, moves: int) -> None:
    world = World("one", "two")
    world.runs(100, 100)
    claims = [Claim(f"r{i}", "m", move_tokens=100 * passes) for i in range(2)]
    world.settle(claims, "one")
    assert len(world.homes.even_out(claims)) == moves


def test_what_is_fixed_stays() -> None:
    world = World("one", "two")
    world.runs(100, 100, 100)
    claims = [Claim(f"r{i}", "m", fixed=i < 2) for i in range(3)]
    world.settle(claims, "one")
    assert [move.run_id for move in world.homes.even_out(claims)] == ["r2"]


@pytest.mark.parametrize(("memory", "moves"), [(0, 2), (70, 2), (69, 0)])
def test_where_no_move_pays_two_runs_are_exchanged_if_both_fit(memory: int, moves: int) -> None:
    world = World("one", "two", memory=memory)
    claims = [Claim(c.run_id, "m", 10 * (i + 2)) for i, c in enumerate(world.runs(100, 100, 50, 50))]
    world.settle(claims[:2], "one")  # 20 and 30 bytes
    world.settle(claims[2:], "two")  # 40 and 50 bytes
    found = world.homes.even_out(claims)
    assert len(found) == moves
    assert {(move.source, move.target) for move in found} <= {("one", "two"), ("two", "one")}
    if moves:
        assert set(world.loads(claims).values()) == {150}


# ---- by numbers: at a load of 80 a move or an exchange must lower it by 5, and so the gap must be 10


def moved(here: list[int], there: list[int], fixed: int = 0, move_tokens: int = 0) -> list[tuple[str, str]]:
    """The moves between "one" and "two" that pay at once; the last so many runs cannot move."""
    world = World("one", "two")
    claims = [
        Claim(claim.run_id, "m", move_tokens=move_tokens, fixed=number >= len(here) + len(there) - fixed)
        for number, claim in enumerate(world.runs(*here, *there))
    ]
    world.settle(claims[: len(here)], "one")
    world.settle(claims[len(here) :], "two")
    return [(move.run_id, move.target) for move in world.homes.even_out(claims)]


@pytest.mark.parametrize(
    ("here", "there", "fixed", "found"),
    [
        ([4, 76], [70], 1, [("r0", "two")]),
        ([4, 76], [71], 1, []),
        ([7, 73], [68], 1, [("r0", "two")]),
        ([7, 73], [69], 1, []),
        ([1, 79], [40], 1, [("r0", "two")]),
        ([55, 25], [50, 20], 0, [("r0", "two"), ("r2", "one")]),
        ([54, 26], [50, 21], 0, []),
        ([5, 3], [4, 2], 0, [("r0", "two"), ("r2", "one")]),
        ([0, 100, 100], [50, 50], 0, [("r1", "two"), ("r3", "one")]),
    ],
    ids=str,
)
def test_what_moves(here: list[int], there: list[int], fixed: int, found: list[tuple[str, str]]) -> None:
    assert moved(here, there, fixed) == found


@pytest.mark.parametrize(
    ("here", "there", "move_tokens", "moves"),
    [([12, 12], [], 96, 1), ([12, 12], [], 100, 0), ([100, 100], [50, 50], 200, 2), ([100, 100], [50, 50], 201, 0)],
)
def test_what_moves_is_paid_in_eight_passes(here: list[int], there: list[int], move_tokens: int, moves: int) -> None:
    assert len(moved(here, there, move_tokens=move_tokens)) == moves


def test_two_of_different_length_are_paid_together() -> None:
    for back, moves in ((160, 2), (168, 0)):  # 30 and 20, or 21, of the 50 by which the load falls
        world = World("one", "two")
        world.runs(100, 100, 50, 50)
        tokens = [240, 10**6, back, 10**6]
        claims = [Claim(f"r{i}", "m", move_tokens=each) for i, each in enumerate(tokens)]
        world.settle(claims[:2], "one")
        world.settle(claims[2:], "two")
        assert len(world.homes.even_out(claims)) == moves


def test_a_move_is_from_the_fullest_and_needs_room_where_it_goes() -> None:
    world = World("middle", "full", "empty", memory=4)
    claims = [Claim(c.run_id, "m", 1) for c in world.runs(60, 60, 100, 100, 0)]
    world.settle(claims[:2], "middle")
    world.settle(claims[2:4], "full")
    world.settle([Claim("held", "m", 3)], "empty")
    assert world.homes.even_out(claims[:4])[0].source == "full"
    world = World("one", "two", memory=3)
    claims = [Claim(c.run_id, "m", 1) for c in world.runs(100, 100)]
    world.settle(claims, "one")
    world.settle([Claim("held", "m", 3)], "two")
    assert world.homes.even_out(claims) == []
    world.homes.offer("two", ["m"])  # memory of unknown size is enough
    world.now += LOOK_S
    assert [move.target for move in world.homes.even_out(claims)] == ["two"]


def test_moves_are_looked_for_from_the_start_and_every_half_second() -> None:
    world = World("one", "two")
    claims = [Claim(f"r{i}", "m") for i in range(2)]
    assert world.homes.without({"r0", "r1", "r2"}) == {"r0", "r1", "r2"}
    world.settle(claims, "one")
    assert world.homes.without({"r1", "r2"}) == {"r2"}
    assert len(world.homes.even_out(claims)) == 1  # at a clock of 0
    more = [Claim(f"m{i}", "m") for i in range(40)]
    world.settle(more, "one")
    world.now += LOOK_S / 2
    assert world.homes.even_out(more) == []
    world.now += LOOK_S / 2
    assert len(world.homes.even_out(more)) == MOST_MOVES


def test_what_has_moved_may_move_again_when_it_has_stayed() -> None:
    world = World("one", "two")
    claims = world.runs(100, 100)
    world.settle(claims, "one")
    (move,) = world.homes.even_out(claims)
    (other,) = [claim for claim in claims if claim.run_id != move.run_id]
    world.homes.settle(other, "two")
    for waits_s, moves in ((STAY_S - LOOK_S, 0), (LOOK_S, 1)):
        world.now += waits_s
        assert len(world.homes.even_out([claim for claim in claims if claim != other])) == moves


def test_one_that_nobody_can_serve_keeps_nobody_from_a_place() -> None:
    assert World("one").homes.place([Claim("x", "none"), Claim("y", "m")]) == {"y": "one"}


def test_what_is_guessed_of_a_new_run_weighs_as_a_second_of_it() -> None:
    """The guess counts as one earlier second, which is a second older by now, at a half-life of 10."""
    world = World("one")
    world.homes.outstanding("r0", 60)
    world.now += 1
    older = 0.5 ** (1 / 10)
    assert world.homes.demand("r0") == pytest.approx((60 + older * 12.5) / (1 + older))


loads = st.lists(st.tuples(st.integers(0, PASS), st.integers(0, 2)), min_size=1, max_size=24)


@given(loads, st.integers(2, 4))
def test_under_constant_demand_moves_end_and_nothing_that_would_pay_is_left(
    found: list[tuple[int, int]], n: int
) -> None:
    world = World(*(f"t{i}" for i in range(n)))
    claims = world.runs(*(tokens for tokens, _ in found))
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
        demand = world.homes.demand(claim.run_id)
        if world.homes.home(claim.run_id) == top and demand:
            gain = min(demand, full[top] - low - demand)
            assert gain <= 0 or gain < MARGIN * full[top]


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 5 * PASS), min_size=6, max_size=6), min_size=5, max_size=60), st.integers(2, 3))
def test_under_any_demand_no_run_moves_twice_within_its_stay(demands: list[list[int]], trainers: int) -> None:
    world = World(*(f"t{i}" for i in range(trainers)))
    claims = world.runs(*demands[0])
    world.settle(claims, "t0")
    when: dict[str, list[float]] = {}
    for outstanding in demands:
        world.now += 3.0
        for claim, tokens in zip(claims, outstanding, strict=True):
            world.homes.outstanding(claim.run_id, tokens)
        for move in world.homes.even_out(claims):
            assert move.source != move.target == world.homes.home(move.run_id)
            when.setdefault(move.run_id, []).append(world.now)
    assert all(b - a >= STAY_S for times in when.values() for a, b in pairwise(times))


def test_who_is_gone_leaves_its_runs_without_a_home() -> None:
    world = World("one", "two")
    world.settle(world.runs(1, 1), "one")
    world.homes.leave("one")
    assert [world.homes.home(run) for run in ("r0", "r1")] == [None, None]
    assert set(world.homes.place(world.runs(1, 1)).values()) == {"two"}
    assert world.homes.forget("r0") is None


# ---- clients that wait for their answers, at trainers that take passes

BUDGET = 2048
THINKS_S = st.sampled_from([0.0, 0.01])


def played(clients: Sequence[Client], crowded: int, trainers: int = 2, seconds: float = 60.0) -> Loops:
    """At first `crowded` of the runs live on the first trainer, the others on the last."""
    loops = Loops(clients, trainers, BUDGET)
    loops.live_on("t0", *list(loops.runs)[:crowded])
    loops.live_on(f"t{trainers - 1}", *list(loops.runs)[crowded:])
    loops.begin()
    loops.play(seconds)
    return loops


@settings(max_examples=examples(12), deadline=None)
@given(st.integers(1, 12), st.integers(2, 3), st.data())
def test_equal_clients_are_split_evenly_wherever_they_begin(count: int, trainers: int, data: st.DataObject) -> None:
    client = Client(data.draw(st.sampled_from([64, 256, 1024])), data.draw(st.integers(1, 2)), data.draw(THINKS_S))
    loops = played([client] * count, data.draw(st.integers(0, count)), trainers)
    counts = loops.counts().values()
    assert max(counts) - min(counts) <= 1
    moved = len(loops.moves)
    loops.play(60)
    assert len(loops.moves) == moved <= count


uneven = st.lists(
    st.builds(Client, st.sampled_from([32, 64, 128, 256, 512, 1024]), st.integers(1, 2), THINKS_S),
    min_size=2,
    max_size=8,
)


@settings(max_examples=examples(12), deadline=None)
@given(uneven, st.data())
def test_uneven_clients_end_where_neither_move_nor_exchange_evens_much_out(
    clients: list[Client], data: st.DataObject
) -> None:
    loops = played(clients, data.draw(st.integers(0, len(clients))), seconds=100)
    moved = len(loops.moves)
    loops.play(60)
    assert len(loops.moves) == moved
    loads, in_flight = loops.loads(), {run: of.client.tokens * of.client.in_flight for run, of in loops.runs.items()}
    full, empty = sorted(loads, key=loads.__getitem__, reverse=True)
    there = {name: [0, *(in_flight[run] for run in loops.runs if loops.homes.home(run) == name)] for name in loads}
    gap = loads[full] - loads[empty]
    gains = [min(out - back, gap - (out - back)) for out in there[full] for back in there[empty]]
    assert max(gains) <= 3 * MARGIN * loads[full]  # they think a little, and answers come in passes


def test_a_large_client_is_alone_and_its_flood_does_not_crowd_others_out() -> None:
    for large in (Client(BUDGET, 2), Client(BUDGET, 100)):
        loops = played([*[Client(64)] * 8, large], 9)
        alone = loops.homes.home("r8")
        assert [run for run in loops.runs if loops.homes.home(run) == alone] == ["r8"]
    loops = played([*[Client(256, 2)] * 8, Client(BUDGET, 100)], 9)
    assert loops.counts()[str(loops.homes.home("r8"))] == 3  # it counts a pass, as four of the others


def test_clients_that_think_count_little() -> None:
    loops = played([*[Client(1024, 1, think_s=30.0 + i) for i in range(4)], *[Client(256)] * 4], 8)
    busy = Counter(loops.homes.home(f"r{i}") for i in range(4, 8))
    assert sorted(busy.values()) == [2, 2]
    loops.play(60)
    assert Counter(loops.homes.home(f"r{i}") for i in range(4, 8)) == busy


def test_a_trainer_that_joins_has_its_share_of_clients_within_seconds() -> None:
    loops = played([Client(256, 2)] * 9, 5)
    loops.join("t2")
    loops.play(2)
    assert set(loops.counts().values()) == {3}
