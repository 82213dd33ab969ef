"""Sampling by closed forms: which tokens are kept, which is drawn, and what is reported."""

import math

import numpy as np
import pytest
import torch

from workers.generator.engine import GenerateRequest, SamplingParams
from workers.generator.tokens.prompt_scores import PromptScores, land
from workers.generator.tokens.sampling import Draw, SamplingRows, draw, prompt_rng, sample, sequence_rng, truncate

PROBS = [0.1, 0.4, 0.05, 0.3, 0.15]  # most probable first: tokens 1, 3, 4, 0, 2
LOGITS = torch.tensor(PROBS).log()


def parts(draws: list[Draw]) -> tuple[list[int], list[float]]:
    return [drawn.token for drawn in draws], [drawn.logprob for drawn in draws]


def kept(top_k: int, top_p: float) -> dict[int, float]:
    logprobs_CK, ids_CK = truncate(
        LOGITS[None],
        LOGITS[None],
        torch.tensor([top_k if top_k > 0 else 5]),
        torch.tensor([top_p], dtype=torch.float64),
    )
    cells = zip(ids_CK[0].tolist(), logprobs_CK[0].exp().tolist(), strict=True)
    return {token: prob for token, prob in cells if prob > 0}


@pytest.mark.parametrize(
    ("top_k", "top_p", "tokens"),
    [
        pytest.param(-1, 1.0, {0, 1, 2, 3, 4}, id="off"),
        pytest.param(1, 1.0, {1}, id="k1"),
        pytest.param(3, 1.0, {1, 3, 4}, id="k3"),
        pytest.param(-1, 0.39, {1}, id="p-below-the-first"),
        pytest.param(-1, 0.5, {1, 3}, id="p-reached-by-two"),
        pytest.param(-1, 0.84, {1, 3, 4}, id="p-reached-by-three"),
        pytest.param(-1, 1e-9, {1}, id="p-tiny-keeps-one"),
        pytest.param(2, 0.55, {1}, id="p-of-what-k-left"),  # 0.4 / 0.7 = 0.571 >= 0.55
        pytest.param(2, 0.58, {1, 3}, id="p-of-what-k-left-needs-both"),
    ],
)
def test_truncate_keeps(top_k: int, top_p: float, tokens: set[int]) -> None:
    result = kept(top_k, top_p)
    assert set(result) == tokens
    assert all(prob == pytest.approx(PROBS[token]) for token, prob in result.items())


@pytest.mark.parametrize(("top_p", "count"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.5 + 1e-9, 3)])
def test_top_p_at_an_exact_tie_keeps_the_smallest_prefix(top_p: float, count: int) -> None:
    """Four tokens of one quarter each: two reach one half, a third would be beyond it. Equals rank by id."""
    equals = torch.zeros(1, 4)
    logprobs_CK, ids_CK = truncate(equals, equals, torch.tensor([4]), torch.tensor([top_p], dtype=torch.float64))
    assert ids_CK.tolist() == [[0, 1, 2, 3]]
    assert (logprobs_CK == 0).tolist() == [[index < count for index in range(4)]]
    rows = SamplingRows.of([SamplingParams(top_p=top_p)] * 101, 4, torch.device("cpu"))
    tokens, _ = parts(sample(torch.zeros(101, 4), rows, [index / 101 for index in range(101)]))
    assert set(tokens) == set(range(count))


@pytest.mark.parametrize("size", [3, 8, 10, 49, 50_000])
def test_top_p_of_equal_tokens_keeps_as_many_as_reach_it(size: int) -> None:
    """However their sum rounds."""
    counts = sorted({1, size // 3, size // 2, size - 1})
    equals = torch.log_softmax(torch.zeros(len(counts), size), dim=-1)
    top_p = torch.tensor([count / size for count in counts], dtype=torch.float64)
    logprobs_CK, _ = truncate(equals, equals, torch.full((len(counts),), size), top_p)
    assert torch.isfinite(logprobs_CK).sum(dim=1).tolist() == counts


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1e6])
def test_neighbours_that_round_to_one_logprob_rank_by_their_logits(temperature: float) -> None:
    """With top_k 1 the greedy token is drawn; it is also the first of the likeliest, at a prompt's position too."""
    logits = torch.zeros(3, 32_000)
    logits[:, 5], logits[:, 900] = 0.01, math.nextafter(0.01, 1) + 1e-9
    assert len(torch.log_softmax(logits[0], -1)[[5, 900]].unique()) == 1 < len(logits[0, [5, 900]].unique())
    asked = [{"temperature": 0}, {"temperature": temperature, "top_k": 1}, {"temperature": temperature, "top_p": 1e-9}]
    rows = SamplingRows.of([SamplingParams(**each) for each in asked], 32_000, torch.device("cpu"), [2, 2, 2])
    draws = sample(logits, rows, [0.5, 0.5, 0.5])
    assert [(drawn.token, drawn.top[0] if drawn.top else []) for drawn in draws] == [(900, [900, 5])] * 3
    scores = PromptScores(GenerateRequest("r", (1, 5, 900), topk_prompt_logprobs=2), 32_000)
    scores.fill(0, torch.stack([logits[0], logits[0].flip(0)]))
    land([scores])
    assert scores.topk is not None
    assert scores.topk.token_ids[1:].tolist() == [[900, 5], [31_999 - 900, 31_999 - 5]]


def test_draw_inverts_the_cumulative_distribution() -> None:
    uniforms = [0.0, 0.099, 0.101, 0.499, 0.501, 0.549, 0.551, 0.849, 0.851, 0.9999999]
    columns = torch.tensor(uniforms, dtype=torch.float64)
    expected = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert draw(LOGITS.expand(len(uniforms), -1), columns[:, None])[:, 0].tolist() == expected
    assert draw(LOGITS[None], columns[None])[0].tolist() == expected


def test_draw_never_takes_what_has_no_mass() -> None:
    logprobs = torch.tensor([[-math.inf, 0.0, -math.inf, -math.inf]])
    for uniform in (0.0, 0.5, math.nextafter(1.0, 0.0)):
        assert draw(logprobs, torch.tensor([[uniform]], dtype=torch.float64)).item() == 1


def test_reported_logprob_is_of_the_scaled_distribution_before_the_cut() -> None:
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=2.0),
        SamplingParams(temperature=0.5, top_k=2),
        SamplingParams(temperature=2.0, top_p=0.3),
    ]
    rows = SamplingRows.of(params, 5, torch.device("cpu"))
    tokens, logprobs = parts(sample(LOGITS.expand(4, -1), rows, [0.3] * 4))
    for token, logprob, temperature in zip(tokens, logprobs, (1.0, 2.0, 0.5, 2.0), strict=True):
        assert logprob == pytest.approx(torch.log_softmax(LOGITS / temperature, -1)[token].item(), abs=1e-6)
    assert tokens[0] == 1
    assert tokens[2] in {1, 3}
    assert tokens[3] == 1


@pytest.mark.parametrize("params", [SamplingParams(top_k=1), SamplingParams(temperature=0), SamplingParams(top_p=1e-6)])
def test_degenerate_cuts_are_greedy(params: SamplingParams) -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    rows = SamplingRows.of([params] * 64, 50, torch.device("cpu"))
    tokens, _ = parts(sample(logits, rows, sequence_rng(0, 0).random(64).tolist()))
    assert tokens == logits.argmax(-1).tolist()


def test_frequencies_follow_the_truncated_distribution() -> None:
    count = 20_000
    params = [SamplingParams(temperature=0.5, top_k=3)] * count
    rows = SamplingRows.of(params, 5, torch.device("cpu"))
    tokens, _ = parts(sample(LOGITS.expand(count, -1), rows, sequence_rng(7, 0).random(count).tolist()))
    squares = np.array([PROBS[1] ** 2, PROBS[3] ** 2, PROBS[4] ** 2])
    frequencies = np.bincount(tokens, minlength=5)[[1, 3, 4]] / count
    assert np.bincount(tokens, minlength=5)[[0, 2]].sum() == 0
    np.testing.assert_allclose(frequencies, squares / squares.sum(), atol=0.01)


def test_a_row_draws_the_same_in_any_company() -> None:
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(temperature=0.7 + 0.01 * i, top_k=(i % 5) * 10 or -1, top_p=0.9) for i in range(40)]
    uniforms = sequence_rng(3, 0).random(40).tolist()
    together = sample(logits, SamplingRows.of(params, 300, torch.device("cpu")), uniforms)
    for row in range(40):
        alone_rows = SamplingRows.of([params[row]], 300, torch.device("cpu"))
        assert sample(logits[row : row + 1], alone_rows, [uniforms[row]]) == [together[row]]


def test_rngs_are_keyed_by_seed_and_sample() -> None:
    first = sequence_rng(5, 0).random(4).tolist()
    assert sequence_rng(5, 0).random(4).tolist() == first
    assert sequence_rng(5, 1).random(4).tolist() != first
    assert sequence_rng(6, 0).random(4).tolist() != first
    assert sequence_rng(None, 0).random(4).tolist() != sequence_rng(None, 0).random(4).tolist()
    assert sequence_rng(-1, 0).random() == sequence_rng(2**64 - 1, 0).random()


def test_a_row_that_is_not_finite_is_told_by_its_logprob() -> None:
    logits = torch.stack([LOGITS, torch.full((5,), math.nan), LOGITS])
    rows = SamplingRows.of([SamplingParams()] * 3, 5, torch.device("cpu"))
    tokens, logprobs = parts(sample(logits, rows, [0.5, 0.5, 0.5]))
    assert math.isnan(logprobs[1])
    assert tokens[0] == tokens[2] == 1 or logprobs[0] == logprobs[2]
    cut = SamplingRows.of([SamplingParams(top_k=2)] * 3, 5, torch.device("cpu"))
    assert math.isnan(sample(logits, cut, [0.5, 0.5, 0.5])[1].logprob)


def test_tables_tell_the_likeliest_tokens_of_the_scaled_distribution() -> None:
    params = [SamplingParams(), SamplingParams(temperature=0.5, top_k=1), SamplingParams()]
    draws = sample(LOGITS.expand(3, -1), SamplingRows.of(params, 5, torch.device("cpu"), [0, 2, 5]), [0.5] * 3)
    assert draws[0].top is None
    assert draws[1].top is not None
    assert draws[1].top[0] == [1, 3]
    scaled = torch.log_softmax(LOGITS / 0.5, -1)
    assert draws[1].top[1] == pytest.approx([scaled[1].item(), scaled[3].item()], abs=1e-6)
    assert draws[2].top is not None
    assert draws[2].top[0] == [1, 3, 4, 0, 2]
    assert dict(zip(*draws[2].top, strict=True))[draws[2].token] == draws[2].logprob


def test_a_sequence_has_its_own_numbers_from_whichever_position_it_goes_on() -> None:
    whole = sequence_rng(7, 3).random(20)
    for position in range(12):
        assert sequence_rng(7, 3, position).random(20 - position).tolist() == whole[position:].tolist()
    others = [sequence_rng(7, 4), sequence_rng(8, 3), sequence_rng(-7, 3), sequence_rng(None, 3), prompt_rng(7)]
    drawn = [rng.random() for rng in others]
    assert len({whole[0], *drawn, sequence_rng(None, 3).random()}) == len(drawn) + 2
