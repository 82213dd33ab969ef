"""A loop, written down before it runs, to be priced (`estimate`) and checked (`validate`).

    plan = Plan(
        "weft/tiny-moe",
        rank=16,
        steps=[
            PlannedSample(prompts, num_samples=8, sampling_params=SamplingParams(max_tokens=64)),
            PlannedTrain(data, "importance_sampling"),
            PlannedUpdate(AdamParams(learning_rate=1e-4)),
        ],
        times=100,
    )

A datum or parameters that are not built yet, or cannot be built because a field is wrong, may be given as dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from weft.wire.inputs import AnyPrompt, Datum, ModelInput
from weft.wire.sampling import SamplingParams
from weft.wire.training import AdamParams, DimuonParams

if TYPE_CHECKING:
    from weft.loss_handle import LossHandle

AnyDatum = Datum | Mapping[str, Any]


@dataclass(frozen=True)
class PlannedTrain:
    """A `forward_backward`, or with `forward_only` a `forward`.

    A `loss_fn` that is no name is a custom loss: a callable, or a handle of `create_custom_loss`.
    """

    data: Sequence[AnyDatum]
    loss_fn: str | Callable[..., Any] | LossHandle = "cross_entropy"
    loss_fn_config: Mapping[str, float | str] | None = None
    forward_only: bool = False


@dataclass(frozen=True)
class PlannedUpdate:
    """An `optim_step`."""

    params: AdamParams | DimuonParams | Mapping[str, Any] = field(default_factory=AdamParams)


@dataclass(frozen=True)
class PlannedSample:
    """A `sample` of each prompt. With `expected_tokens` per sequence the estimate is closer; without it, it is the most
    that the sample can cost."""

    prompts: Sequence[AnyPrompt]
    num_samples: int = 1
    sampling_params: SamplingParams | Mapping[str, Any] = field(default_factory=SamplingParams)
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    expected_tokens: int | None = None


@dataclass(frozen=True)
class PlannedSave:
    """A save of the run under a name: its state, its sampler weights or an export."""

    name: str
    kind: Literal["weights", "sampler_weights", "external_weights"] = "weights"
    ttl_seconds: int | None = None
    overwrite: bool = False


PlannedStep = PlannedTrain | PlannedUpdate | PlannedSample | PlannedSave


@dataclass(frozen=True)
class Plan:
    """A run and its loop: all `steps`, `times` over. `base_model` may be left out for a run that exists."""

    base_model: str | None = None
    steps: Sequence[PlannedStep] = ()
    times: int = 1
    rank: int = 32
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    optimizer: str = "adamw"


def datum_of(datum: AnyDatum) -> Datum:
    """`datum` itself if it is a `Datum`, or else a `Datum` made of its fields."""
    if isinstance(datum, Datum):
        return datum
    fields = dict(datum)
    given = fields.get("model_input")
    if isinstance(given, Mapping):
        fields["model_input"] = ModelInput(**given)
    return Datum(**fields)


def prompt_length(prompt: AnyPrompt) -> int:
    """Tokens of a prompt."""
    return prompt.length if isinstance(prompt, ModelInput) else len(prompt)
