"""`weft.rl` on a real service: it trains what it sampled, learns, keeps its lag and budget, and survives a kill."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import weft
from weft import rl
from weft.rl.loops import rollouts
from weft.rl.loops.limits import model_limits
from weft.rl.supervised.sft import nll
from weft.types import AdamParams, Datum, ModelInput, SamplingParams

from tests.e2e.conftest import BASE_MODEL, Weftd
from tests.forked import Forked, run_forked
from tests.isolation import isolated

pytestmark = pytest.mark.server


@pytest.fixture
def service(weftd: Weftd) -> Iterator[weft.ServiceClient]:
    with weft.ServiceClient(base_url=weftd.url, api_key=weftd.key("rl")) as service:
        yield service


def sums(count: int = 64, seed: int = 0) -> list[dict[str, str]]:
    rng = random.Random(seed)
    asked = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(count)]
    return [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in asked]


def right(text: str, task: Any) -> float:
    return float(text.strip() == task["answer"])


ONE_TURN = rl.prompts(sums(), right, max_tokens=6, expected=rl.Size(drawn=6, read=20))


def fresh(service: weft.ServiceClient, seed: int = 0, rank: int = 8) -> weft.TrainingClient:
    return service.create_lora_training_client(BASE_MODEL, rank=rank, seed=seed)


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


def rows(count: int) -> list[dict[str, str]]:
    return [{"prompt": s["prompt"], "chosen": s["answer"], "rejected": "it is raining"} for s in sums(count)]


def test_dpo_is_torchs_gradient_and_learns_the_preference(service: weft.ServiceClient) -> None:
    beta = 0.3
    base = service.create_sampling_client(base_model=BASE_MODEL)
    probe = rl.pairs(rows(1), base.get_tokenizer())[0].chosen
    after = []
    for ours in (True, False):
        run = fresh(service, seed=3)
        some = rl.pairs(rows(4), run.get_tokenizer())
        if ours:
            report = rl.dpo(run, some, reference=base, beta=beta, batch=4, learning_rate=1e-3, sinks=[])
            assert report.curve("loss") == pytest.approx([np.log(2)], abs=1e-5)
            assert report.spent_nusd >= run.cost().result(60).total_nusd
        else:
            references = [pair_logprobs(base, pair) for pair in some]

            def loss(data: Any, logprobs: Any, references: Any = references) -> Any:
                h = []
                for i, (chosen, rejected) in enumerate(references):
                    got = [
                        (logprobs[2 * i + j] * data[2 * i + j].loss_fn_inputs["weights"].to_torch()).sum()
                        for j in (0, 1)
                    ]
                    h.append(beta * ((got[0] - chosen) - (got[1] - rejected)))
                return -torch.nn.functional.logsigmoid(torch.stack(h)).mean(), {}

            run.forward_backward_custom([datum for pair in some for datum in pair.data], loss).result(60)
            run.optim_step(AdamParams(learning_rate=1e-3)).result(60)
        after.append(run.forward([probe], "cross_entropy").result(60).loss_fn_outputs[0]["logprobs"].to_numpy())
    np.testing.assert_allclose(after[0], after[1], atol=2e-5)
    run = fresh(service)
    report = rl.dpo(
        run, rl.pairs(rows(32), run.get_tokenizer()), reference=base, batch=8, epochs=2, learning_rate=1e-3, sinks=[]
    )
    assert report.steps[-1]["accuracy"] > 0.9
    assert report.steps[-1]["loss"] < 0.6


def pair_logprobs(sampler: weft.SamplingClient, pair: Any) -> list[float]:
    found = []
    for datum in pair.data:
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy().tolist()
        weights = datum.loss_fn_inputs["weights"].to_numpy().tolist()
        whole = ModelInput.from_ints([*datum.model_input.to_ints(), targets[-1]])
        logprobs = sampler.compute_logprobs(whole).result(60)
        found.append(sum(lp * w for lp, w in zip(logprobs[1:], weights, strict=True) if lp is not None))
    return found


def test_sft_then_distillation_to_it_halves_the_reverse_kl(service: weft.ServiceClient) -> None:
    teacher_run = fresh(service, seed=1, rank=16)
    talks = [
        [{"role": "user", "content": s["prompt"]}, {"role": "assistant", "content": s["answer"]}] for s in sums(96)
    ]
    data = rl.conversations(talks, teacher_run.get_tokenizer())
    report = rl.sft(
        teacher_run, data, test=data[:16], every=6, batch=16, epochs=3, learning_rate=rl.linear(2e-3, 18), sinks=[]
    )
    assert report.steps[-1]["loss"] < 0.5 * report.steps[0]["loss"]
    assert len(report.curve("test/loss")) == 3
    short = rl.sft(teacher_run, data, test=data[:16], batch=32, epochs=1, learning_rate=0.0, sinks=[])
    assert ["test/loss" in step for step in short.steps] == [False] * (len(short.steps) - 1) + [True]
    teacher = teacher_run.save_weights_and_get_sampling_client().result(60)
    student = fresh(service, seed=2, rank=16)
    report = rl.distill(
        student, ONE_TURN, teacher, steps=10, groups=rl.Groups(batch=8, size=4), learning_rate=2e-3, sinks=[]
    )
    gaps = report.curve("reverse_kl")
    assert sum(gaps[-3:]) < 0.5 * sum(gaps[:3])


def test_data_that_are_fewer_than_a_batch_are_each_in_it_once(service: weft.ServiceClient) -> None:
    """As in a DataLoader of torch: the step is on the mean over the data, and an epoch is one step."""
    run = fresh(service)
    answers = ["8", "It is nine, I think.", "ten"]
    talks = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}] for answer in answers]
    data = rl.conversations(talks, run.get_tokenizer())
    expected = nll(run, data)
    report = rl.sft(run, data, epochs=2, sinks=[])
    assert len(report.steps) == 2
    assert report.steps[0]["loss"] == pytest.approx(expected, rel=1e-6)
    assert report.steps[0]["tokens"] == sum(float(d.loss_fn_inputs["weights"].to_numpy().sum()) for d in data)


def test_the_budget_is_never_passed(service: weft.ServiceClient) -> None:
    run = fresh(service)
    groups = rl.Groups(batch=4, size=4)
    whole = rl.estimate(run, ONE_TURN, groups=groups, steps=100)
    budget = whole.total_nusd / 1e9 / 20
    report = rl.train(run, ONE_TURN, steps=100, groups=groups, schedule=rl.Async(1), budget_usd=budget, sinks=[])
    assert report.ended == "budget"
    assert 1 <= len(report.steps) < 100
    time.sleep(1)  # cancelled samples are billed when they end
    assert run.cost().result(60).total_nusd <= report.spent_nusd <= budget * 1e9


LIFE = """
import json, sys, weft
from weft import rl
from tests.e2e.test_rl import ONE_TURN, Noted
with weft.ServiceClient() as service:
    run = service.create_lora_training_client("weft/tiny-moe", rank=8, seed=0)
    report = rl.train(run, ONE_TURN, steps=int(sys.argv[2]), groups=rl.Groups(batch=4, size=4), schedule=rl.Async(1),
        learning_rate=1e-3, sinks=[Noted(sys.argv[1])], checkpoint=rl.Checkpoints("life", every=3), seed=4)
    print(json.dumps({"resumed_at": report.resumed_at, "spent": report.spent_nusd}))
"""


class Noted(rl.JsonLines):
    """A file of steps, written slowly so that a test can see a step before the next is over."""

    def log(self, step: int, of: int, metrics: Any) -> None:
        super().log(step, of, metrics)
        time.sleep(0.2)


def test_killed_whatever_is_killed_it_goes_on_and_trains_nothing_too_old(
    own_weftd: Callable[..., Weftd], tmp_path: Path
) -> None:
    """SIGKILL for the trainer, the generator, then the client. Its next life goes on from the last save; the server's
    records of both runs tell, by the sequences that training named, how old trained tokens were."""
    server, lines, steps = own_weftd(), tmp_path / "steps.jsonl", 12
    environment = os.environ | {"WEFT_BASE_URL": server.url, "WEFT_API_KEY": server.key("killed")}
    life = ("-c", LIFE, str(lines), str(steps))
    first = Forked(*life, env=environment)

    def reach(step: int) -> None:
        deadline = time.monotonic() + 200
        while len(seen(lines)) < step:
            assert time.monotonic() < deadline
            assert first.poll() is None
            time.sleep(0.02)

    for step, role in ((1, "trainer"), (3, "generator")):
        reach(step)
        server.worker(role).kill()
    reach(5)
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = run_forked(*life, env=environment)
    assert second.returncode == 0, second.stderr
    told = json.loads(second.stdout)
    assert told["resumed_at"] in (3, 6)
    numbers = [each["step"] for each in seen(lines)]
    again = numbers[numbers.index(told["resumed_at"], 5 if told["resumed_at"] < 5 else 0) :]
    assert again == list(range(told["resumed_at"], steps))
    assert max(each["lag/max"] for each in seen(lines)) <= 1
    with weft.ServiceClient(base_url=server.url, api_key=server.key("killed")) as service:
        rest = service.create_rest_client()
        assert rest.get_usage().result(60).total_nusd <= told["spent"]
        runs = rest.list_training_runs().result(60).training_runs
        ages = [rest.get_run_health(run.training_run_id).result(60) for run in runs]
    assert len(ages) == 2
    for health in ages:
        assert health.named
        assert sum(health.staleness.values()) > 0
        assert max(health.staleness) <= 1


def seen(path: Path) -> list[dict[str, float]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


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


def test_a_loop_whose_rollouts_all_fail_says_why(service: weft.ServiceClient) -> None:
    async def broken(task: Any, chat: rl.Chat) -> float:
        raise KeyError("no such column")

    with pytest.raises(rl.RolloutsFailedError, match=r"in a row failed; the last: KeyError: 'no such column'"):
        rl.train(fresh(service), rl.function(broken, sums()), steps=2, groups=rl.Groups(batch=2, size=2), sinks=[])


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


def test_what_a_teacher_cannot_read_with_its_hint_is_left_out_of_a_distillation(
    service: weft.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    """A rollout may fill the context, so that it does not fit with the hint; steps on the others are paid for."""
    asked = [{"prompt": "?", "answer": ""}, {"prompt": "word " * 1500, "answer": ""}]
    hint = [{"role": "system", "content": "word " * 600}]
    teacher = service.create_sampling_client(base_model=BASE_MODEL)
    env, groups = rl.prompts(asked, max_tokens=4), rl.Groups(batch=2, size=2)
    report = rl.distill(fresh(service), env, teacher, hint=lambda task: hint, steps=2, groups=groups, sinks=[])
    assert [step["data"] for step in report.steps] == [2, 2]
    assert [step["too_long_for_teacher"] for step in report.steps] == [2, 2]
    assert "the teacher takes 2048 tokens, and a rollout with its hint has" in caplog.text


def test_a_conversation_that_fills_the_context_says_so(service: weft.ServiceClient) -> None:
    run = fresh(service)
    limit = asyncio.run(model_limits(run)).context_length
    long = [{"prompt": "word " * limit, "answer": ""}]
    with pytest.raises(rl.RolloutsFailedError, match=rf"tokens, the model takes {limit}"):
        rl.train(run, rl.prompts(long, right), steps=1, groups=rl.Groups(batch=1, size=2), sinks=[])


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
