"""The generators that come to one desk, and which of them gets a request.

The queue decides who is next, whoever serves it; only then is a replica chosen, among those with a free slot. So no
request waits while any replica that can serve it has room. Among them the least loaded gets it, where one that holds
what it needs (`needed`) counts as HEAD_START emptier: near-equals are told apart by what they hold, and no replica is
left idle for that. Pure state, no I/O but the link.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.journal.samplers import SamplerFacts
from scheduler.links.sockets import Link
from scheduler.order.operations import Operation

#: What holding the adapter is worth, as a share of a replica's slots.
HEAD_START = 0.25
#: Holdings (and refusals) remembered of one replica; those used longest ago are forgotten.
REMEMBERED = 1024


def needed(op: Operation, sampler: SamplerFacts) -> str:
    """What a generator has in memory once it has served `op`: the weights, by their run if they follow it; for the base
    model, prompts of this organisation."""
    return (sampler.run_id if sampler.inflight else sampler.adapter_ref) or op.org_id


def fullness(free: int, slots: int) -> float:
    """The share of a generator's slots that are busy, where some are free."""
    return 1 - free / slots


def samples_of(op: Operation) -> int:
    return int(op.plan.get("num_samples", 1))


@dataclass(eq=False)
class Replica:
    """One generator, from the moment its link opens until it closes."""

    name: str
    link: Link
    models: frozenset[str] = frozenset()
    free: int = 0
    held: dict[str, Operation] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)
    _warm: OrderedDict[str, str] = field(default_factory=OrderedDict)
    _declined: OrderedDict[str, str] = field(default_factory=OrderedDict)

    def offer(self, models: Iterable[str], free: int) -> None:
        self.models, self.free = frozenset(models), free

    def take(self, op: Operation, needs: str) -> None:
        self.free -= samples_of(op)
        self.held[op.id] = op
        remember(self._warm, needs, "")

    def decline(self, reason: str, *keys: str) -> None:
        """It cannot serve what goes by any of `keys` (an operation's id, an adapter)."""
        for key in keys:
            remember(self._declined, key, reason)

    def declined(self, *keys: str) -> str | None:
        """Why it cannot serve something that goes by these keys, as far as it has said."""
        return next((self._declined[key] for key in keys if key in self._declined), None)

    def load(self, needs: str) -> float:
        """How full it is, from 0 to 1, less what it is worth that it holds what is needed."""
        busy = sum(samples_of(held) for held in self.held.values())
        return fullness(self.free, busy + self.free) - (HEAD_START if needs in self._warm else 0.0)


def choose(replicas: Iterable[Replica], op: Operation, adapter: str, needs: str) -> Replica | None:
    """Who gets `op` now; None when nobody with a free slot can serve it, or the adapter."""
    able = [
        replica
        for replica in replicas
        if replica.free > 0 and op.base_model in replica.models and replica.declined(op.id, adapter) is None
    ]
    return min(able, key=lambda replica: replica.load(needs), default=None)


def remember(memory: OrderedDict[str, str], key: str, value: str) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > REMEMBERED:
        memory.popitem(last=False)
