"""The check of a sample request before it is accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from weft.wire import EncodedTextChunk, SampleRequest, SamplingParams, TensorData

from api.errors import Invalid
from store.settings import Limits
from workers.model.card import ModelCard

MAX_STOP_CHARACTERS = 256
MAX_TOP_LOGPROBS = 100


def check_sample(request: SampleRequest, card: ModelCard, limits: Limits, *, of_run: bool = True) -> int:
    """Check a request. Returns the most tokens that one of its sequences can get: generation ends at the context
    length, of which the last token sampled needs no place. `of_run`: the sampler is of a run of the client's. Raises
    Invalid naming the field, limit and value."""
    prompt = prompt_tokens(request)
    longest = min(card.context_length, limits.max_seq_len)
    if prompt.size == 0:
        raise Invalid("prompt: empty; it needs at least one token")
    if prompt.size > longest:
        raise Invalid(f"prompt: {prompt.size} tokens, the context length of {card.name} is {longest}")
    bad = np.flatnonzero((prompt < 0) | (prompt >= card.vocab_size))
    if bad.size:
        raise Invalid(
            f"prompt: token {int(prompt[bad[0]])} at position {int(bad[0])}; "
            f"this model's tokens are 0 to {card.vocab_size - 1}"
        )
    if not 1 <= request.num_samples <= limits.max_num_samples:
        raise Invalid(f"num_samples: must be 1 to {limits.max_num_samples}, got {request.num_samples}")
    _check_params(request.sampling_params)
    _check_stop(request.sampling_params, card, limits)
    _check_logprobs(request, card, int(prompt.size))
    if request.return_routed_experts and not card.num_experts:
        raise Invalid(f"return_routed_experts: {card.name} has no experts; leave it out")
    if request.max_staleness is not None and not of_run:
        raise Invalid(
            "max_staleness: this sampler is of no training run, so its policy never gets old; leave it out, or sample "
            "from a run's weights (save_weights_for_sampler)"
        )
    room = longest - int(prompt.size) + 1
    return min(request.sampling_params.max_tokens or room, room)


def prompt_tokens(request: SampleRequest) -> npt.NDArray[np.int64]:
    """All token ids of the prompt, int64 [T]. Raises Invalid for anything that is not text."""
    parts = []
    for index, chunk in enumerate(request.prompt.chunks):
        if not isinstance(chunk, EncodedTextChunk):
            raise Invalid(
                f"prompt.chunks.{index}: {chunk.type} chunks are not supported; "
                "the models served here read text only (encoded_text)"
            )
        parts.append(np.array(chunk.tokens, dtype=np.int64))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _check_params(params: SamplingParams) -> None:
    """What the type does not say."""
    if params.top_k != -1 and not 1 <= params.top_k < 2**31:
        raise Invalid(f"sampling_params.top_k: must be -1 (all) or at least 1, got {params.top_k}")


def _check_stop(params: SamplingParams, card: ModelCard, limits: Limits) -> None:
    """`stop` is a string, strings, or token ids; absent means EOS and [] means nothing stops."""
    stops: Sequence[str | int] = [params.stop] if isinstance(params.stop, str) else params.stop or ()
    if len(stops) > limits.max_stop_sequences:
        raise Invalid(f"sampling_params.stop: {len(stops)} entries, the limit is {limits.max_stop_sequences}")
    for index, stop in enumerate(stops):
        where = f"sampling_params.stop: entry {index}"
        if isinstance(stop, int):
            if not 0 <= stop < card.vocab_size:
                raise Invalid(f"{where} is {stop}; this model's tokens are 0 to {card.vocab_size - 1}")
        elif not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise Invalid(f"{where} has {len(stop)} characters; it must have 1 to {MAX_STOP_CHARACTERS}")


def _check_logprobs(request: SampleRequest, card: ModelCard, length: int) -> None:
    """What is asked about tokens beside those sampled; `length` is that of the prompt."""
    for field in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        value = getattr(request, field)
        if not 0 <= value <= MAX_TOP_LOGPROBS:
            raise Invalid(f"{field}: must be 0 to {MAX_TOP_LOGPROBS}, got {value}")
    last_n = request.prompt_logprobs_last_n
    if last_n is not None:
        if not request.prompt_logprobs:
            raise Invalid("prompt_logprobs_last_n: it limits prompt_logprobs, which is not asked for")
        if not 1 <= last_n <= length - 1:
            raise Invalid(
                f"prompt_logprobs_last_n: must be 1 to {length - 1} with {length} prompt tokens, got {last_n}"
            )
    if request.target_prompt_logprobs is not None:
        _check_targets(request.target_prompt_logprobs, card, length)


def _check_targets(targets: TensorData, card: ModelCard, length: int) -> None:
    where, shape = "target_prompt_logprobs", targets.shape or []
    if targets.dtype != "int64" or len(shape) != 2 or shape[1] < 1:
        raise Invalid(f"{where}: must be int64 [prompt tokens - 1, K], got {targets.dtype} {shape}")
    if shape[0] != length - 1:
        raise Invalid(f"{where}: must have {length - 1} rows, one less than prompt tokens, got {shape[0]}")
    ids = targets.values.astype(np.int64)
    if ids.size > MAX_TOP_LOGPROBS * shape[0]:
        raise Invalid(f"{where}: {ids.size} cells, the limit is {MAX_TOP_LOGPROBS} for each of the {shape[0]} rows")
    bad = np.flatnonzero((ids < -1) | (ids >= card.vocab_size))
    if bad.size:
        raise Invalid(f"{where}: token {int(ids[bad[0]])}; must be -1 (nothing) or 0 to {card.vocab_size - 1}")
    if not (ids >= 0).any():
        raise Invalid(f"{where}: it names no token; leave it out")
