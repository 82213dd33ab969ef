"""The progress of a request at vLLM: its sequences, their results so far, and the `Finished` it ends as."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.wire.binary.sample_codec import SequenceResult

from workers.generator.engine import Facts, Finished, GenerateRequest
from workers.generator.tokens.stop import StopRule
from workers.generator.vllm import translate
from workers.generator.vllm.policies import Pushed, spans


@dataclass(eq=False)
class SequenceProgress:
    sample: int
    result: SequenceResult
    vllm_id: str = ""  # while vLLM has it
    version: int = 0  # policy version that it began with
    started: bool = False
    stale: bool = False  # aborted because it is too old
    prompt_hit: int = 0  # prompt tokens that came from the prefix cache
    scores: Sequence[Any] | None = None  # vLLM's prompt logprobs


@dataclass(eq=False)
class RequestProgress:
    request: GenerateRequest
    rule: StopRule
    vocab_size: int
    beyond: bool = False  # its sequences need no slot
    sequences: list[SequenceProgress] = field(default_factory=list)
    pushed: Pushed | None = None  # its adapter
    task: asyncio.Task[Any] | None = None
    work: list[asyncio.Task[None]] = field(default_factory=list)  # one for each sequence, once there is an adapter
    wanted: asyncio.Future[Finished] | None = None  # set when it is cancelled: gets its end
    run_version: int = 0  # the newest version of its run that it was told

    def __post_init__(self) -> None:
        nothing = translate.sequence_of(self.request, {"token_ids": [], "logprobs": None}, self.vocab_size)
        self.sequences = [SequenceProgress(sample, nothing) for sample in range(self.request.num_samples)]

    @property
    def version(self) -> int:
        """The policy version that a new sequence begins with."""
        return self.pushed.version if self.pushed is not None else 0

    def too_old(self, version: int) -> bool:
        """True if a sequence that began with this policy version must end, since the policy has moved too far."""
        most = self.request.max_staleness
        return most is not None and self.run_version - version > most

    def take(self, sequence: SequenceProgress, answer: dict[str, Any]) -> None:
        """Take vLLM's answer to one sequence, ended or aborted."""
        (choice,) = answer["choices"]
        result = translate.sequence_of(self.request, choice, self.vocab_size)
        tokens = result.tokens.tolist()
        ended = self.rule.check(tokens) if tokens else None
        sequence.result = replace(
            result,
            stop_reason=ended or "length",
            policy=spans(self.pushed, choice["weight_versions"], len(tokens)),
            stale=sequence.stale and ended is None,
        )
        details = answer["usage"].get("prompt_tokens_details") or {}
        sequence.prompt_hit = int(details.get("cached_tokens") or 0)
        sequence.scores = answer.get("prompt_logprobs")

    def finished(self) -> Finished:
        """The request's result so far. The prompt counts as computed by its first sequence, for all of them; where none
        draws a token, the others need no copy of it."""
        request, first = self.request, self.sequences[0]
        started = sum(sequence.started for sequence in self.sequences)
        started = started if request.sampling.max_tokens != 0 else min(started, 1)
        length, hit, scores = len(request.prompt), first.prompt_hit, first.scores
        facts = Facts(
            prefill=length - hit if started else 0,
            cached_prefill=hit + length * (started - 1) if started else 0,
            sample=sum(len(sequence.result.tokens) for sequence in self.sequences),
            cache_hit=hit,
        )
        return Finished(
            request.id,
            tuple(sequence.result for sequence in self.sequences),
            prompt_logprobs=translate.prompt_logprobs_of(request, scores) if scores else None,
            topk_prompt_logprobs=translate.prompt_topk_of(request, scores, self.vocab_size) if scores else None,
            facts=facts,
        )
