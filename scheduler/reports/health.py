"""How a run's loop is doing: who waits for whom, how much of what is sampled gets trained, how old it is by then.

Computed from the journal's rows of a recent window, so it is the same on every replica and after a restart. A run's
samples are those of its samplers. Staleness is counted in tokens: a row says which version of the policy each was drawn
from (`scheduler.journal.samples.versions`). Training data may name the sequences that they come from; then it is known
which tokens were trained, by which version, and which were not. Where none does, a sample is taken to be trained by the
first forward_backward accepted after it had ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row as SqlRow, select
from sqlalchemy.orm import Session

from billing.reports.ownership import covered_s
from scheduler.journal.rows import num_samples, priority, sequences
from scheduler.links.messages import OpKind
from scheduler.order.operations import INTERACTIVE, SAMPLE
from store import tables
from store.tables.base import any_index_but

#: How many operations of a run are looked at (the latest), and how many sequences that they name: one operation may
#: name thousands.
MAX_ROWS, MAX_NAMES = 20_000, 200_000
#: How many operations' sequences are read at a time.
AT_A_TIME = 50


@dataclass(frozen=True)
class Stall:
    """What a run waits for now. `waiting_for` is sampling | training | client; of the latest batch (the samples since
    the last forward_backward) `open_groups` of `groups` have not ended. `oldest_*` is what has waited longest."""

    waiting_for: str
    open_groups: int
    groups: int
    open_training: int
    oldest_request_id: str | None
    oldest_s: float

    def sentence(self, reason: str = "") -> str:
        """The report in a sentence for people; `reason` says what the oldest operation waits for."""
        if self.waiting_for == "client":
            return f"nothing is queued; the client has sent nothing for {self.oldest_s:.0f} s"
        if self.waiting_for == "sampling":
            what, whose = f"{self.open_groups} of {self.groups} groups", "sample"
        else:
            what, whose = f"{self.open_training} training operations", "operation"
        return f"waiting for {what}; oldest {whose} {self.oldest_s:.0f} s" + (f", {reason}" if reason else "")


@dataclass(frozen=True)
class Health:
    """`trainer_wait` is the share of the window (from the run's first operation in it) in which the trainer computed
    nothing for this run; `sequences_in_flight` the mean number of its sequences in generators; `acceptance` trained
    tokens for each sampled one (more than 1 where prompts are trained on); `staleness` counts sampled tokens by the
    optimizer steps between what drew and what trained them.

    `sampling_wait` is the share of its samples' time, of those that have ended, in which they waited for a place in a
    generator (None: none has ended); where it has samples of both priorities, of the interactive ones.

    `named`: its training names sequences. Then `acceptance` is the share of sampled tokens that were trained on, and
    `untrained_tokens` are those that had been sampled when the latest named batch came, and none has named."""

    window_s: float
    trainer_wait: float
    sequences_in_flight: float
    sampled_tokens: int
    trained_tokens: int
    sampled_tokens_per_s: float
    trained_tokens_per_s: float
    acceptance: float
    staleness: dict[int, int]
    named: bool
    untrained_tokens: int | None
    queue_p50_s: float
    queue_p95_s: float
    sampling_wait: float | None
    stall: Stall


@dataclass(frozen=True)
class _Row:
    id: str
    seq: int
    kind: str
    open: bool
    accepted: datetime
    finished: datetime | None
    begun: float | None  # seconds after acceptance
    interactive: bool
    spans: list[tuple[float, float]]
    sequences: int
    drawn: list[dict[int, int]]  # of a sample: by sequence, the tokens of each policy version
    named: dict[str, int]  # sequences named by a training operation, and their tokens in it
    version: int | None  # the policy's version after the operation


def health_of(session: Session, run: tables.Run, now: datetime, window: timedelta) -> Health:
    """The health of one run over the last `window`."""
    rows = _rows(session, run, now - window)
    begun = min((max(row.accepted, now - window) for row in rows), default=now)
    seconds = max((now - begun).total_seconds(), 1e-9)
    since = (now - window).timestamp()
    training = [row for row in rows if row.kind != SAMPLE]
    samples = [row for row in rows if row.kind == SAMPLE]
    sampled, trained = _tokens(session, run, now - window)
    busy_s = covered_s(_after(since, [span for row in training for span in row.spans]))
    flying_s = sum(
        row.sequences * sum(end - start for start, end in _after(since, row.spans)) for row in samples if row.spans
    )
    use = _use(training, samples)
    queued = sorted(row.begun for row in rows if row.begun is not None)
    return Health(
        window_s=seconds,
        trainer_wait=max(0.0, 1 - busy_s / seconds),
        sequences_in_flight=flying_s / seconds,
        sampled_tokens=sampled,
        trained_tokens=trained,
        sampled_tokens_per_s=sampled / seconds,
        trained_tokens_per_s=trained / seconds,
        acceptance=use.acceptance if use is not None else trained / sampled if sampled else 0.0,
        staleness=use.staleness if use is not None else _inferred_staleness(training, samples),
        named=use is not None,
        untrained_tokens=None if use is None else use.untrained,
        queue_p50_s=_quantile(queued, 0.5),
        queue_p95_s=_quantile(queued, 0.95),
        sampling_wait=_sampling_wait(samples),
        stall=_stall(training, samples, now),
    )


def _rows(session: Session, run: tables.Run, since: datetime) -> list[_Row]:
    samplers = session.scalars(select(tables.Sampler.id).filter_by(run_id=run.id, org_id=run.org_id)).all()
    operation = tables.Operation
    recent = (operation.finished_at >= since) | (operation.state == "queued")
    own = any_index_but(operation.org_id) == run.org_id
    query = select(
        operation.id,
        operation.seq,
        operation.kind,
        operation.state,
        operation.accepted_at,
        operation.finished_at,
        operation.timings,
        operation.policy,
        num_samples.label("num_samples"),  # the rest of a plan can be long
        priority.label("priority"),
    ).where(own, operation.lane.in_([run.id, *samplers]), recent)
    latest = session.execute(query.order_by(operation.accepted_at.desc()).limit(MAX_ROWS)).all()
    kept, names = list[_Row](), 0
    for start in range(0, len(latest), AT_A_TIME):
        part = latest[start : start + AT_A_TIME]
        named = _named(session, [row.id for row in part if row.kind == OpKind.FORWARD_BACKWARD])
        kept += [_read(row, named.get(row.id) or {}) for row in part]
        names += sum(len(each or ()) for each in named.values())
        if names > MAX_NAMES:
            break
    return kept[::-1]


def _named(session: Session, op_ids: Sequence[str]) -> dict[str, dict[str, int] | None]:
    """The sequences that training operations name, and how many of their tokens."""
    if not op_ids:
        return {}
    query = select(tables.Operation.id, sequences).where(tables.Operation.id.in_(op_ids))
    return {id: named for id, named in session.execute(query)}


def _read(row: SqlRow[Any], named: dict[str, int]) -> _Row:
    policy = row.policy or {}
    stretches = (row.timings or {}).get("stretches", [])
    accepted_s = row.accepted_at.timestamp()
    return _Row(
        row.id,
        row.seq,
        row.kind,
        row.state == "queued",
        row.accepted_at,
        row.finished_at,
        stretches[0][1] / 1e6 if stretches else None,
        row.priority == INTERACTIVE,
        [(accepted_s + start / 1e6, accepted_s + end / 1e6) for _, start, end, *_ in stretches],
        (row.num_samples or 1) if row.kind == SAMPLE else 0,
        [{int(version): tokens for version, tokens in one.items()} for one in policy.get("drawn", ())],
        named,
        policy.get("version"),
    )


def _sampling_wait(samples: Sequence[_Row]) -> float | None:
    """Sampling wait: each sequence of a request counts."""
    ended = [row for row in samples if row.begun is not None and row.spans]
    urgent = [row for row in ended if row.interactive] or ended
    waited = sum(row.sequences * (row.begun or 0.0) for row in urgent)
    drawn = sum(row.sequences * sum(end - start for start, end in row.spans) for row in urgent)
    return waited / (waited + drawn) if waited + drawn else None


def _tokens(session: Session, run: tables.Run, since: datetime) -> tuple[int, int]:
    """How many tokens were sampled, and how many trained."""
    event = tables.UsageEvent
    query = select(event.kind, event.quantity).where(event.run_id == run.id, event.recorded_at >= since)
    sums: Counter[str] = Counter()
    for kind, quantity in session.execute(query.where(event.org_id == run.org_id)):
        sums[kind] += quantity
    return sums["sample"], sums["train"]


def _after(since_s: float, spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(max(start, since_s), end) for start, end in spans if end > since_s]


@dataclass(frozen=True)
class _Use:
    """How training used the tokens that were sampled, by the sequences that training data name."""

    staleness: dict[int, int]
    acceptance: float
    untrained: int


def _use(training: Sequence[_Row], samples: Sequence[_Row]) -> _Use | None:
    """What became of the tokens of `samples`; None if no training operation names a sequence."""
    naming = [row for row in training if row.named]
    if not naming:
        return None
    drawn = {f"{row.id}:{index}": one for row in samples for index, one in enumerate(row.drawn)}
    used: Counter[str] = Counter()
    for row in naming:
        for name in row.named.keys() & drawn.keys():
            used[name] = max(used[name], min(row.named[name], sum(drawn[name].values())))
    counts: Counter[int] = Counter()
    for row, version in _trained_by(training):
        for name in row.named.keys() & drawn.keys():
            left = row.named[name]
            for old, tokens in sorted(drawn[name].items()):
                counts[max(0, version - old)] += min(tokens, left)
                left -= min(tokens, left)
    latest = max(row.accepted for row in naming)
    due = [row for row in samples if row.finished is not None and row.finished <= latest]
    had, all_drawn = (sum(sum(one.values()) for row in rows for one in row.drawn) for rows in (due, samples))
    trained = sum(used.values())
    staleness = {steps: tokens for steps, tokens in sorted(counts.items()) if tokens}
    return _Use(staleness, trained / all_drawn if all_drawn else 0.0, max(0, had - trained))


def _inferred_staleness(training: Sequence[_Row], samples: Sequence[_Row]) -> dict[int, int]:
    batches = sorted((row.accepted, version) for row, version in _trained_by(training))
    counts: Counter[int] = Counter()
    for sample in samples:
        place = bisect_left(batches, (sample.finished, 0)) if sample.finished is not None else len(batches)
        if place < len(batches):
            for version, tokens in (pair for one in sample.drawn for pair in one.items()):
                counts[max(0, batches[place][1] - version)] += tokens
    return dict(sorted(counts.items()))


def _trained_by(training: Sequence[_Row]) -> Iterator[tuple[_Row, int]]:
    """Each forward_backward with the policy version that it was computed on: the version after the operations before
    it; or, before the first that tells its version, the one before that. Without those for which no operation tells."""
    version, waiting = None, list[_Row]()
    for row in sorted(training, key=lambda row: row.seq):
        if row.version is not None:
            found = row.version - (row.kind == OpKind.OPTIM_STEP)
            yield from ((before, found) for before in waiting if row.kind != OpKind.LOAD_STATE)
            version, waiting = row.version, []
        elif row.kind == OpKind.OPTIM_STEP and row.open and version is not None:
            version += 1
        elif row.kind == OpKind.FORWARD_BACKWARD and version is not None:
            yield row, version
        elif row.kind == OpKind.FORWARD_BACKWARD:
            waiting.append(row)


def _stall(training: Sequence[_Row], samples: Sequence[_Row], now: datetime) -> Stall:
    last = max((row.accepted for row in training if row.kind == OpKind.FORWARD_BACKWARD), default=None)
    open_training = [row for row in training if row.open]
    open_samples = [row for row in samples if row.open]
    batch = [row for row in samples if row.open or last is None or row.accepted > last]
    waiting = open_training or open_samples
    if waiting:
        oldest = min(waiting, key=lambda row: row.accepted)
        name, since = oldest.id, oldest.accepted
    else:
        name, since = None, max((row.finished or row.accepted for row in [*training, *samples]), default=now)
    kind = "training" if open_training else "sampling" if open_samples else "client"
    age_s = max(0.0, (now - since).total_seconds())
    return Stall(kind, len(open_samples), len(batch), len(open_training), name, age_s)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
