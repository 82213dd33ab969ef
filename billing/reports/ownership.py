"""What serving each organisation and model has cost and what it has paid: `billing.reports.tco` with measured figures.

The machines cost the same whether they work or not. Their cost over a time is divided in proportion to the seconds that
each organisation's operations were computed (`operations.timings`; shared time by tokens), so idle time is carried in
proportion to use. Read-only; for operators, since it looks at all organisations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

import msgspec
from sqlalchemy import Text, cast, func, select
from sqlalchemy.orm import Session

from billing.reports.spending import SUMS, both
from billing.reports.tco import GpuHour, divide, pool_usd, usd_per_mtok
from store.tables import Operation, Organisation, UsageHour

Pair = tuple[str, str]  # (organisation, base model)

#: Kinds of usage that are computed; storage is paid for but uses no GPU.
COMPUTED = ("train", "prefill", "cached_prefill", "sample")


#: Pass, start and end in microseconds, runs, organisations, tokens (`scheduler.order.timings`).
Stretch = tuple[int, int, int, int, int, int]


class _Timings(msgspec.Struct):
    stretches: list[Stretch] = []


_TIMINGS = msgspec.json.Decoder(_Timings)
_EPOCH = datetime(1970, 1, 1)


@dataclass(frozen=True)
class Margin:
    """What one organisation paid for tokens of one model, and what these cost on our machines."""

    org_id: str
    base_model: str
    tokens: int
    machine_s: float
    paid_usd: float
    cost_usd: float

    @property
    def margin_usd(self) -> float:
        return self.paid_usd - self.cost_usd

    @property
    def price_usd_per_mtok(self) -> float:
        return usd_per_mtok(self.paid_usd, self.tokens)

    @property
    def cost_usd_per_mtok(self) -> float:
        return usd_per_mtok(self.cost_usd, self.tokens)


@dataclass(frozen=True)
class Ownership:
    """The whole service over a time. `utilisation` is the share of the machines' time in which they computed."""

    since: datetime
    until: datetime
    gpus: int
    machines: int
    gpu_hour: GpuHour
    margins: list[Margin]

    @property
    def seconds(self) -> float:
        return (self.until - self.since).total_seconds()

    @property
    def cost_usd(self) -> float:
        return pool_usd(self.gpu_hour.usd, self.gpus, self.seconds)

    @property
    def paid_usd(self) -> float:
        return sum(row.paid_usd for row in self.margins)

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.margins)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / self.seconds / self.gpus if self.seconds > 0 else 0.0

    @property
    def utilisation(self) -> float:
        busy = sum(row.machine_s for row in self.margins)
        return busy / (self.seconds * self.machines) if self.seconds > 0 else 0.0

    @property
    def price_usd_per_mtok(self) -> float:
        return usd_per_mtok(self.paid_usd, self.tokens)

    @property
    def cost_usd_per_mtok(self) -> float:
        return usd_per_mtok(self.cost_usd, self.tokens)


def days_back(asked: int | None, known: int) -> int:
    """How many days to look back: 30, or as far back as samples are kept, unless another number is asked for. Raises
    ValueError for more than that."""
    days = min(30, known) if asked is None else asked
    if days > known:
        raise ValueError(f"samples are known for {known} days (limits.sample_days), got {days}")
    return days


def ownership(
    session: Session, since: datetime, until: datetime, *, gpu_hour: GpuHour, gpus: int, machines: int = 2
) -> Ownership:
    """The service from `since`, or from its first hour, to `until`. `gpus` are paid for; `machines` (trainers and
    generators) run on them."""
    since = min(max(since, _first_hour(session) or since), until)
    paid, tokens = _usage(session, since, until)
    seconds = _machine_seconds(session, since, until)
    costs = divide(pool_usd(gpu_hour.usd, gpus, (until - since).total_seconds()), seconds)
    margins = [
        Margin(*pair, tokens.get(pair, 0), seconds.get(pair, 0.0), paid.get(pair, 0) / 1e9, costs.get(pair, 0.0))
        for pair in sorted({*paid, *seconds})
    ]
    return Ownership(since, until, gpus, machines, gpu_hour, margins)


def _first_hour(session: Session) -> datetime | None:
    """The hour in which the oldest organisation was made. Machines cost nothing before."""
    began = session.scalar(select(func.min(Organisation.created_at)))
    return began and began.replace(minute=0, second=0, microsecond=0)


def _usage(session: Session, since: datetime, until: datetime) -> tuple[dict[Pair, int], dict[Pair, int]]:
    """Nano-dollars and tokens of each pair."""
    row = UsageHour
    columns = (row.org_id, row.base_model, row.kind)
    # The table's key begins with organisation and hour: with both given, only these hours are read.
    every = row.org_id.in_(select(Organisation.id))
    query = select(*columns, *SUMS).where(every, row.hour >= since, row.hour < until).group_by(*columns)
    paid: defaultdict[Pair, int] = defaultdict(int)
    tokens: defaultdict[Pair, int] = defaultdict(int)
    for org_id, base_model, kind, *sums in session.execute(query):
        quantity, amount_nusd = both(*sums)
        paid[org_id, base_model] += amount_nusd
        tokens[org_id, base_model] += quantity if kind in COMPUTED else 0
    return paid, tokens


def _machine_seconds(session: Session, since: datetime, until: datetime) -> dict[Pair, float]:
    """The seconds in which trainers and generators computed, divided among (organisation, model) by their shares."""
    row = Operation
    # There may be hundreds of thousands of rows: read as text, times and timings are several times as fast.
    instant, timings = cast(row.accepted_at, Text), cast(row.timings, Text)
    query = select(row.org_id, row.base_model, row.kind == "sample", row.tokens, instant, timings)
    query = query.where(row.finished_at >= since, row.finished_at < until, row.timings.is_not(None))
    query = query.execution_options(yield_per=5000)
    parts: dict[bool, defaultdict[Pair, float]] = {kind: defaultdict(float) for kind in (False, True)}
    spans: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for org_id, base_model, is_sample, tokens, accepted_at, text in session.connection().execute(query):
        stretches, accepted_s = _TIMINGS.decode(text).stretches, _epoch_s(accepted_at)
        covered, used_us = spans[bool(is_sample)], 0.0
        own = max(1, tokens) / max(1, len(stretches))  # for each stretch, its share of the tokens
        for _, start, end, _, _, total in stretches:
            covered.append((accepted_s + start / 1e6, accepted_s + end / 1e6))
            used_us += (end - start) * own / total if total > own else end - start
        parts[bool(is_sample)][org_id, base_model] += used_us
    seconds: defaultdict[Pair, float] = defaultdict(float)
    for kind in (False, True):
        for pair, used in divide(covered_s(spans[kind]), parts[kind]).items():
            seconds[pair] += used
    return seconds


def _epoch_s(text: str) -> float:
    """A stored instant; SQLite's text has no zone, and is UTC."""
    at = datetime.fromisoformat(text)
    return at.timestamp() if at.tzinfo else (at - _EPOCH).total_seconds()


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reached:
            covered += end - (start if start > reached else reached)
            reached = end
    return covered
