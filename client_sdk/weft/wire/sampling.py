"""Bodies of sampling."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from weft.wire.base import Count, Finite, Integer, NotBoolean, Positive, Request, Response, SampleSeq, Seed
from weft.wire.binary.sample_codec import (
    PolicySpan,
    SampleResult,
    SampleUsage,
    SequenceResult,
    StopReason,
    TopkLogprobs,
)
from weft.wire.inputs import ModelInput, Token
from weft.wire.shown import shown
from weft.wire.tensor import TensorData

__all__ = [
    "CreateSamplingSessionRequest",
    "CreateSamplingSessionResponse",
    "GetSamplerResponse",
    "PromptAltTokens",
    "SampleRequest",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "TokensDrawn",
]


class SamplingParams(Request):
    """How to draw tokens: none with `max_tokens` 0, which only computes the prompt. `stop` absent means the model's
    end-of-sequence tokens; `stop=[]` means nothing stops it but `max_tokens`. `temperature` 0 is greedy; `top_k` -1 and
    `top_p` 1 are off."""

    max_tokens: Count | None = None
    seed: Seed | None = None
    stop: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[Annotated[Token, NotBoolean]], Field(fail_fast=True)]
        | None
    ) = None
    temperature: Finite = Field(default=1.0, ge=0)
    top_k: Integer = Field(default=-1, ge=-1)
    top_p: Finite = Field(default=1.0, gt=0, le=1)


class CreateSamplingSessionRequest(Request):
    """A sampler of a base model or of saved weights (`tinker://...`)."""

    session_id: str
    sampling_session_seq_id: Count
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class CreateSamplingSessionResponse(Response):
    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class GetSamplerResponse(Response):
    sampler_id: str
    base_model: str
    model_path: str | None = None


class SampleRequest(Request):
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: Positive = 1
    sampling_session_id: str | None = None
    seq_id: SampleSeq | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: Count = 0
    prompt_logprobs_last_n: Count | None = None
    record_stability_info: bool | None = None
    max_staleness: Count | None = None
    return_routed_experts: bool | None = None
    #: True: the sample's tokens can be read while they are drawn (`stream_future`).
    stream: bool | None = None
    type: Literal["sample"] = "sample"


class TokensDrawn(Response):
    """Tokens of sequence `sample` of a request that is being drawn, from its token number `start` on: the logprob of
    each, and the policy version that drew it. `tops` are the likeliest tokens beside each (ids and logprobs) where they
    are asked for."""

    sample: int
    start: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    tops: list[tuple[list[int], list[float]]] = Field(default=[])


@dataclass(frozen=True)
class PromptAltTokens:
    """Other draws at each prompt position after the first: ids int64 and logprobs float32, [prompt - 1, k]."""

    tokens: TensorData
    logprobs: TensorData


class SampledSequence:
    """One sampled sequence: `tokens`, the `logprobs` of each, and why it stopped.

    Lists are made when asked for; `tokens_np` (int32) and `logprobs_np` (float32) are the arrays themselves.
    """

    def __init__(self, result: SequenceResult, sequence_id: str) -> None:
        self._result = result
        self.sequence_id = sequence_id

    def __repr__(self) -> str:
        return f"SampledSequence(tokens={shown(self.tokens)}, stop_reason={self.stop_reason!r})"

    @property
    def stop_reason(self) -> StopReason:
        return self._result.stop_reason

    @property
    def policy_versions(self) -> list[PolicySpan]:
        """Which policy version (optimizer steps of the run) drew how many tokens, in order; their lengths add up to the
        tokens. Empty from a server that does not tell."""
        return list(self._result.policy)

    @property
    def stale(self) -> bool:
        """True if the server stopped the sequence because the run had moved further than `max_staleness`."""
        return self._result.stale

    @property
    def routed_experts_np(self) -> npt.NDArray[np.int64] | None:
        """The experts that each token of prompt + tokens but the last was sent to, [prompt + N - 1, mixture layers,
        choices], where asked for. Training on these tokens with it as the input `routed_experts` chooses the same."""
        return self._result.routed_experts

    @property
    def tokens_np(self) -> npt.NDArray[np.int32]:
        return self._result.tokens

    @property
    def logprobs_np(self) -> npt.NDArray[np.float32] | None:
        return self._result.logprobs

    @property
    def topk_logprobs_np(self) -> TopkLogprobs | None:
        return self._result.topk

    @cached_property
    def tokens(self) -> list[int]:
        return self._result.tokens.tolist()  # type: ignore[no-any-return]

    @cached_property
    def logprobs(self) -> list[float] | None:
        return None if self._result.logprobs is None else self._result.logprobs.tolist()

    @cached_property
    def topk_logprobs(self) -> list[list[tuple[int, float]] | None] | None:
        return None if self._result.topk is None else self._result.topk.tolist()


class SampleResponse:
    """All sequences of one request, and what was asked about its prompt."""

    def __init__(self, result: SampleResult, sequence_ids: list[str] | None = None) -> None:
        names = sequence_ids or [""] * len(result.sequences)
        self.sequences = [SampledSequence(item, name) for item, name in zip(result.sequences, names, strict=True)]
        #: Billed tokens by kind; None from a server that does not report them.
        self.usage: SampleUsage | None = result.usage
        self.prompt_cache_hit_tokens = result.prompt_cache_hit_tokens
        self.prompt_logprobs_np = result.prompt_logprobs
        self.topk_prompt_logprobs_np = result.topk_prompt_logprobs
        self.target_prompt_logprobs = result.target_prompt_logprobs
        alternatives = result.prompt_alt_tokens
        self.prompt_alt_tokens = (
            None if alternatives is None else PromptAltTokens(*(TensorData.from_numpy(part) for part in alternatives))
        )

    def __repr__(self) -> str:
        return f"SampleResponse(sequences={self.sequences!r})"

    @cached_property
    def prompt_logprobs(self) -> list[float | None] | None:
        """One per prompt token; None if there is none (the first token always)."""
        if self.prompt_logprobs_np is None:
            return None
        return [None if value != value else value for value in self.prompt_logprobs_np.tolist()]

    @cached_property
    def topk_prompt_logprobs(self) -> list[list[tuple[int, float]] | None] | None:
        return None if self.topk_prompt_logprobs_np is None else self.topk_prompt_logprobs_np.tolist()
