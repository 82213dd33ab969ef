"""How far a request has come: its sequences, what they sampled, and the `Finished` it ends as. No torch work here.

A request waits, its prompt is prefilled in one or more pieces, and then its sequences run, each in a slot of the KV
cache. Sequences for which there was no slot start later from what the prefill left: the prompt's keys and values lie at
the head of every slot the request holds, and the logits after the prompt are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from workers.generator.adapters import HeldAdapter
from workers.generator.block_index import BLOCK_TOKENS, Chain, Root
from workers.generator.engine import (
    Facts,
    Finished,
    GenerateRequest,
    RequestError,
    SequenceResult,
    StopReason,
    TopkLogprobs,
)
from workers.generator.prompt_scores import PromptScores
from workers.generator.sampling import Draw, sequence_rng
from workers.generator.stop import StopRule


class SequenceProgress:
    """One continuation in the making. While it runs, the cache holds its prompt and all its tokens but the newest."""

    def __init__(self, owner: RequestProgress, sample: int) -> None:
        self.owner = owner
        self.sample = sample
        self.slot = -1
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[tuple[list[int], list[float]]] = []
        self.stop_reason: StopReason | None = None
        self._rng = sequence_rng(owner.request.sampling.seed, sample)
        #: The random number of the next token. It is renewed only when a token is accepted, so that a step which
        #: is tried again draws the same.
        self.uniform = float(self._rng.random())

    @property
    def position(self) -> int:
        """Where the newest token goes in the cache."""
        return len(self.owner.request.prompt) + len(self.tokens) - 1

    def accept(self, drawn: Draw) -> None:
        self.tokens.append(drawn.token)
        self.logprobs.append(drawn.logprob)
        if drawn.top is not None:
            self.tops.append(drawn.top)
        self.uniform = float(self._rng.random())
        self.stop_reason = self.owner.rule.check(self.tokens)

    def result(self) -> SequenceResult:
        """What it has; one that was cut short ends for its length."""
        tokens, logprobs = np.array(self.tokens, dtype=np.int32), np.array(self.logprobs, dtype=np.float32)
        return SequenceResult(tokens, logprobs, self.stop_reason or "length", self._topk())

    def _topk(self) -> TopkLogprobs | None:
        if not self.tops:
            return None
        ids, logprobs = zip(*self.tops, strict=True)
        return TopkLogprobs(np.array(ids, dtype=np.int32), np.array(logprobs, dtype=np.float32))


@dataclass(eq=False)
class RequestProgress:
    request: GenerateRequest
    rule: StopRule
    adapter: HeldAdapter | None
    scores: PromptScores
    sequences: list[SequenceProgress] = field(default_factory=list)
    started: int = 0  # sequences[:started] have or had a slot
    chain: Chain = field(default_factory=lambda: Chain(("", 0)))  # the prompt's blocks in the prefix cache
    places: list[int] = field(default_factory=list)  # of those that were there when it started
    cache_hit: int = 0  # prompt tokens that they cover
    computed: int = 0  # prompt tokens that are in the slot
    goal: int = 0  # where the prefill that is under way, or was the last, takes `computed`
    prompt_logits_V: Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        self.sequences = [SequenceProgress(self, sample) for sample in range(self.request.num_samples)]

    @property
    def unstarted(self) -> int:
        return len(self.sequences) - self.started

    @property
    def cache_root(self) -> Root:
        """Whose prompts, computed with which weights, begin as this one's may."""
        return self.request.tenant, self.adapter.weights if self.adapter is not None else 0

    @property
    def hit_limit(self) -> int:
        """Most prompt tokens that need not be computed: logits are needed after the last, and where it is scored."""
        return min(len(self.request.prompt) - 1, self.scores.first_row)

    @property
    def may_hit_more(self) -> bool:
        """Whether one more block could come from the prefix cache, if only it were there."""
        return (len(self.chain.keys) + 1) * BLOCK_TOKENS <= self.hit_limit

    @property
    def at_end(self) -> bool:
        """Whether the prefill under way completes the prompt."""
        return self.goal == len(self.request.prompt)

    def reach(self, budget: int) -> int:
        """How far a prefill of at most `budget` tokens gets: to the end, or by whole blocks."""
        end = len(self.request.prompt)
        return end if end - self.computed <= budget else self.computed + budget // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def done(self) -> bool:
        return all(sequence.stop_reason for sequence in self.sequences)

    def running(self) -> Iterator[SequenceProgress]:
        return (sequence for sequence in self.sequences if sequence.slot >= 0)

    def start_next(self, slot: int) -> SequenceProgress:
        sequence = self.sequences[self.started]
        self.started += 1
        sequence.slot = slot
        return sequence

    def finished(self) -> Finished:
        """The request as it stands, whether all its sequences have ended or it is cancelled."""
        length, hit = len(self.request.prompt), self.cache_hit if self.started else 0
        facts = Facts(
            prefill=self.computed - hit if self.started else 0,
            cached_prefill=hit + length * max(0, self.started - 1),
            sample=sum(len(sequence.tokens) for sequence in self.sequences),
            cache_hit=hit,
        )
        end = Finished(self.request.id, tuple(sequence.result() for sequence in self.sequences), facts=facts)
        if self.computed < length:
            return end
        return replace(
            end,
            prompt_logprobs=self.scores.logprobs,
            topk_prompt_logprobs=self.scores.topk,
            target_logprobs=self.scores.targets,
            prompt_alt_tokens=self.scores.alternatives,
        )


def refused(request_id: str, message: str) -> Finished:
    """The end of a request that cannot be served as it is."""
    return Finished(request_id, error=RequestError(message, "user"))


def request_fault(request: GenerateRequest, context: int, vocab_size: int) -> str | None:
    """What is wrong with a request, or None. The last token sampled needs no place in the context."""
    sampling = request.sampling
    if not request.prompt:
        return "the prompt is empty: it needs at least one token"
    if len(request.prompt) > context:
        return f"the prompt has {len(request.prompt)} tokens; the context of this model is {context}"
    if not all(0 <= token < vocab_size for token in request.prompt):
        return f"the prompt has a token outside the vocabulary of {vocab_size}"
    if request.num_samples < 1:
        return f"num_samples is {request.num_samples}; it must be at least 1"
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}; it must be at least 1"
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature is {sampling.temperature}; it must be a number from 0 up"
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}; it must be above 0 and at most 1"
    if sampling.top_k < -1:
        return f"top_k is {sampling.top_k}; it must be -1 or 0 (off), or at least 1"
    return None
