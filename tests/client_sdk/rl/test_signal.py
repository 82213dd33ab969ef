"""Advantages, penalties and filters: closed forms, and golden values of prime-rl's and slime's own code."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weft.rl.rollout import Group, Rollout, Turn
from weft.rl.signal import advantages, filters, lengths
from weft.rl.signal.lengths import Size

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden.json").read_text())["advantages"]
REWARDS = GOLDEN["rewards"]
ALL = [advantages.dr_grpo, advantages.grpo, advantages.rloo, advantages.maxrl, advantages.reinforce]
SIZES = [Size(*size) for size in zip(*(GOLDEN["lens"][key] for key in ("out", "in", "turns")), strict=True)]


@pytest.mark.parametrize(
    ("name", "advantage"),
    [
        ("drgrpo", advantages.dr_grpo),
        ("grpo_pstd", lambda rewards: advantages.grpo(rewards, unbiased=False)),
        ("grpo_std_unbiased", advantages.grpo),
        ("maxrl", advantages.maxrl),
        ("rloo", advantages.rloo),
        ("linear_len_penalty", lambda rewards: advantages.dr_grpo(lengths.linear()(rewards, SIZES))),
        (
            "tokens_len_penalty_2026_05",
            lambda rewards: advantages.dr_grpo(lengths.short_and_right()(rewards, SIZES)),
        ),
    ],
)
def test_values_are_those_of_prime_rl_and_slime(name: str, advantage: Any) -> None:
    assert advantage(REWARDS) == pytest.approx(GOLDEN[name], abs=2e-6)


def test_the_running_baseline_moves_after_it_was_used() -> None:
    golden = GOLDEN["rae_ema_0.95"]
    baseline = advantages.RunningBaseline(0.95)
    for reward, advantage, after in zip(golden["rewards"], golden["adv"], golden["baseline_after"], strict=True):
        assert baseline([reward]) == pytest.approx([advantage])
        assert baseline.baseline == pytest.approx(after, abs=1e-6)
    again = advantages.RunningBaseline(0.95)
    again.load_state_dict(json.loads(json.dumps(baseline.state_dict())))
    assert again([1.0]) == baseline([1.0])


@pytest.mark.parametrize(
    "advantage",
    [advantages.dr_grpo, advantages.grpo, partial(advantages.grpo, eps=0.0), advantages.rloo, advantages.maxrl],
)
@pytest.mark.parametrize("rewards", [[1.0], [0.5, 0.5, 0.5], [0.0, 0.0], [0.1] * 3, [0.7] * 6, [1 / 3] * 7])
def test_equal_rewards_teach_nothing(advantage: Any, rewards: list[float]) -> None:
    assert advantage(rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e200, 1e307])
def test_an_advantage_by_the_spread_does_not_depend_on_the_rewards_size(size: float) -> None:
    assert advantages.grpo([0.0, 2 * size], eps=0.0) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


@pytest.mark.parametrize("advantage", ALL, ids=lambda each: str(each.__name__))
@pytest.mark.parametrize(
    "rewards",
    [[np.int64(1), np.int64(0), np.int64(0)], [np.float32(1), 0, 0.0], [np.bool_(True), False, np.float16(0)]],
    ids=["integers", "mixed", "truths"],
)
def test_numbers_of_numpy_teach_what_plain_numbers_do(advantage: Any, rewards: list[Any]) -> None:
    found = advantage(rewards)
    assert found == advantage([1.0, 0.0, 0.0])
    assert {type(each) for each in found} == {float}


def test_penalties_at_their_edges() -> None:
    nothing = [0.0, 0.0]
    sizes = [Size(10), Size(20)]
    assert lengths.linear()(nothing, sizes) == nothing
    assert lengths.short_and_right()(nothing, sizes) == nothing
    assert lengths.overlong(100, 20)([1.0, 1.0, 1.0, 1.0], [Size(n) for n in (80, 90, 100, 400)]) == [
        1.0,
        0.5,
        0.0,
        0.0,
    ]
    with pytest.raises(ValueError, match="limit of 10"):
        lengths.overlong(10, 11)


def test_each_part_of_a_rollouts_length_has_its_share() -> None:
    sizes = [Size(10, read=30, turns=1), Size(20, read=60, turns=2), Size(0, read=0, turns=0)]
    penalised = lengths.linear(0.25, 0.5, 0.125)([3.0, 1.0, 2.0], sizes)
    assert penalised == [3 - 2 * (0.125 + 0.25 + 0.0625), 1 - 2 * 0.875, 2]
    assert lengths.short_and_right()([2.0, 2.0, 1.0], sizes) == [2 * (1 + 1 - 10 / 15), 2.0, 1.0]


def test_advantages_and_filters_of_small_groups() -> None:
    assert advantages.rloo([0.0, 1.0]) == [-1.0, 1.0]
    assert not filters.spread(0.0)(group(1.0))


@pytest.mark.parametrize("penalty", [lengths.linear(), lengths.short_and_right(), lengths.overlong(800, 600)])
@pytest.mark.parametrize("reward", [-2.0, -1.0, 0.0, 1.0])
def test_of_equal_rewards_the_longer_is_never_the_better(penalty: Any, reward: float) -> None:
    sizes = [Size(10), Size(100), Size(500), Size(1000), Size(10, turns=9)]
    short, *_, long, _ = penalty([reward] * 4 + [-1.0], sizes)
    assert short >= long


def group(*rewards: float) -> Group:
    return Group("task", [Rollout([], reward) for reward in rewards])


def test_group_filters() -> None:
    assert not filters.not_solved_or_hopeless(group(1, 1))
    assert not filters.not_solved_or_hopeless(group(0, 0))
    assert filters.not_solved_or_hopeless(group(0.5, 0.5))
    assert not filters.not_all_equal(group(0.5, 0.5))
    assert filters.not_all_equal(group(0.5, 0.6))
    assert not filters.spread(0.2)(group(0.5, 0.6))
    assert filters.spread(0.05)(group(0.5, 0.6))


def drawn(tokens: list[int], logprobs: list[float]) -> Rollout:
    return Rollout([Turn((1,), tuple(tokens), tuple(logprobs))])


def test_rollout_filters() -> None:
    keep = filters.not_gibberish(vocab_size=100, rare_from=90)
    least = -math.log(100) - 2.0
    assert not keep(drawn([95], [least - 0.1]))
    assert keep(drawn([95], [least + 0.1]))
    assert keep(drawn([10], [least - 5]))
    steady = filters.not_repeating(run=3)
    assert not steady(drawn([7, 7, 7], [-0.001] * 3))
    assert steady(drawn([7, 7, 7, 7], [-0.001, -0.001, -0.5, -0.001]))
    assert steady(drawn([7, 7, 7], [-0.5, -0.001, -0.001]))
