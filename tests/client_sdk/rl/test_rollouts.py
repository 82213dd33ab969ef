"""What a loop that ends leaves to its next life."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from weft import rl
from weft.errors import APIConnectionError, InternalServerError, RateLimitError, RequestFailedError
from weft.rl.chat.purse import BudgetSpent, Purse
from weft.rl.envs.environment import Outcome, checked
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
    """Stands for a run, as rollouts need it. `eos` is the token that its server knows to end a text."""

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
    """A base model that has learned to chat would otherwise write the rest of the conversation, up to max_tokens."""
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
    """A user's own environment, whose rewards nobody has checked."""

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
    """A user's own source, with a mistake in it."""

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
    """An environment in which something is cancelled the first time."""

    async def group(self, task: Any, chats: Sequence[rl.Chat]) -> list[Outcome]:
        if not self.outcomes:
            self.outcomes = [rl.Reward(1.0), rl.Reward(0.0)]
            raise asyncio.CancelledError
        return await super().group(task, chats)


@pytest.mark.parametrize(("kind", "failed"), [("function", "rollouts"), ("prompts", "rollouts"), ("own", "groups")])
def test_what_is_cancelled_within_a_rollout_is_that_rollouts_failure(kind: str, failed: str) -> None:
    """Such as a judge whose future somebody else has cancelled: the loop waited for ever."""
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
    """Such as a broken line in a file of ten thousand."""
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
    """A loop may end, and be saved, between a batch and its step: if the budget suffices only to sample."""

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
    """A sampler that gives scripted answers, and raises those that are errors."""

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
    """A late group is cancelled once enough others have ended; a failed one is not tried again."""
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
