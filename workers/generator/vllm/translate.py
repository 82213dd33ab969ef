"""Between the engine's requests and vLLM's bodies and answers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from weft.wire.binary.sample_codec import EMPTY_LOGPROB, EMPTY_TOKEN, SequenceResult, TopkLogprobs

from workers.generator.engine import GenerateRequest, Logprobs

#: The most top logprobs asked of vLLM; beyond, JSON would be most of the work.
MAX_TOPK = 1024
#: vLLM refuses temperatures above the range, and raises lower ones to its lower end.
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0


def beyond(request: GenerateRequest, *, tempered: bool) -> str | None:
    """Why vLLM cannot serve a request, or None. `tempered`: its logprobs are taken at the request's temperature."""
    if request.prompt_alt_tokens_k:
        return "other draws for prompt tokens (prompt_alt_tokens_k) are not served by vLLM"
    if request.return_routed_experts:
        return "the experts that tokens were sent to (return_routed_experts) are not told by vLLM here"
    if request.target_tokens is not None:
        return "logprobs of chosen tokens (target_prompt_logprobs) are not served by vLLM"
    if max(request.topk_prompt_logprobs, request.topk_sample_logprobs) > MAX_TOPK:
        return f"vLLM serves logprobs of at most {MAX_TOPK} top tokens"
    if not (request.sampling.temperature == 0 or LEAST_TEMPERATURE <= request.sampling.temperature <= MOST_TEMPERATURE):
        return f"vLLM serves temperature 0 and from {LEAST_TEMPERATURE} to {MOST_TEMPERATURE}"
    if not tempered and request.sampling.temperature not in (0, 1):
        return "a temperature other than 0 and 1 needs a vLLM with Weft's plugin, whose logprobs heed it"
    return None


def params_of(request: GenerateRequest, sample: int, limit: int, eos: Sequence[int]) -> dict[str, Any]:
    """vLLM's sampling parameters for one sequence of a request, which may have at most `limit` tokens."""
    sampling = request.sampling
    stops = [*(eos if sampling.stop_at_eos else ()), *sampling.stop_token_ids]
    params: dict[str, Any] = {
        "max_tokens": max(1, limit),  # vLLM draws at least one token, which `sequence_of` leaves out
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "ignore_eos": True,
        "stop_token_ids": stops,
        # One more than asked: vLLM counts the sampled token, likely or not.
        "logprobs": request.topk_sample_logprobs + (request.topk_sample_logprobs > 0),
        "detokenize": False,
    }
    if sampling.seed is not None:
        params["seed"] = sequence_seed(sampling.seed, sample)
    if sample == 0 and (request.prompt_logprobs or request.topk_prompt_logprobs > 0):
        params["prompt_logprobs"] = request.topk_prompt_logprobs
    return params


def cache_salt(tenant: str, weights: str) -> str:
    """vLLM's cache salt: only prompts with the same one share its prefix cache."""
    return hashlib.sha256(f"{tenant}\0{weights}".encode()).hexdigest()


def sequence_seed(seed: int, sample: int) -> int:
    """A seed of 63 bits for each (seed, sample)."""
    digest = hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sequence_of(request: GenerateRequest, choice: Mapping[str, Any], vocab: int) -> SequenceResult:
    """One sequence of vLLM's answer, without its policy spans, with the stop reason "length"."""
    drawn = slice(0) if request.sampling.max_tokens == 0 else slice(None)
    tokens = np.array(choice["token_ids"][drawn], dtype=np.int32)
    content = ((choice["logprobs"] or {}).get("content") or [])[drawn]
    logprobs = np.array([entry["logprob"] for entry in content], dtype=np.float32)
    k = min(request.topk_sample_logprobs, vocab)
    topk = _table([entry["top_logprobs"] for entry in content], k) if k and content else None
    return SequenceResult(tokens, logprobs, "length", topk)


def prompt_logprobs_of(request: GenerateRequest, found: Sequence[Mapping[str, Any] | None]) -> Logprobs | None:
    """Logprobs of the prompt's own tokens; NaN for the first and for those not asked for."""
    if not request.prompt_logprobs:
        return None
    logprobs_P = np.full(len(request.prompt), np.nan, np.float32)
    for i in _asked(request):
        row = found[i]
        logprobs_P[i] = math.nan if row is None else row[str(request.prompt[i])]["logprob"]
    return logprobs_P


def prompt_topk_of(
    request: GenerateRequest, found: Sequence[Mapping[str, Any] | None], vocab: int
) -> TopkLogprobs | None:
    k = min(request.topk_prompt_logprobs, vocab)
    if not k:
        return None
    asked, rows = set(_asked(request)), []
    for i, row in enumerate(found):
        entries = [] if row is None or i not in asked else [{"token_id": int(t), **e} for t, e in row.items()]
        rows.append(entries)
    return _table(rows, k)


def _asked(request: GenerateRequest) -> range:
    length, last_n = len(request.prompt), request.prompt_logprobs_last_n
    return range(max(1, 0 if last_n is None else length - last_n), length)


def _table(rows: Sequence[Sequence[Mapping[str, Any]]], k: int) -> TopkLogprobs:
    """The `k` likeliest of each row, likeliest first; vLLM's rows have the sampled token in front, top or not."""
    ids_RK = np.full((len(rows), k), EMPTY_TOKEN, np.int32)
    logprobs_RK = np.full((len(rows), k), EMPTY_LOGPROB, np.float32)
    for r, row in enumerate(rows):
        best = {entry["token_id"]: entry["logprob"] for entry in row}
        for c, (token, logprob) in enumerate(sorted(best.items(), key=lambda pair: (-pair[1], pair[0]))[:k]):
            ids_RK[r, c], logprobs_RK[r, c] = token, logprob
    return TopkLogprobs(ids_RK, logprobs_RK)
