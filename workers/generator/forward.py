"""The model passes of TorchEngine: prompts packed into one prefill, and one token for every running sequence.

Nothing here changes a request: a pass may be repeated, for fewer requests, after one that raised. Writing the same
keys and values to the same slots twice is harmless.

Shapes: T packed tokens, R rows that need logits, V vocabulary, N prompt positions, K top tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from weft.wire.sample_codec import EMPTY_LOGPROB, EMPTY_TOKEN

from workers.generator.engine import Logprobs, TopkLogprobs
from workers.generator.kv_cache import DecodeAttend, KVCache
from workers.generator.progress import RequestProgress, SequenceProgress
from workers.generator.sampling import SamplingRows
from workers.model.decoder import Decoder, PackedAttend
from workers.model.lora import LoraRows

#: Prompt logprobs are computed for so many logits at a time (rows x vocabulary), to bound memory.
MAX_LOGITS = 1 << 24


@dataclass(frozen=True)
class PromptOutcome:
    """What a prefill gives one request."""

    logits_V: Tensor  # after the last prompt token
    logprobs: Logprobs | None
    topk: TopkLogprobs | None


class DecodePlan:
    """A fixed set of running sequences, one row each, in the order of their adapters so that each adapter's rows are
    contiguous. It is good for as many steps as the set and its adapters stay the same."""

    def __init__(self, sequences: Iterable[SequenceProgress], vocab_size: int, device: torch.device) -> None:
        self.rows = sorted(sequences, key=_adapter_order)
        self.slots = [row.slot for row in self.rows]
        self.lora = lora_rows([(row.owner, 1) for row in self.rows])
        self.sampling = SamplingRows.of([row.owner.request.sampling for row in self.rows], vocab_size, device)


def _adapter_order(sequence: SequenceProgress) -> tuple[str, int]:
    adapter = sequence.owner.adapter
    return (adapter.name if adapter else "", sequence.slot)


def lora_rows(counts: Sequence[tuple[RequestProgress, int]]) -> LoraRows | None:
    """A group for each item: how many packed rows it has in turn. None when no request has an adapter.

    Neighbours with one adapter do not share a group: the product of a group is computed over its rows together, and
    how it rounds depends on their number. A group of a request's own rows gives it the same bits in any company."""
    if all(progress.adapter is None for progress, _ in counts):
        return None
    adapters = [progress.adapter.adapter if progress.adapter else None for progress, _ in counts]
    return LoraRows([0, *accumulate(rows for _, rows in counts)], adapters, [None] * len(adapters))


def decode(decoder: Decoder, cache: KVCache, plan: DecodePlan) -> Tensor:
    """Feed every sequence its newest token: logits_RV for the next."""
    positions = [row.position for row in plan.rows]
    tokens_R = torch.tensor([row.tokens[-1] for row in plan.rows], device=cache.device)
    attend = DecodeAttend(cache, plan.slots, positions)
    hidden_RD = decoder(tokens_R, torch.tensor(positions, device=cache.device), attend, plan.lora)
    return decoder.logits(hidden_RD, plan.lora)


def prefill(decoder: Decoder, cache: KVCache, work: Sequence[tuple[RequestProgress, int]]) -> list[PromptOutcome]:
    """Run the prompts of several requests, packed without padding, each into its slot."""
    prompts = [progress.request.prompt for progress, _ in work]
    lengths, slots = [len(prompt) for prompt in prompts], [slot for _, slot in work]

    def keep(layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        cache.write_prompts(layer, k_TKD, v_TKD, slots, lengths)

    tokens_T = torch.tensor([token for prompt in prompts for token in prompt], device=cache.device)
    positions_T = torch.cat([torch.arange(length, device=cache.device) for length in lengths])
    lora = lora_rows([(progress, length) for (progress, _), length in zip(work, lengths, strict=True)])
    hidden_TD = decoder(tokens_T, positions_T, PackedAttend(lengths, on_kv=keep), lora)
    last_R = torch.tensor(lengths, device=cache.device).cumsum(0) - 1
    logits_RV = decoder.logits(hidden_TD[last_R], lora_rows([(progress, 1) for progress, _ in work]))
    outcomes: list[PromptOutcome] = []
    for (progress, _), hidden_ND, logits_V in zip(work, torch.split(hidden_TD, lengths), logits_RV, strict=True):
        outcomes.append(_outcome(decoder, progress, hidden_ND, logits_V))
    return outcomes


def _outcome(decoder: Decoder, progress: RequestProgress, hidden_ND: Tensor, logits_V: Tensor) -> PromptOutcome:
    request = progress.request
    if not request.prompt_logprobs and not request.topk_prompt_logprobs:
        return PromptOutcome(logits_V.clone(), None, None)
    logprobs, topk = prompt_logprobs(decoder, progress, hidden_ND, request.topk_prompt_logprobs)
    return PromptOutcome(
        logits_V.clone(),
        logprobs if request.prompt_logprobs else None,
        topk if request.topk_prompt_logprobs else None,
    )


def prompt_logprobs(
    decoder: Decoder, progress: RequestProgress, hidden_ND: Tensor, top: int
) -> tuple[Logprobs, TopkLogprobs]:
    """Logprobs of each prompt token given those before it, and the `top` most probable tokens of its position.
    The first token has nothing before it: NaN, and an empty row."""
    prompt = progress.request.prompt
    top = min(top, decoder.config.vocab_size)
    logprobs = np.full(len(prompt), np.nan, dtype=np.float32)
    ids_NK = np.full((len(prompt), top), EMPTY_TOKEN, dtype=np.int32)
    top_NK = np.full((len(prompt), top), EMPTY_LOGPROB, dtype=np.float32)
    chunk = max(1, MAX_LOGITS // decoder.config.vocab_size)
    for start in range(0, len(prompt) - 1, chunk):
        stop = min(start + chunk, len(prompt) - 1)
        targets_R = torch.tensor(prompt[start + 1 : stop + 1], device=hidden_ND.device)
        logits_RV = decoder.logits(hidden_ND[start:stop], lora_rows([(progress, stop - start)])).float()
        logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
        logprobs[start + 1 : stop + 1] = logprobs_RV.gather(1, targets_R[:, None])[:, 0].cpu().numpy()
        if top:
            best = logprobs_RV.topk(top, dim=-1)
            ids_NK[start + 1 : stop + 1] = best.indices.cpu().numpy()
            top_NK[start + 1 : stop + 1] = best.values.cpu().numpy()
    return logprobs, TopkLogprobs(ids_NK, top_NK)
