"""Usage summed by run, from the hourly sums, which agree with the events to the nano-dollar."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, literal, select
from sqlalchemy.orm import Session

from store.tables import Operation, Sampler, UsageHour
from store.tables.base import any_index_but, halves, whole


@dataclass(frozen=True)
class UsageRow:
    """A sum of events. `run_id` is None for samples of a base model; `quantity` is tokens, or byte-hours of storage."""

    run_id: str | None
    kind: str
    base_model: str
    quantity: int
    amount_nusd: int


def summary(session: Session, org_id: str, run_id: str | None = None, since: datetime | None = None) -> list[UsageRow]:
    """Usage of an organisation by run, kind and base model, of one run only or since an hour if asked. An organisation
    has hundreds of thousands of hours in a year, so the database adds them up."""
    hour = UsageHour
    key = (hour.run_id, hour.kind, hour.base_model)
    query = select(*key, *halves(hour.quantity, hour.amount_nusd)).where(hour.org_id == org_id).group_by(*key)
    if run_id is not None:
        query = query.where(hour.run_id == run_id)
    if since is not None:
        query = query.where(hour.hour >= since)
    return sorted(
        (
            UsageRow(run or None, kind, base_model, whole(*sums[:2]), whole(*sums[2:]))
            for run, kind, base_model, *sums in session.execute(query)
        ),
        key=lambda row: (row.run_id or "", row.kind, row.base_model),
    )


def held_nusd(session: Session, org_id: str, run_id: str | None = None) -> int:
    """The most that operations under way can cost, of an organisation or of one run. Read it before `summary`: what
    ends in between is then counted twice rather than not at all."""
    op = Operation
    query = select(func.coalesce(func.sum(op.hold_nusd), 0))
    query = query.where(op.state == "queued", any_index_but(op.org_id) == org_id)
    if run_id is not None:
        samplers = select(Sampler.id).where(Sampler.run_id == run_id)
        query = query.where(op.lane.in_(samplers.union_all(select(literal(run_id)))))
    return int(session.execute(query).scalar_one())
