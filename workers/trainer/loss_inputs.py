"""Which inputs and settings each loss takes, and the check of both.

Called twice, with the same outcome: by the API before an operation is accepted, and by the trainer before it spends
compute. numpy only: the API process has no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workers.model.config import DecoderConfig
from workers.trainer.custom_format import CustomLoss, CustomLossError, check_custom_data

Array = np.ndarray[Any, np.dtype[Any]]

#: Bounds on the probability ratio exp(lp - q): absolute values, not epsilons. Also legal as per-token inputs.
THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")

#: Accepted beside `logprobs` and `advantages` because published RL data carries them; the formulas do not use them.
#: A position is taken out of an RL loss by a zero advantage.
UNUSED_IN_RL = frozenset({"weights", "mask"})

#: The loss_fn whose formula the user has uploaded (custom_format.py).
CUSTOM = "custom"

#: Says which positions of a datum make up its sequence ratio (gspo).
RATIO_MASK = "sequence_ratio_mask"


#: The experts that each input token must choose, [N, mixture layers, choices]: rollout routing replay.
ROUTES = "routed_experts"


class LossInputError(ValueError):
    """The loss, its configuration or a datum's inputs are not usable; the message names which and why."""


@dataclass(frozen=True)
class LossSpec:
    """What one loss takes: `required` inputs per datum, `settings` with their defaults (numbers of at least 0)."""

    required: tuple[str, ...]
    settings: Mapping[str, float] = field(default_factory=dict)
    multi_target: bool = False

    @property
    def clip(self) -> tuple[float, float] | None:
        """The default bounds, if this loss clips or masks by the ratio."""
        low, high = (self.settings.get(name) for name in THRESHOLDS)
        return None if low is None or high is None else (low, high)

    @property
    def accepted(self) -> frozenset[str]:
        names = frozenset(self.required)
        if self.required != _CROSS_ENTROPY:
            names |= UNUSED_IN_RL
        return names | frozenset((ROUTES, *THRESHOLDS)) if self.clip else names | {ROUTES}


def _clip(low: float, high: float) -> dict[str, float]:
    return dict(zip(THRESHOLDS, (low, high), strict=True))


_CROSS_ENTROPY = ("target_tokens", "weights")
_RL = ("target_tokens", "logprobs", "advantages")

#: docs/losses.md says where each default comes from.
LOSSES: dict[str, LossSpec] = {
    "cross_entropy": LossSpec(_CROSS_ENTROPY, multi_target=True),
    "importance_sampling": LossSpec(_RL),
    "ppo": LossSpec(_RL, _clip(0.8, 1.2)),
    "cispo": LossSpec(_RL, _clip(0.0, 4.0)),
    "dro": LossSpec(_RL, {"beta": 0.1}),
    "gspo": LossSpec((*_RL, RATIO_MASK), _clip(1 - 3e-4, 1 + 4e-4)),
    "stable_reinforce": LossSpec(_RL, {**_clip(0.125, 8.0), "prob_threshold": 0.2, "kl_coeff": 0.01}),
}


def check_loss(
    loss_fn: str,
    config: Mapping[str, float | str],
    datum_inputs: Sequence[Mapping[str, Array]],
    lengths: Sequence[int] | None = None,
    custom: CustomLoss | None = None,
) -> None:
    """Check an operation's loss, its config and the `loss_fn_inputs` of all its data.

    `lengths` are the numbers of model input tokens; with them, target i must belong to input token i. `custom` is the
    uploaded loss that a `loss_fn` of "custom" names.
    Raises LossInputError naming the datum index, the field, the limit and the value.
    """
    if loss_fn == CUSTOM:
        _check_custom(custom, config, datum_inputs, lengths)
        return
    spec = LOSSES.get(loss_fn)
    if spec is None:
        raise LossInputError(f"unknown loss_fn {loss_fn!r}; this server has {', '.join(sorted([*LOSSES, CUSTOM]))}")
    _check_config(loss_fn, spec, config)
    for index, inputs in enumerate(datum_inputs):
        try:
            _check_datum(loss_fn, spec, config, inputs, None if lengths is None else lengths[index])
        except LossInputError as error:
            raise LossInputError(f"datum {index}: {error}") from None


def loss_id_of(config: Mapping[str, float | str]) -> str:
    """The uploaded loss that the config of a custom loss names."""
    loss_id = config.get("loss_id")
    if set(config) != {"loss_id"} or not isinstance(loss_id, str):
        raise LossInputError(f"loss_fn_config of a custom loss is its loss_id alone, a text; got {dict(config)!r:.200}")
    return loss_id


def _check_custom(
    loss: CustomLoss | None,
    config: Mapping[str, float | str],
    datum_inputs: Sequence[Mapping[str, Array]],
    lengths: Sequence[int] | None,
) -> None:
    if loss is None:
        raise LossInputError(f"no custom loss {loss_id_of(config)!r}")
    try:
        check_custom_data(loss, datum_inputs)
    except CustomLossError as error:
        raise LossInputError(str(error)) from None
    spec = LossSpec(_CROSS_ENTROPY, multi_target=True)
    for index, inputs in enumerate(datum_inputs):
        try:
            _check_targets(spec, CUSTOM, inputs["target_tokens"], None if lengths is None else lengths[index])
        except LossInputError as error:
            raise LossInputError(f"datum {index}: {error}") from None


def _check_config(loss_fn: str, spec: LossSpec, config: Mapping[str, float | str]) -> None:
    for key, value in config.items():
        if key not in spec.settings:
            takes = f"takes {', '.join(spec.settings)}" if spec.settings else "takes none"
            raise LossInputError(f"unknown loss_fn_config key {key!r}: {loss_fn} {takes}")
        if isinstance(value, str) or not math.isfinite(value) or value < 0:
            raise LossInputError(f"loss_fn_config {key!r} must be a finite number >= 0, got {value!r}")
    if spec.clip:
        low, high = (config.get(key, default) for key, default in zip(THRESHOLDS, spec.clip, strict=True))
        if float(low) > float(high):
            raise LossInputError(f"loss_fn_config: clip_low_threshold {low} is above clip_high_threshold {high}")


def _check_datum(
    loss_fn: str, spec: LossSpec, config: Mapping[str, float | str], inputs: Mapping[str, Array], length: int | None
) -> None:
    for name in spec.required:
        if name not in inputs:
            raise LossInputError(f"{loss_fn} needs the input {name!r}; it has {sorted(inputs)}")
    for name in inputs:
        if name not in spec.accepted:
            raise LossInputError(f"unknown input {name!r}: {loss_fn} takes {', '.join(sorted(spec.accepted))}")
        if name in THRESHOLDS and name in config:
            raise LossInputError(f"{name!r} is given both in loss_fn_config and per token")
    targets = inputs["target_tokens"]
    _check_targets(spec, loss_fn, targets, length)
    for name, values in inputs.items():
        if values.shape != targets.shape and name != ROUTES:
            raise LossInputError(f"{name!r} has shape {values.shape}, target_tokens has {targets.shape}")
        _check_numbers(name, values)
    if spec.clip:
        _check_token_thresholds(spec.clip, config, inputs)
    if RATIO_MASK in spec.required and not inputs[RATIO_MASK].any() and inputs["advantages"].any():
        raise LossInputError(f"{RATIO_MASK!r} marks no position, but some advantages are not 0")


def check_routes(data: Sequence[Mapping[str, Array]], lengths: Sequence[int], config: DecoderConfig) -> None:
    """Check the replayed routing of all data, of a model with this `config`. Raises LossInputError."""
    for index, (inputs, length) in enumerate(zip(data, lengths, strict=True)):
        routes = inputs.get(ROUTES)
        if routes is None:
            continue
        at = f"datum {index}: {ROUTES!r}"
        shape = (length, len(config.mixture_layers), config.experts_per_token)
        if not config.num_experts:
            raise LossInputError(f"{at}: this model has no experts")
        if routes.shape != shape:
            raise LossInputError(f"{at} has shape {routes.shape}; it needs [tokens, mixture layers, choices] {shape}")
        if not np.issubdtype(routes.dtype, np.integer):
            raise LossInputError(f"{at} must be integers, got {routes.dtype}")
        free = (routes == -1).all(axis=2, keepdims=True)
        bad = np.flatnonzero((~free & ((routes < 0) | (routes >= config.num_experts))).any(axis=(1, 2)))
        if bad.size:
            raise LossInputError(
                f"{at} at token {int(bad[0])}: every choice is an expert 0 to {config.num_experts - 1}, or all of a "
                "layer are -1, which leaves them to the router"
            )


def _check_targets(spec: LossSpec, loss_fn: str, targets: Array, length: int | None) -> None:
    if not np.issubdtype(targets.dtype, np.integer):
        raise LossInputError(f"'target_tokens' must be integers, got {targets.dtype}")
    if targets.ndim != 1 and not (spec.multi_target and targets.ndim == 2):
        shapes = "[N] or [N, K]" if spec.multi_target else "[N]"
        raise LossInputError(f"'target_tokens' of {loss_fn} must have shape {shapes}, got {targets.shape}")
    if targets.size == 0:
        raise LossInputError("'target_tokens' is empty")
    if length is not None and targets.shape[0] != length:
        raise LossInputError(f"'target_tokens' has {targets.shape[0]} positions, the model input {length} tokens")
    if int(targets.min()) < 0:
        raise LossInputError(f"'target_tokens' holds the negative id {int(targets.min())}")


def _check_numbers(name: str, values: Array) -> None:
    if values.dtype.kind not in "fiub":
        raise LossInputError(f"{name!r} must be numbers, got {values.dtype}")
    bad = ~np.isfinite(values)
    if bad.any():
        position = int(np.flatnonzero(bad.reshape(-1))[0])
        raise LossInputError(f"{name!r} is {values.reshape(-1)[position]} at element {position}; it must be finite")


def _check_token_thresholds(
    defaults: tuple[float, float], config: Mapping[str, float | str], inputs: Mapping[str, Array]
) -> None:
    if not any(name in inputs for name in THRESHOLDS):
        return
    low, high = (
        inputs[name] if name in inputs else np.asarray(float(config.get(name, default)))
        for name, default in zip(THRESHOLDS, defaults, strict=True)
    )
    if (low < 0).any():
        raise LossInputError(f"'clip_low_threshold' holds the negative ratio bound {low.min()}")
    if (low > high).any():
        raise LossInputError("'clip_low_threshold' is above 'clip_high_threshold' at some positions")
