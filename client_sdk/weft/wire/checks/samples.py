"""What is wrong with a request for samples: its prompt, its parameters, and the likeliest tokens that it asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from weft.wire.account.limits import LimitsResponse, ModelLimits
from weft.wire.checks.problem import Problem, bounds
from weft.wire.inputs import EncodedTextChunk, ModelInput
from weft.wire.sampling import SampleRequest, SamplingParams
from weft.wire.tensor import TensorData

Tokens = npt.NDArray[np.int64]

#: The lowest temperature other than 0: logits are divided by it, and must stay finite in float32.
LEAST_TEMPERATURE = 1e-6


def text_problems(prompt: ModelInput) -> Iterator[Problem]:
    """Problems of chunks that are not text."""
    for index, chunk in enumerate(prompt.chunks):
        if not isinstance(chunk, EncodedTextChunk):
            what = f"{chunk.type} chunks are not supported; the models served here read text only (encoded_text)"
            yield Problem(f"prompt.chunks.{index}", what, "encoded_text", chunk.type)


def sample_problems(
    request: SampleRequest, tokens: Tokens, limits: LimitsResponse, model: ModelLimits, name: str, *, of_run: bool
) -> Iterator[Problem]:
    """All problems of a request whose prompt is `tokens`. `of_run`: the sampler is of a run of the client's."""
    yield from prompt_problems(tokens, model, name)
    yield from count_problems(request.num_samples, limits)
    yield from params_problems(request.sampling_params, model, limits)
    for field in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        yield from top_problems(field, getattr(request, field), limits)
    yield from _about_the_prompt(request, model, limits, int(tokens.size))
    if request.return_routed_experts and not model.num_experts:
        yield Problem("return_routed_experts", f"{name} has no experts; leave it out")
    if request.max_staleness is not None and not of_run:
        what = (
            "this sampler is of no training run, so its policy never gets old; leave it out, or sample from a run's "
            "weights (save_weights_for_sampler)"
        )
        yield Problem("max_staleness", what)


def prompt_problems(tokens: Tokens, model: ModelLimits | None, name: str) -> Iterator[Problem]:
    """Problems of the tokens of a prompt. Without a known model, its vocabulary and context are not checked."""
    if tokens.size == 0:
        yield Problem("prompt", "empty; it needs at least one token")
    if model is None:
        return
    longest = model.context_length
    if tokens.size > longest:
        # "prompt is too long": what proxies of agents look for, to have a conversation shortened
        what = f"prompt is too long: {tokens.size} tokens, the context length of {name} is {longest}"
        yield Problem("prompt", what, longest, int(tokens.size))
    bad = np.flatnonzero((tokens < 0) | (tokens >= model.vocab_size))
    if bad.size:
        token, limit = int(tokens[bad[0]]), f"0 to {model.vocab_size - 1}"
        what = f"token {token} at position {int(bad[0])}; this model's tokens are {limit}"
        yield Problem("prompt", what, limit, token)


def count_problems(num_samples: int, limits: LimitsResponse) -> Iterator[Problem]:
    """How many sequences are asked for."""
    most = limits.max_num_samples
    if num_samples < 1 or (most is not None and num_samples > most):
        limit = bounds(1, most)
        yield Problem("num_samples", f"must be {limit}, got {num_samples}", limit, num_samples)


def params_problems(params: SamplingParams, model: ModelLimits | None, limits: LimitsResponse) -> Iterator[Problem]:
    """Problems that the type alone does not exclude. `stop` is a string, strings, or token ids; without it the model's
    EOS ends a sample, with [] nothing does."""
    if 0 < params.temperature < LEAST_TEMPERATURE:
        limit = f"0 (greedy) or at least {LEAST_TEMPERATURE}"
        what = f"must be {limit}, got {params.temperature}"
        yield Problem("sampling_params.temperature", what, limit, params.temperature)
    if params.top_k != -1 and not 1 <= params.top_k < 2**31:
        what = f"must be -1 (all) or at least 1, got {params.top_k}"
        yield Problem("sampling_params.top_k", what, "-1 (all) or at least 1", params.top_k)
    stops: Sequence[str | int] = [params.stop] if isinstance(params.stop, str) else params.stop or ()
    most, longest = limits.max_stop_sequences, limits.max_stop_characters
    if most is not None and len(stops) > most:
        yield Problem("sampling_params.stop", f"{len(stops)} entries, the limit is {most}", most, len(stops))
    for index, stop in enumerate(stops):
        where = f"sampling_params.stop[{index}]"
        if isinstance(stop, str):
            if not stop or (longest is not None and len(stop) > longest):
                limit = bounds(1, longest)
                yield Problem(where, f"has {len(stop)} characters; it must have {limit}", limit, len(stop))
        elif model is not None and not 0 <= stop < model.vocab_size:
            limit = f"0 to {model.vocab_size - 1}"
            yield Problem(where, f"is {stop}; this model's tokens are {limit}", limit, stop)


def top_problems(field: str, value: int, limits: LimitsResponse) -> Iterator[Problem]:
    """How many of the likeliest tokens are asked for."""
    most = limits.max_top_logprobs
    if value < 0 or (most is not None and value > most):
        limit = bounds(0, most)
        yield Problem(field, f"must be {limit}, got {value}", limit, value)


def _about_the_prompt(
    request: SampleRequest, model: ModelLimits, limits: LimitsResponse, length: int
) -> Iterator[Problem]:
    last_n, where = request.prompt_logprobs_last_n, "prompt_logprobs_last_n"
    if last_n is not None and not request.prompt_logprobs:
        yield Problem(where, "it limits prompt_logprobs, which is not asked for")
    elif last_n is not None and not 1 <= last_n <= length - 1:
        what = f"must be 1 to {length - 1} with {length} prompt tokens, got {last_n}"
        yield Problem(where, what, f"1 to {length - 1}", last_n)
    if request.target_prompt_logprobs is not None:
        yield from _targets(request.target_prompt_logprobs, model, limits, length)


def _targets(targets: TensorData, model: ModelLimits, limits: LimitsResponse, length: int) -> Iterator[Problem]:
    where, shape = "target_prompt_logprobs", targets.shape or []
    if targets.dtype != "int64" or len(shape) != 2 or shape[1] < 1:
        what = f"must be int64 [prompt tokens - 1, K], got {targets.dtype} {shape}"
        yield Problem(where, what, "int64 [prompt tokens - 1, K]", shape)
        return
    if shape[0] != length - 1:
        what = f"must have {length - 1} rows, one less than prompt tokens, got {shape[0]}"
        yield Problem(where, what, length - 1, shape[0])
    ids, most = targets.values.astype(np.int64), limits.max_top_logprobs
    if most is not None and ids.size > most * shape[0]:
        what = f"{ids.size} cells, the limit is {most} for each of the {shape[0]} rows"
        yield Problem(where, what, most, ids.size)
    bad = np.flatnonzero((ids < -1) | (ids >= model.vocab_size))
    if bad.size:
        token, limit = int(ids[bad[0]]), f"-1 (nothing) or 0 to {model.vocab_size - 1}"
        yield Problem(where, f"token {token}; must be {limit}", limit, token)
    if not (ids >= 0).any():
        yield Problem(where, "it names no token; leave it out")
