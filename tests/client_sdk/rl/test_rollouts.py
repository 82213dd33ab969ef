"""What a loop that ends leaves for the next life of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from weft import rl
from weft.errors import APIConnectionError, InternalServerError, RateLimitError, RequestFailedError
from weft.rl.chat.purse import BudgetSpent, Purse
from weft.rl.envs.environment import Outcome, checked
from weft.rl.loops import rollouts as loop
from weft.rl.rollout import Group
from weft.wire.account.limits import LimitsResponse, ModelLimits
from weft.wire.training import GetInfoResponse, ModelData

from tests.client_sdk.rl.kit import Said, Scripted, policy, tokenizer

NOBODY = cast(Any, None)


def test_tasks_under_way_when_the_budget_ends_are_tried_again() -> None:
    async def solve(task: int, chat: rl.Chat) -> float:
        started.append(task)
        if len(started) < 3:
            await asyncio.sleep(30)
        raise BudgetSpent("no more")

    started = list[int]()

    async def life() -> rl.Rollouts:
        rollouts = rl.Rollouts(NOBODY, rl.function(solve, range(8)), groups=rl.Groups(batch=3, size=1))
        rollouts.policy = policy()[0]
        with pytest.raises(BudgetSpent):
            await rollouts.batch()
        await rollouts.__aexit__(None, None, None)
        return rollouts

    again = asyncio.run(life()).state_dict()["again"]
    assert len(started) == 3
    assert [index for _, index, _ in again] == started


class Run:
    """In place of a run: what rollouts ask of one. `eos` is what its server knows to end a text."""

    def __init__(self, sampler: Scripted, eos: list[int] | None) -> None:
        self.sampler, self.eos = sampler, eos
        self.get_tokenizer = tokenizer

    async def save_weights_and_get_sampling_client_async(self, **kind: str) -> Scripted:
        return self.sampler

    def create_rest_client(self) -> Run:
        return self

    async def get_limits(self) -> LimitsResponse:
        model = ModelLimits(vocab_size=1000, context_length=2048, eos_token_ids=self.eos)
        return LimitsResponse(models={"base": model}, losses={})

    async def get_info_async(self) -> GetInfoResponse:
        data = ModelData(model_name="base")
        return GetInfoResponse(model_id="run", model_data=data)


@pytest.mark.parametrize(
    ("eos", "told"), [(["<|endoftext|>"], True), (["<|endoftext|>", "<|im_end|>"], False), (None, False)]
)
def test_an_answer_ends_as_the_template_ends_it_also_where_the_base_model_ends_texts_alone(
    eos: list[str] | None, told: bool
) -> None:
    """A base model that has learned to chat would write the rest of the conversation, up to max_tokens."""
    end = tokenizer().convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    known = tokenizer().convert_tokens_to_ids(eos) if eos else eos
    sampler = policy("8", "8")[1]

    async def life(**more: Any) -> None:
        env = rl.prompts(["3 + 5"], lambda text, task: 1.0, **more)
        groups = rl.Groups(batch=1, size=1)
        async with rl.Rollouts(cast(Any, Run(sampler, known)), env, groups=groups, batches=1) as rollouts:
            await rollouts.batch()

    asyncio.run(life())
    asyncio.run(life(stop=["."]))
    assert [params.stop for params in sampler.params] == [sorted(end) if told else None, ["."]]


class Judge:
    """Somebody's own environment, whose rewards nobody has looked at."""

    expected = advantage = None
    tasks = range(2)

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = list(outcomes)

    async def group(self, task: Any, chats: Sequence[rl.Chat]) -> list[Outcome]:
        return self.outcomes


def test_rewards_of_any_environment_are_plain_finite_numbers() -> None:
    rewards = rl.Reward(cast(Any, np.int64(1)), {"tries": cast(Any, np.float32(2))}), rl.Reward(0.5)
    env = Judge(*rewards, rl.Reward(float("nan")), rl.Reward(cast(Any, None)))

    async def life() -> tuple[rl.Batch, rl.Rollouts]:
        rollouts = rl.Rollouts(NOBODY, env, groups=rl.Groups(batch=1, size=4))
        rollouts.policy = policy()[0]
        return await rollouts.batch(), rollouts

    batch, rollouts = asyncio.run(life())
    assert [(rollout.reward, type(rollout.reward)) for rollout in batch.rollouts] == [(1.0, float), (0.5, float)]
    assert [type(value) for value in batch.rollouts[0].metrics.values()] == [float]
    assert rollouts.waste["failed_rollouts"] == 2
    evaluation = rl.Evaluation(env, size=4)
    assert asyncio.run(rl.evaluate(policy()[0], evaluation)) == {"eval/reward": 0.375, "eval/failed": 4.0}


def refuses(group: Group) -> bool:
    raise KeyError("no such metric")


class Retires(rl.Shuffled):
    """A source of one's own, with a mistake."""

    def observe(self, index: int, mean: float) -> None:
        raise KeyError("no such task")


@pytest.mark.parametrize(
    ("groups", "source", "says"),
    [
        (rl.Groups(batch=1, size=2, keep=[refuses]), None, "no such metric"),
        (rl.Groups(batch=1, size=2, keep_rollout=[cast(Any, refuses)]), None, "no such metric"),
        (rl.Groups(batch=1, size=2), Retires(2), "no such task"),
    ],
    ids=["keep", "keep_rollout", "source"],
)
def test_a_mistake_in_what_judges_groups_ends_the_loop(groups: rl.Groups, source: Any, says: str) -> None:
    async def life() -> None:
        rollouts = rl.Rollouts(NOBODY, Judge(rl.Reward(1.0), rl.Reward(0.0)), groups=groups, sources=source)
        rollouts.policy = policy()[0]
        async with asyncio.timeout(10):
            await rollouts.batch()

    with pytest.raises(KeyError, match=says):
        asyncio.run(life())


class Cancelled(Judge):
    """An environment within which something is cancelled the first time."""

    async def group(self, task: Any, chats: Sequence[rl.Chat]) -> list[Outcome]:
        if not self.outcomes:
            self.outcomes = [rl.Reward(1.0), rl.Reward(0.0)]
            raise asyncio.CancelledError
        return await super().group(task, chats)


@pytest.mark.parametrize(("kind", "failed"), [("function", "rollouts"), ("prompts", "rollouts"), ("own", "groups")])
def test_what_is_cancelled_within_a_rollout_is_that_rollouts_failure(kind: str, failed: str) -> None:
    """As a judge is whose future somebody else has cancelled: the loop waited for ever."""
    asked = iter(range(9))

    async def judged(*_: Any) -> float:
        if next(asked) == 1:
            judge = asyncio.get_running_loop().create_future()
            judge.cancel()
            await judge
        return 1.0

    env: Any = {"function": rl.function(judged, [1]), "prompts": rl.prompts(["?"], judged), "own": Cancelled()}[kind]

    async def life() -> tuple[rl.Batch, rl.Rollouts]:
        rollouts = rl.Rollouts(NOBODY, env, groups=rl.Groups(batch=1, size=2))
        rollouts.policy = policy("a", "b")[0]
        async with asyncio.timeout(10):
            return await rollouts.batch(), rollouts

    batch, rollouts = asyncio.run(life())
    assert len(batch.rollouts) == (2 if kind == "own" else 1)
    assert rollouts.waste[f"failed_{failed}"] == 1


@pytest.mark.parametrize(("name", "says"), [("", "tasks[1]"), ("sums", "tasks[1] of 'sums'")])
def test_a_task_that_no_group_comes_to_anything_with_is_named(
    name: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As a broken line of a file is, one of ten thousand."""
    env = rl.prompts([{"prompt": "?"}, {"question": "?"}], max_tokens=4)

    async def life() -> rl.Batch:
        rollouts = rl.Rollouts(NOBODY, {name: env} if name else env, groups=rl.Groups(batch=2, size=1))
        rollouts.policy = policy(*"abcd")[0]
        async with asyncio.timeout(10):
            return await rollouts.batch()

    assert {group.index for group in asyncio.run(life()).groups} == {0}
    assert f"a group of {says} failed: ValueError: a task has no 'prompt': " in caplog.text


def test_a_filter_may_be_any_callable() -> None:
    async def life(keep: Any) -> rl.Rollouts:
        groups = rl.Groups(batch=1, size=2, keep=[keep])
        rollouts = rl.Rollouts(NOBODY, Judge(rl.Reward(1.0), rl.Reward(1.0)), groups=groups)
        rollouts.policy = policy()[0]
        async with asyncio.timeout(10):
            assert (await rollouts.batch()).rollouts == []
        return rollouts

    named = asyncio.run(life(partial(lambda least, group: group.mean < least, 1.0)))
    assert "rejected_tokens/partial" in named.waste


@pytest.mark.parametrize("trained", [False, True])
def test_tasks_of_a_batch_are_tried_again_unless_it_was_trained(trained: bool) -> None:
    """A loop may end, and be saved, between a batch and its step: a budget suffices to sample it and not to train."""

    async def life() -> list[Any]:
        env = rl.function(lambda task, chat: asyncio.sleep(0, 1.0), range(8))
        rollouts = rl.Rollouts(NOBODY, env, groups=rl.Groups(batch=3, size=1), batches=1)
        rollouts.policy = policy()[0]
        async with asyncio.timeout(10):
            assert len((await rollouts.batch()).groups) == 3
        if trained:
            await rollouts.step(None)
        await rollouts.__aexit__(None, None, None)
        return list(rollouts.state_dict()["again"])

    again = asyncio.run(life())
    assert len(again) == (0 if trained else 3)


class Failing(Scripted):
    """Says what it is told to, and raises what is an error."""

    def _next(self) -> Said:
        if isinstance(error := self.answers[0], Exception):
            self.answers.pop(0)
            raise error
        return super()._next()


@pytest.mark.parametrize(
    "error",
    [
        RateLimitError("too much at once", 429),
        InternalServerError("away", 503),
        APIConnectionError("the connection was reset"),
        RequestFailedError("the generator died", "op", "server"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_sample_that_failed_is_no_reward_of_zero_though_code_goes_on_from_any_error(error: Exception) -> None:
    async def solve(task: int, chat: rl.Chat) -> float:
        try:
            await chat.user("?").sample()
            reply = await chat.user("sure?").sample()
        except Exception:
            return 0.0
        return float(reply.text == "8")

    async def life() -> tuple[rl.Batch, rl.Rollouts]:
        env = rl.function(solve, range(1))
        rollouts = rl.Rollouts(NOBODY, env, groups=rl.Groups(batch=1, size=3))
        rollouts.policy = policy()[0]
        rollouts.policy.sampler = cast(Any, Failing("7", "7", "7", "8", cast(Any, error), "9"))
        async with asyncio.timeout(10):
            return await rollouts.batch(), rollouts

    batch, rollouts = asyncio.run(life())
    assert sorted(batch.groups[0].rewards) == [0.0, 1.0]
    assert rollouts.waste["failed_rollouts"] == 1


def test_a_sample_that_is_made_good_by_another_try_keeps_its_reward() -> None:
    async def solve(task: int, chat: rl.Chat) -> float:
        chat.user("?")
        while True:
            try:
                return float((await chat.sample()).text)
            except RateLimitError:
                continue

    async def reward(*answers: Any) -> Outcome:
        who = policy()[0]
        who.sampler = cast(Any, Failing(*answers))
        chat = rl.Chat(who)
        [found] = await rl.function(solve, ["?"]).group("?", [chat])
        return checked(found, chat)

    busy = RateLimitError("too much at once", 429)
    assert asyncio.run(reward(busy, busy, "8")) == rl.Reward(8.0)


@pytest.mark.parametrize(
    ("ends", "size", "why"),
    [
        ("late", 1, "late_tokens"),
        ("failed", 1, "failed_tokens"),
        ("failed", 2, "failed_tokens"),
        ("rejected", 2, "rejected_tokens/keep_rollout"),
    ],
)
def test_what_was_drawn_in_vain_is_counted_however_soon_it_ends(ends: str, size: int, why: str) -> None:
    """A late group is cancelled when as many as are needed have ended; one that failed is not tried again."""
    numbers = iter(range(99))

    async def solve(task: int, chat: rl.Chat) -> float:
        number = next(numbers)
        await chat.user("?").sample()
        if number == 0 and ends == "failed":
            raise KeyError("no such column")
        await asyncio.sleep(30 if number == 0 and ends == "late" else 0)
        return float(number)

    async def life() -> rl.Rollouts:
        schedule = rl.Sync(oversample=2 if ends == "late" else 1)
        keep: list[Any] = [lambda rollout: rollout.reward > 0] if ends == "rejected" else []
        groups, purse = rl.Groups(batch=1, size=size, keep_rollout=keep), Purse({"sample": 10_000})
        rollouts = rl.Rollouts(NOBODY, rl.function(solve, range(9)), groups=groups, schedule=schedule, purse=purse)
        rollouts.policy = policy("8", "8")[0]
        async with asyncio.timeout(10):
            assert len((await rollouts.batch()).rollouts) == 1
            await rollouts.step(None)
        return rollouts

    rollouts, drawn = asyncio.run(life()), len(tokenizer().encode("8<|im_end|>"))
    found = rollouts.metrics()
    assert [found[f"waste/{why}"], found["waste_usd"]] == [drawn, drawn * 10 / 1e9]
    assert rollouts.state_dict()["again"] == []


def test_nothing_goes_on_behind_the_end() -> None:
    """Neither rollouts, nor who looks how far they are."""
    told = list[str]()

    async def solve(task: int, chat: rl.Chat) -> float:
        try:
            await asyncio.sleep(30 if task else 0)
        finally:
            told.append(f"{task} ended")
        return 1.0

    async def life() -> None:
        run = cast(Any, Run(policy()[1], None))
        groups, schedule = rl.Groups(batch=1, size=1), rl.Async(max_lag=1)
        concurrency = rl.Concurrency(start=2)
        env = rl.function(solve, [0, 1, 2])
        async with rl.Rollouts(run, env, groups=groups, schedule=schedule, concurrency=concurrency) as rollouts:
            await rollouts.batch()
        told.append("the loop has ended")
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(life())
    assert told[-1] == "the loop has ended"


@pytest.mark.parametrize(
    ("schedule", "concurrency", "batches", "begun"),
    [
        (rl.Async(max_lag=3), None, 2, [2, 2]),
        (rl.Async(max_lag=3), None, 9, [4, 4]),
        (rl.Async(max_lag=3), rl.Concurrency(start=2, most=3), 9, [2, 3]),
        (rl.Sync(oversample=3), None, 1, [3, 3]),
    ],
)
def test_as_many_groups_are_begun_as_there_is_room_for(
    schedule: Any, concurrency: Any, batches: int, begun: list[int]
) -> None:
    """`begun` before the first has ended, and at most at a time, which is what sandboxes are asked for."""
    boxes, started = cast(Any, object()), list[int]()

    async def solve(task: int, chat: rl.Chat) -> float:
        started.append(task)
        await asyncio.sleep(0.05)
        return 1.0

    async def life() -> int:
        env = rl.function(solve, range(99))
        (boxed := cast(Any, Judge())).sandboxes = boxes
        more: dict[str, Any] = {"schedule": schedule, "concurrency": concurrency, "batches": batches}
        rollouts = rl.Rollouts(NOBODY, env, groups=rl.Groups(batch=1, size=1), **more)
        rollouts.policy = policy()[0]
        waiting = asyncio.ensure_future(rollouts.batch())
        await asyncio.sleep(0.02)
        count = len(started)
        await waiting
        await rollouts.__aexit__(None, None, None)
        mixed = rl.Rollouts(NOBODY, {"a": env, "b": boxed}, groups=rl.Groups(batch=1, size=5), **more)
        assert mixed.most_of(cast(Any, object())) == 0
        return count * 1000 + mixed.most_of(boxes)

    assert divmod(asyncio.run(life()), 1000) == (begun[0], (4 if begun == [2, 2] else begun[1]) * 5)


def test_a_limit_is_judged_by_groups_that_began_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were under way when it moved have to end first. In a limit's first second nobody is asked."""
    now, ends, windows = [100.0], asyncio.Event(), list[float]()
    monkeypatch.setattr(loop, "LOOK_S", 0)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    observed, waits = list[tuple[int, float, float]](), [APIConnectionError("reset"), None, 0.25, 0.5, 0.5]

    class Health(Run):
        async def get_run_health(self, run_id: str, window_s: float) -> Any:
            windows.append(window_s)
            now[0] += 4
            if isinstance(found := waits.pop(0), Exception):
                raise found
            return SimpleNamespace(sampling_wait=found)

    class Told(rl.Concurrency):
        def observe(self, in_flight: int, running: float, waiting: float) -> None:
            observed.append((in_flight, running, waiting))
            self._limit = 3.0

    async def solve(task: int, chat: rl.Chat) -> float:
        await ends.wait()
        return 1.0

    async def spin(later_s: float) -> list[float]:
        now[0] += later_s
        for _ in range(50):
            await asyncio.sleep(0)
        return list(windows)

    async def life() -> None:
        run, env, groups = Health(policy()[1], None), rl.function(solve, range(9)), rl.Groups(batch=1, size=1)
        more: dict[str, Any] = {"schedule": rl.Async(max_lag=3), "concurrency": Told(start=2)}
        async with rl.Rollouts(cast(Any, run), env, groups=groups, **more) as rollouts:
            waiting = asyncio.ensure_future(rollouts.batch())
            assert await spin(0) == []
            assert await spin(0.5) == []
            assert await spin(0.5) == [1.0, 5.0, 9.0]
            assert observed == [(2, 0.75, 0.25)]
            assert await spin(30) == [1.0, 5.0, 9.0]
            assert rollouts.metrics()["in_flight"] == rollouts.metrics()["in_flight/limit"] == 3
            ends.set()
            await spin(0)
            waits[1:] = [None] * 99
            assert (await spin(2))[3:6] == [2.0, 6.0, 10.0]
            assert observed[1][1:] == (0.5, 0.5)
            await waiting

    asyncio.run(life())


@pytest.mark.parametrize(("error", "limit"), [(RateLimitError("too much at once", 429), 2), (KeyError("answer"), 4)])
def test_a_refusal_halves_how_many_are_under_way(error: Exception, limit: int) -> None:
    errors = [error]

    async def solve(task: int, chat: rl.Chat) -> float:
        for each in errors[:1]:
            errors.clear()
            raise each
        return 1.0

    async def life() -> int:
        more: dict[str, Any] = {"schedule": rl.Async(max_lag=3), "concurrency": rl.Concurrency(start=4)}
        rollouts = rl.Rollouts(NOBODY, rl.function(solve, range(9)), groups=rl.Groups(batch=1, size=1), **more)
        rollouts.policy = policy()[0]
        async with asyncio.timeout(10):
            await rollouts.batch()
        return int(rollouts.metrics()["in_flight/limit"])

    assert asyncio.run(life()) == limit
