"""What the service promises, in plain torch: transformers' own model, a LoRA written by hand, textbook losses and
optimizers. It imports nothing of ours, and knows of us only what docs/ publish: the files of an export, the formulas.

One `Plain` is one run, trained alone and patiently: no passes, no slices, no paging, no neighbours. A datum is a
dictionary of lists or arrays: `tokens` [T], `target_tokens` [T] or [T, targets], and the other inputs of its loss;
logits are divided by `sampling_temperature` [1] or [T].
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

Datum = Mapping[str, Any]
Factors = dict[str, Tensor]
Loss = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]

#: Sequences that are computed at once, to bound memory; the number changes no result.
BATCH = 64
PREFIX = "base_model.model."
#: Names in Tinker's layout for the parts of stacked experts.
EXPERTS = {"w1": "gate", "w2": "down", "w3": "up"}


def load_base(folder: Path) -> Any:
    """The frozen model, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    return model.eval().requires_grad_(False)


# ---- the adapter


def load_factors(export: Path) -> tuple[Factors, float]:
    """The LoRA factors of an export in Tinker's layout, `module.A` and `module.B`, and alpha / rank."""
    config = json.loads((export / "adapter_config.json").read_text())
    found = load_file(export / "adapter_model.safetensors")
    names = {key: key.removeprefix(PREFIX).removesuffix(".weight").replace(".lora_", ".") for key in found}
    return {names[key]: tensor for key, tensor in found.items()}, config["lora_alpha"] / config["r"]


def folded(model: Any, factors: Factors, scale: float) -> Factors:
    """All weights of the model with the adapter added: W + scale B A. A factor [1, ..] is shared by all experts."""
    weights = dict(model.named_parameters())

    def delta(module: str) -> Tensor:
        return scale * (factors[f"{module}.B"] @ factors[f"{module}.A"])

    for module in sorted({name.rpartition(".")[0] for name in factors}):
        parent, _, last = module.rpartition(".")
        if last == "unembed_tokens":
            weights["lm_head.weight"] = weights["lm_head.weight"] + delta(module)
        elif EXPERTS.get(last) == "gate":  # with "up" in one tensor
            both = torch.cat([delta(f"{parent}.w1"), delta(f"{parent}.w3")], dim=1)
            weights[f"{parent}.gate_up_proj"] = weights[f"{parent}.gate_up_proj"] + both
        elif EXPERTS.get(last) == "down":
            weights[f"{parent}.down_proj"] = weights[f"{parent}.down_proj"] + delta(module)
        elif last not in EXPERTS:
            weights[f"{module}.weight"] = weights[f"{module}.weight"] + delta(module)
    return weights


# ---- losses: lp is the targets' log-probability; `datum` holds the other inputs, of the same shape


def cross_entropy(lp: Tensor, datum: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    return -(datum["weights"] * lp).sum()


def importance_sampling(lp: Tensor, datum: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    return -(torch.exp(lp - datum["logprobs"]) * datum["advantages"]).sum()


def ppo(lp: Tensor, datum: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    ratio = torch.exp(lp - datum["logprobs"])
    clipped = ratio.clamp(config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2))
    return -torch.minimum(ratio * datum["advantages"], clipped * datum["advantages"]).sum()


def cispo(lp: Tensor, datum: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    ratio = torch.exp(lp - datum["logprobs"]).detach()
    ratio = ratio.clamp(config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0))
    return -(ratio * lp * datum["advantages"]).sum()


def dro(lp: Tensor, datum: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """A position with A = 0 and q = 0 is left out: the cookbook makes prompts so."""
    advantages, q = datum["advantages"], datum["logprobs"]
    inside = (advantages != 0) | (q != 0)
    return -(lp * advantages - config.get("beta", 0.1) / 2 * (lp - q) ** 2)[inside].sum()


def gspo(lp: Tensor, datum: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    marked = datum["sequence_ratio_mask"] != 0
    mean = (lp.detach() - datum["logprobs"])[marked].mean()
    ratio = torch.exp(mean) * torch.exp(lp - lp.detach())
    clipped = ratio.clamp(config.get("clip_low_threshold", 1 - 3e-4), config.get("clip_high_threshold", 1 + 4e-4))
    return -torch.minimum(ratio * datum["advantages"], clipped * datum["advantages"]).sum()


def stable_reinforce(lp: Tensor, datum: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """As docs/losses.md defines it; a position with A = 0 and q = 0 is left out, as for dro."""
    advantages, q = datum["advantages"], datum["logprobs"]
    ratio, moved = torch.exp(lp - q), torch.exp(lp.detach()) - torch.exp(q)
    low, high = config.get("clip_low_threshold", 0.125), config.get("clip_high_threshold", 8.0)
    outside = (ratio < low) | (ratio > high) | (moved * advantages.sign() > config.get("prob_threshold", 0.2))
    terms = -torch.where(outside, 0.0, ratio) * advantages + config.get("kl_coeff", 0.01) * (lp - q) ** 2
    return terms[(advantages != 0) | (q != 0)].sum()


LOSSES: dict[str, Loss] = {
    loss.__name__: loss for loss in (cross_entropy, importance_sampling, ppo, cispo, dro, gspo, stable_reinforce)
}


def loss_of(datum: Datum, lp: Tensor, loss_fn: str, config: Mapping[str, float] | None = None) -> Tensor:
    """The loss of one datum whose targets have these log-probabilities."""
    names = datum.keys() - {"tokens", "target_tokens", "sampling_temperature"}
    inputs = {name: torch.as_tensor(datum[name], dtype=lp.dtype) for name in names}
    return LOSSES[loss_fn](lp, inputs, config or {})


# ---- one run


@dataclass
class State:
    """What training changes. `m` and `v` are the optimizer's moments (dimuon has no second)."""

    factors: Factors
    m: Factors = field(default_factory=dict)
    v: Factors = field(default_factory=dict)
    steps: int = 0


@dataclass(frozen=True)
class Computed:
    """The answer of one forward or forward_backward. `unsure` marks positions that may rightly differ, because at or
    before them a router chose between two experts whose logits differ by less than `Plain.tie`."""

    loss: float
    logprobs: list[Tensor]
    unsure: list[Tensor]


class Plain:
    """A run that starts from these factors; `scale` is alpha / rank. `tie`: router logits that differ by less may
    change their order by round-off."""

    def __init__(self, model: Any, factors: Factors, scale: float, *, tie: float = 1e-5) -> None:
        self.model, self.scale, self.tie = model, scale, tie
        self.state = copied(State(factors))
        self.saved: dict[str, State] = {}

    def forward(self, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float] | None = None) -> Computed:
        with torch.no_grad():
            return self._compute(data, loss_fn, config or {})

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float] | None = None
    ) -> Computed:
        """Adds to the gradient until the next step."""
        return self._compute(data, loss_fn, config or {})

    def optim_step(self, params: Mapping[str, Any]) -> float:
        """One step of AdamW, or of dimuon if `params` has that type. Returns the gradient's norm before clipping."""
        state = self.state
        grads = {n: f.grad if f.grad is not None else torch.zeros_like(f) for n, f in state.factors.items()}
        norm = float(torch.stack([g.double().norm() for g in grads.values()]).norm())
        limit = params.get("grad_clip_norm", 0.0)
        if 0 < limit < norm:
            grads = {name: grad * (limit / norm) for name, grad in grads.items()}
        state.steps += 1
        with torch.no_grad():
            for name, factor in state.factors.items():
                (self._dimuon if params.get("type") == "dimuon" else self._adamw)(name, factor, grads[name], params)
                factor.grad = None
        return norm

    def save_state(self, name: str) -> None:
        """Weights and moments; a gradient that no step has used is not saved."""
        self.saved[name] = copied(self.state)

    def load_state(self, saved: State, *, optimizer: bool) -> None:
        self.state = copied(saved) if optimizer else State(copied(saved).factors)

    def resumed(self, saved: State, *, optimizer: bool) -> Plain:
        """Another run that goes on from there."""
        other = copy.copy(self)
        other.saved = {}
        other.load_state(saved, optimizer=optimizer)
        return other

    def _compute(self, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float]) -> Computed:
        total, logprobs, unsure = 0.0, [], []
        for first in range(0, len(data), BATCH):
            batch = data[first : first + BATCH]
            loss = torch.zeros((), dtype=self.model.dtype)
            for datum, (lp, doubt_T) in zip(batch, self._logprobs(batch), strict=True):
                loss = loss + loss_of(datum, lp, loss_fn, config)
                logprobs.append(lp.detach())
                unsure.append(doubt_T)
            if torch.is_grad_enabled():
                loss.backward()
            total += loss.item()
        return Computed(total, logprobs, unsure)

    def _logprobs(self, batch: Sequence[Datum]) -> list[tuple[Tensor, Tensor]]:
        """For each datum the log-probabilities of its targets, in their shape, and `unsure`. Shorter data are padded at
        their end, which causal attention does not see."""
        sizes = [len(datum["tokens"]) for datum in batch]
        tokens_NT = torch.zeros(len(batch), max(sizes), dtype=torch.int64)
        for row_T, datum, size in zip(tokens_NT, batch, sizes, strict=True):
            row_T[:size] = torch.as_tensor(datum["tokens"])
        weights = folded(self.model, self.state.factors, self.scale)
        arguments = {"input_ids": tokens_NT, "use_cache": False, "output_router_logits": True}
        out = torch.func.functional_call(self.model, weights, (), arguments)
        unsure_NT = self._unsure(out.router_logits, tokens_NT.shape)
        found = []
        for logits_TV, unsure_T, datum, size in zip(out.logits, unsure_NT, batch, sizes, strict=True):
            targets = torch.as_tensor(datum["target_tokens"], dtype=torch.int64)
            temperature = torch.as_tensor(datum.get("sampling_temperature", [1.0]), dtype=logits_TV.dtype)
            lp = (
                torch.log_softmax(logits_TV[:size] / temperature.view(-1, 1), -1)
                .gather(1, targets.view(size, -1))
                .view(targets.shape)
            )
            found.append((lp, unsure_T[:size]))
        return found

    def _unsure(self, router_logits: Sequence[Tensor], shape: torch.Size) -> Tensor:
        """[data, tokens]: whether, at the token or before it, the last chosen expert was chosen by less than `tie`."""
        chosen = self.model.config.num_experts_per_tok
        unsure_NT = torch.zeros(shape, dtype=torch.bool)
        for logits in router_logits:
            sorted_NTE = logits.detach().view(*shape, -1).sort(descending=True).values
            unsure_NT |= sorted_NTE[..., chosen - 1] - sorted_NTE[..., chosen] < self.tie
        return unsure_NT.cumsum(1) > 0

    def _adamw(self, name: str, weight: Tensor, grad: Tensor, params: Mapping[str, Any]) -> None:
        """Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2."""
        state, rate = self.state, params.get("learning_rate", 1e-4)
        beta1, beta2 = params.get("beta1", 0.9), params.get("beta2", 0.95)
        m = state.m[name] = beta1 * state.m.get(name, 0.0) + (1 - beta1) * grad
        v = state.v[name] = beta2 * state.v.get(name, 0.0) + (1 - beta2) * grad**2
        unbiased_m, unbiased_v = m / (1 - beta1**state.steps), v / (1 - beta2**state.steps)
        weight.mul_(1 - rate * params.get("weight_decay", 0.0))
        weight.sub_(rate * unbiased_m / (unbiased_v.sqrt() + params.get("eps", 1e-12)))

    def _dimuon(self, name: str, weight: Tensor, grad: Tensor, params: Mapping[str, Any]) -> None:
        """docs/losses.md, "dimuon"."""
        beta1 = params.get("beta1", 0.9)
        m = self.state.m[name] = beta1 * self.state.m.get(name, 0.0) + (1 - beta1) * grad
        weight.sub_(params["learning_rate"] * orthogonal(m))


def orthogonal(m: Tensor) -> Tensor:
    """U V^T of every matrix [.., rows, columns] by five of Muon's quintic steps and four cubic ones."""
    if m.shape[-2] > m.shape[-1]:
        return orthogonal(m.mT).mT
    x = m.double() / m.double().norm(dim=(-2, -1), keepdim=True).clamp(min=1e-300)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    for _ in range(4):
        x = 1.5 * x - 0.5 * (x @ x.mT) @ x
    return x.to(m.dtype)


def copied(state: State) -> State:
    """A copy without any gradient."""
    factors = {name: tensor.detach().clone().requires_grad_() for name, tensor in state.factors.items()}
    return State(factors, copy.deepcopy(state.m), copy.deepcopy(state.v), state.steps)
