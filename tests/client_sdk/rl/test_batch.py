"""What of a batch is trained, by closed forms."""

from __future__ import annotations

from typing import Any

import pytest
from weft import rl
from weft.rl.rollout import Group, Rollout, Turn


def batch(*rewards: float) -> rl.Batch:
    """One group, whose rollouts draw two tokens each."""
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


def test_a_metric_of_an_environment_takes_no_number_of_the_loops_place() -> None:
    given = batch(0, 1)
    for rollout in given.rollouts:
        rollout.metrics = {"reward": 7.0, "rollouts": 7.0, "tries": 3.0}
    found = given.metrics()
    assert (found["reward"], found["rollouts"], found["tries"]) == (0.5, 2.0, 3.0)
