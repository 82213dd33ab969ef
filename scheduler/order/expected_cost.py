"""What work weighs in the fair order: the shares of organisations, and what a sample is expected to use.

A sample is admitted for the tokens it may use at most, and mostly ends long before. It is charged the mean of what its
session's sequences have used lately when it is taken, and the difference when it ends: short answers are not
overcharged, and until then nobody's estimate is far off. Pure state; the journal asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from scheduler.order.operations import Operation

#: About how many sequences the mean goes back.
MEMORY = 64
#: How many sessions are remembered; the one sampled from longest ago is forgotten.
REMEMBERED = 4096
#: How long an organisation's weight is used before it is read again.
WEIGHT_LASTS_S = 10.0


@dataclass
class _Lengths:
    mean: float = 0.0
    seen: int = 0

    def observe(self, tokens: float, sequences: int) -> None:
        self.seen = min(MEMORY, self.seen + sequences)
        self.mean += (tokens - self.mean) * min(1.0, sequences / self.seen)


class ExpectedCosts:
    def __init__(self, read_weight: Callable[[str], int], clock: Callable[[], float]) -> None:
        self._read_weight = read_weight
        self._clock = clock
        self._weights: dict[str, tuple[int, float]] = {}
        self._lengths: OrderedDict[str, _Lengths] = OrderedDict()

    def weight(self, org_id: str) -> int:
        """The fair share of an organisation, relative to others'."""
        known = self._weights.get(org_id)
        if known is None or known[1] <= self._clock():
            known = self._weights[org_id] = (self._read_weight(org_id), self._clock() + WEIGHT_LASTS_S)
        return known[0]

    def known_weight(self, org_id: str) -> int:
        """The weight as last read; it may be old if the organisation has sent nothing for long."""
        known = self._weights.get(org_id)
        return known[0] if known is not None else self.weight(org_id)

    def weight_lasts(self, org_id: str) -> bool:
        """True if `weight` would use the remembered value, and not ask again."""
        known = self._weights.get(org_id)
        return known is not None and known[1] > self._clock()

    def expected(self, op: Operation) -> int:
        """How many tokens a sample will probably use; never more than it may."""
        sequences, prompt = _sequences(op), op.sample.prompt_tokens
        lengths = self._lengths.get(op.session_id)
        if lengths is None:
            return op.tokens
        return min(op.tokens, prompt + round(sequences * lengths.mean))

    def ended(self, op: Operation, facts: Mapping[str, int]) -> int:
        """Learn from a sample that has ended with these `facts`. Returns by how many tokens its charge was too low."""
        sequences, sampled = _sequences(op), facts.get("sample", 0)
        self._lengths.setdefault(op.session_id, _Lengths()).observe(sampled / sequences, sequences)
        self._lengths.move_to_end(op.session_id)
        if len(self._lengths) > REMEMBERED:
            self._lengths.popitem(last=False)
        return facts.get("prefill", 0) + sampled - op.charged


def _sequences(op: Operation) -> int:
    return max(1, op.sample.num_samples)
