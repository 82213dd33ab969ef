"""Which parts of a batch are trained, by closed forms."""

from __future__ import annotations

from typing import Any

import pytest
from weft import rl
from weft.rl.rollout import Group, Rollout, Turn
from weft.wire.binary.sample_codec import PolicySpan


def batch(*rewards: float) -> rl.Batch:
    """A batch of one group, whose rollouts draw two tokens each."""
    turn = Turn((1, 2), (3, 4), (-0.5, -0.25))
    return rl.Batch([Group("task", [Rollout([turn], reward) for reward in rewards])], 0, 0)


def weights(data: list[Any], name: str) -> list[list[float]]:
    return [datum.loss_fn_inputs[name].to_numpy().tolist() for datum in data]


def test_what_has_no_advantage_is_left_out() -> None:
    loss = rl.losses.importance_sampling()
    assert batch(1, 1).data(rl.dr_grpo, loss) == []
    [lost, won] = batch(0, 0.5, 1).data(rl.dr_grpo, loss)
    assert weights([lost, won], "advantages") == [[0, -0.125, -0.125], [0, 0.125, 0.125]]


@pytest.mark.parametrize("loss", [rl.losses.cross_entropy(), rl.losses.mixed(ce=1.0)], ids=lambda loss: str(loss.name))
def test_a_loss_that_imitates_learns_from_all_that_was_kept(loss: Any) -> None:
    data = batch(1, 1).data(rl.dr_grpo, loss)
    name = "weights" if loss.name == "cross_entropy" else "mask"
    assert weights(data, name) == [[0, 0.25, 0.25]] * 2


@pytest.mark.parametrize(("reduce", "share"), [("tokens", 0.25), ("rollouts", 0.5), ("sum", 1.0)])
def test_what_the_sum_of_a_loss_is_divided_by(reduce: Any, share: float) -> None:
    loss = rl.losses.importance_sampling()
    data = batch(0, 0.5, 1).data(rl.dr_grpo, loss, reduce=reduce)
    assert weights(data, "advantages") == [[0, -0.5 * share, -0.5 * share], [0, 0.5 * share, 0.5 * share]]
    assert batch(1, 1).data(rl.dr_grpo, loss, reduce=reduce) == []


def test_an_environment_has_its_own_advantage_of_rewards_after_the_penalty() -> None:
    given, sizes = batch(1, 2), list[Any]()
    given.groups += [Group("task", given.groups[0].rollouts, "own"), Group("task", [], "none")]

    def penalty(rewards: Any, of: Any) -> list[float]:
        sizes.extend(of)
        return [reward + 1 for reward in rewards]

    own = {"own": lambda rewards: [10 * reward for reward in rewards]}
    loss = rl.losses.importance_sampling()
    data = given.data(list, loss, penalty=penalty, reduce="sum", advantages=own)
    assert [row[1] for row in weights(data, "advantages")] == [2, 3, 20, 30]
    assert sizes == [rl.Size(drawn=2, read=2, turns=1)] * 4


def test_what_is_shown_of_a_batch() -> None:
    def rollout(reward: float, *versions: int, **metrics: float) -> Rollout:
        turns = [Turn((1,), (2, 3), (-1.0, -1.0), (PolicySpan(version, 2),)) for version in versions]
        return Rollout(turns, reward, metrics)

    groups = [
        Group("task", [rollout(1.0, 7, 6, tries=3.0), rollout(0.0, 8)], "sums"),
        Group("task", [rollout(0.25, 12)], "code"),
        Group("task", [rollout(0.75)]),
    ]
    assert rl.Batch(groups, version=3, base=10).metrics() == {
        "reward": 0.5,
        "rollouts": 4.0,
        "tokens/rollout": 2.0,
        "turns/rollout": 1.0,
        "lag/max": 7.0,
        "lag/mean": 4.0,
        "tries": 3.0,
        "sums/reward": 0.5,
        "code/reward": 0.25,
    }
    shown = rl.Batch(groups[2:], version=3, base=10).metrics()
    assert (shown["lag/max"], shown["lag/mean"]) == (0.0, 0.0)
    assert not any("/reward" in each.metrics() for each in (rl.Batch(groups[:2], 3, 10), rl.Batch(groups[2:], 3, 10)))
    assert rl.Batch([], version=3, base=10).metrics() == {"rollouts": 0.0}


def test_a_metric_of_an_environment_takes_no_number_of_the_loops_place() -> None:
    given = batch(0, 1)
    for rollout in given.rollouts:
        rollout.metrics = {"reward": 7.0, "rollouts": 7.0, "tries": 3.0}
    found = given.metrics()
    assert (found["reward"], found["rollouts"], found["tries"]) == (0.5, 2.0, 3.0)
