"""Results of sampling: a SampleResponse in protobuf to plain arrays and back. Malformed bytes raise `WireError`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from weft.wire.binary import weft_wire_pb2 as pb
from weft.wire.binary.arrays import FLOAT32, INT32, UINT16, Array, read_flat, read_tensor, write_tensor
from weft.wire.binary.message import read_message
from weft.wire.error import WireError
from weft.wire.tensor import TensorData, read_tensor_data, write_tensor_data

__all__ = ["PolicySpan", "SampleUsage", "StopReason", "TopkLogprobs"]

StopReason = Literal["length", "stop"]

#: The token and the logprob in empty cells of a top-k table.
EMPTY_TOKEN, EMPTY_LOGPROB = 0, -99999.0

_REASONS: dict[int, StopReason] = {pb.STOP_REASON_STOP: "stop", pb.STOP_REASON_LENGTH: "length"}
_CODES: dict[StopReason, pb.StopReason] = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


@dataclass(frozen=True)
class TopkLogprobs:
    """The k likeliest tokens at each of N positions: ids int32 [N, k] and logprobs float32 [N, k]."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]

    def tolist(self) -> list[list[tuple[int, float]] | None]:
        """Pairs (token, logprob) per position; None if the whole row is empty."""
        rows: list[list[tuple[int, float]] | None] = []
        for tokens, logprobs in zip(self.token_ids.tolist(), self.logprobs.tolist(), strict=True):
            cells = zip(tokens, logprobs, strict=True)
            row = [(token, logprob) for token, logprob in cells if logprob != EMPTY_LOGPROB]
            rows.append(row or None)
        return rows


@dataclass(frozen=True)
class PolicySpan:
    """`length` tokens in a row drawn with the weights of policy `version`: the optimizer steps behind them."""

    version: int
    length: int


@dataclass(frozen=True)
class SequenceResult:
    """One sampled sequence: tokens int32 [N] and the logprob of each, float32 [N], under the sampled distribution.

    `policy` says which policy version drew which tokens, from the first to the last. `stale`: the sequence was stopped
    because the run had moved further than the request's `max_staleness`; its stop reason is "length".
    `routed_experts`: the experts that each token of prompt + tokens but the last was sent to, int64 [prompt + N - 1,
    mixture layers, choices]; a datum with these tokens takes it as the input of that name."""

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32] | None
    stop_reason: StopReason
    topk: TopkLogprobs | None = None
    policy: tuple[PolicySpan, ...] = ()
    stale: bool = False
    routed_experts: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True)
class SampleUsage:
    """The tokens that a request is billed, by the kinds of a price list: prompt tokens that were computed (`prefill`)
    or found in memory (`cached_prefill`), and drawn tokens (`sample`)."""

    prefill: int = 0
    cached_prefill: int = 0
    sample: int = 0


@dataclass(frozen=True)
class SampleResult:
    """All that one sample request returns. `prompt_logprobs` float32 [prompt], NaN where there is none;
    `target_prompt_logprobs` float32 in the shape and layout of the request; `prompt_alt_tokens` ids int64 and logprobs
    float32, both [prompt - 1, k]."""

    sequences: list[SequenceResult]
    prompt_logprobs: npt.NDArray[np.float32] | None = None
    prompt_cache_hit_tokens: int = 0
    topk_prompt_logprobs: TopkLogprobs | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens: tuple[Array, Array] | None = None
    usage: SampleUsage | None = None


def encode_sample_response(
    sequences: Sequence[SequenceResult],
    prompt_logprobs: npt.NDArray[np.float32] | None = None,
    prompt_cache_hit_tokens: int = 0,
    topk_prompt_logprobs: TopkLogprobs | None = None,
    target_prompt_logprobs: TensorData | None = None,
    prompt_alt_tokens: tuple[Array, Array] | None = None,
    usage: SampleUsage | None = None,
) -> bytes:
    """The bytes of a SampleResponse; what its parts are, `SampleResult` says."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=prompt_cache_hit_tokens)
    for sequence in sequences:
        written = message.sequences.add()
        written.stop_reason = _CODES[sequence.stop_reason]
        written.tokens = _bytes(sequence.tokens, INT32)
        if sequence.logprobs is not None:
            written.logprobs = _bytes(sequence.logprobs, FLOAT32)
        if sequence.topk is not None:
            _write_topk(written.topk_sampled_logprobs, sequence.topk)
        for span in sequence.policy:
            written.policy_spans.add(version=span.version, length=span.length)
        written.stale = sequence.stale
        if sequence.routed_experts is not None:
            _, written.routed_experts.layers, written.routed_experts.choices = sequence.routed_experts.shape
            written.routed_experts.ids = _bytes(sequence.routed_experts, UINT16)
    if prompt_logprobs is not None:
        message.prompt_logprobs = _bytes(prompt_logprobs, FLOAT32)
    if topk_prompt_logprobs is not None:
        _write_topk(message.topk_prompt_logprobs, topk_prompt_logprobs)
    if target_prompt_logprobs is not None:
        write_tensor_data(message.target_prompt_logprobs, target_prompt_logprobs)
    if prompt_alt_tokens is not None:
        tokens, logprobs = prompt_alt_tokens
        write_tensor(message.prompt_alt_tokens.tokens, tokens, "prompt_alt_tokens.tokens")
        write_tensor(message.prompt_alt_tokens.logprobs, logprobs, "prompt_alt_tokens.logprobs")
    if usage is not None:
        message.usage.prefill, message.usage.sample = usage.prefill, usage.sample
        message.usage.cached_prefill = usage.cached_prefill
    return message.SerializeToString()


def _bytes(array: npt.ArrayLike, dtype: np.dtype[np.generic]) -> bytes:
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


def _write_topk(message: pb.TopkLogprobs, topk: TopkLogprobs) -> None:
    if topk.token_ids.shape != topk.logprobs.shape or topk.token_ids.ndim != 2:
        raise WireError(f"top-k: ids {topk.token_ids.shape} and logprobs {topk.logprobs.shape} must both be [N, k]")
    message.length, message.k = topk.token_ids.shape
    message.token_ids = _bytes(topk.token_ids, INT32)
    message.logprobs = _bytes(topk.logprobs, FLOAT32)


def decode_sample_response(body: bytes) -> SampleResult:
    """Read a SampleResponse."""
    message = read_message(body, pb.SampleResponse)
    alternatives: tuple[Array, Array] | None = None
    if message.HasField("prompt_alt_tokens"):
        alt = message.prompt_alt_tokens
        alternatives = (
            read_tensor(alt.tokens, "prompt_alt_tokens.tokens"),
            read_tensor(alt.logprobs, "prompt_alt_tokens.logprobs"),
        )
    usage = message.usage
    return SampleResult(
        sequences=[_read_sequence(item, f"sequences[{index}]") for index, item in enumerate(message.sequences)],
        prompt_logprobs=_read_logprobs(message.prompt_logprobs, "prompt_logprobs"),
        prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
        topk_prompt_logprobs=(
            _read_topk(message.topk_prompt_logprobs, "topk_prompt_logprobs")
            if message.HasField("topk_prompt_logprobs")
            else None
        ),
        target_prompt_logprobs=(
            read_tensor_data(message.target_prompt_logprobs, "target_prompt_logprobs")
            if message.HasField("target_prompt_logprobs")
            else None
        ),
        prompt_alt_tokens=alternatives,
        usage=SampleUsage(usage.prefill, usage.cached_prefill, usage.sample) if message.HasField("usage") else None,
    )


def _read_sequence(message: pb.SampledSequence, where: str) -> SequenceResult:
    reason = _REASONS.get(message.stop_reason)
    if reason is None:
        raise WireError(f"{where}: stop reason {message.stop_reason} is unknown")
    tokens = read_flat(message.tokens, INT32, f"{where}.tokens").astype(np.int32, copy=False)
    logprobs = _read_logprobs(message.logprobs, f"{where}.logprobs")
    if logprobs is not None and logprobs.size != tokens.size:
        raise WireError(f"{where}: {logprobs.size} logprobs for {tokens.size} tokens")
    topk = None
    if message.HasField("topk_sampled_logprobs"):
        topk = _read_topk(message.topk_sampled_logprobs, f"{where}.topk_sampled_logprobs")
    policy = tuple(PolicySpan(span.version, span.length) for span in message.policy_spans)
    if policy and (sum(span.length for span in policy) != tokens.size or any(span.length < 1 for span in policy)):
        raise WireError(f"{where}: policy spans {[span.length for span in policy]} do not cover {tokens.size} tokens")
    routes = None
    if message.HasField("routed_experts"):
        routes = _read_routes(message.routed_experts, f"{where}.routed_experts")
    return SequenceResult(tokens, logprobs, reason, topk, policy, message.stale, routes)


def _read_routes(message: pb.RoutedExperts, where: str) -> npt.NDArray[np.int64]:
    ids = read_flat(message.ids, UINT16, where).astype(np.int64)
    each = message.layers * message.choices
    if not each or ids.size % each:
        raise WireError(
            f"{where}: {ids.size} ids are not {message.layers} layers x {message.choices} choices of tokens"
        )
    return ids.reshape(-1, message.layers, message.choices)


def _read_logprobs(data: bytes, where: str) -> npt.NDArray[np.float32] | None:
    """Absent and empty bytes mean the same to every client of the protocol: no logprobs."""
    return read_flat(data, FLOAT32, where).astype(np.float32, copy=False) if data else None


def _read_topk(message: pb.TopkLogprobs, where: str) -> TopkLogprobs | None:
    shape = (message.length, message.k)
    if 0 in shape:
        return None
    tokens = read_flat(message.token_ids, INT32, f"{where}.token_ids").astype(np.int32, copy=False)
    logprobs = read_flat(message.logprobs, FLOAT32, f"{where}.logprobs").astype(np.float32, copy=False)
    if tokens.size != shape[0] * shape[1] or logprobs.size != tokens.size:
        raise WireError(f"{where}: {tokens.size} ids and {logprobs.size} logprobs do not fill {shape[0]} x {shape[1]}")
    return TopkLogprobs(token_ids=tokens.reshape(shape), logprobs=logprobs.reshape(shape))
