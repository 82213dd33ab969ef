"""The progress of a request: its sequences, what they sampled, and the `Finished` it ends as. No torch work here.

A request waits, its prompt is prefilled in one or more pieces, and then its sequences run, each with pages of the KV
cache. Sequences for which there was no memory start later: a sibling holds the prompt's keys and values in its first
pages, and the logits after the prompt are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from weft.wire.binary.sample_codec import PolicySpan, SequenceResult, StopReason, TopkLogprobs

from workers.generator.adapters import HeldAdapter
from workers.generator.cache.page_groups import Held
from workers.generator.cache.prefix_cache import BLOCK_TOKENS, Chain, Root
from workers.generator.cache.states import States
from workers.generator.engine import Facts, Finished, GenerateRequest, SoFar
from workers.generator.tokens.lookup import Lookup, Runs
from workers.generator.tokens.prompt_scores import PromptScores
from workers.generator.tokens.sampling import Draw, sequence_rng
from workers.generator.tokens.stop import StopRule


class SequenceProgress:
    """One continuation in the making. While it runs, the cache holds its prompt and all its tokens but the newest."""

    def __init__(self, owner: RequestProgress, sample: int) -> None:
        self.owner = owner
        self.sample = sample
        self.pages: list[Held] = []  # of each group of layers; empty while the sequence is not seated
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[tuple[list[int], list[float]]] = []
        self.stop_reason: StopReason | None = None
        self.policy: list[tuple[int, int]] = []  # (version, consecutive tokens drawn from it)
        self.stale = False
        self.states: States = {}  # of recurrent layers, after all tokens but the newest
        self.routes: npt.NDArray[np.int64] | None = None  # set when it ends, if requested
        #: Tokens that may come next, which a decode step tries; after the step, those that came true.
        self.draft: list[int] = []
        self.lookup: Lookup | None = None
        self._watch = owner.rule.watch()
        self._rng = sequence_rng(owner.request.sampling.seed, sample, len(owner.request.prompt))
        #: The random numbers of the next tokens, as far as they were needed. One is used up with each accepted token,
        #: so a token's number does not depend on how often, or how far ahead, it was drawn.
        self._uniforms: list[float] = []

    @property
    def so_far(self) -> SoFar:
        return SoFar(self.tokens, self.logprobs, self.tops, self.policy)

    @property
    def position(self) -> int:
        """The position of the newest token."""
        return len(self.owner.request.prompt) + len(self.tokens) - 1

    def uniform(self, ahead: int) -> float:
        """The random number of the next token, or of the one `ahead` positions after it."""
        while len(self._uniforms) <= ahead:
            self._uniforms.append(float(self._rng.random()))
        return self._uniforms[ahead]

    def accept(self, drawn: Draw, version: int) -> None:
        """Take the next token, drawn from the logits of policy `version`."""
        if not self.tokens:
            self.states = self.owner.states.get(len(self.owner.request.prompt), {})
        self.tokens.append(drawn.token)
        if self.policy and self.policy[-1][0] == version:
            self.policy[-1] = (version, self.policy[-1][1] + 1)
        else:
            self.policy.append((version, 1))
        self.logprobs.append(drawn.logprob)
        if drawn.top is not None:
            self.tops.append(drawn.top)
        self.uniform(0)
        del self._uniforms[0]
        self.stop_reason = self._watch.check(self.tokens)

    def result(self) -> SequenceResult:
        """The sequence's result so far. Cut short, it has the stop reason "length"."""
        tokens, logprobs = np.array(self.tokens, dtype=np.int32), np.array(self.logprobs, dtype=np.float32)
        reason = self.stop_reason or "length"
        policy = tuple(PolicySpan(version, length) for version, length in self.policy)
        return SequenceResult(tokens, logprobs, reason, self._topk(), policy, self.stale, self.routes)

    def _topk(self) -> TopkLogprobs | None:
        if not self.tops:
            return None
        ids, logprobs = zip(*self.tops, strict=True)
        return TopkLogprobs(np.array(ids, dtype=np.int32), np.array(logprobs, dtype=np.float32))


class Row(NamedTuple):
    """A row of a decode step: a sequence's newest token, or the token of its draft `ahead` positions after that."""

    sequence: SequenceProgress
    ahead: int = 0

    @property
    def owner(self) -> RequestProgress:
        return self.sequence.owner

    @property
    def pages(self) -> list[Held]:
        return self.sequence.pages

    @property
    def token(self) -> int:
        return self.sequence.draft[self.ahead - 1] if self.ahead else self.sequence.tokens[-1]

    @property
    def position(self) -> int:
        return self.sequence.position + self.ahead

    @property
    def uniform(self) -> float:
        """The random number of the token that comes after this one."""
        return self.sequence.uniform(self.ahead)


@dataclass(eq=False)
class RequestProgress:
    request: GenerateRequest
    rule: StopRule
    adapter: HeldAdapter | None
    scores: PromptScores
    number: int = 0  # position in the engine's order of arrival
    sequences: list[SequenceProgress] = field(default_factory=list)
    started: int = 0  # sequences[:started] are or were seated
    chain: Chain = field(default_factory=lambda: Chain(("", 0)))  # the prompt's blocks in the prefix cache
    places: list[int] = field(default_factory=list)  # of the blocks found in the prefix cache when it started
    cache_hit: int = 0  # prompt tokens in those blocks
    computed: int = 0  # prompt tokens whose keys and values are in its pages
    goal: int = 0  # the value of `computed` after the prefill in progress, or the last one
    marks: set[int] = field(default_factory=set)  # positions whose states the prefill in progress keeps
    # states by position: where a prefill starts, or the prompt ends
    states: dict[int, States] = field(default_factory=dict)
    prompt_logits_V: Tensor = field(default_factory=lambda: torch.empty(0))
    prompt_version: int | None = None  # policy version of these logits
    given_up: bool = False  # sequences that have not started never will
    awaits: int = 0  # number of the read of its adapter that its prompt waits for; 0: none
    # whether it may not start now, because its adapter waits for memory or has to make room (`admission`)
    held_up: bool = False
    runs: Runs | None = None  # runs of the prompt's tokens, once something was looked up in it
    run_version: int = 0  # the newest version of its run that was reported

    def __post_init__(self) -> None:
        if self.adapter is not None and self.adapter.coming:
            self.awaits = self.adapter.asked
        self.sequences = [SequenceProgress(self, sample) for sample in range(self.request.num_samples)]

    @property
    def place(self) -> tuple[int, int]:
        """The order in which the requests of a tenant start: by priority, then by arrival."""
        return -self.request.priority, self.number

    def before(self, other: RequestProgress) -> bool:
        """Whether this one starts before `other`: of another tenant's, by arrival."""
        if self.request.tenant == other.request.tenant:
            return self.place < other.place
        return self.number < other.number

    @property
    def ready(self) -> bool:
        """True if the request's adapter is in memory, and the request may use it."""
        return not (self.awaits or self.held_up)

    @property
    def unstarted(self) -> int:
        return 0 if self.given_up else len(self.sequences) - self.started

    @property
    def version(self) -> int:
        """The version of the policy that the request samples from now."""
        return self.adapter.version if self.adapter is not None else 0

    @property
    def cache_root(self) -> Root:
        """The tenant and weights whose cached prompts this one may reuse."""
        # Routes are recorded only for requests that ask for them.
        tenant = f"{self.request.tenant} with routes" if self.request.return_routed_experts else self.request.tenant
        return tenant, self.adapter.weights if self.adapter is not None else 0

    @property
    def hit_limit(self) -> int:
        """How many prompt tokens may come from the cache at most: the last one, and scored ones, need logits."""
        return min(len(self.request.prompt) - 1, self.scores.first_row)

    @property
    def may_hit_more(self) -> bool:
        """True if one more block of the prompt may come from the prefix cache, once that block is kept there."""
        return (len(self.chain.keys) + 1) * BLOCK_TOKENS <= self.hit_limit

    @property
    def at_end(self) -> bool:
        """True if the prefill in progress completes the prompt."""
        return self.goal == len(self.request.prompt)

    def reach(self, budget: int) -> int:
        """The position that a prefill of at most `budget` tokens reaches: the end, or a whole number of blocks."""
        end = len(self.request.prompt)
        return end if end - self.computed <= budget else self.computed + budget // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def done(self) -> bool:
        return all(sequence.stop_reason for sequence in self.sequences)

    def running(self) -> Iterator[SequenceProgress]:
        """The seated sequences."""
        return (sequence for sequence in self.sequences[: self.started] if sequence.pages)

    def too_old(self) -> list[SequenceProgress]:
        """The sequences that `max_staleness` ends at the run's present version."""
        most = self.request.max_staleness
        if most is None:
            return []
        fresh = self.version if self.prompt_version is None else self.prompt_version
        open_ones = (sequence for sequence in self.sequences if sequence.stop_reason is None)
        return [
            s for s in open_ones if self.run_version - min((version for version, _ in s.policy), default=fresh) > most
        ]

    @property
    def facts(self) -> Facts:
        """Counts of the tokens computed for the request so far."""
        hit = self.cache_hit if self.started else 0
        return Facts(
            prefill=self.computed - hit if self.started else 0,
            cached_prefill=hit + len(self.request.prompt) * max(0, self.started - 1),
            sample=sum(len(sequence.tokens) for sequence in self.sequences),
            cache_hit=hit,
        )

    def finished(self) -> Finished:
        """The request's result so far, whether all its sequences have ended or it is cancelled."""
        sequences = tuple(sequence.result() for sequence in self.sequences)
        end = Finished(self.request.id, sequences, facts=self.facts)
        if self.computed < len(self.request.prompt):
            return end
        return replace(
            end,
            prompt_logprobs=self.scores.logprobs,
            topk_prompt_logprobs=self.scores.topk,
            target_logprobs=self.scores.targets,
            prompt_alt_tokens=self.scores.alternatives,
        )
