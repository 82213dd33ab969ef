"""`Loss`: a loss by its name on the server, or a function that is traced and run there.

A loss is a sum over positions. The loop scales it in one place: `Loss.datum` multiplies each position by a weight, the
advantages of the server's own losses and the mask of traced ones. A term of the server's that has no advantage as a
factor is scaled by its setting (`PULLS`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from weft.future import APIFuture
from weft.loss_handle import LossHandle
from weft.training_client import TrainingClient
from weft.wire.checks.batches import config_problems
from weft.wire.checks.losses import LOSSES, OF_THE_FORWARD
from weft.wire.inputs import Datum
from weft.wire.tensor import TensorData
from weft.wire.training import ForwardBackwardOutput

#: Losses with a quadratic term, which pulls towards the sampler whatever the advantage, and the setting that is its
#: factor. Their data bring `weights` along, which the server does not use: they tell what to scale the setting by.
PULLS = {"dro": "beta", "stable_reinforce": "kl_coeff"}


#: The metrics in which a traced loss reports sums over its tokens, and the metric with the number of these tokens.
_OF_TOKENS, _TOKENS = ("custom/mismatch_kl:sum", "custom/masked:sum"), "custom/tokens:sum"
#: The inputs that `Loss.datum` has from every rollout.
OF_ROLLOUTS = frozenset({"target_tokens", "logprobs", "advantages", "mask", "q", "weights", *OF_THE_FORWARD})


def means(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a traced loss as the server's own losses tell theirs: means over the tokens that it trained. The
    server by itself counts all positions of such a loss."""
    if _TOKENS not in metrics:
        return dict(metrics)
    found = {name: value for name, value in metrics.items() if name != _TOKENS}
    found |= {name: found[name] / max(1.0, metrics[_TOKENS]) for name in _OF_TOKENS if name in found}
    return found | {"tokens:sum": metrics[_TOKENS]}


@dataclass(frozen=True)
class Loss:
    """A loss and its settings.

    `fn` is None for the server's own; else it takes the logprobs of one datum and what its other parameters name: `q`
    (the sampler's logprobs), `advantages`, `mask`, `old` (the trainer's before the first of several steps), `ref`.
    `bounded`: it clips or masks tokens that have moved far from their sampler, and so stands a lag above 1.
    `all_data`: it learns also from what has no advantage, which the others leave out.
    """

    name: str
    fn: Callable[..., Any] | None = None
    config: Mapping[str, float] = field(default_factory=dict)
    bounded: bool = True
    all_data: bool = False

    def __post_init__(self) -> None:
        if self.fn is None and self.name in LOSSES:
            for problem in config_problems(self.name, LOSSES[self.name], self.config):
                raise ValueError(f"the loss {self.name!r}: {problem.what}")

    @property
    def reads(self) -> tuple[str, ...]:
        """Inputs besides `target_tokens`."""
        if self.fn is not None:
            return tuple(inspect.signature(self.fn).parameters)[1:]
        if self.name == "cross_entropy":
            return ("weights",)
        return ("logprobs", "advantages", "weights") if self.name in PULLS else ("logprobs", "advantages")

    def made(self, run: TrainingClient) -> APIFuture[LossHandle] | None:
        """The loss, made known to the server of `run`; None for a loss that the server has by itself."""
        if self.fn is None:
            return None
        return run.create_custom_loss(self.fn, {"logprobs": 1, **dict.fromkeys(self.reads, 1)})

    def datum(self, datum: Datum, weight: float = 1.0, **more: Any) -> Datum:
        """A datum of `rollout.data_of`, with `more` inputs, as this loss takes it, each position times `weight`."""
        given = {name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()} | more
        scaled = "advantages" if self.fn is None else "mask"
        given[scaled] = given[scaled] * np.float32(weight)
        given |= {"q": given["logprobs"], "weights": given["mask"] * np.float32(weight if self.fn is None else 1)}
        missing = [name for name in self.reads if name not in given]
        if missing:
            raise ValueError(f"the loss {self.name!r} reads {missing[0]!r}, which the data do not have")
        kept = ("target_tokens", *OF_THE_FORWARD)
        inputs = {name: datum.loss_fn_inputs[name] for name in kept if name in datum.loss_fn_inputs}
        inputs |= {name: TensorData.from_numpy(np.asarray(given[name], np.float32)) for name in self.reads}
        return replace(datum, loss_fn_inputs=inputs)

    def forward_backward(
        self, run: TrainingClient, data: Sequence[Datum], handle: LossHandle | None
    ) -> APIFuture[ForwardBackwardOutput]:
        """One pass over `data`, which `datum` has made; `handle` is what `made` gave."""
        if handle is None:
            return run.forward_backward(data, self.name, self._scaled(data))
        return run.forward_backward_custom(data, handle)

    def _scaled(self, data: Sequence[Datum]) -> dict[str, float]:
        """The settings, with that of a quadratic term times the data's weight."""
        pull = PULLS.get(self.name)
        if pull is None:
            return dict(self.config)
        found = sorted({float(np.max(datum.loss_fn_inputs["weights"].to_numpy())) for datum in data} - {0.0})
        if len(found) > 1:
            raise ValueError(
                f"the loss {self.name!r} is given data of weights {found[0]:g} and {found[-1]:g} at once, and has one"
                f" {pull!r} for all: give each weight's data by themselves"
            )
        setting = self.config.get(pull, LOSSES[self.name].config[pull])
        return {**self.config, pull: float(setting or 0.0) * (found[0] if found else 1.0)}


def cross_entropy() -> Loss:
    """-lp of every drawn token, whatever it earned: rejection sampling with a filter."""
    return Loss("cross_entropy", all_data=True)


def importance_sampling() -> Loss:
    """-rho A. Nothing bounds rho."""
    return Loss("importance_sampling", bounded=False)


def ppo(low: float = 0.8, high: float = 1.2) -> Loss:
    """-min(rho A, clamp(rho, low, high) A)."""
    return Loss("ppo", config={"clip_low_threshold": low, "clip_high_threshold": high})


def cispo(low: float = 0.0, high: float = 4.0) -> Loss:
    """-sg(clamp(rho, low, high)) A lp."""
    return Loss("cispo", config={"clip_low_threshold": low, "clip_high_threshold": high})


def dro(beta: float = 0.1) -> Loss:
    """-(lp A - beta/2 (lp - q)^2)."""
    return Loss("dro", config={"beta": beta})


def stable_reinforce(**config: float) -> Loss:
    """The server's REINFORCE in a trust region; docs/losses.md has its settings."""
    return Loss("stable_reinforce", config=config)
