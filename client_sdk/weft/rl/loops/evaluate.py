"""Evaluation: an environment's mean reward with some weights, beside training or alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.rl.chat.chat import Chat, Policy
from weft.rl.envs.environment import Environment, Reward
from weft.wire.sampling import SamplingParams


@dataclass(frozen=True)
class Evaluation:
    """Every `every` steps, and at the end: `size` rollouts of each of `tasks` (all of `env`'s), with these weights."""

    env: Environment
    every: int = 20
    size: int = 1
    tasks: Sequence[Any] | None = None
    sampling: SamplingParams | None = None
    name: str = "eval"


async def evaluate(policy: Policy, evaluation: Evaluation, seed: int = 0) -> dict[str, float]:
    """Means over the rollouts; those that fail earn nothing and are counted."""
    params = evaluation.sampling or SamplingParams()

    async def one(number: int, task: Any) -> list[Any]:
        chats = [Chat(policy, f"eval/{seed}/{number}/{each}", params=params) for each in range(evaluation.size)]
        try:
            return list(await evaluation.env.group(task, chats))
        except Exception as error:
            return [error] * evaluation.size

    tasks = evaluation.env.tasks if evaluation.tasks is None else evaluation.tasks
    outcomes = [outcome for group in await asyncio.gather(*map(one, range(len(tasks)), tasks)) for outcome in group]
    rewards = [outcome.value if isinstance(outcome, Reward) else 0.0 for outcome in outcomes]
    failed = sum(not isinstance(outcome, Reward) for outcome in outcomes)
    found = {f"{evaluation.name}/reward": sum(rewards) / max(1, len(rewards))}
    return found | ({f"{evaluation.name}/failed": float(failed)} if failed else {})
