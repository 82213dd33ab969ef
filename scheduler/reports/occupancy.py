"""Who had the machines when: the share of time in which trainers and generators computed for each organisation.

Computed from the timings of operations that have ended, so a long one shows when it is done. A stretch that several
shared counts for each by its part of the tokens. For one organisation, everybody else is one: `others`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.reports.ownership import covered_s
from billing.reports.tco import divide
from scheduler.order.operations import SAMPLE
from store.tables import Operation

#: How many operations are looked at: the latest.
MAX_ROWS = 50_000


@dataclass(frozen=True)
class Stretch:
    """A time, in seconds, in which `owner` used the share `weight` of a machine."""

    owner: str
    start_s: float
    end_s: float
    weight: float


@dataclass(frozen=True)
class Timeline:
    """For each bucket of time (from `starts_s`), the share of it in which a machine worked for each owner. The shares
    add up to the part of the bucket in which the machine worked at all."""

    starts_s: list[float]
    shares: dict[str, list[float]]


def stretches(session: Session, since: datetime, until: datetime) -> dict[str, list[Stretch]]:
    """Stretches of all organisations, by machine: training and sampling. The caller decides who may see whose."""
    found: dict[str, list[Stretch]] = {"training": [], "sampling": []}
    row = Operation
    query = select(row.org_id, row.kind, row.tokens, row.accepted_at, row.timings)
    query = query.where(row.finished_at >= since, row.finished_at < until + timedelta(hours=1))
    for org_id, kind, tokens, accepted_at, timings in session.execute(
        query.order_by(row.finished_at.desc()).limit(MAX_ROWS)
    ):
        machine = "sampling" if kind == SAMPLE else "training"
        found[machine] += _of_operation(org_id, tokens, accepted_at.timestamp(), (timings or {}).get("stretches", []))
    return found


def _of_operation(org_id: str, tokens: int, accepted_s: float, kept: list[list[Any]]) -> Iterable[Stretch]:
    own = max(1, tokens) / max(1, len(kept))
    for _, start, end, _, _, total in kept:
        yield Stretch(org_id, accepted_s + start / 1e6, accepted_s + end / 1e6, own / max(own, total))


def timeline(found: Iterable[Stretch], since: datetime, until: datetime, buckets: int, seen: set[str]) -> Timeline:
    """The timeline of `found`. Owners that are not in `seen` are added up as "others"."""
    start_s, bucket_s = since.timestamp(), (until - since).total_seconds() / buckets
    spans: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    parts: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for stretch in found:
        owner = stretch.owner if stretch.owner in seen else "others"
        first = max(0, int((stretch.start_s - start_s) // bucket_s))
        last = min(buckets - 1, int((stretch.end_s - start_s) // bucket_s))
        for index in range(first, last + 1):
            begin = max(stretch.start_s, start_s + index * bucket_s)
            end = min(stretch.end_s, start_s + (index + 1) * bucket_s)
            if end > begin:
                spans[index].append((begin, end))
                parts[index][owner] += (end - begin) * stretch.weight
    owners = sorted(seen & {owner for part in parts.values() for owner in part})
    if any("others" in part for part in parts.values()):
        owners.append("others")
    shares = {owner: [0.0] * buckets for owner in owners}
    for index, part in parts.items():
        for owner, used_s in divide(covered_s(spans[index]), part).items():
            shares[owner][index] = min(1.0, used_s / bucket_s)
    return Timeline([start_s + index * bucket_s for index in range(buckets)], shares)
