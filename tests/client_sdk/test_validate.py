"""Everything wrong with a plan, all at once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from weft import AdamParams, Datum, ModelInput, Plan, PlannedSample, PlannedSave, PlannedTrain, PlannedUpdate, Problem
from weft.loss_handle import trace
from weft.plan.validate import validate
from weft.types import (
    DimuonParams,
    LimitsResponse,
    LossLimits,
    ModelLimits,
    PromptProvenanceSpan as Prompt,
    SampledProvenanceSpan as Sampled,
    TensorData,
)

THRESHOLDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
RL = ["target_tokens", "logprobs", "advantages"]
LIMITS = LimitsResponse(
    models={"org/tiny": ModelLimits(vocab_size=100, context_length=8)},
    losses={
        "cross_entropy": LossLimits(required=["target_tokens", "weights"], multi_target=True),
        "ppo": LossLimits(required=RL, optional=["mask", *THRESHOLDS], config=THRESHOLDS),
        "gspo": LossLimits(required=[*RL, "sequence_ratio_mask"]),
        "custom": LossLimits(required=["target_tokens"], config={"loss_id": None}, other_inputs=True),
        "stable_reinforce": LossLimits(required=RL, recorded=["logprobs"]),
    },
    optimizers=["adamw", "dimuon"],
    max_body_bytes=10_000,
    max_tokens_per_op=30,
    max_rank=64,
    max_num_samples=4,
    max_stop_sequences=2,
    max_stop_characters=5,
    max_top_logprobs=3,
    min_ttl_seconds=3600,
    max_ttl_seconds=7200,
)


def datum(tokens: list[int], **inputs: Any) -> Datum:
    named = {"target_tokens": tokens, "weights": [1.0] * len(tokens)} | inputs
    return Datum(ModelInput.from_ints(tokens), {name: value for name, value in named.items() if value is not None})


def problems(*steps: Any, **fields: Any) -> list[Problem]:
    return validate(Plan(**({"base_model": "org/tiny", "steps": steps} | fields)), LIMITS)


def places(*steps: Any, **fields: Any) -> list[str]:
    return [problem.where for problem in problems(*steps, **fields)]


GOOD = PlannedTrain([datum([1, 2, 3])])


def test_a_good_plan_has_none() -> None:
    rl = datum([1, 2], weights=None, logprobs=[-1.0, -1.0], advantages=[1.0, 0.0])
    saves = [
        PlannedSave("s-1", ttl_seconds=3600),
        PlannedSave("s-1", "sampler_weights"),
        PlannedSave("s-1", overwrite=True),
    ]
    sample = PlannedSample([[1, 2]], 4, {"max_tokens": 7, "stop": ["ab", "c"]})
    assert problems(GOOD, PlannedTrain([rl], "ppo", {"clip_low_threshold": 0.5}), PlannedUpdate(), sample, *saves) == []


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"base_model": "x/y"}, "base_model"),
        ({"base_model": None}, "base_model"),
        ({"rank": 65}, "rank"),
        ({"rank": 0}, "rank"),
        ({"seed": 2**63}, "seed"),
        ({"optimizer": "lion"}, "optimizer"),
        ({"times": 0}, "times"),
        ({"steps": ()}, "steps"),
        ({"train_mlp": False, "train_attn": False, "train_unembed": False}, "train_mlp"),
    ],
)
def test_the_run(fields: dict[str, Any], where: str) -> None:
    assert places(*([] if "steps" in fields else [GOOD]), **fields) == [where]


INPUT = "steps[0].data[0].loss_fn_inputs"


@pytest.mark.parametrize(
    ("data", "loss", "config", "where"),
    [
        ([datum([1, 100])], "cross_entropy", {}, ["steps[0].data[0].model_input", f"{INPUT}['target_tokens']"]),
        ([datum([1] * 9)], "cross_entropy", {}, ["steps[0].data[0].model_input"]),
        ([datum([1, 2], weights=[1.0])], "cross_entropy", {}, [f"{INPUT}['weights']"]),
        ([datum([1, 2], weights=[1.0, math.inf])], "cross_entropy", {}, [f"{INPUT}['weights']"]),
        ([datum([1, 2], target_tokens=[1])], "cross_entropy", {}, [f"{INPUT}['target_tokens']", f"{INPUT}['weights']"]),
        ([datum([1, 2], target_tokens=np.ones((2, 2), int), weights=np.ones((2, 2)))], "cross_entropy", {}, []),
        ([datum([1, 2], target_tokens=np.ones(2))], "cross_entropy", {}, [f"{INPUT}['target_tokens']"]),
        ([datum([1, 2], weights=None)], "cross_entropy", {}, [f"{INPUT}['weights']"]),
        ([datum([1], mask=np.ones(1))], "cross_entropy", {}, [f"{INPUT}['mask']"]),
        ([datum([1])], "hinge", {}, ["steps[0].loss_fn"]),
        ([datum([1])], "cross_entropy", {"beta": 1.0}, ["steps[0].loss_fn_config['beta']"]),
        ([], "cross_entropy", {}, ["steps[0].data"]),
        ([datum([1] * 7)] * 5, "cross_entropy", {}, ["steps[0].data"]),
        ([{"model_input": [1], "loss_fn_inputs": {"nonsense": [1]}}], "cross_entropy", {},
         [f"{INPUT}['target_tokens']", f"{INPUT}['weights']", f"{INPUT}['nonsense']"]),
        ([{"model_input": [1], "loss_fn_inputs": {"weights": "abc"}}], "cross_entropy", {}, ["steps[0].data[0]"]),
        ([{"model_input": [-1]}], "cross_entropy", {}, ["steps[0].data[0]"]),
        ([Datum(ModelInput.empty(), {"target_tokens": TensorData([], "int64"), "weights": []})], "cross_entropy", {},
         ["steps[0].data[0].model_input"]),
    ],
)  # fmt: skip
def test_data(data: list[Any], loss: str, config: dict[str, Any], where: list[str]) -> None:
    assert places(PlannedTrain(data, loss, config)) == where


def rl(**inputs: Any) -> Datum:
    return datum([1, 2], weights=None, logprobs=[-1.0, -1.0], advantages=[1.0, 1.0], **inputs)


@pytest.mark.parametrize(
    ("inputs", "config", "where"),
    [
        ({}, {"clip_low_threshold": 1.5}, ["steps[0].loss_fn_config['clip_low_threshold']"]),
        ({}, {"clip_low_threshold": -1.0}, ["steps[0].loss_fn_config['clip_low_threshold']"]),
        ({}, {"clip_high_threshold": "high"}, ["steps[0].loss_fn_config['clip_high_threshold']"]),
        ({"clip_low_threshold": [0.5, 1.3]}, {}, [INPUT]),
        ({"clip_low_threshold": [-0.5, 1.0]}, {}, [f"{INPUT}['clip_low_threshold']"]),
        ({"clip_low_threshold": [0.5, 0.5]}, {"clip_low_threshold": 0.5}, [f"{INPUT}['clip_low_threshold']"]),
        ({"target_tokens": np.ones((2, 1), int)}, {}, [f"{INPUT}['{name}']" for name in RL]),
    ],
)
def test_rl_settings(inputs: dict[str, Any], config: dict[str, Any], where: list[str]) -> None:
    assert places(PlannedTrain([rl(**inputs)], "ppo", config)) == where


def test_custom_losses() -> None:
    def nll(logprobs: Any, weights: Any) -> Any:
        return -(logprobs * weights).sum(), {}

    handle = trace(nll, {"logprobs": 1, "weights": 1})
    assert places(PlannedTrain([datum([1]), datum([1], weights=None)], handle)) == [
        "steps[0].data[1].loss_fn_inputs['weights']"
    ]
    assert places(PlannedTrain([datum([1, 100], mine=np.ones(3))], lambda data, logprobs: None)) == [
        "steps[0].data[0].model_input",
        "steps[0].data[0].loss_fn_inputs['target_tokens']",
    ]
    assert places(PlannedTrain([datum([1])], "custom", {"loss_id": "L1"})) == []


def spans(*parts: tuple[type, int]) -> list[Any]:
    return [kind("q", 0, length) for kind, length in parts]


def test_provenance_stands_in_for_what_was_recorded() -> None:
    lacking = datum([1, 2], weights=None, advantages=[0.0, 1.0])
    assert places(PlannedTrain([lacking], "stable_reinforce")) == [f"{INPUT}['logprobs']"]
    told = lacking.with_provenance(spans((Prompt, 2)), spans((Prompt, 1), (Sampled, 1)))
    assert places(PlannedTrain([told], "stable_reinforce")) == []
    assert places(PlannedTrain([told], "ppo")) == [f"{INPUT}['logprobs']"]
    assert places(PlannedTrain([rl()], "stable_reinforce")) == []


def test_spans_that_do_not_fit() -> None:
    short = replace(rl(), model_input_spans=spans((Prompt, 1)), loss_fn_input_spans=spans((Sampled, 3)))
    where = ["steps[0].data[0].model_input_spans", "steps[0].data[0].loss_fn_input_spans"]
    assert places(PlannedTrain([short], "ppo")) == where
    prompt_only = rl().with_provenance(spans((Prompt, 2)), spans((Prompt, 2)))
    assert places(PlannedTrain([prompt_only], "ppo")) == []
    assert places(PlannedTrain([prompt_only], "stable_reinforce")) == [f"{INPUT}['advantages']"]


def test_a_ratio_mask_that_marks_nothing() -> None:
    assert places(PlannedTrain([rl(sequence_ratio_mask=[0.0, 0.0])], "gspo")) == [f"{INPUT}['sequence_ratio_mask']"]
    assert places(PlannedTrain([rl(sequence_ratio_mask=[0.0, 1.0])], "gspo")) == []


@pytest.mark.parametrize(
    ("params", "optimizer", "where"),
    [
        (AdamParams(learning_rate=2.0), "adamw", ["learning_rate"]),
        (AdamParams(eps=0.0), "adamw", ["eps"]),
        ({"learning_rate": -1.0, "beta1": 2.0}, "adamw", ["learning_rate", "beta1"]),
        ({"lr": 1.0}, "adamw", ["lr"]),
        (AdamParams(), "dimuon", [""]),
        (DimuonParams(learning_rate=0.1), "adamw", [""]),
        ({"learning_rate": 0.1}, "dimuon", []),
    ],
)
def test_updates(params: Any, optimizer: str, where: list[str]) -> None:
    found = places(GOOD, PlannedUpdate(params), optimizer=optimizer)
    assert found == [f"steps[1].params.{name}".removesuffix(".") for name in where]


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"num_samples": 5}, ["num_samples"]),
        ({"topk_prompt_logprobs": 4, "topk_sample_logprobs": -1}, ["topk_prompt_logprobs", "topk_sample_logprobs"]),
        ({"prompts": []}, ["prompts"]),
        ({"prompts": [[1], [1] * 9, [100], [], [1, 2]]}, ["prompts[1]", "prompts[2]", "prompts[3]"]),
        ({"sampling_params": {"max_tokens": 8}, "prompts": [[1], [1, 2]]}, ["prompts[1]"]),
        (
            {"sampling_params": {"temperature": -1, "top_p": 0}},
            ["sampling_params.temperature", "sampling_params.top_p"],
        ),
        ({"sampling_params": {"top_k": 0}}, ["sampling_params.top_k"]),
        ({"sampling_params": {"stop": ["a", "b", "abcdef"]}}, ["sampling_params.stop", "sampling_params.stop[2]"]),
        ({"sampling_params": {"stop": [100]}}, ["sampling_params.stop[0]"]),
    ],
)
def test_samples(fields: dict[str, Any], where: list[str]) -> None:
    assert places(PlannedSample(**({"prompts": [[1]]} | fields))) == [f"steps[0].{name}" for name in where]


def test_a_server_that_does_not_say_its_limits_has_none() -> None:
    model = ModelLimits(vocab_size=100, context_length=1000)
    limits = LimitsResponse(models={"org/tiny": model}, losses=LIMITS.losses)
    sample = PlannedSample([[1] * 9], 500, {"stop": ["a" * 1000, *"abc"]}, topk_sample_logprobs=500)
    assert validate(Plan("org/tiny", [PlannedTrain([datum([1] * 40)] * 40), sample]), limits) == []


@pytest.mark.parametrize(("least", "most"), [(None, None), (60, None), (None, 5)])
def test_a_limit_that_an_older_server_does_not_say_is_not_named(least: int | None, most: int | None) -> None:
    limits = LIMITS.model_copy(update=dict.fromkeys([name for name in dict(LIMITS) if name.startswith("max_")]))
    limits = limits.model_copy(update={"min_ttl_seconds": least, "max_ttl_seconds": most})
    sample = PlannedSample([[1]], num_samples=0, sampling_params={"stop": [""]}, topk_sample_logprobs=-1)
    steps = [GOOD, sample, PlannedSave("a", ttl_seconds=6 if least is None else 59)]
    found = [str(problem) for problem in validate(Plan("org/tiny", rank=0, steps=steps), limits)]
    short = "steps[1].sampling_params.stop[0]: has 0 characters; it must have at least 1"
    assert found[:2] == ["rank: must be at least 1, got 0", short]
    assert len(found) == 4 + (least is not most)
    assert not any("None" in each for each in found)


def test_saves() -> None:
    twice = [PlannedSave("a"), PlannedSave("a"), PlannedSave("b/c"), PlannedSave("d", ttl_seconds=5)]
    assert places(*twice) == ["steps[1].name", "steps[2].name", "steps[3].ttl_seconds"]
    assert places(PlannedSave("a"), times=2) == ["steps[0].name"]
    plan = Plan("org/tiny", [PlannedSave("a"), PlannedSave("b", "sampler_weights")])
    assert [p.value for p in validate(plan, LIMITS, ["weights/a", "weights/b"])] == ["weights/a"]


def test_a_problem_is_one_line() -> None:
    assert str(Problem("rank", "too much", 16, 17)) == "rank: too much (got 17; limit 16)"
    assert str(Problem("rank", "must be 1 to 16, got 17", "1 to 16", 17)) == "rank: must be 1 to 16, got 17"
    assert str(Problem("steps", "none")) == "steps: none"


ROUTES = f"{INPUT}['routed_experts']"


@pytest.mark.parametrize(
    ("experts", "shape", "last", "wrong"),
    [
        pytest.param(8, (2, 3, 2), 7, False, id="right"),
        pytest.param(8, (2, 3, 2), 8, True, id="no-such-expert"),
        pytest.param(8, (0, 2), 0, True, id="empty"),
        pytest.param(0, (2, 3, 2), 0, True, id="a-model-without-experts"),
        pytest.param(None, (0, 2), 0, False, id="a-server-that-does-not-say"),
    ],
)
def test_replayed_routes(experts: int | None, shape: tuple[int, ...], last: int, wrong: bool) -> None:
    known = {"num_experts": experts, "mixture_layers": 3, "experts_per_token": 2} if experts is not None else {}
    model = ModelLimits(vocab_size=100, context_length=8, **known)
    loss = LossLimits(required=["target_tokens", "weights"], optional=["routed_experts"])
    limits = LIMITS.model_copy(update={"models": {"org/tiny": model}, "losses": {"cross_entropy": loss}})
    routes = np.zeros(shape, np.int64)
    routes.reshape(-1)[-1:] = last
    plan = Plan("org/tiny", [PlannedTrain([datum([1, 2], routed_experts=routes)])])
    assert [problem.where for problem in validate(plan, limits)] == [ROUTES] * wrong
