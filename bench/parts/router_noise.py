"""Noise in the routers of a mixture of experts, for bench/mismatch.py: what the sampler's own choice of experts,
replayed by the trainer, takes away of the mismatch.

Shapes: T tokens, D hidden width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.generator.engine import GenerateRequest, SamplingParams as EngineParams
from workers.generator.torch_engine import TorchEngine
from workers.model.attend import PackedAttend
from workers.model.base.weights import load_decoder
from workers.model.decoder import Decoder
from workers.model.logprobs import target_logprobs
from workers.model.mixture.router import Router
from workers.model.tiny import TINY_PATH

#: Sizes of noise in the routers: in units of their logits, and of their weights' standard deviation.
ROUNDING = (1e-4, 1e-3, 1e-2, 1e-1)
VOCABULARY = 1500


def routers(decoder: Decoder) -> list[Router]:
    return [module for module in decoder.modules() if isinstance(module, Router)]


def rounded(decoder: Decoder, size: float) -> None:
    """Each router chooses by its logits with noise; the weights of the chosen experts stay the router's own."""
    generator = torch.Generator().manual_seed(0)

    def choose(router: Router, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x_TD, lora, _ = given
        logits_TE = x_TD @ router.weight.T
        noisy_TE = logits_TE + size * torch.randn(logits_TE.shape, generator=generator)
        return x_TD, lora, torch.topk(noisy_TE, router.choices, dim=-1).indices

    for router in routers(decoder):
        router.register_forward_pre_hook(choose)


def reweighted(decoder: Decoder, size: float) -> None:
    """The weights of each router get noise of `size` times their standard deviation."""
    generator = torch.Generator().manual_seed(0)
    for router in routers(decoder):
        weight = router.weight
        weight += size * weight.std() * torch.randn(weight.shape, generator=generator)


KINDS: dict[str, Callable[[Decoder, float], None]] = {"rounding": rounded, "weights": reweighted}


def routing(prompts: int, tokens: int) -> dict[str, list[dict[str, float]]]:
    """Mismatch KL by size of the noise, without and with replay."""
    trainer, found = load_decoder(TINY_PATH), dict[str, list[dict[str, float]]]()
    for kind, disturb in KINDS.items():
        found[kind] = []
        for size in ROUNDING:
            sampler = load_decoder(TINY_PATH)
            disturb(sampler, size)
            engine = TorchEngine(sampler, (), slots=32, context=256, prefix_bytes=0)
            point = {"noise": size} | mismatches(engine, trainer, prompts, tokens)
            found[kind].append(point)
    return found


def mismatches(engine: TorchEngine, trainer: Decoder, prompts: int, tokens: int) -> dict[str, float]:
    rng, ratios = np.random.default_rng(1), dict[str, list[np.ndarray]]({"free": [], "replayed": []})
    asked = {f"r{each}": tuple(rng.integers(0, VOCABULARY, 24).tolist()) for each in range(prompts)}
    for number, (name, prompt) in enumerate(asked.items()):
        params = EngineParams(max_tokens=tokens, seed=number, stop_at_eos=False)
        engine.add(GenerateRequest(name, prompt, params, return_routed_experts=True))
    ended: list[Any] = []
    while len(ended) < prompts:
        ended += engine.step()
    for finished in ended:
        [sequence] = finished.sequences
        routes = torch.from_numpy(sequence.routed_experts).transpose(0, 1).contiguous()
        for name, forced in (("free", None), ("replayed", routes)):
            own = scored(trainer, [*asked[finished.id], *sequence.tokens.tolist()], len(sequence.tokens), forced)
            ratios[name].append(own.astype(np.float64) - sequence.logprobs)
    return {name: mismatch_kl(np.concatenate(each)) for name, each in ratios.items()}


@torch.no_grad()
def scored(decoder: Decoder, ids: Sequence[int], count: int, routes: Tensor | None) -> np.ndarray:
    """The trainer's logprobs of the last `count` of `ids`."""
    length = len(ids) - 1
    hidden = decoder(torch.tensor(ids[:-1]), torch.arange(length), PackedAttend([length]), None, None, routes)
    rows = torch.arange(length - count, length)
    logprobs: np.ndarray = target_logprobs(decoder, hidden, rows, torch.tensor(ids[-count:]), None).numpy()
    return logprobs


def mismatch_kl(log_ratio: np.ndarray) -> float:
    """Mean of rho - 1 - log rho."""
    return float((np.exp(log_ratio) - 1 - log_ratio).mean())
