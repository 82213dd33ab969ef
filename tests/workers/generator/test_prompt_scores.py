"""What can be asked about a prompt, compared with transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from workers.generator import forward
from workers.generator.cache.prefix_cache import BLOCK_TOKENS
from workers.generator.engine import GenerateRequest, SamplingParams, TargetTokens
from workers.generator.tokens.prompt_scores import PromptScores
from workers.model.decoder import Decoder

from .conftest import VOCAB, run
from .test_engine_contract import ask, prompt
from .test_torch_engine import make

ONE = SamplingParams(max_tokens=1, temperature=0)


def expected(reference: Qwen3MoeForCausalLM, tokens: tuple[int, ...], temperature: float = 1.0) -> np.ndarray:
    """Logprobs [prompt - 1, vocabulary] of all tokens that could have been in each place after the first."""
    with torch.no_grad():
        logits_TV = reference(torch.tensor([tokens])).logits[0, :-1]
    result: np.ndarray = torch.log_softmax(logits_TV / temperature, -1).numpy()
    return result


@pytest.mark.parametrize("length", [5, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 6])
def test_targets(
    reference: Qwen3MoeForCausalLM, decoder: Decoder, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(forward, "MAX_LOGITS", BLOCK_TOKENS * VOCAB)  # a chunk for each block
    rng = np.random.default_rng(0)
    rows = np.sort(rng.integers(0, length - 1, 40))
    ids = rng.integers(-1, VOCAB, 40)
    request = ask("r", length, ONE, target_tokens=TargetTokens(rows, ids))
    told = run(make(decoder), request)["r"].target_logprobs
    table = expected(reference, request.prompt)
    wanted = np.where(ids < 0, 0.0, table[rows, ids])
    assert told is not None
    np.testing.assert_allclose(told, wanted, atol=1e-4)


def test_alternatives_follow_the_model_at_the_requests_temperature(
    reference: Qwen3MoeForCausalLM, decoder: Decoder
) -> None:
    sampling = SamplingParams(max_tokens=1, temperature=0.8, seed=3, top_k=1)
    request = ask("r", 6, sampling, prompt_alt_tokens_k=20_000)
    told = run(make(decoder), request)["r"].prompt_alt_tokens
    assert told is not None
    ids, logprobs = told
    table, scaled = expected(reference, request.prompt), np.exp(expected(reference, request.prompt, 0.8))
    for row in range(5):
        frequencies = np.bincount(ids[row], minlength=VOCAB) / 20_000
        np.testing.assert_allclose(frequencies, scaled[row], atol=0.015)
        np.testing.assert_allclose(logprobs[row], table[row, ids[row]], atol=1e-4)


def test_tables_of_sampled_tokens(reference: Qwen3MoeForCausalLM, decoder: Decoder) -> None:
    request = ask("r", 7, SamplingParams(max_tokens=9, temperature=0.6), num_samples=2, topk_sample_logprobs=4)
    for sequence in run(make(decoder), request, ask("plain", 9))["r"].sequences:
        table = expected(reference, (*request.prompt, *sequence.tokens.tolist()), 0.6)[6:]
        assert sequence.topk is not None
        np.testing.assert_array_equal(sequence.topk.token_ids, np.argsort(-table, axis=1)[:, :4])
        np.testing.assert_allclose(sequence.topk.logprobs, -np.sort(-table, axis=1)[:, :4], atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "row"),
    [
        pytest.param({}, 10, id="nothing"),
        pytest.param({"prompt_logprobs": True}, 0, id="all"),
        pytest.param({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, 6, id="last-3"),
        pytest.param({"target_tokens": TargetTokens(np.array([2, 4]), np.array([-1, 5]))}, 4, id="first-named-target"),
        pytest.param({"prompt_alt_tokens_k": 1}, 0, id="alternatives"),
    ],
)
def test_the_first_row_that_is_needed(fields: dict[str, object], row: int) -> None:
    request = GenerateRequest("r", prompt(10), **fields)  # type: ignore[arg-type]
    assert PromptScores(request, VOCAB).first_row == row
