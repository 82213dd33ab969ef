"""Closed forms, golden values of shared/reference/rl-loss-golden.json, and where gradients must and must not flow."""

import json
import math
from pathlib import Path

import pytest
import torch

from workers.trainer.losses import LOSS_FUNCTIONS, cispo, cross_entropy, importance_sampling, ppo
from workers.trainer.metrics import Measure, merge_measures, metric_values

GOLDEN = json.loads((Path(__file__).parent / "data" / "tinker_losses.json").read_text())
FUNCTION = {"importance_sampling": importance_sampling, "ppo_0.8_1.2": ppo, "cispo_0_4": cispo}


def rl(lp, q, advantages):
    lp_P = torch.tensor(lp, requires_grad=True)
    return lp_P, {"logprobs": torch.tensor(q), "advantages": torch.tensor(advantages)}


@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_golden(name: str) -> None:
    case = GOLDEN["cases"][name]
    lp_P, inputs = rl(GOLDEN["lp"], GOLDEN["logprobs"], [case["adv"] * m for m in GOLDEN["mask"]])
    loss, metrics = FUNCTION[name.rpartition("_")[0]](lp_P, inputs, {})
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=2e-5)
    torch.testing.assert_close(lp_P.grad, torch.tensor(case["grad"]), atol=2e-6, rtol=2e-6)
    assert metrics["loss:sum"].total == pytest.approx(case["loss"], abs=2e-5)


@pytest.mark.parametrize("loss_fn", LOSS_FUNCTIONS)
def test_every_metric_name_has_one_colon_and_loss_sum_is_there(loss_fn: str) -> None:
    lp_P, inputs = rl([-1.0], [-1.0], [1.0])
    _, metrics = LOSS_FUNCTIONS[loss_fn](lp_P, inputs | {"weights": torch.ones(1)}, {})
    assert "loss:sum" in metrics
    assert all(name.count(":") == 1 for name in metrics)


def test_cross_entropy_is_linear_in_weights() -> None:
    lp_P = torch.tensor([-1.0, -2.0, -4.0], requires_grad=True)
    loss, metrics = cross_entropy(lp_P, {"weights": torch.tensor([0.5, 0.0, -2.0])}, {})
    loss.backward()
    assert loss.item() == -7.5
    assert lp_P.grad.tolist() == [-0.5, 0.0, 2.0]
    assert metrics["tokens:sum"].total == 2


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        pytest.param(1.5, 1.0, 0.0, id="above-and-wanted-is-clipped"),
        pytest.param(1.5, -1.0, 1.5, id="above-and-unwanted-flows"),
        pytest.param(0.5, 1.0, -0.5, id="below-and-wanted-flows"),
        pytest.param(0.5, -1.0, 0.0, id="below-and-unwanted-is-clipped"),
        pytest.param(1.1, 1.0, -1.1, id="inside"),
    ],
)
def test_ppo_gradient_flow(ratio: float, advantage: float, gradient: float) -> None:
    lp_P, inputs = rl([math.log(ratio)], [0.0], [advantage])
    loss, metrics = ppo(lp_P, inputs, {})
    loss.backward()
    assert lp_P.grad.item() == pytest.approx(gradient, rel=1e-6)
    assert metric_values(metrics)["clip_fraction:mean"] == (gradient == 0.0)


def test_cispo_gradient_always_flows_and_is_bounded() -> None:
    lp_P, inputs = rl([math.log(100.0), math.log(2.0)], [0.0, 0.0], [1.0, -1.0])
    loss, metrics = cispo(lp_P, inputs, {"clip_high_threshold": 3.0})
    loss.backward()
    assert lp_P.grad.tolist() == pytest.approx([-3.0, 2.0])
    assert metric_values(metrics)["clip_fraction:mean"] == 0.5


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo"])
def test_thresholds_per_token_equal_config_position_by_position(loss_fn: str) -> None:
    bounds = [(0.9, 1.1), (0.0, 1.2), (0.5, 9.0)]
    lp, q, advantages = [-0.5, -1.0, -2.0], [-1.0, -0.4, -3.5], [1.0, -1.0, 0.5]
    lp_P, inputs = rl(lp, q, advantages)
    low, high = torch.tensor(bounds).T
    whole, _ = LOSS_FUNCTIONS[loss_fn](lp_P, inputs | {"clip_low_threshold": low, "clip_high_threshold": high}, {})
    parts = []
    for i, (lo, hi) in enumerate(bounds):
        one, one_inputs = rl([lp[i]], [q[i]], [advantages[i]])
        part, _ = LOSS_FUNCTIONS[loss_fn](one, one_inputs, {"clip_low_threshold": lo, "clip_high_threshold": hi})
        parts.append(part.item())
    assert whole.item() == pytest.approx(sum(parts), rel=1e-6)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo"])
def test_placeholder_logprobs_at_zero_advantage_do_nothing(loss_fn: str) -> None:
    lp_P, inputs = rl([-3.0, -1.0], [-99999.0, -1.0], [0.0, 2.0])
    loss, metrics = LOSS_FUNCTIONS[loss_fn](lp_P, inputs, {})
    loss.backward()
    assert lp_P.grad.tolist() == [0.0, -2.0]
    values = metric_values(metrics)
    assert values["tokens:sum"] == 1
    assert values["mismatch_kl:mean"] == 0.0
    assert values["ratio:mean"] == 1.0


def test_halves_add_up_to_the_whole() -> None:
    lp, q, advantages = [-0.5, -1.0, -2.0, -0.1], [-1.0, -0.4, -3.5, -0.1], [1.0, -1.0, 0.5, 0.0]
    _, whole = ppo(*rl(lp, q, advantages), {})
    merged: dict[str, Measure] = {}
    for a, b in ((0, 1), (1, 4)):
        merge_measures(merged, ppo(*rl(lp[a:b], q[a:b], advantages[a:b]), {})[1])
    assert metric_values(merged) == pytest.approx(metric_values(whole), rel=1e-6)


def test_maximum_and_empty_mean() -> None:
    merged: dict[str, Measure] = {}
    merge_measures(merged, {"a:max": Measure(2.0), "b:mean": Measure(0.0, 0.0)})
    merge_measures(merged, {"a:max": Measure(1.0), "b:mean": Measure(0.0, 0.0)})
    assert metric_values(merged) == {"a:max": 2.0, "b:mean": 0.0}
