"""`weft.rl` on a real service: it trains what it sampled, learns, keeps its lag, and takes what the server takes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import time
from typing import Any

import numpy as np
import pytest
import weft
from weft import rl
from weft.rl.loops import rollouts
from weft.types import AdamParams, Datum, ModelInput, SamplingParams

from tests.e2e.conftest import BASE_MODEL, Weftd
from tests.e2e.rl_tasks import ONE_TURN, fresh, right, sums

pytestmark = pytest.mark.server


def test_it_learns_and_its_numbers_are_on_the_server(service: weft.ServiceClient) -> None:
    run = fresh(service, rank=16)
    report = rl.train(run, ONE_TURN, steps=12, groups=rl.Groups(batch=8, size=8), learning_rate=1e-3, sinks=[], seed=1)
    rewards = report.curve("reward")
    assert sum(rewards[-4:]) > 2 * sum(rewards[:4])
    assert report.steps[0]["ratio"] == pytest.approx(1, abs=1e-6)
    assert abs(report.steps[0]["mismatch_kl"]) <= 1e-8
    billed = run.cost().result(60).total_nusd
    assert billed <= report.spent_nusd <= billed + sum(report.curve("data"))  # rounding: a nano-dollar each


async def twice(task: Any, chat: rl.Chat) -> rl.Reward:
    """Two turns: the second question is about the same sum."""
    first = await chat.user(task["prompt"]).sample(max_tokens=6)
    second = await chat.user(task["prompt"]).sample(max_tokens=6)
    good = [right(reply.text, task) for reply in (first, second)]
    return rl.Reward(sum(good) / 2, {"first": good[0]})


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_turns_of_own_code_join_and_are_on_policy_to_the_last_digit(
    service: weft.ServiceClient, temperature: float
) -> None:
    report = rl.train(
        fresh(service),
        rl.function(twice, sums()),
        steps=2,
        groups=rl.Groups(batch=4, size=4),
        sampling=SamplingParams(temperature=temperature),
        learning_rate=1e-3,
        sinks=[],
    )
    for step in report.steps:
        assert step["turns/rollout"] == 2
        assert step["ratio"] == pytest.approx(1, abs=1e-6)
        assert abs(step["mismatch_kl"]) <= 1e-8
        assert step["data"] <= step["rollouts"]


def test_no_token_is_older_than_the_lag_by_what_the_server_reported(service: weft.ServiceClient) -> None:
    async def slow(task: Any, chat: rl.Chat) -> float:
        reply = await chat.user(task["prompt"]).sample(max_tokens=6)
        await asyncio.sleep(random.Random(task["prompt"]).expovariate(5))
        return right(reply.text, task)

    run = fresh(service)
    trained: list[int] = []
    drawn: list[int] = []

    async def loop() -> None:
        rollouts = rl.Rollouts(
            run, rl.function(slow, sums()), groups=rl.Groups(batch=4, size=4), schedule=rl.Async(max_lag=2)
        )
        loss = rl.losses.ppo()
        async with rollouts:
            for _ in range(8):
                batch = await rollouts.batch()
                now = run_version(run)
                oldest = [s.version for r in batch.rollouts for t in r.turns for s in t.versions]
                trained.extend(now - version for version in oldest)
                assert batch.lags
                drawn.append(sum(rollout.sampled for rollout in batch.rollouts))
                data = batch.data(lambda rewards: [1.0] * len(rewards), loss)
                loss.forward_backward(run, data, None)
                await rollouts.step(run.optim_step(AdamParams(learning_rate=1e-4)))
                steps[0] += 1

    steps = [0]

    def run_version(run: weft.TrainingClient) -> int:
        return steps[0]

    asyncio.run(loop())
    assert max(trained) <= 2
    assert max(trained) >= 1, "nothing was sampled while the trainer worked"
    health = service.create_rest_client().get_run_health(run.get_info().model_id).result(60)
    assert health.named, "the data say which sequences they are of"
    assert max(health.staleness) == max(trained)
    assert sum(health.staleness.values()) == sum(drawn)
    assert 0 < health.acceptance <= 1


@pytest.mark.parametrize(
    "loss",
    [
        rl.losses.dppo_kl(),
        rl.losses.intellect3(0.5, 5.0, veto=1e-5),
        rl.losses.icepop(),
        rl.losses.icepop(old=True),
        rl.losses.gspo(),
        rl.losses.ref_kl(),
        rl.losses.mixed(1.0, 0.1, 0.5),
    ],
    ids=lambda loss: f"{loss.name}-{'-'.join(loss.reads)}",
)
def test_one_pass_equals_two(service: weft.ServiceClient, loss: Any) -> None:
    """The server's graph of the loss, and torch here from the same logprobs: value, metrics and gradient agree."""
    run, rng = fresh(service), np.random.default_rng(0)
    handle = loss.made(run).result(60)
    assert handle.loss_id is not None
    data = []
    for _ in range(2):
        tokens = rng.integers(50, 500, 13).tolist()
        given = {name: (rng.normal(size=12) - 7).astype(np.float32) for name in ("q", "old", "ref")}
        given |= {"advantages": rng.normal(size=12).astype(np.float32), "mask": np.ones(12, np.float32)}
        inputs = {"target_tokens": tokens[1:], **{name: given[name] for name in loss.reads}}
        data.append(Datum(ModelInput.from_ints(tokens[:-1]), inputs))
    found = []
    for fn in (handle, lambda data, logprobs: handle.run(data, logprobs)):
        output = run.forward_backward_custom(data, fn).result(60)
        stepped = run.optim_step(AdamParams(learning_rate=0.0)).result(60)
        found.append((output.metrics["loss:sum"], (stepped.metrics or {})["grad_norm:mean"]))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("loss", [rl.losses.dro(), rl.losses.stable_reinforce(kl_coeff=1.0)], ids=["dro", "stable"])
def test_all_of_a_loss_of_the_server_is_a_mean_where_it_is_asked_for(service: weft.ServiceClient, loss: Any) -> None:
    """Off policy: a 64th of the loss has a 64th of the gradient, also in the quadratic term."""
    run, rng = fresh(service), np.random.default_rng(0)
    tokens = rng.integers(50, 500, 13).tolist()
    given = {name: rng.normal(size=12).astype(np.float32) for name in ("logprobs", "advantages")}
    inputs = {"target_tokens": tokens[1:], **given, "mask": np.ones(12, np.float32)}
    datum, norms = Datum(ModelInput.from_ints(tokens[:-1]), inputs), []
    for weight in (1, 1 / 64):
        loss.forward_backward(run, [loss.datum(datum, weight)], None).result(60)
        norms.append((run.optim_step(AdamParams(learning_rate=0.0)).result(60).metrics or {})["grad_norm:mean"])
    assert norms[1] == pytest.approx(norms[0] / 64, rel=1e-5)


def test_an_evaluation_goes_on_beside_training_and_behind_it(weftd: Weftd, service: weft.ServiceClient) -> None:
    run = fresh(service)
    evaluation = rl.Evaluation(ONE_TURN, every=2, tasks=sums(8, seed=9))
    report = rl.train(run, ONE_TURN, steps=4, groups=rl.Groups(batch=2, size=4), evaluation=evaluation, sinks=[])
    assert len(report.curve("eval/reward")) == 2
    assert all(0 <= reward <= 1 for reward in report.curve("eval/reward"))
    with contextlib.closing(sqlite3.connect(weftd.data_dir / "weft.db")) as database:
        query = (
            "SELECT json_extract(o.plan, '$.priority'), sum(json_extract(o.plan, '$.num_samples')) FROM operations o"
            " JOIN samplers s ON s.id = o.lane WHERE s.run_id = ? AND o.kind = 'sample' GROUP BY 1"
        )
        asked = dict(database.execute(query, [run.get_info().model_id]).fetchall())
    assert asked == {"interactive": 4 * 2 * 4, "batch": 2 * 8}


def test_an_evaluation_takes_a_run_or_any_sampler(service: weft.ServiceClient) -> None:
    run = fresh(service)
    path = run.save_weights_for_sampler("evaluated").result().path
    greedy = rl.Evaluation(ONE_TURN, tasks=sums(4), sampling=SamplingParams(temperature=0.0))
    samplers = service.create_sampling_client(model_path=path), service.create_sampling_client(base_model=BASE_MODEL)
    same: list[weft.TrainingClient | weft.SamplingClient] = [run, *samplers]
    found = [asyncio.run(rl.evaluate(weights, greedy)) for weights in same]
    assert found[0].keys() == {"eval/reward"}
    assert found == [found[0]] * 3


@pytest.mark.parametrize(("start", "end"), [(1, 3), (32, 28)])
def test_groups_in_flight_follow_what_the_server_takes(
    service: weft.ServiceClient, start: int, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has places for two groups: a loop with one group leaves it idle, with 32 most samples wait."""
    monkeypatch.setattr(rollouts, "LOOK_S", 0.2)

    async def loop(run: weft.TrainingClient) -> None:
        env = rl.prompts(sums(), right, max_tokens=20, stop=[0])
        schedule, concurrency = rl.Async(max_lag=31), rl.Concurrency(start=start)
        async with rl.Rollouts(run, env, groups=rl.Groups(1, 16), schedule=schedule, concurrency=concurrency) as made:
            assert made.metrics()["in_flight/limit"] == start
            deadline = time.monotonic() + 60
            while concurrency.limit < end if start < end else concurrency.limit > end:
                assert time.monotonic() < deadline, concurrency.limit
                await made.batch()
                await made.step(None)

    asyncio.run(loop(fresh(service)))


def test_a_rollout_that_fails_leaves_its_group(service: weft.ServiceClient) -> None:
    calls = iter(range(1000))

    async def flaky(task: Any, chat: rl.Chat) -> float:
        reply = await chat.user(task["prompt"]).sample(max_tokens=6)
        if next(calls) % 4 == 0:
            raise RuntimeError("the sandbox died")
        return right(reply.text, task)

    report = rl.train(fresh(service), rl.function(flaky, sums()), steps=2, groups=rl.Groups(batch=2, size=4), sinks=[])
    assert report.steps[-1]["waste/failed_rollouts"] == 4
    assert report.steps[0]["rollouts"] == 6


def test_an_answer_can_be_ended_while_it_is_drawn(service: weft.ServiceClient) -> None:
    """The tokens drawn by then are trained on and paid for."""
    seen: list[list[int]] = []

    async def impatient(task: Any, chat: rl.Chat) -> float:
        asked: list[int] = []
        seen.append(asked)

        def enough(ids: list[int]) -> bool:
            asked.append(len(ids))
            return len(ids) >= asked[0] + 5  # not at the first tokens, however many come at once

        reply = await chat.user(task["prompt"]).sample(max_tokens=1500, stop=[], prune=enough)
        assert asked[0] + 5 <= len(reply.turn.tokens) < 1500
        assert len(reply.turn.tokens) == len(reply.turn.logprobs)
        return float(len(reply.turn.tokens))

    run = fresh(service)
    groups = rl.Groups(batch=1, size=2)
    report = rl.train(run, rl.function(impatient, sums()), steps=1, groups=groups, sinks=[], advantage=rl.reinforce)
    assert report.steps[0]["rollouts"] == 2
    assert abs(report.steps[0]["mismatch_kl"]) <= 1e-8
    assert [max(asked) - min(asked) >= 5 for asked in seen] == [True, True]
    billed = {row.kind: row.tokens for row in run.cost().result(60).rows}
    assert billed["sample"] == sum(report.curve("tokens/rollout")) * 2


@pytest.mark.parametrize(
    "schedule",
    [rl.Sync(oversample=2.0), rl.Partial(tokens=40, in_flight=4, retention=2)],
    ids=["oversampling", "token-budget"],
)
def test_other_schedules_train_within_their_lag(service: weft.ServiceClient, schedule: Any) -> None:
    async def slow(task: Any, chat: rl.Chat) -> float:
        reply = await chat.user(task["prompt"]).sample(max_tokens=6)
        await asyncio.sleep(0.3 if task["answer"] in ("10", "11", "12") else 0.01)
        reply = await chat.user(task["prompt"]).sample(max_tokens=6)
        return right(reply.text, task)

    run = fresh(service)
    report = rl.train(
        run,
        rl.function(slow, sums()),
        steps=5,
        groups=rl.Groups(batch=2, size=4),
        schedule=schedule,
        learning_rate=1e-3,
        sinks=[],
    )
    assert len(report.steps) == 5
    assert max(report.curve("lag/max")) <= schedule.max_lag
    assert report.steps[-1]["late_groups"] >= (1 if isinstance(schedule, rl.Sync) else 0)
