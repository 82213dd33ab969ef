"""A batch of groups: its training data and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from weft.rl.losses.loss import Loss
from weft.rl.rollout import Group, Rollout, data_of
from weft.rl.signal.advantages import Advantage
from weft.rl.signal.lengths import Penalty, Size
from weft.wire.inputs import Datum

#: The divisor of a loss's sum over the batch: the number of drawn tokens, the number of data, or none.
Reduce = Literal["tokens", "rollouts", "sum"]
#: The largest number of float32, in which data hold advantages.
MOST = float(np.finfo(np.float32).max)
#: Gives further inputs of a datum, before the loss takes it.
More = Callable[[Datum], Mapping[str, Any]]


@dataclass
class Batch:
    """Groups that are trained together, at policy version `version` of the loop and `base + version` of the server."""

    groups: list[Group]
    version: int
    base: int

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def lags(self) -> list[int]:
        """For each group that has tokens: by how many steps the group's oldest token is behind, as the server reported
        that token's version."""
        now = self.base + self.version
        return [now - oldest for group in self.groups if (oldest := group.oldest) is not None]

    def data(
        self,
        advantage: Advantage,
        loss: Loss,
        *,
        penalty: Penalty | None = None,
        reduce: Reduce = "tokens",
        advantages: Mapping[str, Advantage] | None = None,
        more: More | None = None,
    ) -> list[Datum]:
        """The batch as data for `loss`. Rollouts with advantage 0 are left out, since they would cost money and teach
        nothing, unless the loss learns from them, too (`Loss.all_data`).

        `advantages` replaces `advantage` for groups of these environments.
        """
        made: list[Datum] = []
        for group in self.groups:
            own = (advantages or {}).get(group.source, advantage)
            for rollout, value in zip(group.rollouts, _advantages(group, own, penalty), strict=True):
                if value != 0 or loss.all_data:
                    made += data_of(rollout, value)
        whole = denominator(made, reduce)
        return [loss.datum(datum, 1 / whole, **(more(datum) if more else {})) for datum in made]

    def metrics(self) -> dict[str, float]:
        rollouts = self.rollouts
        if not rollouts:
            return {"rollouts": 0.0}
        names = sorted({name for rollout in rollouts for name in rollout.metrics})
        found = {
            name: _mean([rollout.metrics[name] for rollout in rollouts if name in rollout.metrics]) for name in names
        }
        found |= {  # set last, so that no metric of an environment replaces these
            "reward": _mean([rollout.reward for rollout in rollouts]),
            "rollouts": float(len(rollouts)),
            "tokens/rollout": _mean([rollout.sampled for rollout in rollouts]),
            "turns/rollout": _mean([len(rollout.turns) for rollout in rollouts]),
            "lag/max": float(max(self.lags, default=0)),
            "lag/mean": _mean(self.lags),
        }
        for name in sorted({group.source for group in self.groups} - {""}):
            found[f"{name}/reward"] = _mean([s for g in self.groups if g.source == name for s in g.rewards])
        return found


def _advantages(group: Group, advantage: Advantage, penalty: Penalty | None) -> list[float]:
    if not group.rollouts:
        return []
    rewards = group.rewards
    if penalty is not None:
        sizes = [Size(r.sampled, r.read, len(r.turns)) for r in group.rollouts]
        rewards = _one_each("rewards behind `penalty`", penalty(rewards, sizes), rewards)
    return _one_each("advantages", advantage(rewards), rewards)


def _one_each(what: str, found: Sequence[float], rewards: Sequence[float]) -> list[float]:
    """`found` as floats. It comes from a function of the user: raises ValueError unless it has one finite float32 for
    each reward."""
    values = [float(value) for value in found]
    if len(values) != len(rewards) or not all(abs(value) <= MOST for value in values):
        raise ValueError(
            f"{what} must be a finite number for each reward, within {MOST:g} (float32): for {rewards!r:.120} got"
            f" {values!r:.120}"
        )
    return values


def denominator(data: Sequence[Datum], reduce: Reduce) -> float:
    """The divisor for the summed loss of these data, by `reduce`."""
    if reduce == "sum":
        return 1.0
    if reduce == "rollouts":
        return float(len(data))
    return max(1.0, sum(float(datum.loss_fn_inputs["mask"].to_numpy().sum()) for datum in data))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
