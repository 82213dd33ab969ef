"""The losses of `weft.rl` against closed forms and golden values from the code of prime-rl, slime and Tinker; as plain
torch, and by the interpreter with which the trainer runs uploaded losses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from weft.loss_handle import trace
from weft.rl import losses
from weft.rl.loops.report import plain as numbers
from weft.rl.losses import Loss
from weft.wire.checks.custom_format import decode_custom_loss, encode_custom_loss
from weft.wire.inputs import Datum, ModelInput

from workers.trainer.losses.custom_graph import run_custom_loss
from workers.trainer.losses.named import LOSS_FUNCTIONS

GOLDEN = json.loads((Path(__file__).parents[2] / "client_sdk/rl/data/golden.json").read_text())
LP, Q, OLD, REF, MASK = (GOLDEN["inputs"][name] for name in ("cur", "infer", "old", "ref", "mask"))
CASES: dict[str, Loss] = {
    "prime_dppo_kl": losses.dppo_kl(),
    "prime_ipo": losses.ipo(),
    "prime_ref_kl(opd)": losses.ref_kl(),
    "prime_ce": losses.cross_entropy(),
    "prime_i3_code_default": losses.intellect3(),
    "prime_i3_icepop_0.5_5_seq1e-5": losses.intellect3(0.5, 5.0, veto=1e-5),
    "prime_i3_sequence_ratio": losses.intellect3(level="sequence"),
    "slime_ppo_clip_0.2": losses.ppo_clip(old=True),
    "slime_ppo_dual_clip_c3": losses.ppo_clip(0.2, 0.28, dual=3.0, old=True),
    "slime_cispo_low1_high4": losses.clipped_is(0.0, 5.0, old=True),
    "slime_grpo_tis_C2": losses.tis(old=True),
    "slime_grpo_icepop_0.5_5": losses.icepop(old=True),
    "slime_gspo_3e-4_4e-4": losses.gspo(old=True),
    "tinker_importance_sampling": losses.importance_sampling(),
    "tinker_ppo_0.8_1.2": losses.ppo(),
    "tinker_cispo_0_4": losses.cispo(),
    "tinker_dro_b0.05": losses.dro(0.05),
}
Runner = Callable[..., tuple[Any, dict[str, float]]]


def given(loss: Loss, advantage: float, mask: list[float] = MASK) -> dict[str, torch.Tensor]:
    """The inputs as the training loop gives them: a token that was not drawn has 0 as advantage, sampler's logprob and
    mask."""
    on = torch.tensor([float(m) for m in mask])
    values = {"q": Q, "logprobs": Q, "old": OLD, "ref": REF, "weights": mask, "mask": mask}
    made = {name: torch.tensor([float(v) for v in value]) * on for name, value in values.items()}
    made["advantages"] = advantage * on
    return {name: made[name] for name in loss.reads}


def plain(loss: Loss, lp: torch.Tensor, inputs: dict[str, torch.Tensor]) -> tuple[Any, dict[str, float]]:
    assert loss.fn is not None
    value, metrics = loss.fn(lp, *inputs.values())
    return value, {name: float(metric.detach()) for name, metric in metrics.items()}


def interpreted(loss: Loss, lp: torch.Tensor, inputs: dict[str, torch.Tensor]) -> tuple[Any, dict[str, float]]:
    """The loss traced, sent, stored, read again and run, as the trainer does."""
    assert loss.fn is not None
    handle = trace(loss.fn, {"logprobs": 1, **dict.fromkeys(inputs, 1)})
    graph = json.loads(handle.encoded().model_dump_json(exclude_none=True))
    pairs = [(item.name, item.rank) for item in handle.inputs]
    stored = decode_custom_loss(encode_custom_loss(handle.name, pairs, graph))
    return run_custom_loss(stored, [lp, *inputs.values()])


def built_in(loss: Loss, lp: torch.Tensor, inputs: dict[str, torch.Tensor]) -> tuple[Any, dict[str, float]]:
    value, _ = LOSS_FUNCTIONS[loss.name](lp, inputs, dict(loss.config))
    return value, {}


def gradient(run: Runner, loss: Loss, lp: list[float], inputs: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    leaf = torch.tensor(lp, requires_grad=True)
    value, _ = run(loss, leaf, inputs)
    value.backward()
    assert leaf.grad is not None
    return float(value.detach()), leaf.grad


@pytest.mark.parametrize("run", [plain, interpreted], ids=["plain", "trainer"])
@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_golden(name: str, run: Runner) -> None:
    case = GOLDEN["cases"][name]
    loss = CASES[name.removesuffix("_pos").removesuffix("_neg")]
    value, grad = gradient(run if loss.fn else built_in, loss, LP, given(loss, case["adv"]))
    assert value == pytest.approx(case["loss"], rel=1e-6, abs=1e-6)
    torch.testing.assert_close(grad, torch.tensor(case["grad"]), atol=1e-6, rtol=0)


def test_golden_shares_of_masked_tokens() -> None:
    for name in ("prime_dppo_kl_pos", "prime_dppo_kl_neg", "prime_ipo_pos", "prime_ipo_neg"):
        case, loss = GOLDEN["cases"][name], CASES[name[:-4]]
        _, metrics = interpreted(loss, torch.tensor(LP), given(loss, case["adv"]))
        assert metrics["custom/masked:sum"] / metrics["custom/tokens:sum"] == pytest.approx(case["is_masked"])


@pytest.mark.parametrize("weight", [1.0, 0.25, 1e-3])
def test_metrics_of_a_traced_loss_are_means_over_its_tokens_whatever_the_loop_divides_by(weight: float) -> None:
    loss = losses.icepop(old=True)
    inputs = given(loss, 1.0)
    _, metrics = interpreted(loss, torch.tensor(LP), {**inputs, "mask": inputs["mask"] * weight})
    told = numbers({**metrics, "tokens:sum": float(len(LP))})
    drawn = [(lp - q, old - q) for lp, q, old, m in zip(LP, Q, OLD, MASK, strict=True) if m]
    kl = sum(math.exp(log_rho) - 1 - log_rho for log_rho, _ in drawn) / len(drawn)
    masked = sum(not 0.5 <= math.exp(log_k) <= 5 for _, log_k in drawn) / len(drawn)
    assert told == pytest.approx({"mismatch_kl": kl, "masked": masked, "tokens": len(drawn)}, rel=1e-5)


@pytest.mark.parametrize(("tokens", "kl"), [(0.0, 0.0), (1.0, 0.5), (4.0, 0.125)])
def test_metrics_are_means_over_their_tokens_and_0_without_any(tokens: float, kl: float) -> None:
    told = numbers({"custom/mismatch_kl:sum": 0.5 * bool(tokens), "custom/tokens:sum": tokens, "tokens:sum": 9.0})
    assert told == {"mismatch_kl": kl, "tokens": tokens}


def test_the_kl_of_ratios_near_1_is_not_lost_to_rounding() -> None:
    loss, lp = losses.ppo_clip(), -torch.linspace(0.5, 3.0, 50)
    q = lp + 1e-4 * torch.linspace(-1, 1, 50)
    _, metrics = interpreted(loss, lp, {"q": q, "advantages": torch.ones(50), "mask": torch.ones(50)})
    wanted = sum(math.expm1(x) - x for x in (lp.double() - q.double()).tolist())
    assert metrics["custom/mismatch_kl:sum"] == pytest.approx(wanted, rel=1e-2)


@pytest.mark.parametrize(
    ("loss", "advantage", "pull"),
    [
        (losses.icepop(), 1.0, 0.0),
        (losses.icepop(old=True), -1.0, 0.0),
        (losses.intellect3(), 1.0, 0.0),
        (losses.areal(), -1.0, 0.0),
        (losses.areal(old=True), 1.0, 0.0),
        (losses.dppo_kl(kl=0.5), 1.0, 999.0),
        (losses.ipo(kl=0.5), -1.0, 999.0),
    ],
    ids=lambda given: getattr(given, "name", given),
)
def test_a_token_that_is_masked_has_no_ratio_however_large_it_is(loss: Loss, advantage: float, pull: float) -> None:
    """exp overflows from 88.7 on, and 0 times infinity would make the gradient of the whole batch NaN."""
    given = {"q": -1000.0, "old": -1.0, "advantages": advantage, "mask": 1.0}
    inputs = {name: torch.tensor([given[name], {"q": -1.0}.get(name, given[name])]) for name in loss.reads}
    _, grad = gradient(interpreted, loss, [-1.0, -1.0], inputs)
    assert grad.tolist() == pytest.approx([pull, -advantage])


@pytest.mark.parametrize(
    ("loss", "q"),
    [(losses.icepop(old=True), -1.0), (losses.icepop(old=True), -400.0), (losses.areal(old=True), -400.0)],
)
def test_a_token_that_is_masked_may_have_moved_by_any_ratio(loss: Loss, q: float) -> None:
    """Its weight is 0; for A < 0 nothing bounds how far the steps have moved it."""
    given = {"q": [q, -1.0], "old": [-200.0, -1.0], "advantages": [-1.0, -1.0], "mask": [1.0, 1.0]}
    value, grad = gradient(interpreted, loss, [-1.0, -1.0], {name: torch.tensor(given[name]) for name in loss.reads})
    assert value == pytest.approx(1.0)
    assert grad.tolist() == pytest.approx([0.0, 1.0])


@pytest.mark.parametrize("loss", [losses.tis(old=True), losses.areal(old=True), losses.icepop(low=0.0, old=True)])
def test_a_weight_may_be_as_small_as_the_ratio_is_large(loss: Loss) -> None:
    """Their product is 1, but in float32 one is 0 and the other infinite."""
    given = {"q": -1.0, "old": -200.0, "advantages": -1.0, "mask": 1.0}
    value, grad = gradient(interpreted, loss, [-1.0], {name: torch.tensor([given[name]]) for name in loss.reads})
    assert [value, *grad.tolist()] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(
    ("loss", "advantage"),
    [
        (losses.ppo_clip(old=True), 1.0),
        (losses.ppo_clip(old=True), 0.0),
        (losses.ppo_clip(dual=3.0, old=True), 1.0),
        (losses.ppo_clip(dual=3.0, old=True), -1.0),
        (losses.icepop(old=True), 1.0),
        (losses.tis(old=True), 1.0),
        (losses.areal(old=True), 1.0),
        (losses.gspo(), 1.0),
        (losses.gspo(old=True), 1.0),
        (losses.sapo(old=True), 1.0),
        (losses.sapo(old=True), -1.0),
    ],
    ids=lambda given: getattr(given, "name", given),
)
def test_a_ratio_beyond_float32_that_is_clipped_has_no_gradient(loss: Loss, advantage: float) -> None:
    """So it is in the server's own losses; and the reported metrics are finite."""
    given = {"q": -200.0, "old": -200.0, "advantages": advantage, "mask": 1.0}
    inputs = {name: torch.tensor([given[name]] * 2) for name in loss.reads}
    value, grad = gradient(interpreted, loss, [-1.0, -2.0], inputs)
    assert math.isfinite(value)
    assert grad.tolist() == [0.0, 0.0]
    _, metrics = interpreted(loss, torch.tensor([-1.0, -2.0]), inputs)
    assert metrics["custom/mismatch_kl:sum"] == pytest.approx(math.exp(199) + math.exp(198))


@pytest.mark.parametrize("name", [name for name, loss in CASES.items() if loss.fn is not None])
def test_a_datum_without_drawn_tokens_has_no_loss(name: str) -> None:
    value, grad = gradient(plain, CASES[name], LP, given(CASES[name], 1.0, [0.0] * len(LP)))
    assert value == 0
    assert not grad.any()


def test_a_sequence_that_opsm_drops_may_have_any_ratio() -> None:
    inputs = {"q": [-100.0, -1.0], "advantages": [-1.0, -1.0], "mask": [1.0, 1.0]}
    tensors = {name: torch.tensor(values) for name, values in inputs.items()}
    _, grad = gradient(interpreted, losses.opsm(), [-1.0, -500.0], tensors)
    assert grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("run", [plain, interpreted], ids=["plain", "trainer"])
def test_areal_is_ppo_on_the_proximal_policy_times_its_weight(run: Runner, advantage: float) -> None:
    loss = losses.areal(old=True)
    value, grad = gradient(run, loss, LP, given(loss, advantage))
    wanted, wanted_grad = 0.0, []
    for lp, q, old, m in zip(LP, Q, OLD, MASK, strict=True):
        w, r = math.exp(old - q), math.exp(lp - old)
        kept = m * w * (w <= 5)
        clipped = min(r * advantage, min(max(r, 0.8), 1.2) * advantage)
        wanted -= kept * clipped
        wanted_grad.append(-kept * advantage * r * (clipped == r * advantage))
    assert value == pytest.approx(wanted, rel=1e-6)
    torch.testing.assert_close(grad, torch.tensor(wanted_grad), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("advantage", "tau"), [(1.0, 1.0), (-0.5, 1.05)])
def test_sapo_closed_form(advantage: float, tau: float) -> None:
    """At r = 1 the loss is -(2 / tau) A and the gradient -A; far from 1 the gradient vanishes without clipping."""
    loss = losses.sapo(old=True)
    values = zip(loss.reads, (-1.0, -1.0, advantage, 1.0), strict=True)
    inputs = {name: torch.tensor([value] * 2) for name, value in values}
    value, grad = gradient(interpreted, loss, [-1.0, 2.0], inputs)
    far = 1 / (1 + math.exp(-tau * (math.exp(3.0) - 1)))
    assert value == pytest.approx(-advantage * (2 / tau + 4 / tau * far), rel=1e-6)
    assert grad.tolist() == pytest.approx([-advantage, -4 * far * (1 - far) * math.exp(3.0) * advantage], abs=1e-6)


@pytest.mark.parametrize(
    ("lp", "advantage", "kept"),
    [(-1.2, -1.0, False), (-1.2, 1.0, True), (-0.9, -1.0, True), (-1.00005, -1.0, True)],
    ids=["fell-and-unwanted", "fell-and-wanted", "rose-and-unwanted", "hardly-moved"],
)
def test_opsm_drops_whole_sequences(lp: float, advantage: float, kept: bool) -> None:
    loss = losses.opsm()
    inputs = {"q": torch.full((3,), -1.0), "advantages": torch.full((3,), advantage), "mask": torch.ones(3)}
    value, grad = gradient(interpreted, loss, [lp] * 3, inputs)
    each = -math.exp(lp + 1.0) * advantage * kept
    assert value == pytest.approx(3 * each, rel=1e-5)
    assert grad.tolist() == pytest.approx([each] * 3, rel=1e-5)


@pytest.mark.parametrize(("advantage", "log_r"), [(-2.0, 2.0), (-0.5, 2.0), (-0.5, 0.5)])
def test_a_dual_clip_bounds_what_an_unwanted_token_costs(advantage: float, log_r: float) -> None:
    loss = losses.ppo_clip(dual=3.0, old=True)
    given = {"q": -1.0, "old": -3.0, "advantages": advantage, "mask": 1.0}
    inputs = {name: torch.tensor([given[name]]) for name in loss.reads}
    value, grad = gradient(interpreted, loss, [-3.0 + log_r], inputs)
    assert value == pytest.approx(-advantage * min(math.exp(log_r), 3.0))
    assert grad.tolist() == pytest.approx([-advantage * math.exp(log_r) if math.exp(log_r) < 3 else 0.0])


@pytest.mark.parametrize(("log_rho", "ratio"), [(1.0, 1.0), (-1.0, -1.0), (2.1, None), (-2.1, None), (12.0, 10.0)])
def test_a_sequence_has_one_ratio_of_which_each_token_takes_its_share(log_rho: float, ratio: float | None) -> None:
    """`ratio` is the logarithm that counts, at most 10; None means that the sequence is out of bounds."""
    loss = losses.intellect3(high=math.inf if log_rho > 10 else 8.0, level="sequence")
    inputs = {"q": [-20.0, -1.0, -9.0], "advantages": [0.5] * 3, "mask": [1.0, 1.0, 0.0]}
    tensors = {name: torch.tensor(values) for name, values in inputs.items()}
    value, grad = gradient(interpreted, loss, [-20.0 + log_rho + 0.25, -1.25, -1.0], tensors)
    whole = 0.0 if ratio is None else -0.5 * math.exp(ratio)
    assert value == pytest.approx(whole)
    assert grad.tolist() == pytest.approx([whole / 2, whole / 2, 0.0])


@pytest.mark.parametrize(
    ("loss", "low", "high"),
    [
        (losses.intellect3(), 0.125, 8.0),
        (losses.icepop(), 0.5, 5.0),
        (losses.areal(), None, 5.0),
        (losses.tis(), None, 2.0),
        (losses.gspo(), 1 - 3e-4, 1 + 4e-4),
    ],
    ids=lambda given: getattr(given, "name", given),
)
def test_a_loss_masks_tokens_beyond_its_own_bounds(loss: Loss, low: float | None, high: float) -> None:
    """Its one token is masked just beyond the bounds of the code that the loss comes from, and not just within them."""

    def masked(ratio: float) -> float:
        lp = -9.0 + math.log(ratio)
        values = {"q": -9.0, "advantages": 1.0, "mask": 1.0}
        inputs = {name: torch.tensor([values[name]]) for name in loss.reads}
        return interpreted(loss, torch.tensor([lp]), inputs)[1]["custom/masked:sum"]

    assert [masked(high * (1 + by)) for by in (-1e-5, 1e-5)] == [0, 1]
    below = [1, 0] if low is not None else [0, 0]
    assert [masked((low or 1e-3) * (1 + by)) for by in (-1e-5, 1e-5)] == below


@pytest.mark.parametrize(("probability", "masked"), [(0.75, [0, 0, 1]), (0.65, [0] * 3), (0.25, [1, 1, 0])])
def test_dppo_masks_what_has_moved_far_in_its_advantages_direction(probability: float, masked: list[int]) -> None:
    """The token had a probability of 0.5. An advantage of 0 counts as a negative one."""
    for advantage, wanted in zip((-0.5, 0.0, 0.5), masked, strict=True):
        inputs = {"q": math.log(0.5), "advantages": advantage, "mask": 1.0}
        tensors = {name: torch.tensor([value]) for name, value in inputs.items()}
        _, metrics = interpreted(losses.dppo_kl(), torch.tensor([math.log(probability)]), tensors)
        assert metrics["custom/masked:sum"] == wanted


def test_clipped_is_weighs_a_token_by_its_ratio_up_to_4() -> None:
    loss = losses.clipped_is(old=True)
    for log_r, weight in ((math.log(3.9), 3.9), (math.log(4.1), 4.0), (math.log(0.1), 0.1)):
        values = {"q": -1.0, "old": -3.0, "advantages": 2.0, "mask": 1.0}
        inputs = {name: torch.tensor([values[name]]) for name in loss.reads}
        assert gradient(interpreted, loss, [-3.0 + log_r], inputs)[1].tolist() == pytest.approx([-2.0 * weight])


def test_one_low_ratio_vetoes_the_rollout() -> None:
    lp, q = [-1.0, -1.0], [-1.0, -1.0]
    inputs = {"q": torch.tensor(q), "advantages": torch.ones(2), "mask": torch.ones(2)}
    loss = losses.intellect3(0.5, 5.0, veto=1e-5)
    assert gradient(interpreted, loss, lp, inputs)[0] == -2.0
    assert gradient(interpreted, loss, [-1.0, -20.0], inputs)[0] == 0.0
    inputs["mask"] = torch.tensor([1.0, 0.0])
    assert gradient(interpreted, loss, [-1.0, -20.0], inputs)[0] == -1.0


@pytest.mark.parametrize(
    ("make", "this"),
    [
        *((make, LP) for make in (losses.icepop, losses.tis, losses.areal, losses.ppo_clip, losses.sapo)),
        (losses.clipped_is, LP),
        (losses.gspo, Q),
        (losses.opsm, Q),
    ],
)
def test_with_one_step_a_batch_the_old_trainer_is_this_one_or_the_sampler(
    make: Callable[..., Loss], this: list[float]
) -> None:
    read, now = make(old=True), make()
    inputs = given(read, -1.0)
    inputs["old"] = torch.tensor(this)
    value, grad = gradient(interpreted, read, LP, inputs)
    again, same = gradient(interpreted, now, LP, given(now, -1.0))
    assert again == value
    assert grad.any()
    torch.testing.assert_close(same, grad, atol=0, rtol=0)


def test_components_add_up() -> None:
    loss = losses.mixed(rl=0.5, ce=0.1, ref=2.0)
    value, grad = gradient(interpreted, loss, LP, given(loss, 1.0))
    parts = [(0.5, losses.dppo_kl()), (2.0, losses.ref_kl())]
    values = [(weight, *gradient(plain, part, LP, given(part, 1.0))) for weight, part in parts]
    values.append((0.1, *gradient(built_in, losses.cross_entropy(), LP, given(losses.cross_entropy(), 1.0))))
    assert value == pytest.approx(sum(weight * part for weight, part, _ in values), rel=1e-6)
    torch.testing.assert_close(grad, sum((weight * part for weight, _, part in values), torch.zeros(8)))


class OneDatum:
    """Replaces a run: computes the one datum that a loss has made and sends, with logprobs LP."""

    def __init__(self, fn: Callable[..., Any] | None) -> None:
        self.fn = fn

    def forward_backward(self, data: list[Datum], name: str, config: dict[str, float]) -> tuple[float, torch.Tensor]:
        def run(loss: Loss, lp: torch.Tensor, inputs: dict[str, torch.Tensor]) -> tuple[Any, dict[str, float]]:
            return LOSS_FUNCTIONS[name](lp, inputs, config)[0], {}

        return self._gradient(run, data)

    def forward_backward_custom(self, data: list[Datum], handle: Any) -> tuple[float, torch.Tensor]:
        return self._gradient(interpreted, data)

    def _gradient(self, run: Runner, data: list[Datum]) -> tuple[float, torch.Tensor]:
        [datum] = data
        inputs = {name: torch.tensor(value.to_numpy()) for name, value in datum.loss_fn_inputs.items()}
        del inputs["target_tokens"]
        return gradient(run, Loss("", self.fn), LP, inputs)


def sent(loss: Loss, weight: float) -> tuple[float, torch.Tensor]:
    inputs = {name: torch.tensor(values) for name, values in (("logprobs", Q), ("old", OLD), ("ref", REF))}
    on = torch.tensor([float(m) for m in MASK])
    datum = Datum(
        ModelInput.from_ints([1] * len(LP)),
        {"target_tokens": [2] * len(LP), "logprobs": (inputs["logprobs"] * on).numpy(), "advantages": -on.numpy()}
        | {"mask": on.numpy()},
    )
    made = loss.datum(datum, weight, old=inputs["old"].numpy(), ref=inputs["ref"].numpy())
    found: Any = loss.forward_backward(cast(Any, OneDatum(loss.fn)), [made], cast(Any, None if loss.fn is None else ""))
    return cast(tuple[float, torch.Tensor], found)


@pytest.mark.parametrize("name", [*CASES, "stable_reinforce", "stable_reinforce_kl1", "mixed"])
def test_the_weight_of_a_datum_scales_it(name: str) -> None:
    """Also the terms without the factor A: the pull of a quadratic term towards the sampler."""
    more = {
        "stable_reinforce": losses.stable_reinforce(),
        "stable_reinforce_kl1": losses.stable_reinforce(kl_coeff=1.0),
        "mixed": losses.mixed(rl=0.5, ce=0.1, ref=2.0),
    }
    loss = (CASES | more)[name]
    value, grad = sent(loss, 1.0)
    scaled, scaled_grad = sent(loss, 1 / 512)
    assert scaled == pytest.approx(value / 512, rel=1e-6)
    torch.testing.assert_close(scaled_grad, grad / 512, atol=1e-9, rtol=1e-5)


class Asked:
    """Replaces a run: notes what the server is asked to compute."""

    def forward_backward(self, data: list[Datum], name: str, config: dict[str, float]) -> tuple[str, dict[str, float]]:
        return name, config


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        (losses.ppo(0.9, 1.3), {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}),
        (losses.cispo(0.5, 2.0), {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}),
        (losses.dro(0.3), {"beta": 0.3 / 4}),
        (losses.dro(), {"beta": 0.1 / 4}),
        (losses.stable_reinforce(prob_threshold=0.3, kl_coeff=1.0), {"prob_threshold": 0.3, "kl_coeff": 0.25}),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_the_server_is_told_the_settings_of_a_loss(loss: Loss, config: dict[str, float]) -> None:
    inputs = {"target_tokens": [2, 3], "logprobs": [-1.0, -1.0], "advantages": [1.0, 0.0], "mask": [1.0, 0.0]}
    data = [loss.datum(Datum(ModelInput.from_ints([1, 2]), inputs), 0.25)]
    asked: Any = loss.forward_backward(cast(Any, Asked()), data, None)
    assert asked == (loss.name, pytest.approx(config))


def test_a_loss_that_reads_what_data_do_not_have_says_so() -> None:
    inputs = {"target_tokens": [2], "logprobs": [-1.0], "advantages": [1.0], "mask": [1.0]}
    with pytest.raises(ValueError, match="reads 'ref', which the data do not have"):
        losses.ref_kl().datum(Datum(ModelInput.from_ints([1]), inputs))


def test_data_of_different_weights_do_not_share_a_pull() -> None:
    loss = losses.dro()
    datum = Datum(
        ModelInput.from_ints([1]),
        {"target_tokens": [2], "logprobs": [-1.0], "advantages": [1.0], "mask": [1.0]},
    )
    with pytest.raises(ValueError, match=r"'dro' is given data of weights 0\.25 and 0\.5 at once"):
        loss.forward_backward(cast(Any, OneDatum(None)), [loss.datum(datum, 0.25), loss.datum(datum, 0.5)], None)
