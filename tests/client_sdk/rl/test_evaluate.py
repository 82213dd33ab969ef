"""Evaluations whose rollouts take sandboxes: as many at a time as training leaves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from weft import rl
from weft.rl.loops.evaluate import Places, places
from weft.rl.sandboxes.sandbox import Sandbox, SandboxError

from tests.isolation import isolated

pytestmark = isolated
POLICY = cast(rl.Policy, SimpleNamespace(sampler=None))


async def solve(task: Any, chat: rl.Chat, box: Sandbox) -> float:
    return float((await box.exec("true")).returncode == 0)


def test_tasks_wait_for_a_place() -> None:
    async def go() -> None:
        home = rl.sandboxes.Local(most=4)
        evaluation = rl.Evaluation(rl.function(solve, range(7), sandboxes=home), size=2)
        assert await rl.evaluate(POLICY, evaluation) == {"eval/reward": 1.0}
        room = await places(evaluation, kept=2)
        assert await most_at_a_time(home, evaluation, room) == 2

    asyncio.run(go())


async def most_at_a_time(home: rl.sandboxes.Local, evaluation: rl.Evaluation, room: Places) -> int:
    """Sandboxes that two evaluations which share their room have open together."""
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


def test_no_place_for_one_task_is_known_before() -> None:
    home = rl.sandboxes.Local(most=4)
    evaluation = rl.Evaluation(rl.function(solve, range(7), sandboxes=home), size=2)
    with pytest.raises(SandboxError, match="up to 5 sandboxes at a time are needed, and there is room for 4"):
        asyncio.run(places(evaluation, kept=3))
