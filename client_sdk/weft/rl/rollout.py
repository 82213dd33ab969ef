"""What was sampled, and the data that it becomes: turns of a rollout, rollouts of a group.

What is trained is what was sampled, token for token: a datum is cut from the ids that the sampler read and drew, and
nothing is ever tokenised again. A turn whose prompt begins with all of an earlier turn's prompt and tokens joins it in
one datum, so a conversation of T turns costs one pass over its tokens and not T; a turn that does not begins a new
datum. Several conversations of one rollout (agents, sub-agents) are told apart by the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from weft.wire.binary.arrays import Array
from weft.wire.binary.sample_codec import PolicySpan
from weft.wire.checks.losses import ROUTES, TEMPERATURE
from weft.wire.inputs import Datum, ModelInput, PromptProvenanceSpan, ProvenanceSpans, SampledProvenanceSpan


def off_policy(temperature: float, top_p: float, top_k: int) -> str:
    """The settings because of which tokens drawn with them cannot be trained on, in words; "" if there are none. The
    trainer is told a temperature, but no cut (top_p, top_k): logprobs are those before a cut, so the bias of a cut
    would not even show."""
    cuts = (("temperature", temperature, temperature == 0), ("top_p", top_p, top_p < 1), ("top_k", top_k, top_k > 0))
    return ", ".join(f"{name}={value}" for name, value, wrong in cuts if wrong)


@dataclass(frozen=True)
class Turn:
    """One sample: the ids that it continued, the ids that were drawn with their logprobs, by which versions, and how.
    `sequence_id` is the server's name of it. `routed_experts`, where they were asked for, are the experts that each
    token of both but the last was sent to, [tokens - 1, mixture layers, choices]."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[PolicySpan, ...] = ()
    stop_reason: str = "stop"
    stale: bool = False
    agent: str = ""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    sequence_id: str = ""
    routed_experts: Array | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"{len(self.tokens)} sampled tokens have {len(self.logprobs)} logprobs")


@dataclass
class Rollout:
    """One attempt at a task: its turns in the order in which they ended, and what it earned."""

    turns: list[Turn]
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def sampled(self) -> int:
        """Tokens that were drawn."""
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def read(self) -> int:
        """Tokens of prompts that no turn had drawn or read before."""
        return sum(len(each.tokens) for each in join(self.turns)) - self.sampled

    @property
    def oldest(self) -> int | None:
        """The oldest policy version that drew any of its tokens; None if nothing was drawn."""
        return min((span.version for turn in self.turns for span in turn.versions if span.length), default=None)


@dataclass
class Group:
    """Attempts at the same task, whose rewards are compared with each other."""

    task: Any
    rollouts: list[Rollout]
    source: str = ""
    index: int = -1

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts]

    @property
    def mean(self) -> float:
        return sum(self.rewards) / len(self.rollouts)

    @property
    def sampled(self) -> int:
        return sum(rollout.sampled for rollout in self.rollouts)

    @property
    def oldest(self) -> int | None:
        """The oldest policy version that drew any of the tokens."""
        return min((old for rollout in self.rollouts if (old := rollout.oldest) is not None), default=None)


@dataclass
class Joined:
    """Turns that extend each other, laid end to end; `drawn` says which tokens were sampled, `temperatures` at what,
    `spans` in which sequences, and `routes` through which experts each token but the last went, turn by turn."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    spans: ProvenanceSpans = field(default_factory=list)
    routes: list[Array] | None = field(default_factory=list)

    def add(self, turn: Turn) -> None:
        before = len(self.tokens)
        read, drawn = turn.prompt[before:], turn.tokens
        self.tokens += [*read, *drawn]
        self.logprobs += [0.0] * len(read) + list(turn.logprobs)
        self.drawn += [False] * len(read) + [True] * len(drawn)
        self.temperatures += [1.0] * len(read) + [turn.temperature] * len(drawn)
        self.spans.append(PromptProvenanceSpan(turn.sequence_id, before, len(read)))
        self.spans.append(SampledProvenanceSpan(turn.sequence_id, 0, len(drawn)))
        if turn.routed_experts is None or self.routes is None:
            self.routes = None  # one turn without them: nothing is replayed
        else:  # of what an earlier turn drew, its own count: they made its logprobs
            self.routes.append(turn.routed_experts[max(before - 1, 0) :])

    def spans_of(self, start: int, stop: int) -> ProvenanceSpans | None:
        """The spans of the tokens [start, stop); None if a server has not named its sequences."""
        if not all(span.sequence_id for span in self.spans):
            return None
        cut, at = ProvenanceSpans(), 0
        for span in self.spans:
            first, last = max(start - at, 0), min(stop - at, span.length)
            if first < last:
                cut.append(replace(span, offset=span.offset + first, length=last - first))
            at += span.length
        return cut


def join(turns: Sequence[Turn]) -> list[Joined]:
    """Join turns into as few sequences as they allow: each turn goes to the longest sequence that its prompt
    extends."""
    sequences: list[Joined] = []
    for turn in turns:
        extended = [s for s in sequences if list(turn.prompt[: len(s.tokens)]) == s.tokens]
        target = max(extended, key=lambda s: len(s.tokens), default=None)
        if target is None:
            target = Joined()
            sequences.append(target)
        target.add(turn)
    return sequences


def data_of(rollout: Rollout, advantage: float) -> list[Datum]:
    """The rollout as training data, of all inputs that a loss of this package reads but `old` and `ref`, and with the
    temperatures, the experts where they are known, and the names of the sequences that it was drawn in.

    Position i of the input predicts target i. What was read, not drawn, has advantage, logprob and mask 0. Raises
    ValueError for turns that were drawn after a cut (`off_policy`).
    """
    for turn in rollout.turns:
        if wrong := off_policy(turn.temperature, turn.top_p, turn.top_k):
            raise ValueError(f"a turn was drawn with {wrong}; what is trained on is drawn from all tokens, above 0")
    return [_datum(each, advantage) for each in join(rollout.turns) if any(each.drawn)]


def _datum(joined: Joined, advantage: float) -> Datum:
    drawn = np.asarray(joined.drawn[1:], np.float32)
    sampler: Array = np.asarray(joined.logprobs[1:], np.float32)
    inputs = {
        "target_tokens": joined.tokens[1:],
        "logprobs": sampler,
        "advantages": drawn * np.float32(advantage),
        "mask": drawn,
    }
    if any(temperature != 1 for temperature in joined.temperatures):
        inputs[TEMPERATURE] = np.asarray(joined.temperatures[1:], np.float32)
    if joined.routes is not None:
        inputs[ROUTES] = np.concatenate(joined.routes).astype(np.int64)
    last = len(joined.tokens) - 1
    spans = joined.spans_of(0, last), joined.spans_of(1, last + 1)
    return Datum(ModelInput.from_ints(joined.tokens[:-1]), inputs, *spans)
