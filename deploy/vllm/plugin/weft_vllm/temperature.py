"""Logprobs of softmax(logits / temperature), before any top-k or top-p cut; greedy requests have those of the logits.

vLLM offers them before the temperature or after the cuts. Its sampler computes the former with `compute_logprobs`, on
logits that are yet untouched: for the length of one call, that divides by the rows' temperatures first. Logprobs of
prompts are computed outside that call and stay those of the plain logits.
"""

from __future__ import annotations

from typing import Any

#: A temperature below this counts as 0 in vLLM.
GREEDY = 1e-5


def install() -> None:
    import torch
    from vllm.v1.sample.sampler import Sampler

    forward, plain = Sampler.forward, Sampler.compute_logprobs

    def tempered(self: Any, logits: Any, sampling_metadata: Any, *args: Any, **options: Any) -> Any:
        temperature = sampling_metadata.temperature
        if temperature is None:  # all greedy
            return forward(self, logits, sampling_metadata, *args, **options)
        divisor = torch.where(temperature < GREEDY, 1.0, temperature).unsqueeze(1)
        self.compute_logprobs = lambda logits: plain(logits.float() / divisor)
        try:
            return forward(self, logits, sampling_metadata, *args, **options)
        finally:
            del self.compute_logprobs

    Sampler.forward = tempered
