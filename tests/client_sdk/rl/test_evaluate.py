"""How much of an evaluation is under way at a time: what has room, and with the sandboxes that training leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from weft import rl
from weft.rl.loops.evaluate import Places, places
from weft.rl.sandboxes.sandbox import Sandbox, SandboxError
from weft.wire.sampling import SamplingParams

from tests.client_sdk.rl.kit import policy
from tests.isolation import isolated

POLICY = cast(rl.Policy, SimpleNamespace(sampler=None))


async def solve(task: Any, chat: rl.Chat, box: Sandbox) -> float:
    return float((await box.exec("true")).returncode == 0)


def test_time_that_a_rollout_has_does_not_run_while_others_are_evaluated() -> None:
    """If all tasks ran at once they would wait for each other at the server while their own time runs: most would fail
    and earn nothing, only because there are many."""
    at_work, most = [0], [0]

    async def busy(task: Any, chat: rl.Chat) -> float:
        at_work[0] += 1
        most[0] = max(most[0], at_work[0])
        await asyncio.sleep(0)
        at_work[0] -= 1
        return 1.0

    evaluation = rl.Evaluation(rl.function(busy, range(500)), size=2)
    assert asyncio.run(rl.evaluate(POLICY, evaluation)) == {"eval/reward": 1.0}
    assert most[0] == 128
    many = rl.Evaluation(rl.function(busy, range(2)), size=200)  # of one task, more than are under way otherwise
    assert asyncio.run(asyncio.wait_for(rl.evaluate(POLICY, many), 10)) == {"eval/reward": 1.0}


def test_rollouts_are_sampled_as_the_evaluation_says_each_with_random_numbers_of_its_own() -> None:
    async def answer(task: Any, chat: rl.Chat) -> float:
        return float((await chat.user(task).sample()).text == "8")

    of, sampler = policy("8", "9")
    evaluation = rl.Evaluation(rl.function(answer, ["?"]), size=2, sampling=SamplingParams(max_tokens=3), name="sums")
    assert asyncio.run(rl.evaluate(of, evaluation)) == {"sums/reward": 0.5}
    assert [params.max_tokens for params in sampler.params] == [3, 3]
    assert len({params.seed for params in sampler.params}) == 2


class Broken:
    """A user's own environment, which fails as a whole, or returns one rollout too few."""

    tasks = range(2)

    async def group(self, task: Any, chats: Sequence[rl.Chat]) -> list[rl.Reward]:
        if task:
            raise KeyError("no such column")
        return [rl.Reward(1.0)]


def test_an_environment_that_fails_as_a_whole_has_failed_rollouts() -> None:
    found = asyncio.run(rl.evaluate(policy()[0], rl.Evaluation(cast(Any, Broken()), size=2)))
    assert found == {"eval/reward": 0.0, "eval/failed": 4.0}


@isolated
def test_tasks_wait_for_a_place() -> None:
    async def go() -> None:
        home = rl.sandboxes.Local(most=4)
        evaluation = rl.Evaluation(rl.function(solve, range(3), sandboxes=home), size=2)
        assert await rl.evaluate(POLICY, evaluation) == {"eval/reward": 1.0}
        room = await places(evaluation, kept=2)
        assert await most_at_a_time(home, evaluation, room) == 2

    asyncio.run(go())


async def most_at_a_time(home: rl.sandboxes.Local, evaluation: rl.Evaluation, room: Places) -> int:
    """How many sandboxes two evaluations with shared room have open together, at most."""
    seen = [0]

    async def look() -> None:
        while True:
            seen.append(home.open)
            await asyncio.sleep(0.001)

    looking = asyncio.ensure_future(look())
    found = await asyncio.gather(*(rl.evaluate(POLICY, evaluation, room=room) for _ in range(2)))
    looking.cancel()
    assert found == [{"eval/reward": 1.0}] * 2
    return max(seen)


@isolated
def test_no_place_for_one_task_is_known_before() -> None:
    home = rl.sandboxes.Local(most=4)
    evaluation = rl.Evaluation(rl.function(solve, range(7), sandboxes=home), size=2)
    with pytest.raises(SandboxError, match="up to 5 sandboxes at a time are needed, and there is room for 4"):
        asyncio.run(places(evaluation, kept=3))
