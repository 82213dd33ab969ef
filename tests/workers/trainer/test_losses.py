"""Each loss against closed forms and the golden values of shared/reference/rl-loss-golden.json; and where gradients
must and must not flow."""

import json
import math
from pathlib import Path

import pytest
import torch
from weft.wire.checks.losses import LOSSES, clip_of

from workers.trainer.losses.named import LOSS_FUNCTIONS, cispo, cross_entropy, dro, gspo, ppo, stable_reinforce
from workers.trainer.metrics import Measure, merge_measures, metric_values

GOLDEN = json.loads((Path(__file__).parent / "data" / "tinker_losses.json").read_text())
CLIPPING = sorted(name for name, spec in LOSSES.items() if clip_of(spec))
RATIO_LOSSES = sorted(set(LOSSES) - {"cross_entropy"})
#: Losses that have, besides terms with the factor A, a pull towards the sampler.
QUADRATIC = ["dro", "stable_reinforce"]


def rl(lp, q, advantages):
    lp_P = torch.tensor(lp, requires_grad=True)
    ratio_mask = [float(a != 0) for a in advantages]
    return lp_P, {
        "logprobs": torch.tensor(q),
        "advantages": torch.tensor(advantages),
        "sequence_ratio_mask": torch.tensor(ratio_mask),
    }


@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_golden(name: str) -> None:
    """stable_reinforce without its ratio band is prime-rl's DPPO loss; with only the band it is INTELLECT-3's.

    Positions that the golden values mask are a prompt's here: A = 0 and q = 0, as Tinker's recipes send it."""
    case = GOLDEN["cases"][name]
    q = [value * m for value, m in zip(GOLDEN[case.get("logprobs", "logprobs")], GOLDEN["mask"], strict=True)]
    lp_P, inputs = rl(GOLDEN["lp"], q, [case["adv"] * m for m in GOLDEN["mask"]])
    loss, metrics = LOSS_FUNCTIONS[case["loss_fn"]](lp_P, inputs, case["config"])
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=2e-5)
    torch.testing.assert_close(lp_P.grad, torch.tensor(case["grad"]), atol=2e-6, rtol=2e-6)
    assert metrics["loss:sum"].total == pytest.approx(case["loss"], abs=2e-5)
    if "mask_fraction" in case:
        assert metric_values(metrics)["mask_fraction:mean"] == pytest.approx(case["mask_fraction"])


@pytest.mark.parametrize("loss_fn", LOSS_FUNCTIONS)
def test_every_metric_name_has_one_colon_and_loss_sum_is_there(loss_fn: str) -> None:
    lp_P, inputs = rl([-1.0], [-1.0], [1.0])
    _, metrics = LOSS_FUNCTIONS[loss_fn](lp_P, inputs | {"weights": torch.ones(1)}, {})
    assert {"loss:sum", "tokens:sum"} <= metrics.keys()
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


@pytest.mark.parametrize("loss_fn", [name for name in CLIPPING if name != "gspo"])
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


@pytest.mark.parametrize(
    ("loss_fn", "placeholder"),
    [
        *((name, 0.0) for name in RATIO_LOSSES),
        *((name, -99999.0) for name in RATIO_LOSSES if name not in QUADRATIC),
    ],
)
def test_placeholder_logprobs_at_zero_advantage_do_nothing(loss_fn: str, placeholder: float) -> None:
    lp_P, inputs = rl([-3.0, -1.0], [placeholder, -1.0], [0.0, 2.0])
    loss, metrics = LOSS_FUNCTIONS[loss_fn](lp_P, inputs, {})
    loss.backward()
    assert lp_P.grad.tolist() == [0.0, -2.0]
    values = metric_values(metrics)
    assert values["tokens:sum"] == 1
    assert values["mismatch_kl:mean"] == 0.0
    assert values["ratio:mean"] == 1.0


def test_dro_pulls_towards_the_sampler() -> None:
    lp_P, inputs = rl([-1.0], [-3.0], [0.5])
    loss, _ = dro(lp_P, inputs, {})
    loss.backward()
    assert loss.item() == pytest.approx(0.5 + 0.5 * 0.1 * 4)
    assert lp_P.grad.item() == pytest.approx(-0.5 + 0.1 * 2)


@pytest.mark.parametrize(("ratio", "kept"), [(0.12, False), (0.13, True), (7.9, True), (8.1, False)])
def test_the_region_of_stable_reinforce_is_an_eighth_to_eight(ratio: float, kept: bool) -> None:
    """The bounds of docs/losses.md alone: probabilities are too small to move so far that anything else masks."""
    lp_P, inputs = rl([-9.0], [-9.0 - math.log(ratio)], [1.0])
    loss, metrics = stable_reinforce(lp_P, inputs, {})
    loss.backward()
    drift = math.log(ratio)
    assert metric_values(metrics)["mask_fraction:mean"] == float(not kept)
    assert loss.item() == pytest.approx(-ratio * kept + 0.01 * drift**2, rel=1e-4)
    assert lp_P.grad.item() == pytest.approx(-ratio * kept + 0.02 * drift, rel=1e-4)


@pytest.mark.parametrize(("loss_fn", "config"), [("dro", {"beta": 0.5}), ("stable_reinforce", {"kl_coeff": 0.25})])
def test_the_quadratic_pull_does_not_end_with_the_advantage(loss_fn: str, config: dict[str, float]) -> None:
    """A group of equal rewards: A = 0 everywhere, and q = lp + 0.5. The loss is 16 positions of 0.25 * 0.5^2 each."""
    lp = [-2.0 - 0.1 * i for i in range(16)]
    lp_P, inputs = rl(lp, [value + 0.5 for value in lp], [0.0] * 16)
    loss, metrics = LOSS_FUNCTIONS[loss_fn](lp_P, inputs, config)
    loss.backward()
    assert loss.item() == pytest.approx(1.0, rel=1e-5)
    assert lp_P.grad.tolist() == pytest.approx([2 * 0.25 * -0.5] * 16, rel=1e-5)
    values = metric_values(metrics)
    assert values["tokens:sum"] == 16
    assert values["ratio:mean"] == pytest.approx(math.exp(-0.5))
    assert values["mismatch_kl:mean"] == pytest.approx(math.exp(-0.5) - 0.5)


@pytest.mark.parametrize("loss_fn", QUADRATIC)
def test_the_quadratic_pull_leaves_out_only_what_has_neither_advantage_nor_logprob(loss_fn: str) -> None:
    """Positions: the prompt, a sampled token without an advantage, and a token of probability 1 when it was sampled."""
    coefficient = {"dro": 0.5 * 0.1, "stable_reinforce": 0.01}[loss_fn]
    lp_P, inputs = rl([-3.0, -1.25, -0.25], [0.0, -1.0, 0.0], [0.0, 0.0, 1.0])
    loss, metrics = LOSS_FUNCTIONS[loss_fn](lp_P, inputs, {})
    loss.backward()
    pushed, push = {"dro": (0.25, -1.0), "stable_reinforce": (-math.exp(-0.25), -math.exp(-0.25))}[loss_fn]
    assert loss.item() == pytest.approx(pushed + coefficient * (0.25**2 + 0.25**2), rel=1e-5)
    drift = -2 * coefficient * 0.25
    assert lp_P.grad.tolist() == pytest.approx([0.0, drift, push + drift], rel=1e-5)
    assert metrics["tokens:sum"].total == 2


@pytest.mark.parametrize("loss_fn", sorted(set(RATIO_LOSSES) - set(QUADRATIC)))
@pytest.mark.parametrize("q", [-3.0, -1.0, 0.0])
def test_every_other_term_has_the_factor_advantage(loss_fn: str, q: float) -> None:
    """These losses leave positions of A = 0 out: by their formulas such a position is 0 for any finite ratio."""
    lp_P, inputs = rl([-2.0, -1.0], [q, -1.5], [0.0, 0.75])
    inputs["sequence_ratio_mask"] = torch.tensor([0.0, 1.0])
    alone_P, alone_inputs = rl([-1.0], [-1.5], [0.75])
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": 9.0} if clip_of(LOSSES[loss_fn]) else {}
    loss, _ = LOSS_FUNCTIONS[loss_fn](lp_P, inputs, config)
    alone, _ = LOSS_FUNCTIONS[loss_fn](alone_P, alone_inputs, config)
    (loss + alone).backward()
    assert loss.item() == alone.item()
    assert lp_P.grad.tolist() == [0.0, *alone_P.grad.tolist()]


def test_gspo_counts_marked_positions_of_no_advantage() -> None:
    """s is the mean over the positions that the mask marks: (0.5 + 0.25) / 2, although one of them has A = 0."""
    lp_P, inputs = rl([-1.0, -1.0], [-1.5, -1.25], [1.0, 0.0])
    inputs["sequence_ratio_mask"] = torch.ones(2)
    loss, _ = gspo(lp_P, inputs, {"clip_low_threshold": 0.0, "clip_high_threshold": 9.0})
    loss.backward()
    assert loss.item() == pytest.approx(-math.exp(0.375), rel=1e-6)
    assert lp_P.grad.tolist() == pytest.approx([-math.exp(0.375), 0.0], rel=1e-6)


def test_gspo_ratio_is_to_the_bit_the_same_for_all_tokens_of_a_sequence() -> None:
    """A token's own lp, however large, must not round the ratio: near a bound some tokens of a sequence would be
    clipped, and others not."""
    lp_P, inputs = rl([-0.01, -7.0, -900.0], [-0.0101, -7.0001, -900.0], [1.0, 1.0, 1.0])
    loss, metrics = gspo(lp_P, inputs, {"clip_low_threshold": 0.0, "clip_high_threshold": 9.0})
    loss.backward()
    ratio = (lp_P.detach() - inputs["logprobs"]).mean().exp()
    assert lp_P.grad.tolist() == [-ratio.item()] * 3
    assert metric_values(metrics)["sequence_ratio:mean"] == pytest.approx(ratio.item(), rel=1e-7)


def test_gspo_metrics_are_of_the_positions_in_the_loss() -> None:
    """A marked position without an advantage may have a q whose ratio is beyond float32."""
    lp_P, inputs = rl([-1.0, -2.0], [-1.5, -200.0], [1.0, 0.0])
    inputs |= {"sequence_ratio_mask": torch.ones(2), "lengths": torch.tensor([1, 1])}
    found = metric_values(gspo(lp_P, inputs, {})[1])
    assert found["ratio:mean"] == pytest.approx(math.exp(0.5))
    assert found["mismatch_kl:mean"] == pytest.approx(math.exp(0.5) - 1.5)


def test_gspo_metrics_of_ratios_are_of_marked_positions() -> None:
    """Positions that the mask leaves out may have any q: the loss does not read it there."""
    lp_P, inputs = rl([-1.0, -2.0, -3.0], [-1.5, 0.0, -200.0], [1.0, 1.0, 1.0])
    inputs["sequence_ratio_mask"] = torch.tensor([1.0, 0.0, 0.0])
    found = metric_values(gspo(lp_P, inputs, {})[1])
    assert found["ratio:mean"] == pytest.approx(math.exp(0.5))
    assert found["mismatch_kl:mean"] == pytest.approx(math.exp(0.5) - 1.5)
    assert found["tokens:sum"] == 3


@pytest.mark.parametrize("loss_fn", RATIO_LOSSES)
def test_the_kl_of_ratios_near_1_is_not_lost_to_rounding(loss_fn: str) -> None:
    lp = -torch.linspace(0.5, 3.0, 50)
    q = lp + 1e-4 * torch.linspace(-1, 1, 50)
    inputs = {"logprobs": q, "advantages": torch.ones(50), "sequence_ratio_mask": torch.ones(50)}
    log_ratio = (lp.double() - q.double()).tolist()
    wanted = sum(math.expm1(x) - x for x in log_ratio) / 50
    found = metric_values(LOSS_FUNCTIONS[loss_fn](lp, inputs, {})[1])
    assert found["mismatch_kl:mean"] == pytest.approx(wanted, rel=1e-2)


def test_gspo_ratio_is_the_sequences_and_sequences_are_apart() -> None:
    """Two sequences have the ratios exp(0.1) and exp(-0.1 / 2): the exponent is the mean over the marked positions,
    also those without an advantage."""
    lp_P = torch.tensor([-1.0, -2.0, -1.0], requires_grad=True)
    inputs = {
        "logprobs": torch.tensor([-1.1, -1.9, -1.0]),
        "advantages": torch.tensor([1.0, -1.0, 0.0]),
        "sequence_ratio_mask": torch.tensor([1.0, 1.0, 1.0]),
        "lengths": torch.tensor([1, 2]),
    }
    loss, metrics = gspo(lp_P, inputs, {"clip_low_threshold": 0.0, "clip_high_threshold": 9.0})
    loss.backward()
    assert lp_P.grad.tolist() == pytest.approx([-math.exp(0.1), math.exp(-0.05), 0.0])
    assert metric_values(metrics)["sequence_ratio:mean"] == pytest.approx((math.exp(0.1) + math.exp(-0.05)) / 2)


@pytest.mark.parametrize(
    ("lp", "q", "advantage", "kept"),
    [
        pytest.param(-0.1, -0.5, 1.0, False, id="probability-rose-as-pushed"),
        pytest.param(-0.1, -0.5, -1.0, True, id="probability-rose-against-the-push"),
        pytest.param(-0.5, -0.1, -1.0, False, id="probability-fell-as-pushed"),
        pytest.param(-5.0, -8.0, 1.0, False, id="ratio-above"),
        pytest.param(-8.0, -5.0, -1.0, False, id="ratio-below"),
        pytest.param(-90.0, -300.0, 1.0, False, id="ratio-overflows"),
    ],
)
def test_stable_reinforce_masks_what_left_the_region_but_pulls_it_back(lp, q, advantage, kept) -> None:
    lp_P, inputs = rl([lp], [q], [advantage])
    loss, metrics = stable_reinforce(lp_P, inputs, {})
    loss.backward()
    pull = 2 * 0.01 * (lp - q)
    push = -math.exp(lp - q) * advantage if kept else 0.0
    assert lp_P.grad.item() == pytest.approx(push + pull, rel=1e-5)
    assert metric_values(metrics)["mask_fraction:mean"] == (not kept)


def test_halves_add_up_to_the_whole() -> None:
    lp, q, advantages = [-0.5, -1.0, -2.0, -0.1], [-1.0, -0.4, -3.5, -0.1], [1.0, -1.0, 0.5, 0.0]
    _, whole = ppo(*rl(lp, q, advantages), {})  # type: ignore[call-arg]
    merged: dict[str, Measure] = {}
    for a, b in ((0, 1), (1, 4)):
        merge_measures(merged, ppo(*rl(lp[a:b], q[a:b], advantages[a:b]), {})[1])  # type: ignore[call-arg]
    assert metric_values(merged) == pytest.approx(metric_values(whole), rel=1e-6)


def test_maximum_and_empty_mean() -> None:
    merged: dict[str, Measure] = {}
    merge_measures(merged, {"a:max": Measure(2.0), "b:mean": Measure(0.0, 0.0), "c:max": Measure(1.0)})
    merge_measures(merged, {"a:max": Measure(1.0), "b:mean": Measure(0.0, 0.0), "c:max": Measure(2.0)})
    assert metric_values(merged) == {"a:max": 2.0, "b:mean": 0.0, "c:max": 2.0}


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("loss_fn", ["ppo", "gspo"])
def test_a_ratio_beyond_float32_that_is_clipped_has_no_gradient(loss_fn: str, advantage: float) -> None:
    """For A > 0 it has none, like a ratio of e^80. For A < 0 nothing clips it, and the loss is not finite."""
    lp_P, inputs = rl([-1.0], [-300.0], [advantage])
    loss, _ = LOSS_FUNCTIONS[loss_fn](lp_P, inputs, {})
    loss.backward()
    assert lp_P.grad.tolist() == ([0.0] if advantage > 0 else [math.inf])
    _, high = clip_of(LOSSES[loss_fn])
    assert loss.item() == pytest.approx(-high if advantage > 0 else math.inf)


@pytest.mark.parametrize("loss_fn", ["ppo", "gspo", "cispo", "dro", "stable_reinforce"])
@pytest.mark.parametrize("log_ratio", [200.0, 5e4])
def test_metrics_of_ratios_beyond_float32_are_numbers(loss_fn: str, log_ratio: float) -> None:
    """JSON has no infinity, and the operation succeeds, as its loss clips such a ratio."""
    lp_P, inputs = rl([-1.0] * 4, [-1.0 - log_ratio] * 4, [1.0] * 4)
    inputs |= {"sequence_ratio_mask": torch.ones(4)} if loss_fn == "gspo" else {}
    loss, measures = LOSS_FUNCTIONS[loss_fn](lp_P, inputs, {})
    assert loss.isfinite()
    metrics = metric_values(measures)
    told = math.exp(min(log_ratio, 688))
    for name in ["ratio:mean", "mismatch_kl:mean", *(["sequence_ratio:mean"] if loss_fn == "gspo" else [])]:
        assert metrics[name] == pytest.approx(told, rel=1e-4)
    assert all(map(math.isfinite, metrics.values()))


def test_a_small_mismatch_is_told_to_its_digits() -> None:
    """r - 1 - log r is nearly (log r)^2 / 2: too small beside 1 for float32."""
    lp_P, inputs = rl([-1.0, -1.0], [-1.0 + 2**-13, -1.0 - 2**-13], [1.0, 1.0])
    metrics = metric_values(LOSS_FUNCTIONS["importance_sampling"](lp_P, inputs, {})[1])
    assert metrics["mismatch_kl:mean"] == pytest.approx(2**-27, rel=1e-6)
