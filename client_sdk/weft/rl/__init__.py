"""Reinforcement learning, and what goes with it, over a Weft service: `import weft.rl as rl`.

docs/rl.md reads top to bottom. Names are loaded when first used; torch, and packages such as verifiers, only when
something needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.rl import losses as losses, sandboxes as sandboxes
    from weft.rl.chat.chat import Chat as Chat, Policy as Policy, Reply as Reply
    from weft.rl.chat.render import TemplateRenderer as TemplateRenderer, ToolCall as ToolCall
    from weft.rl.envs.environment import Reward as Reward, function as function, prompts as prompts
    from weft.rl.envs.reasoning_gym import reasoning_gym as reasoning_gym
    from weft.rl.envs.trajectories import trajectories as trajectories, trajectories_async as trajectories_async
    from weft.rl.envs.verifiers import verifiers as verifiers
    from weft.rl.loops.batch import Batch as Batch
    from weft.rl.loops.checkpoint import Checkpoints as Checkpoints
    from weft.rl.loops.distill import distill as distill, distill_async as distill_async
    from weft.rl.loops.estimate import estimate as estimate
    from weft.rl.loops.evaluate import Evaluation as Evaluation, evaluate as evaluate
    from weft.rl.loops.failures import RolloutsFailedError as RolloutsFailedError
    from weft.rl.loops.rate import constant as constant, cosine as cosine, linear as linear
    from weft.rl.loops.report import Report as Report
    from weft.rl.loops.rollouts import Groups as Groups, Rollouts as Rollouts
    from weft.rl.loops.sinks import (
        JsonLines as JsonLines,
        Progress as Progress,
        TensorBoard as TensorBoard,
        Trackio as Trackio,
        Wandb as Wandb,
    )
    from weft.rl.loops.train import train as train, train_async as train_async
    from weft.rl.rollout import Group as Group, Rollout as Rollout, Turn as Turn, data_of as data_of
    from weft.rl.schedule.concurrency import Concurrency as Concurrency
    from weft.rl.schedule.schedules import Async as Async, Partial as Partial, Sync as Sync
    from weft.rl.signal import filters as filters, lengths as lengths
    from weft.rl.signal.advantages import (
        RunningBaseline as RunningBaseline,
        dr_grpo as dr_grpo,
        grpo as grpo,
        maxrl as maxrl,
        reinforce as reinforce,
        rloo as rloo,
    )
    from weft.rl.signal.lengths import Size as Size
    from weft.rl.supervised.conversations import conversations as conversations
    from weft.rl.supervised.dpo import dpo as dpo, pairs as pairs
    from weft.rl.supervised.sft import sft as sft
    from weft.rl.tasks.sources import DifficultyPools as DifficultyPools, Pool as Pool, Shuffled as Shuffled

#: The module below `weft.rl` that each name is loaded from.
_HOMES = {
    "chat.chat": "Chat Policy Reply",
    "chat.render": "TemplateRenderer ToolCall",
    "envs.environment": "Reward function prompts",
    "envs.reasoning_gym": "reasoning_gym",
    "envs.trajectories": "trajectories trajectories_async",
    "envs.verifiers": "verifiers",
    "loops.batch": "Batch",
    "loops.checkpoint": "Checkpoints",
    "loops.distill": "distill distill_async",
    "loops.estimate": "estimate",
    "loops.evaluate": "Evaluation evaluate",
    "loops.failures": "RolloutsFailedError",
    "loops.rate": "constant cosine linear",
    "loops.report": "Report",
    "loops.rollouts": "Groups Rollouts",
    "loops.sinks": "JsonLines Progress TensorBoard Trackio Wandb",
    "loops.train": "train train_async",
    "rollout": "Group Rollout Turn data_of",
    "schedule.concurrency": "Concurrency",
    "schedule.schedules": "Async Partial Sync",
    "signal.advantages": "RunningBaseline dr_grpo grpo maxrl reinforce rloo",
    "signal.lengths": "Size",
    "supervised.conversations": "conversations",
    "supervised.dpo": "dpo pairs",
    "supervised.sft": "sft",
    "tasks.sources": "DifficultyPools Pool Shuffled",
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
_MODULES = {"losses": "losses", "sandboxes": "sandboxes", "filters": "signal.filters", "lengths": "signal.lengths"}

__all__ = [*_MODULE_OF, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"weft.rl.{_MODULES[name]}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'weft.rl' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"weft.rl.{_MODULE_OF[name]}"), name)
    return value
