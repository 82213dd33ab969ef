"""What a loop on a real server refuses, and what it tells its user at once."""

from __future__ import annotations

import asyncio
import itertools
import warnings
from typing import Any

import pytest
import weft
from weft import rl
from weft.rl.loops.limits import model_limits
from weft.types import SamplingParams

from tests.e2e.rl_tasks import ONE_TURN, SMALL, fresh, right, sums, warned
from tests.isolation import isolated

pytestmark = pytest.mark.server


def test_what_would_be_off_policy_unseen_is_refused_and_what_collapses_is_warned_of(
    service: weft.ServiceClient,
) -> None:
    for params, says in ((SamplingParams(top_p=0.8), "top_p=0.8"), (SamplingParams(temperature=0), "temperature=0")):
        with pytest.raises(ValueError, match=rf"drawn from all tokens.* got {says}"):
            rl.train(fresh(service), ONE_TURN, sampling=params, sinks=[])
    with pytest.warns(UserWarning, match="bounds no ratio, and tokens may be 3 steps old"):
        rl.train(
            fresh(service),
            ONE_TURN,
            steps=0,
            schedule=rl.Async(3),
            loss=rl.losses.importance_sampling(),
            sinks=[],
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rl.train(fresh(service), ONE_TURN, steps=0, schedule=rl.Async(3), sinks=[])


@isolated
def test_too_few_sandboxes_are_known_before_a_token_is_drawn(service: weft.ServiceClient) -> None:
    async def solve(task: Any, chat: rl.Chat, box: rl.sandboxes.Sandbox) -> float:
        return 1.0

    run = fresh(service)
    env = rl.function(solve, sums(), sandboxes=rl.sandboxes.Local(most=8))
    with pytest.raises(rl.sandboxes.SandboxError, match="up to 16 sandboxes at a time are needed, and there is room"):
        rl.train(run, env, steps=1, groups=rl.Groups(batch=4, size=4), sinks=[])
    evaluation = rl.Evaluation(env, every=1)
    with pytest.raises(rl.sandboxes.SandboxError, match="up to 9 sandboxes at a time are needed, and there is room"):
        rl.train(run, env, steps=1, groups=rl.Groups(batch=2, size=4), evaluation=evaluation, sinks=[])
    assert run.cost().result(60).total_nusd == 0


def test_a_conversation_that_fills_the_context_says_so(service: weft.ServiceClient) -> None:
    run = fresh(service)
    limit = asyncio.run(model_limits(run)).context_length
    long = [{"prompt": "word " * limit, "answer": ""}]
    with pytest.raises(rl.RolloutsFailedError, match=rf"tokens, the model takes {limit}"):
        rl.train(run, rl.prompts(long, right), steps=1, groups=rl.Groups(batch=1, size=2), sinks=[])


def test_a_loop_whose_rollouts_all_fail_says_why(service: weft.ServiceClient) -> None:
    async def broken(task: Any, chat: rl.Chat) -> float:
        raise KeyError("no such column")

    with pytest.raises(rl.RolloutsFailedError, match=r"in a row failed; the last: KeyError: 'no such column'"):
        rl.train(fresh(service), rl.function(broken, sums()), steps=2, groups=rl.Groups(batch=2, size=2), sinks=[])


def test_what_teaches_nothing_is_told_and_the_last_weights_are_evaluated(
    service: weft.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    calls, tasks = iter(range(1000)), sums(4)

    async def solve(task: Any, chat: rl.Chat) -> float:
        await chat.user(task["prompt"]).sample(max_tokens=2)
        if next(calls) % 8 < 2:
            raise KeyError("no such column")
        return 0.0

    tried = rl.Evaluation(rl.prompts(tasks[:2], right, max_tokens=2), every=2)
    report = rl.train(fresh(service), rl.function(solve, tasks), steps=3, groups=SMALL, evaluation=tried, sinks=[])
    assert [number for number, step in enumerate(report.steps) if "eval/reward" in step] == [1, 2]
    assert warned(caplog, "a rollout failed") == [
        "a rollout failed: KeyError: 'no such column' (others like it are only counted)"
    ]
    assert report.steps[-1]["waste/failed_rollouts"] > 1
    assert warned(caplog, "trains nothing") == [
        "step 0 trains nothing: no rollout earned more or less than the others of its group (rewards from 0 to 0)."
        " Where that stays, look at the reward function and at how hard the tasks are; `data` counts what is trained"
    ]


def test_a_filter_that_takes_nothing_is_told_while_it_costs(
    service: weft.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    env = rl.prompts(sums(), max_tokens=1)  # all earn 0
    groups = rl.Groups(batch=2, size=2, keep=[rl.filters.not_all_equal], refill=True)
    report = rl.train(fresh(service), env, steps=1, groups=groups, budget_usd=0.0001, sinks=[])
    assert (report.ended, report.steps) == ("budget", [])
    assert (
        "8 groups in a row were rejected by 'not_all_equal'; the last had rewards from 0 to 0"
        in warned(caplog, "rejected")[0]
    )


def test_an_environment_may_name_a_metric_as_no_curve_is_named(
    service: weft.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    odd = {"länge": 1.0, "long" * 20: 2.0, "fine": 3.0}
    env = rl.prompts(sums(4), lambda text, task: rl.Reward(len(text), odd), max_tokens=2)
    report = rl.train(fresh(service), env, steps=2, groups=SMALL, sinks=[])
    assert [report.curve(name) for name in odd] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    assert len(warned(caplog, "'länge' is not logged at step 0")) == 1


@pytest.mark.parametrize("kind", ["train", "sft"])
def test_a_full_disk_under_a_sink_ends_no_run(
    service: weft.ServiceClient, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    run = fresh(service)
    more: dict[str, Any] = {"sinks": [rl.JsonLines("/dev/full")]}
    if kind == "sft":
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "8"}]
        report = rl.sft(run, rl.conversations([talk], run.get_tokenizer()), batch=1, epochs=2, **more)
    else:
        report = rl.train(run, ONE_TURN, steps=2, groups=SMALL, **more)
    assert (report.ended, len(report.steps)) == ("done", 2)
    assert len(warned(caplog, "JsonLines failed at step 0: OSError: [Errno 28] No space left on device")) == 1


@pytest.mark.parametrize("kind", ["train", "sft"])
@pytest.mark.parametrize("rate", [-1e-4, float("nan")])
def test_a_rate_that_is_none_ends_the_loop_and_leaves_no_gradient(
    service: weft.ServiceClient, rate: float, kind: str
) -> None:
    run, numbers = fresh(service), itertools.count()
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "8"}]
    more: dict[str, Any] = {"learning_rate": lambda step: rate if step else 1e-4, "sinks": []}

    def go() -> None:
        if kind == "sft":
            rl.sft(run, rl.conversations([talk], run.get_tokenizer()), batch=1, epochs=2, **more)
        else:
            env = rl.prompts(sums(4), lambda text, task: next(numbers), max_tokens=2)
            rl.train(run, env, steps=2, groups=SMALL, **more)

    with pytest.raises(ValueError, match="learning_rate: input should be"):
        go()
    update = run.optim_step(weft.AdamParams(learning_rate=0.0)).result(60)
    assert update.metrics is not None
    assert update.metrics["grad_norm:mean"] == 0
