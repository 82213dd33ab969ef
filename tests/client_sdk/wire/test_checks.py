"""The check of losses and their inputs: what it refuses, and that it runs without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from weft.wire.account.limits import LimitsResponse, ModelLimits
from weft.wire.binary.train_codec import ArrayDatum, TrainBatch
from weft.wire.checks.batches import BatchRules, Reads, batch_problems, refusal, size_problems
from weft.wire.checks.losses import WITH_CUSTOM

RULES = BatchRules(WITH_CUSTOM, ModelLimits(vocab_size=100, context_length=64, num_experts=0), "tiny")


def said(loss_fn: str, config: dict[str, Any], data: list[dict[str, Any]], length: int = 2) -> list[str]:
    """All problems of these data, of `length` tokens each; the server reports the first one."""
    made = [ArrayDatum(np.ones(length, np.int32), inputs) for inputs in data]
    return [refusal(found) for found in batch_problems(TrainBatch("r", 1, loss_fn, config, data=made), RULES)]


def rl(**more: Any) -> dict[str, Any]:
    return {
        "target_tokens": np.array([1, 2]),
        "logprobs": np.array([-1.0, -2.0], np.float32),
        "advantages": np.array([1.0, 0.0], np.float32),
        **more,
    }


CE = {"target_tokens": np.array([1, 2]), "weights": np.ones(2, np.float32)}


def test_accepts() -> None:
    wide = {"target_tokens": np.ones((2, 3), np.int64), "weights": np.ones((2, 3))}
    assert said("cross_entropy", {}, [CE, wide]) == []
    assert said("ppo", {"clip_low_threshold": 0.9}, [rl(clip_high_threshold=np.array([1.0, 1.5]))]) == []
    assert said("importance_sampling", {}, [rl(weights=np.ones(2), mask=np.ones(2))]) == []
    assert said("ppo", {"clip_low_threshold": 0.0}, [rl(clip_high_threshold=np.array([0.0, 1.5]))]) == []
    assert said("ppo", {"clip_low_threshold": 1.1, "clip_high_threshold": 1.1}, [rl()]) == []
    assert said("gspo", {}, [rl(advantages=np.zeros(2), sequence_ratio_mask=np.zeros(2))]) == []
    told = [rl(sampling_temperature=np.array(each)) for each in ([0.7], [0.7, 1.3])]
    assert said("dro", {"beta": 0.0}, told) == []


@pytest.mark.parametrize(
    ("loss_fn", "config", "datum", "words"),
    [
        ("sft", {}, CE, "unknown loss_fn 'sft'"),
        ("ppo", {"clip_low": 0.5}, rl(), "unknown loss_fn_config key 'clip_low'"),
        ("importance_sampling", {"clip_low_threshold": 0.5}, rl(), "takes none"),
        ("ppo", {"clip_low_threshold": "0.5"}, rl(), "finite number"),
        ("ppo", {"clip_low_threshold": 2.0}, rl(), "above clip_high_threshold"),
        ("ppo", {}, CE, "datum 1: ppo needs the input 'logprobs'"),
        ("cross_entropy", {}, rl(), "cross_entropy needs the input 'weights'"),
        ("cross_entropy", {}, CE | {"mask": np.ones(2)}, "unknown input 'mask'"),
        ("ppo", {}, rl(advantages=np.ones(3)), r"'advantages' has shape \(3,\)"),
        ("ppo", {}, rl(advantages=np.array([1.0, np.nan])), "'advantages' is nan at element 1"),
        ("cross_entropy", {}, CE | {"weights": np.array([np.inf, 1])}, "'weights' is inf at element 0"),
        ("cross_entropy", {}, CE | {"target_tokens": np.array([1.0, 2.0])}, "must be integers"),
        (
            "cross_entropy",
            {},
            CE | {"target_tokens": np.array([1, -2])},
            "token -2 at position 1; this model's tokens are 0 to 99",
        ),
        ("ppo", {}, {k: v[:, None] for k, v in rl().items()}, r"must have shape \[N\]"),
        ("ppo", {"clip_low_threshold": 0.5}, rl(clip_low_threshold=np.ones(2)), "both in loss_fn_config and"),
        ("ppo", {}, rl(clip_low_threshold=np.array([0.5, 1.5])), "above 'clip_high_threshold'"),
        ("ppo", {}, rl(clip_high_threshold=np.array([1.5, 0.5])), "'clip_low_threshold' is above"),
        ("ppo", {"clip_high_threshold": float("inf")}, rl(), "finite number"),
        ("ppo", {}, rl(clip_low_threshold=np.array([-0.5, 0.5])), "negative ratio bound -0.5"),
        ("cross_entropy", {}, {k: v[:, None, None] for k, v in CE.items()}, r"must have shape \[N\] or \[N, K\]"),
        ("ppo", {}, rl(sampling_temperature=np.ones(3)), "one value, or one for each position"),
        ("ppo", {}, rl(sampling_temperature=np.array([0.5, 0.0])), "is 0.0 at element 1; it must be a finite number"),
        ("ppo", {}, rl(sampling_temperature=np.array([np.nan])), "is nan at element 0"),
        ("dro", {"beta": -0.1}, rl(), "'beta' must be a finite number >= 0"),
        ("dro", {"kl_coeff": 0.1}, rl(), "dro takes beta"),
        ("gspo", {}, rl(), "gspo needs the input 'sequence_ratio_mask'"),
        ("gspo", {}, rl(sequence_ratio_mask=np.zeros(2)), "marks no position"),
        ("stable_reinforce", {"beta": 0.1}, rl(), "stable_reinforce takes clip_low_threshold"),
    ],
)
def test_refuses_by_name(loss_fn: str, config: dict[str, Any], datum: dict[str, Any], words: str) -> None:
    good = CE if loss_fn == "cross_entropy" else rl()
    good = good | ({"sequence_ratio_mask": np.ones(2)} if loss_fn == "gspo" else {})
    assert re.search(words, said(loss_fn, config, [good, datum])[0])


def test_refuses_targets_that_do_not_match_the_tokens() -> None:
    assert said("cross_entropy", {}, [CE], 5) == [
        "datum 0: 'target_tokens' has 2 positions, the model input 5 tokens",
    ]


def test_lists_everything() -> None:
    bad = {"target_tokens": np.array([1, 100]), "weights": np.array([np.nan]), "mask": np.ones(2)}
    assert said("cross_entropy", {"beta": 1.0}, [bad, CE, {}], 2) == [
        "unknown loss_fn_config key 'beta': cross_entropy takes none",
        "datum 0: unknown input 'mask': cross_entropy takes routed_experts, sampling_temperature, "
        "target_tokens, weights",
        "datum 0: 'weights' has shape (1,), target_tokens has (2,)",
        "datum 2: cross_entropy needs the input 'target_tokens'; it has []",
        "datum 2: cross_entropy needs the input 'weights'; it has []",
        "datum 0: 'weights' is nan at element 0; it must be finite",
        "datum 0: target_tokens holds token 100 at position 1; this model's tokens are 0 to 99",
    ]


@pytest.mark.parametrize(
    ("rank", "shape", "fits"),
    [(0, (), True), (0, (1,), True), (0, (2,), False), (1, (1,), True), (2, (1,), False), (2, (1, 1), True)],
)
def test_a_custom_loss_reads_inputs_of_the_rank_that_it_declared(rank: int, shape: tuple[int, ...], fits: bool) -> None:
    reads = Reads("mine", (("logprobs", 1), ("mine", rank)))
    made = ArrayDatum(np.ones(2, np.int32), {"target_tokens": np.array([1, 2]), "mine": np.ones(shape)})
    batch = TrainBatch("r", 1, "custom", {"loss_id": "L"}, data=[made])
    found = [problem.what for _, problem in batch_problems(batch, replace(RULES, reads=reads))]
    assert found == ([] if fits else [f"'mine' has shape {shape}, the loss 'mine' declared rank {rank}"])


@pytest.mark.parametrize(
    ("second", "says"),
    [([0, 7], ""), ([-1, -1], ""), ([-1, 3], "at token 1"), ([0, 8], "at token 1"), ([-2, -2], "at token 1")],
)
def test_replayed_experts_of_a_layer_are_all_left_to_the_router_or_none(second: list[int], says: str) -> None:
    model = ModelLimits(vocab_size=100, context_length=64, num_experts=8, mixture_layers=1, experts_per_token=2)
    made = ArrayDatum(np.ones(2, np.int32), CE | {"routed_experts": np.array([[[1, 2]], [second]])})
    batch = TrainBatch("r", 1, "cross_entropy", {}, data=[made])
    found = [problem.what for _, problem in batch_problems(batch, BatchRules(WITH_CUSTOM, model))]
    assert len(found) == bool(says)
    assert all(says in what for what in found)


@pytest.mark.parametrize(("data", "tokens", "wrong"), [(4, 10, 0), (5, 8, 1), (4, 11, 1), (5, 11, 2)])
def test_a_request_may_be_as_large_as_its_limits(data: int, tokens: int, wrong: int) -> None:
    limits = LimitsResponse(models={}, losses={}, max_data=4, max_tokens_per_op=40)
    assert len(list(size_problems([tokens] * 4 + [0] * (data - 4), limits))) == wrong


@pytest.mark.parametrize("spoilt", [0, 700, 1999])
def test_one_bad_datum_among_many(spoilt: int) -> None:
    """Small arrays are checked together, and the wrong one among them is still found."""
    data: list[dict[str, Any]] = [
        {"target_tokens": np.arange(50), "weights": np.ones(50, np.float32)} for _ in range(2000)
    ]
    data[spoilt]["weights"][7] = np.inf
    data[spoilt]["target_tokens"][8] = -5
    assert said("cross_entropy", {}, data, 50) == [
        f"datum {spoilt}: 'weights' is inf at element 7; it must be finite",
        f"datum {spoilt}: target_tokens holds token -5 at position 8; this model's tokens are 0 to 99",
    ]


def test_imports_no_torch() -> None:
    code = "import sys, weft.wire.checks.batches, weft.wire.checks.custom_format; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
