"""The losses, one function each, with their metrics beside them.

Every loss is the plain SUM over the positions it is given: no mean and no normalisation, so that two half batches equal
one whole batch. Shapes: P positions of one slice, flattened over data (and over K targets per position).
lp_P = log p(target) now, q_P = `logprobs` when sampled, A_P = `advantages`, r = exp(lp - q).
Formulas: the "Losses" page of the Tinker docs; its thresholds are absolute bounds on r.

A position with zero advantage is outside an RL loss: it gives neither loss nor gradient, whatever its q (prompt
positions often carry a placeholder for which exp(lp - q) overflows).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from workers.trainer.loss_inputs import LOSSES, THRESHOLDS
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
    log_ratio_P = _log_ratio(lp_P, inputs)
    loss = -(log_ratio_P.exp() * inputs["advantages"]).sum()
    return loss, {"loss:sum": _total(loss), **_ratio_metrics(log_ratio_P, inputs)}


def ppo(lp_P: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, dict[str, Measure]]:
    """L = -sum min(r * A, clamp(r, low, high) * A). `clip_fraction`: positions where the clamped term is the smaller
    one, so that no gradient flows."""
    log_ratio_P, advantages_P = _log_ratio(lp_P, inputs), inputs["advantages"]
    low, high = _bounds("ppo", inputs, config)
    free_P = log_ratio_P.exp() * advantages_P
    clamped_P = log_ratio_P.exp().clamp(low, high) * advantages_P
    loss = -torch.minimum(free_P, clamped_P).sum()
    metrics = {"loss:sum": _total(loss), **_ratio_metrics(log_ratio_P, inputs)}
    metrics["clip_fraction:mean"] = _mean_over_loss(clamped_P.detach() < free_P.detach(), inputs)
    return loss, metrics


def cispo(lp_P: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, dict[str, Measure]]:
    """L = -sum detach(clamp(r, low, high)) * lp * A: clipping bounds a position's weight and never stops its gradient.
    `clip_fraction`: positions whose ratio is out of bounds."""
    log_ratio_P = _log_ratio(lp_P, inputs)
    low, high = _bounds("cispo", inputs, config)
    ratio_P = log_ratio_P.detach().exp()
    weight_P = ratio_P.clamp(low, high)
    loss = -(weight_P * lp_P * inputs["advantages"]).sum()
    metrics = {"loss:sum": _total(loss), **_ratio_metrics(log_ratio_P, inputs)}
    metrics["clip_fraction:mean"] = _mean_over_loss(weight_P != ratio_P, inputs)
    return loss, metrics


LOSS_FUNCTIONS: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
}


def _log_ratio(lp_P: Tensor, inputs: Inputs) -> Tensor:
    """lp - q, and 0 with no gradient outside the loss."""
    return torch.where(inputs["advantages"] != 0, lp_P - inputs["logprobs"], torch.zeros_like(lp_P))


def _bounds(loss_fn: str, inputs: Inputs, config: Config) -> tuple[Tensor, Tensor]:
    """Per-token thresholds if given, else those of the config, else the loss's defaults."""
    defaults = LOSSES[loss_fn].clip
    assert defaults is not None
    like = inputs["advantages"]
    low, high = (
        inputs[name] if name in inputs else like.new_tensor(float(config.get(name, default)))
        for name, default in zip(THRESHOLDS, defaults, strict=True)
    )
    return low, high


def _ratio_metrics(log_ratio_P: Tensor, inputs: Inputs) -> dict[str, Measure]:
    """`mismatch_kl` estimates KL(sampler || trainer) per token with the unbiased, never negative estimator
    r - 1 - log r (Schulman, "Approximating KL divergence", k3)."""
    log_ratio_P = log_ratio_P.detach()
    ratio_P = log_ratio_P.exp()
    return {
        "mismatch_kl:mean": _mean_over_loss(ratio_P - 1 - log_ratio_P, inputs),
        "ratio:mean": _mean_over_loss(ratio_P, inputs),
        "tokens:sum": _total((inputs["advantages"] != 0).sum()),
    }


def _total(value: Tensor) -> Measure:
    return Measure(float(value.detach()))


def _mean_over_loss(values_P: Tensor, inputs: Inputs) -> Measure:
    inside_P = inputs["advantages"] != 0
    return Measure(float((values_P * inside_P).sum()), float(inside_P.sum()))
