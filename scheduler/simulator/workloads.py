"""What simulated tenants do: loops of sampling groups, waiting for environments, and training on the result.

The two RL loads are the case studies of SemiAnalysis (2026-06): groups of 16, responses with a heavy tail around 12
thousand tokens, and a trainer that waits 30 % of the time, or 74 % where tools are called a lot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Workload:
    """One tenant's loop. A step samples `groups` requests of `group_size` sequences each, waits `env_s` (mean) for
    every group's environment, trains on all of them and goes on after `think_s`. `overlap` is how many steps the policy
    that samples may be behind: 0 is a synchronous loop. Without `samples` its data are there already. Lengths are
    log-normal, or those in `lengths`, again and again. The loop begins after `begins_s`, and ends after `steps`; 0 is
    never."""

    name: str
    groups: int = 8
    group_size: int = 16
    prompt: int = 6000
    mean_tokens: float = 12_500
    sigma: float = 0.7
    max_tokens: int = 32_768
    env_s: float = 0.0
    think_s: float = 0.0
    overlap: int = 0
    samples: bool = True
    trains: bool = True
    priority: str = "batch"
    weight: int = 1
    lengths: Sequence[int] = ()
    steps: int = 0
    begins_s: float = 0.0

    def sample(self, random: Random, taken: int) -> list[int]:
        """The lengths of the next group's responses; `taken` sequences came before it."""
        if self.lengths:
            return [self.lengths[(taken + i) % len(self.lengths)] for i in range(self.group_size)]
        mu = math.log(self.mean_tokens) - self.sigma**2 / 2
        draw = (random.lognormvariate(mu, self.sigma) for _ in range(self.group_size))
        return [max(1, min(self.max_tokens, round(length))) for length in draw]


#: Reasoning RL on samples that are at most two steps old.
REASONING = Workload("reasoning", groups=32, overlap=2)
#: Agentic RL: minutes of tool calls beside the sampling.
TOOLS = Workload("tools", groups=32, overlap=2, env_s=330.0, prompt=9000)
#: A small experiment.
SMALL = Workload("small", groups=4, mean_tokens=3000, max_tokens=8192, prompt=1000)
#: A flood: eight steps' samples in flight at once, as many as allowed.
FLOOD = Workload("flood", groups=64, overlap=7)
#: A person who tries a model: one short answer at a time.
CHAT = Workload(
    "chat", 1, 1, prompt=500, mean_tokens=400, max_tokens=2048, think_s=60.0, trains=False, priority="interactive"
)

#: Tenants come in this order, again and again.
MIX = (REASONING, TOOLS, SMALL, CHAT, REASONING, TOOLS, SMALL, FLOOD)


def tenants_of(count: int) -> list[Workload]:
    return [MIX[i % len(MIX)] for i in range(count)]
