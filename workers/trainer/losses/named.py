"""The built-in losses, one function each, with their metrics beside them.

Every loss is the plain SUM over the positions it is given: no mean and no normalisation, so that two half batches equal
one whole batch.

Shapes: P positions of one slice, flattened over data (and over K targets per position). lp_P = log p(target) now;
inputs q_P = `logprobs`, those when sampled, and A_P = `advantages`; r = exp(lp - q).

Formulas: the "Losses" pages of the Tinker docs, whose thresholds are absolute bounds on r; stable_reinforce is ours.
docs/losses.md has all of them, with their defaults.

A position that cannot contribute is outside an RL loss: its q reaches no exp, since prompt positions often carry a
placeholder for which exp(lp - q) overflows. If every term of a loss has the factor A, these are the positions with A=0.
A quadratic term (dro, stable_reinforce) remains at A=0, because a group whose rewards are all equal must still be held
to its sampler. In these losses only positions with A=0 and q=0 are outside: the prompts in Tinker's recipes, which were
not sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from weft.wire.checks.losses import LOSSES, MAX_LOG_RATIO, MAX_TOLD_LOG_RATIO, THRESHOLDS, clip_of

from workers.trainer.metrics import Measure

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float | str]
Loss = Callable[[Tensor, Inputs, Config], tuple[Tensor, dict[str, Measure]]]


def cross_entropy(lp_P: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, dict[str, Measure]]:
    """L = -sum lp * w. With K targets per position this is weighted multi-target cross entropy (distillation)."""
    weights_P = inputs["weights"]
    loss = -(lp_P * weights_P).sum()
    return loss, {"loss:sum": _total(loss), "tokens:sum": _total((weights_P != 0).sum())}


def importance_sampling(lp_P: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, dict[str, Measure]]:
    """L = -sum r * A, the gradient through r."""
    inside_P = _pushed(inputs)
    log_ratio_P = _log_ratio(lp_P, inputs, inside_P)
    loss = -(log_ratio_P.exp() * inputs["advantages"]).sum()
    return loss, {"loss:sum": _total(loss), **_ratio_metrics(log_ratio_P, inside_P)}


def ppo(lp_P: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, dict[str, Measure]]:
    """L = -sum min(r * A, clamp(r, low, high) * A). `clip_fraction`: the fraction of positions whose clamped term is
    the smaller one, so that no gradient flows."""
    advantages_P, inside_P = inputs["advantages"], _pushed(inputs)
    log_ratio_P = _log_ratio(lp_P, inputs, inside_P)
    low, high = _bounds("ppo", inputs, config)
    ratio_P = _clipped_exp(log_ratio_P, advantages_P)
    free_P, clamped_P = ratio_P * advantages_P, ratio_P.clamp(low, high) * advantages_P
    loss = -torch.minimum(free_P, clamped_P).sum()
    metrics = {"loss:sum": _total(loss), **_ratio_metrics(log_ratio_P, inside_P)}
    metrics["clip_fraction:mean"] = _mean_over_loss(clamped_P.detach() < free_P.detach(), inside_P)
    return loss, metrics


def cispo(lp_P: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, dict[str, Measure]]:
    """L = -sum detach(clamp(r, low, high)) * lp * A: clipping bounds a position's weight and never stops its gradient.
    `clip_fraction`: the fraction of positions whose ratio is out of bounds."""
    inside_P = _pushed(inputs)
    log_ratio_P = _log_ratio(lp_P, inputs, inside_P)
    low, high = _bounds("cispo", inputs, config)
    ratio_P = log_ratio_P.detach().exp()
    weight_P = ratio_P.clamp(low, high)
    loss = -(weight_P * lp_P * inputs["advantages"]).sum()
    metrics = {"loss:sum": _total(loss), **_ratio_metrics(log_ratio_P, inside_P)}
    metrics["clip_fraction:mean"] = _mean_over_loss(weight_P != ratio_P, inside_P)
    return loss, metrics


def dro(lp_P: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, dict[str, Measure]]:
    """L = -sum [lp * A - beta / 2 * (lp - q)^2]: instead of a ratio, a quadratic pull towards the sampler."""
    inside_P = _pushed_or_sampled(inputs)
    log_ratio_P = _log_ratio(lp_P, inputs, inside_P)
    beta = _setting("dro", "beta", config)
    loss = -(lp_P * inputs["advantages"] - 0.5 * beta * log_ratio_P.square()).sum()
    return loss, {"loss:sum": _total(loss), **_ratio_metrics(log_ratio_P, inside_P)}


def gspo(lp_P: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, dict[str, Measure]]:
    """L = -sum min(s_t * A, clamp(s_t, low, high) * A) (GSPO-token, arXiv 2507.18071). s_t has the value of its
    sequence's ratio, the geometric mean of r over the positions that `sequence_ratio_mask` marks, and the gradient of
    its own lp. `lengths` [S]: of the sequences; if absent, all positions are one sequence."""
    advantages_P, inside_P, marked_P = inputs["advantages"], _pushed(inputs), inputs["sequence_ratio_mask"] != 0
    low, high = _bounds("gspo", inputs, config)
    log_ratio_P = torch.where(marked_P, lp_P.detach() - inputs["logprobs"], torch.zeros_like(lp_P.detach()))
    lengths_S = inputs["lengths"] if "lengths" in inputs else torch.tensor([len(lp_P)], device=lp_P.device)
    # Sums each sequence in its own order, on a GPU too, where `index_add` adds in any order.
    sums_S = torch.segment_reduce(log_ratio_P, "sum", lengths=lengths_S)
    sizes_S = torch.segment_reduce(marked_P.to(sums_S.dtype), "sum", lengths=lengths_S)
    mean_P = (sums_S / sizes_S.clamp(min=1)).repeat_interleave(lengths_S, output_size=len(lp_P))
    # Outside the loss the value must not matter, even where exp would overflow.
    mean_P = torch.where(inside_P, mean_P, torch.zeros_like(mean_P))
    ratio_P = _clipped_exp(mean_P + (lp_P - lp_P.detach()), advantages_P)
    free_P, clamped_P = ratio_P * advantages_P, ratio_P.clamp(low, high) * advantages_P
    loss = -torch.minimum(free_P, clamped_P).sum()
    # The q of an unmarked position is not read by this loss.
    metrics = {"loss:sum": _total(loss), **_ratio_metrics(log_ratio_P, inside_P & marked_P)}
    metrics["tokens:sum"] = _total(inside_P.sum())
    metrics["sequence_ratio:mean"] = _mean_over_loss(_told(mean_P).exp(), inside_P)
    metrics["clip_fraction:mean"] = _mean_over_loss(clamped_P.detach() < free_P.detach(), inside_P)
    return loss, metrics


def stable_reinforce(lp_P: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, dict[str, Measure]]:
    """L = sum [-keep * r * A + kl_coeff * (lp - q)^2]: importance-weighted REINFORCE inside a trust region.

    keep = 0 for a position that has left the region: its ratio is out of [clip_low_threshold, clip_high_threshold]
    (IcePop's mask, applied to r), or its probability has moved by more than `prob_threshold` in the direction in which
    its advantage pushes it (DPPO's mask). Such a position still feels the quadratic pull towards the sampler. The
    combination and its defaults are ours, since Tinker publishes no formula; docs/losses.md gives the reasons."""
    advantages_P, inside_P = inputs["advantages"], _pushed_or_sampled(inputs)
    log_ratio_P = _log_ratio(lp_P, inputs, inside_P)
    low, high = _bounds("stable_reinforce", inputs, config)
    limit = _setting("stable_reinforce", "prob_threshold", config)
    ratio_P = log_ratio_P.detach().exp()
    moved_P = lp_P.detach().exp() - inputs["logprobs"].exp()
    keep_P = (ratio_P >= low) & (ratio_P <= high) & (moved_P * advantages_P.sign() <= limit)
    # The ratio of a masked position may overflow: it must not reach a product.
    pull_P = torch.where(keep_P, log_ratio_P, torch.zeros_like(log_ratio_P)).exp() * keep_P * advantages_P
    drift = log_ratio_P.square().sum()
    loss = -pull_P.sum() + _setting("stable_reinforce", "kl_coeff", config) * drift
    metrics = {"loss:sum": _total(loss), **_ratio_metrics(log_ratio_P, inside_P)}
    metrics["mask_fraction:mean"] = _mean_over_loss(~keep_P, inside_P)
    metrics["squared_log_ratio:mean"] = _mean_over_loss(log_ratio_P.detach().square(), inside_P)
    return loss, metrics


LOSS_FUNCTIONS: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    "stable_reinforce": stable_reinforce,
}


def _pushed(inputs: Inputs) -> Tensor:
    """bool [P]: the positions inside a loss whose every term has the factor A."""
    return inputs["advantages"] != 0


def _pushed_or_sampled(inputs: Inputs) -> Tensor:
    """bool [P]: the positions inside a loss with a quadratic term, which remains at an advantage of 0."""
    return (inputs["advantages"] != 0) | (inputs["logprobs"] != 0)


def _log_ratio(lp_P: Tensor, inputs: Inputs, inside_P: Tensor) -> Tensor:
    """lp - q, and 0 with no gradient outside the loss."""
    return torch.where(inside_P, lp_P - inputs["logprobs"], torch.zeros_like(lp_P))


def _clipped_exp(log_ratio_P: Tensor, advantages_P: Tensor) -> Tensor:
    """r, for a loss that clips it from above if A > 0. There lp - q is cut before r overflows float32: the gradient of
    an r of inf would be 0 times inf, NaN. If A < 0 nothing clips r, and the user should learn of its overflow."""
    return torch.where(advantages_P > 0, log_ratio_P.clamp(max=MAX_LOG_RATIO), log_ratio_P).exp()


def _bounds(loss_fn: str, inputs: Inputs, config: Config) -> tuple[Tensor, Tensor]:
    """The bounds of r: thresholds per token if given, else those of the config, else the loss's defaults."""
    defaults = clip_of(LOSSES[loss_fn])
    assert defaults is not None
    like = inputs["advantages"]
    low, high = (
        inputs[name] if name in inputs else like.new_tensor(float(config.get(name, default)))
        for name, default in zip(THRESHOLDS, defaults, strict=True)
    )
    return low, high


def _setting(loss_fn: str, name: str, config: Config) -> float:
    """A number of the loss's config, or its default."""
    default = LOSSES[loss_fn].config[name]
    assert default is not None
    return float(config.get(name, default))


def _ratio_metrics(log_ratio_P: Tensor, inside_P: Tensor) -> dict[str, Measure]:
    """`mismatch_kl` estimates KL(sampler || trainer) per token by r - 1 - log r, which is unbiased and never negative
    (Schulman, "Approximating KL divergence", k3). Computed with expm1, because for r near 1 the difference r - 1 would
    be mere rounding."""
    log_ratio_P = _told(log_ratio_P)
    return {
        "mismatch_kl:mean": _mean_over_loss(log_ratio_P.expm1() - log_ratio_P, inside_P),
        "ratio:mean": _mean_over_loss(log_ratio_P.exp(), inside_P),
        "tokens:sum": _total(inside_P.sum()),
    }


def _told(log_ratio_P: Tensor) -> Tensor:
    """log r as reported in metrics, float64 [P]: a loss that clips a ratio beyond float32 succeeds, and JSON has no
    infinity."""
    return log_ratio_P.detach().double().clamp(max=MAX_TOLD_LOG_RATIO)


def _total(value: Tensor) -> Measure:
    return Measure(float(value.detach()))


def _mean_over_loss(values_P: Tensor, inside_P: Tensor) -> Measure:
    # A product with 0 would be NaN if a value outside has overflowed.
    return Measure(float(torch.where(inside_P, values_P, 0).sum(dtype=torch.float64)), float(inside_P.sum()))
