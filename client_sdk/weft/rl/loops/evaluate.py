"""Evaluation: an environment's mean reward with some weights, beside training or alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from weft.rl import checks
from weft.rl.chat.chat import Chat, Policy, is_fatal, stops_of
from weft.rl.chat.render import TemplateRenderer
from weft.rl.envs.environment import Environment, Reward, checked
from weft.rl.loops.failures import Failures
from weft.rl.loops.limits import sampler_limits
from weft.rl.loops.rollouts import Groups
from weft.rl.sandboxes.sandbox import require
from weft.sampling_client import SamplingClient
from weft.training_client import TrainingClient
from weft.wire.sampling import SamplingParams


@dataclass(frozen=True)
class Evaluation:
    """When and what to evaluate: every `every` steps and after the last step, `size` rollouts of each of `tasks` (by
    default all tasks of `env`)."""

    env: Environment
    every: int = 20
    size: int = 1
    tasks: Sequence[Any] | None = None
    sampling: SamplingParams | None = None
    name: str = "eval"

    def __post_init__(self) -> None:
        checks.does("env", self.env, "group", "rl.prompts(tasks, reward)")
        checks.count("every", self.every)
        checks.count("size", self.size)
        if self.tasks is not None:
            checks.tasks(self.tasks)
        checks.made("sampling", self.sampling, SamplingParams | None, "weft.SamplingParams(max_tokens=64)")


#: How many rollouts of an evaluation run at a time: as many as a default training step has. More would only wait for
#: each other at the server, while their time limits run.
AT_A_TIME = Groups().batch * Groups().size
#: A semaphore that is entered for each task.
Places = AbstractAsyncContextManager[Any]


async def places(evaluation: Evaluation, kept: int = 0) -> Places:
    """A semaphore for as many tasks at a time as there are sandboxes beside the `kept` ones of training. Raises
    SandboxError if there are not enough for one task."""
    rollouts, sandboxes = AT_A_TIME, getattr(evaluation.env, "sandboxes", None)
    if sandboxes is not None:
        await require(sandboxes, kept + evaluation.size)
        rollouts = min(rollouts, (await sandboxes.quota()).left - kept)
    return asyncio.Semaphore(max(1, rollouts // evaluation.size))


async def policy_of(weights: TrainingClient | SamplingClient) -> Policy:
    """A policy that samples a run's present weights, or a sampler, with the base model's own chat template."""
    if not isinstance(weights, SamplingClient):
        weights = await weights.save_weights_and_get_sampling_client_async()
    model = await sampler_limits(weights)
    renderer = TemplateRenderer(await asyncio.to_thread(weights.get_tokenizer))
    return Policy(weights, renderer, model.context_length, stop=stops_of(renderer, model))


async def evaluate(
    policy: Policy | TrainingClient | SamplingClient,
    evaluation: Evaluation,
    seed: int = 0,
    *,
    room: Places | None = None,
) -> dict[str, float]:
    """Means over the rollouts; those that fail earn nothing and are counted. `policy` may be a run, of which a snapshot
    is taken, or any sampler: `service.create_sampling_client(model_path=...)`. Tasks wait for `room` (by default for
    AT_A_TIME rollouts, within what the quota of their sandboxes leaves). Raises errors that every rollout would meet: a
    spent budget, a refused key."""
    checks.made("evaluation", evaluation, Evaluation, "rl.Evaluation(env)")
    checks.seed(seed)
    of = await policy_of(policy) if isinstance(policy, (TrainingClient, SamplingClient)) else policy
    room = room or await places(evaluation)
    params = evaluation.sampling or SamplingParams()

    async def one(number: int, task: Any) -> list[Any]:
        chats = [Chat(of, f"eval/{seed}/{number}/{each}", params=params) for each in range(evaluation.size)]
        try:
            async with room:
                outcomes = await evaluation.env.group(task, chats)
            return [checked(outcome, chat) for outcome, chat in zip(outcomes, chats, strict=True)]
        except Exception as error:
            return [error] * evaluation.size

    tasks = evaluation.env.tasks if evaluation.tasks is None else evaluation.tasks
    outcomes = [outcome for group in await asyncio.gather(*map(one, range(len(tasks)), tasks)) for outcome in group]
    failures = Failures()
    for outcome in outcomes:
        if is_fatal(outcome):
            raise outcome
        if not isinstance(outcome, Reward):
            failures.tell(outcome, "a rollout of the evaluation")
    rewards = [outcome.value if isinstance(outcome, Reward) else 0.0 for outcome in outcomes]
    failed = sum(not isinstance(outcome, Reward) for outcome in outcomes)
    found = {f"{evaluation.name}/reward": sum(rewards) / max(1, len(rewards))}
    return found | ({f"{evaluation.name}/failed": float(failed)} if failed else {})
