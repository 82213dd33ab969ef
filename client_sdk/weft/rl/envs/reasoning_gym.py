"""`reasoning_gym(name)`: procedurally made tasks of the package reasoning-gym, which judges the answers."""

from __future__ import annotations

import importlib
from typing import Any

from weft.packages import imported
from weft.rl.envs.environment import Prompts, prompts
from weft.rl.signal.advantages import Advantage


def reasoning_gym(
    name: str,
    size: int = 1000,
    seed: int = 0,
    *,
    max_tokens: int | None = None,
    system: str | None = None,
    advantage: Advantage | None = None,
    **options: Any,
) -> Prompts:
    """`size` tasks of the data set `name`; `options` are its own. An answer may be in <answer> tags, or stand alone."""
    gym = imported("reasoning_gym", "rl.reasoning_gym needs the package: pip install reasoning-gym")
    dataset = gym.create_dataset(name, size=size, seed=seed, **options)
    extract = importlib.import_module("reasoning_gym.utils").extract_answer

    def reward(text: str, task: Any) -> float:
        return float(dataset.score_answer(answer=extract(text) or text.strip(), entry=task))

    tasks = [dataset[index] for index in range(size)]
    return prompts(tasks, reward, prompt="question", system=system, max_tokens=max_tokens, advantage=advantage)
