"""What a plan will cost, before it starts: pure arithmetic, the same integers as billing.

Training is exact: its tokens are known, and an amount is rounded once per request, so data are cut here as the client
cuts them. Sampling is bounded from above: a sequence may stop before `max_tokens`, and a prompt may be found in the
cache. docs/billing.md of the server says what is billed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from weft.errors import WeftError
from weft.money import amount_nusd, usd
from weft.plan.plan import Plan, PlannedSample, PlannedTrain, datum_of, prompt_length
from weft.runs.chunks import split
from weft.runs.custom_loss import forward_datum
from weft.wire.account.limits import LimitsResponse, PricesResponse
from weft.wire.account.usage import UsageKind
from weft.wire.sampling import SamplingParams


@dataclass(frozen=True)
class EstimatedRow:
    """Tokens of one kind, and what they cost at `rate_uusd_per_mtok`."""

    kind: UsageKind
    tokens: int
    rate_uusd_per_mtok: int
    amount_nusd: int

    @property
    def amount_usd(self) -> str:
        """The amount in dollars."""
        return usd(self.amount_nusd)


@dataclass(frozen=True)
class CostEstimate:
    """The cost of a plan. `exact` when it is what will be billed; else it is the most that can be, unless a
    `PlannedSample.expected_tokens` says how much to expect."""

    base_model: str
    price_version: str
    rows: list[EstimatedRow]
    exact: bool

    @property
    def total_nusd(self) -> int:
        """The whole amount."""
        return sum(row.amount_nusd for row in self.rows)

    @property
    def total_usd(self) -> str:
        """The whole amount in dollars."""
        return usd(self.total_nusd)


#: One request's tokens, by kind.
Request = dict[UsageKind, int]


def estimate(plan: Plan, prices: PricesResponse, limits: LimitsResponse) -> CostEstimate:
    """Price `plan` at `prices`. `WeftError` if the plan cannot be run at all; `validate` lists all reasons."""
    rates: Mapping[UsageKind, int] = prices.rates_uusd_per_mtok
    tokens: Counter[UsageKind] = Counter()
    amounts: Counter[UsageKind] = Counter()
    exact = True
    for step in plan.steps:
        if isinstance(step, PlannedTrain):
            requests = _train(step, limits)
        elif isinstance(step, PlannedSample):
            requests = _sample(step, _context(prices.base_model, limits))
            exact = False
        else:
            continue
        for request in requests:
            for kind, count in request.items():
                tokens[kind] += count * plan.times
                amounts[kind] += amount_nusd(count, rates[kind]) * plan.times
    rows = [EstimatedRow(kind, tokens[kind], rates[kind], amounts[kind]) for kind in rates if tokens[kind]]
    return CostEstimate(prices.base_model, prices.price_version, rows, exact)


def _context(model: str, limits: LimitsResponse) -> int:
    if model not in limits.models:
        raise WeftError(f"the server has no base model {model!r}; it has {', '.join(sorted(limits.models))}")
    return limits.models[model].context_length


def _train(step: PlannedTrain, limits: LimitsResponse) -> Iterator[Request]:
    """A pass over the data; a custom loss that is computed by the client needs a forward pass before."""
    data = [datum_of(datum) for datum in step.data]
    two_passes = not isinstance(step.loss_fn, str) and getattr(step.loss_fn, "loss_id", None) is None
    if two_passes:
        data = [forward_datum(datum) for datum in data]
    for part in split(data, limits.chunk_data, limits.chunk_bytes):
        tokens = sum(datum.model_input.length for datum in part)
        if two_passes:
            yield {"prefill": tokens}
        yield {"prefill": tokens} if step.forward_only else {"train": tokens}


def _sample(step: PlannedSample, context: int) -> Iterator[Request]:
    """Sampling costs the prompt once, its further copies at the cached rate, and the most tokens that can be drawn."""
    params = step.sampling_params
    params = params if isinstance(params, SamplingParams) else SamplingParams(**params)
    for prompt in step.prompts:
        length = prompt_length(prompt)
        room = max(0, context - length + 1)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        each = most if step.expected_tokens is None else min(step.expected_tokens, most)
        yield {
            "prefill": length,
            "cached_prefill": length * (step.num_samples - 1),
            "sample": each * step.num_samples,
        }
