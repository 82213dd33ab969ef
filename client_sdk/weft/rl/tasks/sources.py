"""Which task comes next. A source draws indices of tasks, hears how they went, and can be stored and restored.

source.draw() -> index        source.observe(index, mean_reward)        state_dict / load_state_dict / metrics
"""

from __future__ import annotations

import base64
import math
import random
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from weft.rl import checks


class Source(Protocol):
    """Decides which task is tried next."""

    def draw(self) -> int: ...
    def observe(self, index: int, mean: float) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def metrics(self) -> dict[str, float]: ...


class Shuffled:
    """Every task once, in an order that depends on seed and round alone; then again, in another."""

    def __init__(self, count: int, seed: int = 0) -> None:
        checks.count("count of tasks", count)
        checks.seed(seed)
        self.count, self.seed, self.drawn = count, seed, 0
        self._round, self._order = -1, list[int]()

    def draw(self) -> int:
        turn, place = divmod(self.drawn, self.count)
        if turn != self._round:
            self._round, self._order = turn, list(range(self.count))
            random.Random(f"{self.seed}/{turn}").shuffle(self._order)
        self.drawn += 1
        return self._order[place]

    def observe(self, index: int, mean: float) -> None:
        """Not used: the order is fixed."""

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = int(state["drawn"])

    def metrics(self) -> dict[str, float]:
        return {"epoch": self.drawn / self.count}


@dataclass(frozen=True)
class Pool:
    """Tasks whose last mean reward is at most `upto`; each is drawn with this weight."""

    name: str
    upto: float
    weight: float

    def __post_init__(self) -> None:
        checks.number("upto", self.upto, least=-math.inf)
        checks.finite("weight", self.weight)


#: Hard and easy tasks are drawn a fifth as often as those that teach most (prime-rl).
FIFTHS = (Pool("hard", 0.25, 0.2), Pool("normal", 0.75, 1.0), Pool("easy", 1.0, 0.2))


class DifficultyPools:
    """Draws tasks, with replacement, by how hard they were the last time.

    A task is in the first pool whose `upto` its mean reward does not pass; a weight of 0 retires it. With `memory` the
    mean is a running one: memory old + (1 - memory) new.
    """

    def __init__(
        self,
        count: int,
        pools: Sequence[Pool] = FIFTHS,
        unseen: float = 1.0,
        memory: float = 0.0,
        seed: int = 0,
    ) -> None:
        checks.count("count of tasks", count)
        checks.listed("pools", pools)
        if [pool.upto for pool in pools] != sorted({pool.upto for pool in pools}) or not pools:
            raise ValueError("pools must be in the order of their `upto`, which must differ")
        checks.finite("unseen", unseen)
        checks.number("memory", memory, most=1)
        checks.seed(seed)
        if memory == 1:
            raise ValueError(f"memory must be in [0, 1), got {memory}")
        self.count, self.pools, self.unseen, self.memory = count, tuple(pools), unseen, memory
        self.seed, self.drawn = seed, 0
        self.means: dict[int, float] = {}

    def pool_of(self, mean: float) -> Pool:
        return next((pool for pool in self.pools if mean <= pool.upto), self.pools[-1])

    def draw(self) -> int:
        weights = [
            self.unseen if (mean := self.means.get(index)) is None else self.pool_of(mean).weight
            for index in range(self.count)
        ]
        if not any(weights):  # all retired: rather repeat than stop
            weights = [1.0] * self.count
        self.drawn += 1
        chance = random.Random(f"{self.seed}/{self.drawn}")  # so that the state is one number
        return chance.choices(range(self.count), weights)[0]

    def observe(self, index: int, mean: float) -> None:
        old = self.means.get(index, mean)
        self.means[index] = round(self.memory * old + (1 - self.memory) * mean, 4)

    def state_dict(self) -> dict[str, Any]:
        """The state, as a packed row of floats: so those of thousands of tasks fit into a checkpoint."""
        row = np.asarray([self.means.get(index, math.nan) for index in range(self.count)], np.float32)
        return {"drawn": self.drawn, "packed": base64.b85encode(zlib.compress(row.tobytes(), 9)).decode()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = int(state["drawn"])
        row = np.frombuffer(zlib.decompress(base64.b85decode(state["packed"])), np.float32)
        self.means = {index: round(float(mean), 4) for index, mean in enumerate(row[: self.count]) if mean == mean}

    def metrics(self) -> dict[str, float]:
        inside = Counter(self.pool_of(mean).name for mean in self.means.values())
        shares = {f"pool/{pool.name}": inside[pool.name] / self.count for pool in self.pools}
        return shares | {"pool/unseen": 1 - len(self.means) / self.count}


class Ratios:
    """Draws names so that after n draws each has had n times its share, to within one."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        for name, share in shares.items():
            checks.finite(f"ratios[{name!r}]", share)
        total = sum(shares.values())
        if total <= 0:
            raise ValueError(f"ratios must have one above 0, got {dict(shares)}")
        self.shares = {name: share / total for name, share in shares.items()}
        self.drawn = dict.fromkeys(shares, 0)

    def draw(self) -> str:
        n = sum(self.drawn.values()) + 1
        name = max(self.shares, key=lambda each: self.shares[each] * n - self.drawn[each])
        self.drawn[name] += 1
        return name

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": dict(self.drawn)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = {name: int(state["drawn"].get(name, 0)) for name in self.shares}
