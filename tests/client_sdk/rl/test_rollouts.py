"""What a loop that ends leaves for the next life of it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from weft import rl
from weft.rl.chat.purse import BudgetSpent

from tests.client_sdk.rl.kit import policy

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
    assert [index for _, index in again] == sorted(started)
