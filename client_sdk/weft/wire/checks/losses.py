"""The losses of a server, and the names of inputs that more than one part of the code must know."""

from __future__ import annotations

from collections.abc import Mapping

from weft.wire.account.limits import LossLimits

#: Bounds on the probability ratio exp(lp - q): absolute values, not epsilons. Also legal as per-token inputs.
THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")

#: The largest logarithm whose exp is still a float32.
MAX_LOG_RATIO = 88.0
#: exp of it is still a float64, and so is the sum of a billion of them; JSON has no word for an infinite one.
MAX_TOLD_LOG_RATIO = 688.0

#: The loss_fn whose formula the user has uploaded (custom_format.py).
CUSTOM = "custom"

#: The input that marks which positions of a datum belong to its sequence ratio (gspo).
RATIO_MASK = "sequence_ratio_mask"

#: The experts that each input token must choose, [T, mixture layers, choices]: rollout routing replay.
ROUTES = "routed_experts"

#: The temperatures that the tokens of a datum were sampled at: one value, or one for each position. Training takes
#: log-probabilities at these.
TEMPERATURE = "sampling_temperature"

#: Inputs that every loss takes, since the forward pass uses them. Their shapes are not those of the targets.
OF_THE_FORWARD = (ROUTES, TEMPERATURE)

_RL = ["target_tokens", "logprobs", "advantages"]


def _clip(low: float, high: float) -> dict[str, float]:
    return dict(zip(THRESHOLDS, (low, high), strict=True))


def _rl(config: Mapping[str, float] | None = None, *more: str, recorded: bool = False) -> LossLimits:
    """`weights` and `mask` are accepted because published RL data carry them; the formulas do not use them. A position
    is taken out of an RL loss by a zero advantage."""
    config = config or {}
    optional = {"weights", "mask", *OF_THE_FORWARD, *(name for name in THRESHOLDS if name in config)}
    return LossLimits(
        required=[*_RL, *more],
        optional=sorted(optional),
        config=dict(config),
        recorded=["logprobs"] if recorded else [],
    )


#: docs/losses.md says where each default comes from.
LOSSES: dict[str, LossLimits] = {
    "cross_entropy": LossLimits(
        required=["target_tokens", "weights"], optional=list(OF_THE_FORWARD), multi_target=True
    ),
    "importance_sampling": _rl(),
    "ppo": _rl(_clip(0.8, 1.2)),
    "cispo": _rl(_clip(0.0, 4.0)),
    "dro": _rl({"beta": 0.1}),
    "gspo": _rl(_clip(1 - 3e-4, 1 + 4e-4), RATIO_MASK),
    "stable_reinforce": _rl({**_clip(0.125, 8.0), "prob_threshold": 0.2, "kl_coeff": 0.01}, recorded=True),
}

#: A custom loss says by itself what it reads.
WITH_CUSTOM: dict[str, LossLimits] = {
    **LOSSES,
    CUSTOM: LossLimits(required=["target_tokens"], config={"loss_id": None}, multi_target=True, other_inputs=True),
}


def clip_of(loss: LossLimits) -> tuple[float, float] | None:
    """The default bounds, if this loss clips or masks by the ratio."""
    low, high = (loss.config.get(name) for name in THRESHOLDS)
    return None if low is None or high is None else (float(low), float(high))


def loss_id_of(config: Mapping[str, float | str]) -> str | None:
    """The uploaded loss that the config of a custom loss names; None if the config is anything else than that."""
    loss_id = config.get("loss_id")
    return loss_id if len(config) == 1 and isinstance(loss_id, str) else None
