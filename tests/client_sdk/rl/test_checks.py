"""Every argument of the toolkit with which nothing could be trained, or a loop would never end, is refused by its name
where it is given: before a token is drawn for it."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from inspect import signature
from typing import Any, cast

import numpy as np
import pytest
import weft
from weft import rl
from weft.rl.loops.train import Recipe
from weft.rl.tasks.sources import Ratios

from tests.client_sdk.rl.kit import policy, tokenizer

NOBODY, NAN, INF = cast(Any, None), math.nan, math.inf
ENV = rl.prompts(["?"])
POOL: dict[str, Any] = {"name": "a", "upto": 1, "weight": 1}
GIBBERISH: dict[str, Any] = {"vocab_size": 9, "rare_from": 0}
TALK = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


async def solve(task: Any, chat: rl.Chat) -> float:
    return 0.0


def trained(**recipe: Any) -> None:
    rl.train(NOBODY, ENV, **recipe)


def tuned(**recipe: Any) -> None:
    rl.sft(NOBODY, rl.conversations([TALK], tokenizer()), **recipe)


def preferred(**recipe: Any) -> None:
    rows = [{"prompt": "?", "chosen": "yes", "rejected": "no"}]
    rl.dpo(NOBODY, rl.pairs(rows, tokenizer()), reference=NOBODY, **recipe)


def distilled(**recipe: Any) -> None:
    rl.distill(NOBODY, ENV, NOBODY, **recipe)


def sampled(max_tokens: Any) -> None:
    asyncio.run(rl.Chat(policy("8")[0]).user("?").sample(max_tokens))


WRONG: list[tuple[Callable[..., Any], dict[str, list[Any]]]] = [
    (rl.Groups, {"batch": [0, -1, 2.5, NAN, "16", True, None], "size": [0, -1, 8.0, NAN, "8", None]}),
    (rl.Groups, {"keep": [rl.filters.not_all_equal, ["x"], None], "keep_rollout": [len, "x"]}),
    (rl.prompts, {"tasks": [[], (), "What?", iter(["?"]), {"prompt": "?"}, 8]}),
    (lambda max_tokens: rl.prompts(["?"], max_tokens=max_tokens), {"max_tokens": [0, -1, 2.5, "6"]}),
    (lambda tasks: rl.function(solve, tasks), {"tasks": [[], range(0), "What?", None]}),
    (lambda timeout_s: rl.function(solve, ["?"], timeout_s=timeout_s), {"timeout_s": [0, -1, NAN, "60"]}),
    (sampled, {"max_tokens": [0, -1, 2.5]}),
    (trained, {"steps": [-1, 2.5, NAN, "10", None], "reduce": ["token", None], "seed": [0.5, None]}),
    (trained, {"groups": [8, None], "loss": ["ppo", rl.losses.ref_kl(), rl.losses.icepop(old=True)]}),
    (trained, {"schedule": ["async", None], "evaluation": [ENV]}),
    (trained, {"checkpoint": ["name"], "sinks": ["a.jsonl", ["a.jsonl"], 8], "optim": [{"beta1": 0.5}, None]}),
    (tuned, {"checkpoint": ["name"], "sinks": ["a.jsonl", ["a.jsonl"], 8], "optim": [{"beta1": 0.5}, None]}),
    (lambda evaluation: asyncio.run(rl.evaluate(NOBODY, evaluation)), {"evaluation": [ENV, None]}),
    (distilled, {"reduce": ["token"], "advantage": [rl.grpo], "penalty": [rl.lengths.linear()], "hint": ["x"]}),
    (trained, {"learning_rate": [-1e-3, NAN, INF, "1e-3"], "budget_usd": [-1, NAN, INF, "1"]}),
    (lambda **given: trained(sampling=weft.SamplingParams(**given)), {"max_tokens": [0]}),
    (tuned, {"batch": [0, -1, 2.5, NAN, "8"], "epochs": [0, -1, NAN, INF, "2"], "every": [0, -1, NAN]}),
    (tuned, {"learning_rate": [-1, NAN, None], "budget_usd": [-1, NAN], "seed": [NAN]}),
    (preferred, {"batch": [0, -1], "epochs": [0, NAN], "beta": [0, -0.1, NAN, INF, "0.1"]}),
    (lambda max_length: rl.conversations([TALK], tokenizer(), max_length=max_length), {"max_length": [1, 0, -1, 9.5]}),
    (lambda **given: rl.Evaluation(ENV, **given), {"every": [0, NAN, 1.5], "size": [0, -1, NAN], "tasks": [[], "?"]}),
    (lambda every: rl.Checkpoints("a", every), {"every": [0, -1, 2.5, NAN]}),
    (lambda steps: rl.estimate(NOBODY, ENV, steps=steps), {"steps": [-1, NAN]}),
    (lambda peak=1.0, **given: rl.linear(peak, **{"steps": 1, **given}), {"peak": [-1, NAN, INF], "steps": [0, 1.5]}),
    (lambda **given: rl.linear(1.0, 10, **given), {"warmup": [-1, NAN]}),
    (lambda **given: rl.cosine(1.0, **{"steps": 10, **given}), {"steps": [0], "warmup": [-1], "floor": [-1, NAN]}),
    (rl.constant, {"rate": [-1, NAN]}),
    (rl.Sync, {"oversample": [0.5, NAN, INF, "2"]}),
    (rl.Async, {"max_lag": [0, -1, 1.5, NAN, "1"]}),
    (lambda **given: rl.Partial(**{"tokens": 9, "in_flight": 2, **given}), {"tokens": [0, NAN], "budget": ["all"]}),
    (lambda **given: rl.Partial(**{"tokens": 9, "in_flight": 2, **given}), {"in_flight": [0], "retention": [0, 1.5]}),
    (rl.Concurrency, {"start": [0, 2.5, NAN], "least": [0, NAN], "most": [0, INF, NAN]}),
    (rl.Shuffled, {"count": [0, -1, 2.5]}),
    (
        lambda **given: rl.DifficultyPools(**{"count": 3, **given}),
        {"count": [0], "unseen": [-1, NAN], "memory": [1, NAN]},
    ),
    (lambda **given: rl.Pool(**{**POOL, **given}), {"weight": [-1, NAN], "upto": [NAN]}),
    (lambda share: Ratios({"share": share, "b": 1.0}), {"share": [-1, NAN, INF, "1"]}),
    (rl.Size, {"drawn": [-1, NAN, "8"]}),
    (lambda **given: rl.Size(8, **given), {"read": [-1, NAN], "turns": [-1, NAN]}),
    (rl.lengths.linear, {"drawn": [-1, NAN], "read": [NAN], "turns": [NAN, "1"]}),
    (rl.filters.spread, {"least": [-1, NAN]}),
    (rl.filters.not_repeating, {"run": [0, NAN], "probability": [0, NAN, 1.5]}),
    (lambda **given: rl.filters.not_gibberish(**{**GIBBERISH, **given}), {"vocab_size": [0], "rare_from": [-1]}),
    (lambda margin: rl.filters.not_gibberish(9, 0, margin), {"margin": [NAN]}),
    (rl.RunningBaseline, {"decay": [1, -1, NAN]}),
    (rl.losses.icepop, {"low": [-1, NAN, "0"], "high": [NAN], "clip": [(NAN, 0.2), (0.2, -1)]}),
    (rl.losses.intellect3, {"veto": [NAN], "level": ["word"]}),
    (rl.losses.dppo_kl, {"low": [NAN], "high": [NAN], "kl": [-1, NAN, INF]}),
    (rl.losses.mixed, {"rl": [NAN, INF], "ce": [-1, INF], "ref": [NAN, INF]}),
    (rl.losses.tis, {"cap": [NAN, True]}),
    (rl.losses.areal, {"upper": [-1]}),
    (rl.losses.ppo_clip, {"dual": [-1, True]}),
    (rl.losses.clipped_is, {"low": [-1]}),
    (rl.losses.gspo, {"high": [NAN]}),
    (rl.losses.ipo, {"width": [-1]}),
    (rl.losses.ref_kl, {"kl": [NAN, INF]}),
    (rl.losses.sapo, {"above": [0, INF], "below": [NAN, 0, INF]}),
    (rl.losses.opsm, {"most": [-1]}),
    (lambda low: rl.losses.intellect3(low, 0.5), {"low": [0.6, INF]}),
    (lambda low: rl.losses.icepop(low, 0.5), {"low": [0.6, INF]}),
    (lambda low: rl.losses.clipped_is(low, 0.5), {"low": [0.6, INF]}),
    (rl.losses.dro, {"beta": [-1, NAN]}),
    (rl.losses.stable_reinforce, {"kl_coeff": [-1, NAN, NOBODY], "no_such": [1]}),
]
CASES = [(make, name, value) for make, wrong in WRONG for name, values in wrong.items() for value in values]


@pytest.mark.parametrize(("make", "name", "value"), CASES)
def test_an_argument_that_cannot_be_is_refused_by_its_name(make: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        make(**{name: value})


#: Each setting of all losses.
SETTINGS = [(name, each) for name in rl.losses.__all__ for each in signature(getattr(rl.losses, name)).parameters]


@pytest.mark.parametrize(
    ("name", "setting"), [each for each in SETTINGS if each[0] not in ("Loss", "stable_reinforce")]
)
@pytest.mark.parametrize("value", [None, [], (0.2,)], ids=str)
def test_a_setting_of_a_loss_that_is_no_number_is_refused_where_it_is_given(
    name: str, setting: str, value: Any
) -> None:
    """Else it would be traced, and refused by the server by a node's name; None means something to `dual` only."""
    if (setting, value) == ("dual", None):
        return
    with pytest.raises((ValueError, TypeError), match=rf"{setting}\b|_{setting}_threshold"):
        getattr(rl.losses, name)(**{setting: value})


def test_a_pair_of_bounds_is_a_pair() -> None:
    assert rl.losses.icepop(clip=cast(Any, [0.2, math.inf])).name == "icepop"
    for wrong in (0.2, (0.2, 0.2, 0.2), "no"):
        with pytest.raises(TypeError, match=r"clip must be as \(0\.2, 0\.2\), got"):
            rl.losses.icepop(clip=cast(Any, wrong))


@pytest.mark.parametrize("loop", [trained, tuned, preferred, distilled])
@pytest.mark.parametrize(
    ("name", "meant"),
    [("lr", "did you mean learning_rate?"), ("seeds", "did you mean seed?"), ("x", "(there are ")],
)
def test_a_name_that_is_no_argument_is_told_what_it_may_mean(loop: Callable[..., Any], name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"no argument {name}.*{re.escape(meant)}.*learning_rate"):
        loop(**{name: 1})


@pytest.mark.parametrize(
    ("schedule", "loss", "told"),
    [
        (rl.Async(2), rl.losses.importance_sampling(), True),
        (rl.Async(1), rl.losses.importance_sampling(), False),
        (rl.Async(2), rl.losses.dppo_kl(), False),
        (rl.Async(2), None, False),
    ],
)
def test_a_loss_that_bounds_nothing_is_told_of_where_tokens_are_old(
    schedule: Any, loss: Any, told: bool, recwarn: pytest.WarningsRecorder
) -> None:
    Recipe(schedule=schedule, loss=loss).chosen_loss()
    assert sum("bounds no ratio, and tokens may be 2 steps old" in str(each.message) for each in recwarn) == told


@pytest.mark.parametrize("bounds", [(1.2, 0.8), (math.nan, 1.2), (0.8, math.nan), (-1, 1.2)])
def test_bounds_of_the_servers_losses(bounds: tuple[float, float]) -> None:
    for loss in (rl.losses.ppo, rl.losses.cispo):
        with pytest.raises(ValueError, match=r"clip_(low|high)_threshold"):
            loss(*bounds)


def test_numbers_of_numpy_are_numbers() -> None:
    assert rl.Groups(batch=cast(Any, np.int64(2)), size=cast(Any, np.int32(3))).size == 3
    assert rl.Async(cast(Any, np.int64(2))).max_lag == 2
    assert rl.linear(cast(Any, np.float32(1)), steps=2)(1) == 0.5
    assert rl.losses.tis(cap=math.inf).name == "tis"
