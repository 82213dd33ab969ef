"""What one organisation may keep here at a time: bytes, runs, sessions, archives, losses.

The server's settings have the defaults (`store.settings.Limits`), the organisation's row what the operator has set
otherwise (`weftd org quota`). Code that adds to a quota checks it in the same write, under the organisation's lock, so
that many at once cannot exceed it together. Results are the exception: the oldest go
(`scheduler.journal.ending.results`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from store import tables
from store.settings import Limits

#: How long losses are kept after their session has ended.
LOSSES_LAST = timedelta(hours=24)


class QuotaReached(Exception):
    """An organisation would have more than it may; the message says of what, and what helps. `ever` is false if this
    alone is larger than the whole quota: no deleting makes room for it."""

    def __init__(self, message: str, ever: bool) -> None:
        super().__init__(message)
        self.ever = ever


@dataclass(frozen=True)
class Quota:
    """`default` is the name of its setting; `remedy` tells the organisation what it can do."""

    default: str
    what: str
    # None: the database does not have it; the code that adds to it counts it
    used: Callable[[Session, str], int] | None
    remedy: str


@dataclass(frozen=True)
class Claim:
    """`adds` more of what `quota` counts; `default` is the limit where the operator has set none."""

    quota: str
    default: int
    adds: int = 1


def claim(limits: Limits, quota: str, adds: int = 1) -> Claim:
    return Claim(quota, getattr(limits, QUOTAS[quota].default), adds)


def check(session: Session, org_id: str, claim: Claim, coming: int = 0) -> None:
    """Raise QuotaReached unless the organisation may have that much more, beside what is `coming` and not in the
    database yet. Call it under the organisation's lock."""
    quota = QUOTAS[claim.quota]
    limit, used = limit_of(session, org_id, claim), coming + (quota.used(session, org_id) if quota.used else 0)
    more = "ask the operator for more (weftd org quota)"
    if claim.adds > limit:
        raise QuotaReached(
            f"the organisation's quota {claim.quota} is {limit}, and this alone would be {claim.adds}: {more}",
            ever=False,
        )
    if used + claim.adds > limit:
        raise QuotaReached(
            f"the organisation's quota {claim.quota} is {limit}: {used} {quota.what}, and this would be {claim.adds} "
            f"more; {quota.remedy}, or {more}",
            ever=True,
        )


def limit_of(session: Session, org_id: str, claim: Claim) -> int:
    own = session.scalar(select(tables.Organisation.quotas).where(tables.Organisation.id == org_id)) or {}
    return int(own.get(claim.quota, claim.default))


@dataclass(frozen=True)
class Standing:
    """How much of a quota an organisation uses. `used` None: the code that adds to it counts it."""

    name: str
    limit: int
    used: int | None

    @property
    def percent(self) -> int:
        return 0 if self.used is None else 100 if not self.limit else self.used * 100 // self.limit


def standings(session: Session, org_id: str, limits: Limits) -> list[Standing]:
    """All quotas of an organisation: each one's limit, and how much of it the organisation uses."""
    return [
        Standing(name, limit_of(session, org_id, claim(limits, name)), quota.used and quota.used(session, org_id))
        for name, quota in QUOTAS.items()
    ]


def stored_bytes(session: Session, org_id: str) -> int:
    """Bytes of checkpoints and samplers, and of queued saves. The saves are found by their runs, since the organisation
    may have far more else queued."""
    span, op, run = tables.StorageSpan, tables.Operation, tables.Run
    stored = select(func.sum(span.size_bytes)).where(span.org_id == org_id, span.ended_at.is_(None))
    live = select(run.id).where(run.org_id == org_id, run.state == "live")
    coming = select(func.sum(op.stores_bytes)).where(op.state == "queued", op.lane.in_(live))
    return int(session.scalar(stored) or 0) + int(session.scalar(coming) or 0)


def _runs(session: Session, org_id: str) -> int:
    return session.scalar(select(func.count()).select_from(tables.Run).filter_by(org_id=org_id, state="live")) or 0


def _sessions(session: Session, org_id: str) -> int:
    return (
        session.scalar(select(func.count()).select_from(tables.Session).filter_by(org_id=org_id, state="active")) or 0
    )


def _losses(session: Session, org_id: str) -> int:
    """Losses of sessions that are active or ended lately. The two are separate queries, each with its index: with OR,
    all sessions that ever existed would be read."""
    op, owner, now = tables.Operation, tables.Session, datetime.now(UTC)
    query = select(func.count()).select_from(owner).join(op, op.lane == owner.id + ":loss")
    query = query.where(owner.org_id == org_id)
    # an end in the future was set by a clock that ran ahead
    lately = owner.ended_at.between(now - LOSSES_LAST, now + LOSSES_LAST)
    return sum(session.scalar(query.where(kept)) or 0 for kept in (owner.state == "active", lately))


def _result_bytes(session: Session, org_id: str) -> int:
    op = tables.Operation
    kept = select(func.sum(op.result_bytes)).where(op.org_id == org_id, op.result_bytes.is_not(None))
    return int(session.scalar(kept) or 0)


def _turn_bytes(session: Session, org_id: str) -> int:
    turn = tables.SessionTurn
    return int(session.scalar(select(func.sum(turn.size_bytes)).where(turn.org_id == org_id)) or 0)


QUOTAS: Mapping[str, Quota] = {
    "stored_bytes": Quota(
        "stored_bytes_per_org",
        "bytes are stored or about to be",
        stored_bytes,
        "delete checkpoints, give them a time to live, or end sessions whose samplers you do not need",
    ),
    "runs": Quota("runs_per_org", "runs are live", _runs, "end sessions whose runs are done"),
    "sessions": Quota("sessions_per_org", "sessions are active", _sessions, "end some that are done"),
    "custom_losses": Quota(
        "custom_losses_per_org",
        "uploaded losses are kept",
        _losses,
        "upload a loss once for each session, and end sessions that are done: theirs go a day later",
    ),
    "archive_bytes": Quota(
        "archive_bytes_per_org",
        "bytes of checkpoints are packed for downloads",
        None,
        "wait until older downloads are over: an archive goes two hours after it was last asked for",
    ),
    "turn_bytes": Quota(
        "turn_bytes_per_org",
        "bytes of turns are kept or being sampled",
        _turn_bytes,
        "sample without X-Session-ID, or wait: turns go after a day",
    ),
    "result_bytes": Quota("result_bytes_per_org", "bytes of results are kept", _result_bytes, "fetch them"),
}
