"""Which task comes next: exact counts, and state that survives a round trip through JSON."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, strategies as st
from weft.rl.loops.checkpoint import MAX_STATE_BYTES, packed
from weft.rl.tasks.sources import DifficultyPools, Pool, Ratios, Shuffled


def restored(made: Any, state: dict[str, Any]) -> Any:
    made.load_state_dict(json.loads(json.dumps(state)))
    return made


@given(st.integers(1, 9), st.integers(0, 40))
def test_every_task_once_in_each_round(count: int, before: int) -> None:
    source = Shuffled(count, seed=3)
    drawn = [source.draw() for _ in range(before)]
    for start in range(0, before - count + 1, count):
        assert sorted(drawn[start : start + count]) == list(range(count))
    again = restored(Shuffled(count, seed=3), source.state_dict())
    assert [again.draw() for _ in range(20)] == [source.draw() for _ in range(20)]


def test_two_rounds_differ() -> None:
    source = Shuffled(50)
    assert [source.draw() for _ in range(50)] != [source.draw() for _ in range(50)]


def test_pools_draw_by_the_latest_mean() -> None:
    source = DifficultyPools(3, seed=1)
    source.observe(0, 0.25)
    source.observe(1, 0.5)
    source.observe(2, 1.0)
    drawn = Counter(source.draw() for _ in range(14_000))
    assert [drawn[i] / 2_000 for i in range(3)] == pytest.approx([1, 5, 1], rel=0.1)
    assert source.metrics() == {"pool/hard": 1 / 3, "pool/normal": 1 / 3, "pool/easy": 1 / 3, "pool/unseen": 0.0}
    source.observe(1, 0.0)
    assert source.pool_of(source.means[1]).name == "hard"


def test_a_running_mean_remembers() -> None:
    source = DifficultyPools(1, memory=0.75)
    source.observe(0, 1.0)
    source.observe(0, 0.0)
    assert source.means[0] == 0.75


def test_retired_tasks_are_not_drawn_while_there_are_others() -> None:
    source = DifficultyPools(2, (Pool("normal", 0.99, 1.0), Pool("easy", 1.0, 0.0)))
    source.observe(0, 1.0)
    assert {source.draw() for _ in range(50)} == {1}
    source.observe(1, 1.0)
    assert {source.draw() for _ in range(50)} == {0, 1}


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1)), max_size=20))
def test_pools_survive_a_restart(seen: list[tuple[int, float]]) -> None:
    source = DifficultyPools(5, seed=9)
    for index, mean in seen:
        source.draw()
        source.observe(index, mean)
    again = restored(DifficultyPools(5, seed=9), source.state_dict())
    assert [again.draw() for _ in range(20)] == [source.draw() for _ in range(20)]
    assert again.metrics() == source.metrics()


@given(st.dictionaries(st.sampled_from("abcd"), st.floats(0.1, 10), min_size=1), st.integers(1, 200))
def test_ratios_hold_to_within_one(shares: dict[str, float], draws: int) -> None:
    ratios = Ratios(shares)
    for _ in range(draws):
        ratios.draw()
    total = sum(shares.values())
    for name, share in shares.items():
        assert abs(ratios.drawn[name] - draws * share / total) < len(shares)
    again = restored(Ratios(shares), ratios.state_dict())
    assert [again.draw() for _ in range(9)] == [ratios.draw() for _ in range(9)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Shuffled(0),
        lambda: DifficultyPools(0),
        lambda: DifficultyPools(1, (Pool("b", 1, 1), Pool("a", 0.5, 1))),
        lambda: DifficultyPools(1, unseen=-1),
        lambda: Ratios({}),
        lambda: Ratios({"a": -1.0, "b": 2.0}),
    ],
)
def test_refused_where_it_is_made(make: Any) -> None:
    with pytest.raises(ValueError, match=r"tasks|order|unseen|ratios"):
        make()


def test_the_pools_of_a_real_data_set_fit_beside_a_checkpoint() -> None:
    count, chance = 7_473, random.Random(0)  # as many as GSM8K has
    source = DifficultyPools(count)
    for _ in range(2 * count):
        source.observe(chance.randrange(count), chance.randint(0, 8) / 8)
    assert len(packed({"rollouts": source.state_dict()})) < MAX_STATE_BYTES
    assert restored(DifficultyPools(count), source.state_dict()).means == source.means
